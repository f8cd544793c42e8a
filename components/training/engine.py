"""The seam between a fit and what does its arithmetic: `Engine`, one network with its optimizer.

Which rows, in which order, how often, when to stop and what to keep is `fit`'s, the same for every engine; how a step
is computed is the engine's. Weights cross this seam as a folder (`evergreen.networks.files`), so no engine needs
another's library, and no copy of a large table is held in memory for saving.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from components.training.rows import RowFolder, Rows

Rate = Callable[[int], float]
"""The learning rate of an optimizer step, by its number; the first step of a model from scratch is number 1."""


class Engine(Protocol):
    """One network and its optimizer."""

    backend: str
    """Value of `Model.backend`."""
    num_steps: int
    """Optimizer steps taken, over all rounds."""

    def restore(self, weights: Path) -> None:
        """Takes over the model in folder `weights`, its optimizer state and step count (zero where it has none).

        Raises:
            ContractError: a file is absent, damaged or of another network.
        """

    def save(self, folder: Path) -> None:
        """Writes weights and optimizer state into `folder`, which is empty.

        Raises:
            PermanentError: what was written is not what was meant to be.
        """

    def open_rows(self, folders: Sequence[RowFolder], slot_sizes: list[int], cache: Path) -> Rows:
        """The rows that a fit learns from these folders, see `rows.open_rows`."""

    def segment_batches(self, batch_size: int) -> int:
        """Batches that one call of `learn` should get; between calls a fit checks the loss and may save."""

    def learn(
        self, rows: Rows, order: NDArray[np.int64], *, batch_size: int, seed: int, rate: Rate | None = None
    ) -> float:
        """Steps through the rows `order`, `batch_size` at a time; the last batch may be smaller.

        Returns the mean over the batches of their mean log loss, in nats; NaN or infinite where a batch's was. Rows
        with weights count by them in the mean of their batch; a batch that has no weight takes no step and does not
        count, and without any other the mean is 0. The rows are perhaps mapped from a file, so only those of a batch
        are copied. `seed` decides dropout within this call; `rate` is the learning rate of each step, None = the
        settings' at all of them.
        """

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Click probabilities of `rows`, [n], without dropout; ids outside their slot have a zero vector."""

    def close(self) -> None:
        """Releases memory and devices; the engine is of no use afterwards."""
