"""A fit's checkpoint: folders of weights, and one small file that says which of them count and where the fit stands.

The small file is replaced in one rename after the weights that it names are on the disk, so a fit that is killed at any
moment finds the last checkpoint whole; folders that no file names are removed by the next save. Random numbers need no
state: each call of the engine has its own seed. Whether a checkpoint belongs to the run that finds it is the step's
question.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evergreen.runtime.durable import whole_directory, whole_file, write_whole
from evergreen.statistics.metrics import grouped_deviation

logger = logging.getLogger(__name__)

START = "start"
"""Folder of the weights that a fit began from; a parent's are put there before it."""
FINAL = "final"
"""Folder of the weights that a fit ended with."""
_PROGRESS = "progress.json"
_LOSSES = "row_losses-{:02d}.npy"
"""Of each trial."""
_NUM_BLOCKS = 20
"""Of fewer the standard error is too uncertain, and more cut too many requests in two."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a fit stands, and the folder of the weights it has there."""

    trial: int
    """Which of the learning rates is tried; one past the last = the end."""
    passes: int
    """Passes made over the rows."""
    batches: int = 0
    """Batches made of the next pass."""
    loss_sum: float = 0.0
    """Sum of their mean losses."""
    step: int
    weights: str
    """Name of a folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Judgement:
    """How a trial's network did on rows just before it learned them."""

    scores: Mapping[str, float | None]
    """`auc` and `log_loss`."""
    row_losses: NDArray[np.float64]
    """Log loss of each of the rows after its logit was corrected as at the end of a fit, times its weight where rows
    have some; the same rows in every trial, none where the trial diverged."""


DIVERGED = Judgement(scores={"auc": None, "log_loss": None}, row_losses=np.empty(0))
"""Of a trial that is given up."""


def best_of(judged: Sequence[Judgement]) -> int:
    """The number of the best trial; a later one only where it is better by more than one standard error.

    The standard error is one of `time_blocks`; where it is unknown (see `grouped_deviation`), the earlier one stays.

    >>> first, second = (Judgement(scores={}, row_losses=np.full(20, loss)) for loss in (0.5, 0.1))
    >>> best_of([first, second]), best_of([second, first])
    (1, 0)
    """
    best = 0
    for number, judgement in enumerate(judged):
        if not len(judgement.row_losses):
            continue
        gains = judged[best].row_losses - judgement.row_losses
        deviation = grouped_deviation((gains, time_blocks(len(gains))))
        if deviation and float(gains.mean()) > deviation.standard_error:
            best = number
    return best


def time_blocks(num_rows: int) -> NDArray[np.int64]:
    """The number of the block of each of so many rows in the order of time: 20 blocks of equal length, [num_rows].

    The rows of a request depend on each other and follow each other in time. Encoded rows do not name their request,
    but a block holds many of them whole, so blocks may be taken as independent.

    >>> time_blocks(40)[[0, 1, 2, 39]].tolist()
    [0, 0, 1, 19]
    """
    numbers: NDArray[np.int64] = np.arange(num_rows) * min(num_rows, _NUM_BLOCKS) // max(num_rows, 1)
    return numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """All that decides how a fit goes on."""

    now: Position
    judged: tuple[Judgement, ...] = ()
    """Of each trial that came so far."""
    best: Position | None = None
    """End of the best trial of those that ended."""
    final_step: int | None = None
    """Step of the final weights; None = the fit has not ended."""
    served_shift: float = 0.0
    """See `FitResult`; of the final weights."""


class CheckpointFolder:
    """Writes and reads the checkpoints of one fit, below one folder."""

    def __init__(self, path: Path) -> None:
        """Takes the folder as it is; it is created by the first write."""
        self.path = path
        self._losses_on_disk: dict[int, Judgement] = {}

    def keep_weights(self, name: str, save: Callable[[Path], None]) -> str:
        """Lets `save` fill a folder, which appears as `name` when it is whole; what had that name is replaced."""
        with whole_directory(self.path / name, replace=True) as aside:
            save(aside)
        return name

    def save(self, checkpoint: Checkpoint) -> None:
        """Makes `checkpoint` the one that counts, and removes what it does not name."""
        for number, judgement in enumerate(checkpoint.judged):
            if judgement is not self._losses_on_disk.get(number):
                with whole_file(self.path / _LOSSES.format(number)) as file:
                    np.save(file, judgement.row_losses)
                self._losses_on_disk[number] = judgement
        described = {
            "now": asdict(checkpoint.now),
            "best": asdict(checkpoint.best) if checkpoint.best else None,
            "judged": [each.scores for each in checkpoint.judged],
            "final_step": checkpoint.final_step,
            "served_shift": checkpoint.served_shift,
        }
        write_whole(self.path / _PROGRESS, json.dumps(described, indent=2) + "\n")
        self._remove_all_unnamed(checkpoint)

    def load(self) -> Checkpoint | None:
        """The checkpoint that counts; None where there is none."""
        try:
            described = json.loads((self.path / _PROGRESS).read_text())
        except FileNotFoundError:
            return None
        judged = tuple(
            Judgement(row_losses=np.load(self.path / _LOSSES.format(number)), scores=scores)
            for number, scores in enumerate(described["judged"])
        )
        self._losses_on_disk = dict(enumerate(judged))
        now, best = Position(**described["now"]), described["best"]
        best = Position(**best) if best else None
        final = {name: described[name] for name in ("final_step", "served_shift")}
        found = Checkpoint(now=now, judged=judged, best=best, **final)
        # Before the next save, which may need the room that a save left which was killed.
        self._remove_all_unnamed(found)
        logger.info("checkpoint found: %s", asdict(now))
        if found.final_step is not None and not (self.path / FINAL).exists():
            return replace(found, final_step=None)  # the final weights were taken to the model store
        return found

    def forget(self) -> None:
        """Removes all of it; broken off, it leaves nothing that `load` would find."""
        (self.path / _PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def _remove_all_unnamed(self, checkpoint: Checkpoint) -> None:
        """Removes what does not count, but for what cannot be removed (NFS keeps files that are open)."""
        named = {START, FINAL, _PROGRESS, checkpoint.now.weights}
        named |= {_LOSSES.format(number) for number in range(len(checkpoint.judged))}
        named |= {checkpoint.best.weights} if checkpoint.best else set()
        for path in self.path.iterdir():
            if path.name not in named:
                with suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
