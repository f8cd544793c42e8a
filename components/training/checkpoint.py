"""Checkpoints of a fit: folders of weights, and a small file that records the progress.

The small file also names the current folders. The small file is replaced by one rename after the
weights are on disk. The last checkpoint of a fit is therefore complete even if the fit is killed.
The next save removes folders that the file does not name. No state of a random generator is stored,
because each call of the engine has its own seed. `step` checks whether a checkpoint belongs to the
current run.
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
"""Folder of the weights at the start of the fit. In an incremental run, the caller writes this
folder before the fit."""
FINAL = "final"
"""Folder of the final weights of the fit."""
_PROGRESS = "progress.json"
_LOSSES = "row_losses-{:02d}.npy"
"""Name pattern of the files with a trial's row losses. The name contains the number of the
trial."""
_NUM_BLOCKS = 20
"""Number of time blocks. With fewer blocks, the standard error is too uncertain. With more blocks,
too many requests are split between two blocks."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Progress of a fit, and the folder of its weights."""

    trial: int
    """Index of the trial. Each trial has its own learning rate. After the last trial, `trial`
    equals the number of trials."""
    passes: int
    """Completed passes over the rows."""
    batches: int = 0
    """Completed batches of the current pass."""
    loss_sum: float = 0.0
    """Sum of the mean losses of the completed batches."""
    step: int
    weights: str
    """Name of the folder with the weights."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrialEvaluation:
    """Evaluation of a trial's network on rows that the trial has not yet used for training."""

    scores: Mapping[str, float | None]
    """`auc` and `log_loss`, or None where undefined."""
    row_losses: NDArray[np.float64]
    """Log loss of each row, after the correction of the bias at the end of a fit. The loss of a
    weighted row is multiplied by its weight. All trials use the same rows. The array is empty if
    the trial diverged."""


DIVERGED = TrialEvaluation(scores={"auc": None, "log_loss": None}, row_losses=np.empty(0))
"""Evaluation of a trial that was abandoned."""


def best_of(evaluations: Sequence[TrialEvaluation]) -> int:
    """Return the index of the best trial.

    A later trial wins only if it is better by more than one standard error. The standard error is
    computed over `_time_blocks`. If the standard error is undefined (see `grouped_deviation`), the
    earlier trial wins.

    >>> first, second = (
    ...     TrialEvaluation(scores={}, row_losses=np.full(20, loss)) for loss in (0.5, 0.1)
    ... )
    >>> best_of([first, second]), best_of([second, first])
    (1, 0)
    """
    best = 0
    for number, evaluation in enumerate(evaluations):
        if not len(evaluation.row_losses):
            continue
        gains = evaluations[best].row_losses - evaluation.row_losses
        deviation = grouped_deviation((gains, _time_blocks(len(gains))))
        if deviation and float(gains.mean()) > deviation.standard_error:
            best = number
    return best


def _time_blocks(num_rows: int) -> NDArray[np.int64]:
    """Return the index of each row's time block, [num_rows].

    There are 20 blocks with equally many rows.

    Rows must be in order of time. The rows of one request are adjacent and depend on each other.
    Encoded rows do not have a request id, but most requests are complete in one block. Blocks can
    therefore be treated as independent.

    >>> _time_blocks(40)[[0, 1, 2, 39]].tolist()
    [0, 0, 1, 19]
    """
    numbers: NDArray[np.int64] = (
        np.arange(num_rows) * min(num_rows, _NUM_BLOCKS) // max(num_rows, 1)
    )
    return numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """State from which a fit continues."""

    now: Position
    evaluations: tuple[TrialEvaluation, ...] = ()
    """Evaluations of the trials so far."""
    best: Position | None = None
    """Final position of the best completed trial."""
    final_step: int | None = None
    """Optimizer step of the final weights, or None before the fit has ended."""
    served_shift: float = 0.0
    """Amount that was added to the bias of the final weights, see `Model.served_shift`."""


class CheckpointFolder:
    """Writes and reads the checkpoints of one fit below one folder."""

    def __init__(self, path: Path) -> None:
        """Store the path. The first write creates the folder of the path."""
        self.path = path
        self._losses_on_disk: dict[int, TrialEvaluation] = {}

    def save_weights(self, name: str, save: Callable[[Path], None]) -> str:
        """Call `save` with a temporary folder, and rename it to `name` when it is complete.

        An existing folder of this name is replaced.
        """
        with whole_directory(self.path / name, replace=True) as aside:
            save(aside)
        return name

    def save(self, checkpoint: Checkpoint) -> None:
        """Make `checkpoint` the current checkpoint, and remove files that it does not name."""
        for number, evaluation in enumerate(checkpoint.evaluations):
            if evaluation is not self._losses_on_disk.get(number):
                with whole_file(self.path / _LOSSES.format(number)) as file:
                    np.save(file, evaluation.row_losses)
                self._losses_on_disk[number] = evaluation
        described = {
            "now": asdict(checkpoint.now),
            "best": asdict(checkpoint.best) if checkpoint.best else None,
            "evaluations": [each.scores for each in checkpoint.evaluations],
            "final_step": checkpoint.final_step,
            "served_shift": checkpoint.served_shift,
        }
        write_whole(self.path / _PROGRESS, json.dumps(described, indent=2) + "\n")
        self._remove_all_unnamed(checkpoint)

    def load(self) -> Checkpoint | None:
        """Return the current checkpoint, or None if there is none."""
        try:
            described = json.loads((self.path / _PROGRESS).read_text())
        except FileNotFoundError:
            return None
        evaluations = tuple(
            TrialEvaluation(row_losses=np.load(self.path / _LOSSES.format(number)), scores=scores)
            for number, scores in enumerate(described["evaluations"])
        )
        self._losses_on_disk = dict(enumerate(evaluations))
        now, best = Position(**described["now"]), described["best"]
        best = Position(**best) if best else None
        final = {name: described[name] for name in ("final_step", "served_shift")}
        found = Checkpoint(now=now, evaluations=evaluations, best=best, **final)
        # Files of a killed save are removed now, because the next save may need their disk space.
        self._remove_all_unnamed(found)
        logger.info("checkpoint found: %s", asdict(now))
        if found.final_step is not None and not (self.path / FINAL).exists():
            return replace(found, final_step=None)  # the final weights were moved to the registry
        return found

    def remove(self) -> None:
        """Remove the checkpoint. If the removal is interrupted, `load` finds nothing."""
        (self.path / _PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def _remove_all_unnamed(self, checkpoint: Checkpoint) -> None:
        """Remove files that the checkpoint does not name.

        Files that cannot be removed are ignored, because open files cannot be removed completely on
        NFS.
        """
        named = {START, FINAL, _PROGRESS, checkpoint.now.weights}
        named |= {_LOSSES.format(number) for number in range(len(checkpoint.evaluations))}
        named |= {checkpoint.best.weights} if checkpoint.best else set()
        for path in self.path.iterdir():
            if path.name not in named:
                with suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
