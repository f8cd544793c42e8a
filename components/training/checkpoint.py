"""A fit's checkpoint: folders of weights, and one small file that says which of them count and where the fit stands.

The small file is replaced in one rename after the weights that it names are on the disk, so a fit that is killed at any
moment finds the last checkpoint whole; folders that no file names are removed by the next save. Random numbers need no
state: each call of the engine has its own seed. Whether a checkpoint belongs to the run that finds it is the step's
question.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.runtime.durable import whole_directory, whole_file, write_whole

logger = logging.getLogger(__name__)

START = "start"
"""Folder of the weights that a fit began from; a parent's are put there before it."""
FINAL = "final"
"""Folder of the weights that a fit ended with."""
_PROGRESS = "progress.json"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a fit stands, and the folder of the weights it has there."""

    branch: int
    """Which part of the rows is being fitted: the newest 1 / 2^branch; one past the last branch = the finish."""
    epoch: int
    """Passes made over that part."""
    batches: int = 0
    """Batches made of the next pass."""
    loss_sum: float = 0.0
    """Sum of their mean losses."""
    step: int
    weights: str
    """Name of a folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Moment:
    """A network at the end of an epoch, and how it did on the stopping slice."""

    branch: int
    epoch: int
    """0 = as the fit began."""
    step: int
    weights: str
    """Name of a folder."""
    scores: Mapping[str, float | None]
    """`auc` and `log_loss`."""
    row_losses: NDArray[np.float64]
    """Log loss of each row of the stopping slice."""

    @property
    def loss(self) -> float:
        """Mean log loss on the stopping slice."""
        loss = self.scores["log_loss"]
        assert loss is not None, "the stopping slice has at least one row"
        return loss

    def is_better_than(self, best: Moment) -> bool:
        """Whether the stopping slice prefers this network to `best`.

        Between parts of the rows by more than one standard error of the paired difference: all rows are the better
        choice where the slice cannot tell (measured: on 1,000 judging rows of an unchanged world a part won by 0.0002
        and cost 0.011 AUC). Within a part, and against fresh weights, any gain counts. A parent is kept only where it
        is better by more than one standard error: what a short window teaches is less than its slice can tell apart,
        and a round that keeps its parent has learned nothing from its rows (docs/freshness.md has the measurement).
        """
        gains = best.row_losses - self.row_losses
        # One row tells nothing of chance.
        noise = float(gains.std() / len(gains) ** 0.5) if len(gains) > 1 else float("inf")
        if best.epoch == 0:
            return float(gains.mean()) > (-noise if best.step > 0 else 0.0)
        return float(gains.mean()) > (noise if self.branch != best.branch else 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """All that decides how a fit goes on."""

    now: Position
    best: Moment
    """Of all branches."""
    start_loss: float
    """Log loss on the stopping slice before the first epoch."""
    branch_loss: float
    """Best log loss of the branch of `now`."""
    stale: int = 0
    """Epochs of that branch since then."""
    final_step: int | None = None
    """Step of the final weights; None = the fit has not ended."""


class CheckpointFolder:
    """Writes and reads the checkpoints of one fit, below one folder."""

    def __init__(self, path: Path) -> None:
        """Takes the folder as it is; it is created by the first write."""
        self.path = path
        self._losses_on_disk: NDArray[np.float64] | None = None

    def keep_weights(self, name: str, save: Callable[[Path], None]) -> str:
        """Lets `save` fill a folder, which appears as `name` when it is whole; what had that name is replaced."""
        with whole_directory(self.path / name, replace=True) as aside:
            save(aside)
        return name

    def save(self, checkpoint: Checkpoint) -> None:
        """Makes `checkpoint` the one that counts, and removes what it does not name."""
        described: dict[str, Any] = {
            **{name: getattr(checkpoint, name) for name in ("start_loss", "branch_loss", "stale", "final_step")},
            "now": asdict(checkpoint.now),
            "best": {name: getattr(checkpoint.best, name) for name in ("branch", "epoch", "step", "weights", "scores")},
        }
        losses = f"row_losses-{checkpoint.best.branch:02d}-{checkpoint.best.epoch:06d}.npy"
        if checkpoint.best.row_losses is not self._losses_on_disk:
            with whole_file(self.path / losses) as file:
                np.save(file, checkpoint.best.row_losses)
            self._losses_on_disk = checkpoint.best.row_losses
        write_whole(self.path / _PROGRESS, json.dumps({**described, "row_losses": losses}, indent=2) + "\n")
        self._remove_all_but(_PROGRESS, losses, checkpoint.now.weights, checkpoint.best.weights)

    def load(self) -> Checkpoint | None:
        """The checkpoint that counts; None where there is none."""
        try:
            described = json.loads((self.path / _PROGRESS).read_text())
        except FileNotFoundError:
            return None
        losses = described.pop("row_losses")
        row_losses = self._losses_on_disk = np.load(self.path / losses)
        now, best = Position(**described.pop("now")), described.pop("best")
        found = Checkpoint(now=now, best=Moment(**best, row_losses=row_losses), **described)
        # Before the next save, which may need the room that a save left which was killed.
        self._remove_all_but(_PROGRESS, losses, now.weights, found.best.weights)
        logger.info("checkpoint found: %s", asdict(now))
        if found.final_step is not None and not (self.path / FINAL).exists():
            return replace(found, final_step=None)  # the final weights were taken to the model store
        return found

    def forget(self) -> None:
        """Removes all of it; broken off, it leaves nothing that `load` would find."""
        (self.path / _PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def _remove_all_but(self, *names: str) -> None:
        """Removes what does not count, but for what cannot be removed (NFS keeps files that are open)."""
        for path in self.path.iterdir():
            if path.name not in {START, FINAL, *names}:
                with suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
