"""The AUC of a moving window after every single record: exact, incremental, a block of records at a time.

In: labels and scores in the order of time. Out: after each of them the AUC of the window that ends with it: its newest
`max_rows` rows, those of the newest `seconds`, or what both allow. For series: policies judged record by record,
charts. A single number per decision point is cheaper from `contracts.metrics` (one sort of the window).

How: 2U, twice the number of (click, other) pairs that the click wins, is kept as an exact integer; twice, so that a tie
counts 1. A row that enters or leaves changes it by the row's wins over the other class of the window. Few rows at a
call go one by one through two sorted lists. Many go in blocks: two binary searches per row in the window as it was
before the block, plus a small matrix for the rows that entered or left inside the block. Nothing is ever rounded until
2U is divided by 2 (clicks x others). Speed, beside river's and scikit-learn's: `make benchmark-monitor`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.runtime.errors import ContractError

BLOCK_ROWS = 512
"""Rows taken at once: fewer pay more calls, more a larger matrix (its size is the product of the classes' changes)."""
FEW_ROWS = 32
"""Up to so many rows at a call go one by one, 5 us each; a block of fewer would cost more."""
_MAX_LEAVING = 2 * BLOCK_ROWS
"""Rows that leave within one block; more at once are not counted one after another."""


class _Changes(NamedTuple):
    """Rows of one class that enter (+1) or leave (-1), and which of a block's changes they are, in their order."""

    scores: NDArray[np.float64]
    signs: NDArray[np.int64]
    order: NDArray[np.int64]


class RollingAuc:
    """The AUC of a window after every record.

    >>> rolling = RollingAuc(max_rows=3)
    >>> rolling.update(np.array([0, 1, 1, 1]), np.array([0.5, 0.5, 0.7, 0.2]))
    array([ nan, 0.5 , 0.75,  nan])
    """

    def __init__(self, *, max_rows: int | None = None, seconds: float | None = None) -> None:
        """An empty window.

        Args:
            max_rows: Newest rows that the window holds; None = no limit.
            seconds: The window holds rows of the half-open interval (t - seconds, t], t the newest row's time; None =
                no limit. At least one limit is expected.

        Raises:
            ContractError: no limit, or one that holds no row.
        """
        if max_rows is None and seconds is None:
            raise ContractError("max_rows and seconds are both None, expected at least one limit of the window")
        if max_rows is not None and max_rows < 1:
            raise ContractError(f"max_rows is {max_rows}, expected at least 1")
        if seconds is not None and not seconds > 0:
            raise ContractError(f"seconds is {seconds}, expected above 0")
        self._max_rows, self._seconds = max_rows, seconds
        # The rows, oldest first, with room behind: the window is the slice from start to end.
        self._click, self._scores, self._times = np.zeros(0, bool), np.zeros(0), np.zeros(0)
        self._start = self._end = 0
        self._sorted_clicks, self._sorted_others = np.zeros(0), np.zeros(0)
        self._lists: tuple[list[float], list[float]] | None = None
        """Others and clicks, sorted, while few rows come at a call; the sorted arrays are out of date then."""
        self._twice_u, self._counts = 0, (0, 0)

    def __len__(self) -> int:
        """Rows in the window."""
        return self._end - self._start

    @property
    def auc(self) -> float | None:
        """AUC of the window now; None unless both classes are present."""
        clicks, others = self._counts
        return self._twice_u / (2 * clicks * others) if clicks and others else None

    def update(
        self, labels: NDArray[np.generic], scores: NDArray[np.floating], times: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Takes in rows, oldest first.

        Args:
            labels: 0 or 1, shape [n].
            scores: Finite numbers, shape [n]; only their order counts.
            times: Seconds, shape [n], never falling, not before those of the last update; needed for a window of time.

        Returns:
            Shape [n]: the AUC after each row; NaN where the window held one class only.

        Raises:
            ContractError: shapes differ, a label is neither 0 nor 1, a score is not finite, or times are missing, not
                finite or falling. The window is as it was before.
        """
        rows = self._checked(labels, scores, times)
        self._make_room(len(rows[0]))
        first, last = self._end, self._end + len(rows[0])
        for held, new in zip((self._click, self._scores, self._times), rows):
            held[first:last] = new
        if last - first <= FEW_ROWS:
            return self._take_singly(first, last)
        self._leave_lists()
        blocks = [self._take(at, min(at + BLOCK_ROWS, last)) for at in range(first, last, BLOCK_ROWS)]
        return np.concatenate(blocks)

    def _checked(
        self, labels: NDArray[np.generic], scores: NDArray[np.floating], times: NDArray[np.float64] | None
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
        label, score = np.asarray(labels), np.asarray(scores, np.float64)
        if times is None and self._seconds is not None:
            raise ContractError(f"times are missing, expected {len(label)}: the window is one of {self._seconds} s")
        time = np.zeros(len(label)) if times is None else np.asarray(times, np.float64)
        if label.ndim != 1 or not label.shape == score.shape == time.shape:
            shapes = ", ".join(str(array.shape) for array in (label, score, time))
            raise ContractError(f"labels, scores and times have shapes {shapes}, expected one same length")
        click = label == 1
        if not (click | (label == 0)).all():
            raise ContractError("labels hold values other than 0 and 1")
        if not np.isfinite(score).all():
            raise ContractError(f"{np.count_nonzero(~np.isfinite(score))} scores are NaN or infinite")
        if times is not None:
            last = self._times[max(self._end - 1, 0) : self._end] if self._seconds is not None else time[:0]
            if not np.isfinite(time).all() or (np.diff(np.concatenate([last, time])) < 0).any():
                raise ContractError("times fall or are not finite, expected rows in the order of time")
        return click, score, time

    def _make_room(self, count: int) -> None:
        """Room for `count` rows behind the window; moves it once per as many rows as it holds."""
        if self._end + count <= len(self._scores):
            return
        kept = slice(self._start, self._end)
        room = 2 * (len(self) + count)
        for name in ("_click", "_scores", "_times"):
            moved = np.zeros(room, getattr(self, name).dtype)
            moved[: len(self)] = getattr(self, name)[kept]
            setattr(self, name, moved)
        self._start, self._end = 0, len(self)

    def _take_singly(self, first: int, last: int) -> NDArray[np.float64]:
        """Takes in the rows from `first` to `last`, which lie behind the window; the AUC after each of them."""
        starts = self._starts(first, last)
        aucs = np.full(last - first, np.nan)
        for row, start in zip(range(first, last), starts.tolist()):
            if start - self._start > _MAX_LEAVING:
                self._sort(start, row + 1)
            else:
                self._change_singly(row, 1)
                for leaving in range(self._start, start):
                    self._change_singly(leaving, -1)
                self._start, self._end = start, row + 1
            clicks, others = self._counts
            if clicks and others:
                aucs[row - first] = self._twice_u / (2 * clicks * others)
        return aucs

    def _change_singly(self, row: int, sign: int) -> None:
        if self._lists is None:
            self._lists = self._sorted_others.tolist(), self._sorted_clicks.tolist()
        click, score = int(self._click[row]), float(self._scores[row])
        own, other = self._lists[click], self._lists[1 - click]
        below = bisect_left(other, score) + bisect_right(other, score)
        self._twice_u += sign * (below if click else 2 * len(other) - below)
        if sign > 0:
            insort(own, score)
        else:
            own.pop(bisect_left(own, score))
        self._counts = len(self._lists[1]), len(self._lists[0])

    def _leave_lists(self) -> None:
        if self._lists is not None:
            self._sorted_others, self._sorted_clicks = (np.array(each, np.float64) for each in self._lists)
            self._lists = None

    def _take(self, first: int, last: int) -> NDArray[np.float64]:
        """As `_take_singly`, all rows at once."""
        rows = last - first
        starts = self._starts(first, last)
        gone = int(starts[-1]) - self._start
        if gone > _MAX_LEAVING and rows == 1:
            # A window of time after a long silence: most of it leaves at once.
            self._sort(int(starts[-1]), last)
            return np.array([np.nan if self.auc is None else self.auc])
        if gone > _MAX_LEAVING:
            middle = first + rows // 2
            return np.concatenate([self._take(first, middle), self._take(middle, last)])
        # Row i enters at 2 i; a row leaves at 2 i + 1 if the window after row i is the first without it.
        leaves = np.arange(self._start, self._start + gone)
        times = np.concatenate([2 * np.arange(rows), 2 * np.searchsorted(starts, leaves, side="right") + 1])
        order = np.argsort(times, kind="stable")
        which = np.concatenate([np.arange(first, last), leaves])[order]
        signs = np.where(order < rows, 1, -1)
        ends = np.arange(rows) + starts - self._start
        self._start, self._end = int(starts[-1]), last
        aucs: NDArray[np.float64] = self._change(self._click[which], self._scores[which], signs)[ends]
        return aucs

    def _starts(self, first: int, last: int) -> NDArray[np.int64]:
        """Where the window begins after each of the rows from `first` to `last`."""
        starts = np.full(last - first, self._start, np.int64)
        if self._max_rows is not None:
            starts = np.maximum(starts, np.arange(first + 1, last + 1) - self._max_rows)
        if self._seconds is not None:
            ages = self._times[first:last] - self._seconds
            out = np.searchsorted(self._times[self._start : last], ages, side="right")
            # However short the window, the newest row is in it: t - seconds may round to t.
            starts = np.maximum(starts, np.minimum(self._start + out, np.arange(first, last)))
        return starts

    def _change(
        self, click: NDArray[np.bool_], score: NDArray[np.float64], signs: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Moves 2U on by rows that enter or leave [m], in this order; the AUC after each of them."""
        order = np.arange(len(click))
        of_clicks, of_others = (_Changes(score[of], signs[of], order[of]) for of in (click, ~click))
        # Against the window as it was before, then against what changed before inside the block.
        won_by_clicks = _twice_below(self._sorted_others, of_clicks.scores)
        lost_by_others = 2 * len(self._sorted_clicks) - _twice_below(self._sorted_clicks, of_others.scores)
        inside = _twice_won(of_clicks.scores[:, None], of_others.scores)
        at_click = inside * (of_clicks.order[:, None] > of_others.order)
        won_by_clicks += _sums(at_click, of_others.signs)
        lost_by_others += _sums((inside - at_click).T, of_clicks.signs)
        steps = np.empty(len(click), np.int64)
        steps[click], steps[~click] = won_by_clicks, lost_by_others
        twice_u = self._twice_u + np.cumsum(steps * signs)
        clicks = self._counts[0] + np.cumsum(np.where(click, signs, 0))
        others = self._counts[1] + np.cumsum(np.where(click, 0, signs))
        self._twice_u, self._counts = int(twice_u[-1]), (int(clicks[-1]), int(others[-1]))
        self._sorted_clicks = _merged(self._sorted_clicks, of_clicks)
        self._sorted_others = _merged(self._sorted_others, of_others)
        pairs = 2.0 * clicks * others
        aucs: NDArray[np.float64] = np.divide(twice_u, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)
        return aucs

    def _sort(self, start: int, end: int) -> None:
        """Makes the window the rows from `start` to `end`, and counts 2U of it anew."""
        self._start, self._end, self._lists = start, end, None
        click, scores = self._click[start:end], self._scores[start:end]
        self._sorted_clicks, self._sorted_others = np.sort(scores[click]), np.sort(scores[~click])
        self._twice_u = int(_twice_below(self._sorted_others, self._sorted_clicks).sum())
        self._counts = len(self._sorted_clicks), len(self._sorted_others)


def _twice_below(ordered: NDArray[np.float64], scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each of `scores` [m]: twice the values of `ordered` below it, and once those equal to it."""
    below = np.searchsorted(ordered, scores, side="left")
    return np.asarray(below + np.searchsorted(ordered, scores, side="right"), np.int64)


def _twice_won(clicks: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.int8]:
    """2 where the click [c, 1] scores higher than the other [o], 1 where both score alike, 0 otherwise; [c, o]."""
    won: NDArray[np.int8] = (clicks > others).view(np.int8) + (clicks >= others).view(np.int8)
    return won


def _sums(won: NDArray[np.int8], signs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of each row of `won` [m, k] weighted by `signs` [k]; float32 is exact here and much faster than integers."""
    sums: NDArray[np.float32] = won.astype(np.float32) @ signs.astype(np.float32)
    return sums.astype(np.int64)


def _merged(ordered: NDArray[np.float64], changes: _Changes) -> NDArray[np.float64]:
    """`ordered` with what entered and without what left; a quarter of the time that sorting it again takes."""
    entered, left = np.sort(changes.scores[changes.signs > 0]), np.sort(changes.scores[changes.signs < 0])
    with_entered = np.empty(len(ordered) + len(entered))
    is_old = np.ones(len(with_entered), bool)
    is_old[np.searchsorted(ordered, entered) + np.arange(len(entered))] = False
    with_entered[~is_old], with_entered[is_old] = entered, ordered
    # Equal values that leave take places one after another.
    repeats = np.arange(len(left)) - np.searchsorted(left, left)
    stays = np.ones(len(with_entered), bool)
    stays[np.searchsorted(with_entered, left) + repeats] = False
    kept: NDArray[np.float64] = with_entered[stays]
    return kept
