"""The seam between a fit and what does its arithmetic: `Engine`, one network with its optimizer.

Which rows, in which order, how often, when to stop and what to keep is `fit`'s, the same for every engine; how a step
is computed is the engine's. Weights cross this seam as a folder of HugeCTR's files (`contracts.model_files`), so no
engine needs another's library, and no copy of a large table is held in memory for keeping.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from components.training.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What one call of `Engine.learn` saw."""

    mean_loss: float
    """Mean over the batches of their mean log loss, in nats; NaN or infinite where a batch's was."""
    bad_batches: range | None = None
    """Batches of the call, counted from 0, among which the first loss that is not finite lies; None = all finite."""


class Engine(Protocol):
    """One network and its optimizer."""

    backend: str
    """Value of `Model.backend`."""
    scores_cheaply: bool
    """Whether `score` right after `learn` costs no more than its rows: else a pass is not looked at in its middle."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, those before `restore` included."""

    def restore(self, weights: Path, num_steps: int) -> None:
        """Takes over the model in folder `weights` with its optimizer state (zero where the folder has none).

        Raises:
            ContractError: a file is absent, truncated, oversized or of another network.
        """

    def save(self, folder: Path) -> None:
        """Writes weights and optimizer state into `folder`, which is empty; keys in ascending order, all of them.

        Raises:
            PermanentError: what was written is not what was meant to be.
        """

    def segment_batches(self, batch_size: int) -> int:
        """Batches that one call of `learn` should get; between calls a fit may save, and looks at the loss."""

    def learn(self, rows: Rows, order: NDArray[np.int64], batch_size: int, seed: int) -> Learnt:
        """Steps through the rows `order`, `batch_size` at a time; the last batch may be smaller.

        Args:
            rows: Rows; perhaps mapped from a file, so only those of a batch are copied.
            order: Row numbers, each below len(rows).
            batch_size: Rows per step.
            seed: Decides dropout within this call.
        """

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Click probabilities of `rows`, [n], without dropout; ids outside their slot have a zero vector."""

    def close(self) -> None:
        """Gives up memory and devices; the engine is of no use afterwards."""
