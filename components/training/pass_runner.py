"""One pass over a part of the rows, segment by segment: what is looked at between two calls of the engine.

Between segments a pass may be saved or broken off, and is looked at for numbers that are none. A segment's seed comes
from its place alone, so a pass that goes on after a break makes the steps that an unbroken one makes. Which passes are
made is `fit`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from components.contracts.metrics import log_loss, roc_auc
from components.runtime.errors import PermanentError, Preempted
from components.training.checkpoint import Position
from components.training.engine import Engine, Learnt
from components.training.metrics_sink import MetricsSink
from components.training.passes import Part, PassOrder, derived_seed
from components.training.progress import Progress
from components.training.rows import RowFolder, Rows, place_of_rows

_METRICS_EVERY_SECONDS = 10.0
_SAMPLE_ROWS = 8192
"""Newest rows that are scored within a pass: some 10 ms."""
_NAMED_ROWS = 5


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a fit is given beside its job."""

    sink: MetricsSink
    """Takes the numbers of each epoch, and some within it."""
    clock: Callable[[], float]
    """Seconds, for speeds and intervals."""
    should_stop: Callable[[], bool]
    """Whether the fit is asked to save and end."""
    progress: Progress


class PassRunner:
    """Makes passes with one engine."""

    def __init__(
        self,
        engine: Engine,
        rows: Rows,
        folders: Sequence[RowFolder],
        judging: slice,
        surroundings: Surroundings,
        *,
        seed: int,
        checkpoint_seconds: float,
        save: Callable[[Position], None],
    ) -> None:
        """Makes a runner.

        Args:
            engine: Takes the steps.
            rows: All rows.
            folders: Where they came from, to name the place of bad ones.
            judging: The stopping slice among `rows`.
            surroundings: Sink, clock, stop request, progress.
            seed: The fit's.
            checkpoint_seconds: Time after which a pass is saved.
            save: Saves the fit as it stands at a position; the position's `weights` are yet to be written.
        """
        self._engine, self._rows, self._folders, self._around = engine, rows, folders, surroundings
        self._sample = rows[max(judging.start, judging.stop - _SAMPLE_ROWS) : judging.stop]
        self._seed, self._checkpoint_seconds, self._save = seed, checkpoint_seconds, save
        self._rows_learnt, self._seconds = 0, 0.0
        self.saved_at = self._told_at = surroundings.clock()

    @property
    def rows_per_second(self) -> float | None:
        """Rows learnt per second of learning in this process; None where there were none."""
        return self._rows_learnt / self._seconds if self._seconds > 0 else None

    @property
    def is_save_due(self) -> bool:
        """Whether the last save is as long ago as saves may lie apart."""
        return self._around.clock() - self.saved_at >= self._checkpoint_seconds

    def run(self, part: Part, batch_size: int, now: Position) -> tuple[Position, float]:
        """Goes on from `now` to the end of its pass; the position there, and the mean loss of the pass's batches.

        Raises:
            PermanentError: a loss or a score is no finite number.
            Preempted: the fit was asked to stop, and is saved.
        """
        order = PassOrder(part, derived_seed(self._seed, now.branch, now.epoch + 1))
        num_batches = -(-len(part) // batch_size)
        segment = self._engine.segment_batches(batch_size)
        self._around.progress.begin(f"branch {now.branch}, epoch {now.epoch + 1}", num_batches, now.batches)
        self._told_at = self._around.clock()
        try:
            while now.batches < num_batches:
                stop = min(now.batches + segment, num_batches)
                now = self._segment(order, batch_size, now, stop, num_batches)
                self._between(now, num_batches)
        finally:
            self._around.progress.end()
        ended = replace(now, epoch=now.epoch + 1, batches=0, loss_sum=0.0)
        return ended, now.loss_sum / num_batches

    def check_scores(self, now: Position) -> tuple[float | None, float | None]:
        """AUC and log loss of the newest rows, as the network is now.

        Raises:
            PermanentError: a score is no number: the newest step spoilt the weights.
        """
        probabilities = self._engine.score(self._sample)
        require_finite(probabilities, now)
        return roc_auc(self._sample.labels, probabilities), log_loss(self._sample.labels, probabilities)

    def _segment(self, order: PassOrder, batch_size: int, now: Position, stop: int, num_batches: int) -> Position:
        began = self._around.clock()
        numbers = order.rows(now.batches * batch_size, stop * batch_size)
        seed = derived_seed(self._seed, now.branch, now.epoch + 1, now.batches + 1)
        learnt = self._engine.learn(self._rows, numbers, batch_size, seed)
        self._check(learnt, numbers, batch_size, now, num_batches)
        self._rows_learnt += len(numbers)
        self._seconds += self._around.clock() - began
        self._around.progress.advance(stop, learnt.mean_loss)
        loss_sum = now.loss_sum + learnt.mean_loss * (stop - now.batches)
        now = replace(now, batches=stop, loss_sum=loss_sum, step=self._engine.num_steps)
        self._tell(learnt, now)
        return now

    def _tell(self, learnt: Learnt, now: Position) -> None:
        if self._around.clock() - self._told_at < _METRICS_EVERY_SECONDS:
            return
        self._told_at = self._around.clock()
        auc, loss = self.check_scores(now) if self._engine.scores_cheaply else (None, None)
        self._around.sink.log_dict(
            {
                "branch": now.branch,
                "epoch": now.epoch + 1,
                "batch": now.batches,
                "segment_loss": learnt.mean_loss,
                "sample_auc": auc,
                "sample_log_loss": loss,
                "rows_per_second": self.rows_per_second,
            },
            now.step,
        )

    def _between(self, now: Position, num_batches: int) -> None:
        """Saves where it is time, and ends the fit where it is asked to end."""
        is_asked = self._around.should_stop()
        # What the end of a pass keeps is decided after it was judged.
        if is_asked or (self.is_save_due and now.batches < num_batches):
            # An engine that saves its table to score it has then half of the save behind it.
            self.check_scores(now)
            self._save(now)
        if is_asked:
            raise Preempted(f"asked to stop: saved at epoch {now.epoch + 1}, batch {now.batches} of {num_batches}")

    def _check(
        self, learnt: Learnt, numbers: NDArray[np.int64], batch_size: int, now: Position, num_batches: int
    ) -> None:
        bad = learnt.bad_batches
        if bad is None and math.isfinite(learnt.mean_loss):
            return
        bad = bad or range(-(-len(numbers) // batch_size))
        rows = numbers[bad.start * batch_size : bad.stop * batch_size]
        batches = f"{now.batches + bad.start + 1}"
        batches += f" to {now.batches + bad.stop}" if len(bad) > 1 else ""
        raise PermanentError(
            f"loss is not finite at epoch {now.epoch + 1}, batch {batches} of {num_batches} ({len(rows)} rows, among "
            f"them {place_of_rows(self._folders, rows[:_NAMED_ROWS].tolist())}), expected a finite number; look at "
            "those rows for values far from the others, or try a smaller learning rate"
        )


def require_finite(probabilities: NDArray[np.float32], now: Position) -> None:
    """Refuses a network that no longer scores.

    Raises:
        PermanentError: a score is no number.
    """
    if num_wrong := int((~np.isfinite(probabilities)).sum()):
        raise PermanentError(
            f"{num_wrong} of {len(probabilities)} scores are not finite after step {now.step} (epoch {now.epoch}, "
            f"batch {now.batches}), expected probabilities; try a smaller learning rate"
        )
