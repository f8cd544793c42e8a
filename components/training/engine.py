"""Interface between a fit and the engine that computes it.

An `Engine` is one network with its optimizer. `fit` decides which rows are used, in which order,
how often, when to stop and what to save. The decisions of `fit` are the same for every engine. The
engine only computes the steps. Weights are exchanged as a folder (`evergreen.networks.files`).
Therefore no engine needs another engine's library, and saving needs no second copy of a large table
in memory.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from components.training.rows import RowFolder, Rows

Rate = Callable[[int], float]
"""Learning rate as a function of the optimizer step. The first step of a model trained from scratch
is number 1."""


class Engine(Protocol):
    """One network and its optimizer."""

    backend: str
    """Value of `Model.backend`."""
    num_steps: int
    """Optimizer steps taken over all runs."""

    def restore(self, weights: Path) -> None:
        """Load the model in folder `weights`, with its optimizer state and step count.

        If the folder has no optimizer state, the state and the step count are zero.

        Raises:
            ContractError: a file is absent, corrupt or of another network.
        """

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into the empty `folder`.

        Raises:
            PermanentError: the written files differ from the engine's weights or state.
        """

    def open_rows(self, folders: Sequence[RowFolder], slot_sizes: list[int], cache: Path) -> Rows:
        """Return the training rows of these folders, see `rows.open_rows`."""

    def segment_batches(self, batch_size: int) -> int:
        """Return the number of batches to pass to one call of `train`.

        Between two calls, a fit checks the loss and may save.
        """

    def train(
        self,
        rows: Rows,
        order: NDArray[np.int64],
        *,
        batch_size: int,
        seed: int,
        rate: Rate | None = None,
    ) -> float:
        """Train on the rows `order`, `batch_size` rows at a time. The last batch may be smaller.

        The loss of a batch is the mean of its rows' log losses, weighted if rows have weights. A
        batch whose weights are all 0 takes no step and has no loss.

        Args:
            rows: The rows. Their arrays may be memory-mapped files. Only the rows of a batch are
                copied.
            order: Row numbers in training order.
            batch_size: Rows of an optimizer step.
            seed: Seed of the dropout in this call.
            rate: Learning rate of each step. None for the constant rate of the settings.

        Returns:
            Mean of the batches' losses in nats. The mean is NaN or infinite if a batch's loss is
            NaN or infinite. The mean is 0 if no batch has a loss.
        """

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Score `rows` without dropout, and return their click probabilities, [n].

        An id outside its slot has a zero vector.
        """

    def close(self) -> None:
        """Release memory and devices. The engine cannot be used afterwards."""
