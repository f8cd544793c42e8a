"""A fit's checkpoint: everything that decides the epochs to come, in one folder that is whole or absent.

Random numbers need no state here: each epoch seeds its own from the seed and its number. Whether a checkpoint belongs
to the run that finds it is the step's question.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.dcn import DcnConfig
from components.contracts.durable import whole_directory, write_whole
from components.contracts.model_files import ModelWeights, read_model, write_model

logger = logging.getLogger(__name__)

_PROGRESS = "progress.json"
_ROW_LOSSES = "row_losses.npy"
_NUMBERS = ("start_loss", "branch_loss", "stale")


@dataclass(frozen=True, kw_only=True, eq=False)
class Moment:
    """A network at the end of an epoch, and how it did on the stopping slice."""

    branch: int
    """Which part of the rows it was fitted to: the newest 1 / 2^branch."""
    epoch: int
    """Passes over that part; 0 = as the fit began."""
    step: int
    weights: ModelWeights
    """With moments."""
    scores: Mapping[str, float | None]
    """`auc` and `log_loss`."""
    row_losses: NDArray[np.float64]
    """Log loss of each row of the stopping slice."""

    def is_better_than(self, best: Moment) -> bool:
        """Whether the stopping slice prefers this network to `best`.

        Between parts of the rows by more than one standard error of the paired difference: all rows are the better
        choice where the slice cannot tell (measured: on 1,000 judging rows of an unchanged world a part won by 0.0002
        and cost 0.011 AUC). Within a part, and against the start, any gain counts.
        """
        gains = best.row_losses - self.row_losses
        is_other_part = self.branch != best.branch and best.epoch > 0
        noise = float(gains.std() / len(gains) ** 0.5) if is_other_part else 0.0
        return float(gains.mean()) > noise


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """Where a fit stands."""

    now: Moment
    best: Moment
    """Of all branches."""
    start_loss: float
    """Log loss on the stopping slice before the first epoch."""
    branch_loss: float
    """Best log loss of the branch of `now`."""
    stale: int
    """Epochs of that branch since then."""


def save(folder: Path, config: DcnConfig, checkpoint: Checkpoint) -> None:
    """Writes the checkpoint below `folder`, then removes the older ones."""
    name = f"{checkpoint.now.branch:02d}-{checkpoint.now.epoch:06d}"
    shutil.rmtree(folder / name, ignore_errors=True)
    with whole_directory(folder / name) as aside:
        for moment_name, moment in _moments(checkpoint).items():
            write_model(aside / moment_name, config, moment.weights)
            np.save(aside / moment_name / _ROW_LOSSES, moment.row_losses)
        described: dict[str, Any] = {key: getattr(checkpoint, key) for key in _NUMBERS}
        for moment_name, moment in (("now", checkpoint.now), ("best", checkpoint.best)):
            described[moment_name] = {key: getattr(moment, key) for key in ("branch", "epoch", "step", "scores")}
        write_whole(aside / _PROGRESS, json.dumps(described, indent=2) + "\n")
    for older in folder.iterdir():
        if older.name != name:
            shutil.rmtree(older)


def load(folder: Path, config: DcnConfig, slot_sizes: list[int]) -> Checkpoint | None:
    """The newest checkpoint below `folder`; None where there is none."""
    # A folder that was never finished begins with a dot.
    whole = sorted(path for path in folder.glob("[0-9]*") if path.is_dir())
    if not whole:
        return None
    described = json.loads((whole[-1] / _PROGRESS).read_text())

    def moment(name: str) -> Moment:
        weights = read_model(whole[-1] / name, config, slot_sizes, optimizer=True)
        row_losses = np.load(whole[-1] / name / _ROW_LOSSES)
        return Moment(weights=weights, row_losses=row_losses, **described[name])

    now = moment("now")
    best = moment("best") if (whole[-1] / "best").exists() else now
    logger.info("checkpoint found: branch %d, epoch %d, step %d", now.branch, now.epoch, now.step)
    return Checkpoint(now=now, best=best, **{key: described[key] for key in _NUMBERS})


def _moments(checkpoint: Checkpoint) -> dict[str, Moment]:
    """Those to write: weights that are the best ones now are written once."""
    if checkpoint.best is checkpoint.now:
        return {"now": checkpoint.now}
    return {"now": checkpoint.now, "best": checkpoint.best}
