"""One pass over a part of the rows: the order of its rows, and what is looked at between two calls of the engine.

The order is a shuffled part of the new rows, mixed with replayed ones; part, share and seed decide it all, so a resumed
pass goes on in the same order. Between segments a pass may be saved or broken off, its loss is checked, and its
progress is reported. A segment's seed comes from its position alone, so a pass that goes on after a break takes the
steps that an unbroken one takes. How many passes there are, over which parts, is `fit`'s.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from components.contracts.metrics import log_loss, roc_auc
from components.runtime.errors import PermanentError, Preempted
from components.training.checkpoint import Position
from components.training.engine import Engine, Learned
from components.training.metrics_sink import MetricsSink
from components.training.rows import RowFolder, Rows, place_of_rows

logger = logging.getLogger(__name__)

_METRICS_EVERY_SECONDS = 10.0
_LOG_EVERY_SECONDS = 30.0
_SAMPLE_ROWS = 8192
"""Newest rows that are scored within a pass: some 10 ms."""
_NAMED_ROWS = 5
_RUN_ROWS = 1 << 10
"""Neighbouring rows that move together in a long pass."""
_MOST_RUNS = 1 << 10
"""Runs that are shuffled into each other in a long pass, at most: a million rows, whose order takes 8 MB."""


def derived_seed(*numbers: int) -> int:
    """A seed below 2^32 that changes with every number and with their order; the last must not be 0.

    (NumPy takes numbers that end in zeros for the shorter ones.)
    """
    assert numbers[-1] != 0
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@dataclass(frozen=True, kw_only=True)
class PassRows:
    """Which rows a pass goes over."""

    first: int
    """First of the new rows; they end at `stop`."""
    stop: int
    replay_first: int
    """First of all replay rows; they end at `replay_stop`."""
    replay_stop: int
    num_replayed: int
    """Replay rows of one pass, at most as many as there are."""

    def __len__(self) -> int:
        """Rows of one pass."""
        return self.stop - self.first + self.num_replayed


def replayed(num_new: int, share: float, available: int) -> int:
    """Replay rows beside `num_new` new ones that make `share` (in [0, 1)) of all, at most those available.

    >>> replayed(900, 0.1, 5000), replayed(900, 0.1, 50), replayed(900, 0.0, 50)
    (100, 50, 0)
    """
    return min(available, round(num_new * share / (1 - share)))


class PassOrder:
    """The row numbers of one pass, in the order in which they are learned.

    Up to a million rows are one permutation. A longer pass is shuffled in two steps, so that its order needs no memory
    of its length and its reads stay near each other: runs of 1024 neighbouring rows change places over the whole pass,
    then windows of equally many such runs, 1024 at most, are permuted row by row. A batch so holds rows of hundreds of
    places of the pass. Of the replay rows, evenly spaced ones take part, other ones in each pass.
    """

    def __init__(self, part: PassRows, seed: int) -> None:
        """Makes the order that `seed` decides."""
        self._part, self._seed = part, seed
        self._offset = float(np.random.default_rng([seed, 1]).random())
        random = np.random.default_rng(seed)
        if len(part) <= _RUN_ROWS * _MOST_RUNS:
            self._window_rows = len(part)
            self._window, self._window_number = random.permutation(len(part)), 0
            return
        # Only whole runs change places: windows then begin at multiples of their length.
        num_runs = -(-len(part) // _RUN_ROWS)
        self._runs = np.append(random.permutation(num_runs - 1), num_runs - 1)
        num_windows = -(-num_runs // _MOST_RUNS)
        self._window_rows = -(-num_runs // num_windows) * _RUN_ROWS
        self._window, self._window_number = np.empty(0, np.int64), -1

    def __len__(self) -> int:
        """Rows of the pass."""
        return len(self._part)

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """The row numbers at positions `start` to `stop`, the end of the pass at most."""
        stop = min(stop, len(self))
        pieces = [np.empty(0, np.int64)]
        while start < stop:
            number, at = divmod(start, self._window_rows)
            piece = self._positions(number)[at : at + stop - start]
            pieces.append(piece)
            start += len(piece)
        return self._to_rows(np.concatenate(pieces))

    def _positions(self, number: int) -> NDArray[np.int64]:
        """Window `number` as positions in the part, new rows first; the last one made is kept."""
        if number != self._window_number:
            num_runs = self._window_rows // _RUN_ROWS
            runs = self._runs[number * num_runs : (number + 1) * num_runs]
            positions = (runs[:, None] * _RUN_ROWS + np.arange(_RUN_ROWS)).ravel()
            random = np.random.default_rng([self._seed, 2, number])
            self._window = random.permutation(positions[positions < len(self)])
            self._window_number = number
        return self._window

    def _to_rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        part = self._part
        num_new = part.stop - part.first
        rows = positions + part.first
        if part.num_replayed:
            is_replay = positions >= num_new
            spacing = (part.replay_stop - part.replay_first) / part.num_replayed
            drawn = ((positions[is_replay] - num_new + self._offset) * spacing).astype(np.int64)
            rows[is_replay] = part.replay_first + np.minimum(drawn, part.replay_stop - part.replay_first - 1)
        return rows


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a fit is given beside its job."""

    sink: MetricsSink
    """Takes the numbers of each epoch, and some within it."""
    clock: Callable[[], float]
    """Seconds, for speeds and intervals."""
    should_stop: Callable[[], bool]
    """Whether the fit is asked to save and end."""


class PassRunner:
    """Makes passes with one engine."""

    def __init__(
        self,
        engine: Engine,
        rows: Rows,
        folders: Sequence[RowFolder],
        *,
        judging: slice,
        surroundings: Surroundings,
        seed: int,
        checkpoint_seconds: float,
        save: Callable[[Position], None],
    ) -> None:
        """Makes a runner.

        Args:
            engine: Takes the steps.
            rows: All rows.
            folders: Where they came from, to name the location of bad ones.
            judging: The stopping slice among `rows`.
            surroundings: Sink, clock, stop request.
            seed: The fit's.
            checkpoint_seconds: Time after which a pass is saved.
            save: Saves the fit as it stands at a position; the position's `weights` are yet to be written.
        """
        self._engine, self._rows, self._folders, self._around = engine, rows, folders, surroundings
        self._sample = rows[max(judging.start, judging.stop - _SAMPLE_ROWS) : judging.stop]
        self._seed, self._checkpoint_seconds, self._save = seed, checkpoint_seconds, save
        self._rows_learned, self._seconds = 0, 0.0
        self.saved_at = self._measured_at = self._logged_at = surroundings.clock()

    @property
    def rows_per_second(self) -> float | None:
        """Rows learned per second of learning in this process; None where there were none."""
        return self._rows_learned / self._seconds if self._seconds > 0 else None

    @property
    def is_save_due(self) -> bool:
        """Whether the last save is as long ago as saves may lie apart."""
        return self._around.clock() - self.saved_at >= self._checkpoint_seconds

    def run(self, part: PassRows, batch_size: int, now: Position) -> tuple[Position, float]:
        """Goes on from `now` to the end of its pass; the position there, and the mean loss of the pass's batches.

        Raises:
            PermanentError: a loss or a score is not finite.
            Preempted: the fit was asked to stop, and is saved.
        """
        order = PassOrder(part, derived_seed(self._seed, now.branch, now.epoch + 1))
        num_batches = -(-len(part) // batch_size)
        segment = self._engine.segment_batches(batch_size)
        self._measured_at = self._logged_at = self._around.clock()
        while now.batches < num_batches:
            stop = min(now.batches + segment, num_batches)
            began = self._around.clock()
            numbers = order.rows(now.batches * batch_size, stop * batch_size)
            seed = derived_seed(self._seed, now.branch, now.epoch + 1, now.batches + 1)
            learned = self._engine.learn(self._rows, numbers, batch_size=batch_size, seed=seed)
            self._require_finite_loss(learned, numbers, batch_size, now=now, num_batches=num_batches)
            self._rows_learned += len(numbers)
            self._seconds += self._around.clock() - began
            loss_sum = now.loss_sum + learned.mean_loss * (stop - now.batches)
            now = replace(now, batches=stop, loss_sum=loss_sum, step=self._engine.num_steps)
            self._report(learned, now, num_batches)
            self._save_if_due(now, num_batches)
        ended = replace(now, epoch=now.epoch + 1, batches=0, loss_sum=0.0)
        return ended, now.loss_sum / num_batches

    def check_scores(self, now: Position) -> tuple[float | None, float | None]:
        """AUC and log loss of the newest rows, as the network is now.

        Raises:
            PermanentError: a score is not finite: the newest step spoilt the weights.
        """
        probabilities = self._engine.score(self._sample)
        require_finite_scores(probabilities, now)
        return roc_auc(self._sample.labels, probabilities), log_loss(self._sample.labels, probabilities)

    def _report(self, learned: Learned, now: Position, num_batches: int) -> None:
        """A log line and numbers for the sink, where the last ones are long enough ago."""
        time = self._around.clock()
        if time - self._logged_at >= _LOG_EVERY_SECONDS:
            self._logged_at = time
            logger.info(
                "branch %d, epoch %d: batch %d of %d, loss %.5f",
                now.branch, now.epoch + 1, now.batches, num_batches, learned.mean_loss,
            )  # fmt: skip
        if time - self._measured_at >= _METRICS_EVERY_SECONDS:
            self._measured_at = time
            auc, loss = self.check_scores(now) if self._engine.scores_cheaply else (None, None)
            numbers = {
                "branch": now.branch,
                "epoch": now.epoch + 1,
                "batch": now.batches,
                "segment_loss": learned.mean_loss,
                "sample_auc": auc,
                "sample_log_loss": loss,
                "rows_per_second": self.rows_per_second,
            }
            self._around.sink.log(numbers, now.step)

    def _save_if_due(self, now: Position, num_batches: int) -> None:
        """Saves where it is time, and ends the fit where it is asked to end."""
        is_asked = self._around.should_stop()
        # What the end of a pass keeps is decided after it was judged.
        if is_asked or (self.is_save_due and now.batches < num_batches):
            # An engine that saves its table to score it has then half of the save behind it.
            self.check_scores(now)
            self._save(now)
        if is_asked:
            raise Preempted(f"asked to stop: saved at epoch {now.epoch + 1}, batch {now.batches} of {num_batches}")

    def _require_finite_loss(
        self, learned: Learned, numbers: NDArray[np.int64], batch_size: int, *, now: Position, num_batches: int
    ) -> None:
        bad = learned.bad_batches
        if bad is None and math.isfinite(learned.mean_loss):
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


def require_finite_scores(probabilities: NDArray[np.float32], now: Position) -> None:
    """Refuses a network that no longer scores.

    Raises:
        PermanentError: a score is not finite.
    """
    if num_wrong := int((~np.isfinite(probabilities)).sum()):
        raise PermanentError(
            f"{num_wrong} of {len(probabilities)} scores are not finite after step {now.step} (epoch {now.epoch}, "
            f"batch {now.batches}), expected probabilities; try a smaller learning rate"
        )
