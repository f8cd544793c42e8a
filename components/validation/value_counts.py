"""Rows per category of one column, exactly up to a bound, with what tells how alike the rows of a request are.

Beyond the bound the rarest values are dropped as a Misra-Gries summary drops them (Agarwal et al., Mergeable summaries,
2013), which costs any count at most a 131072nd of the rows. TFDV's own counts will not do: of a column with more than
1024 distinct values it keeps a sketch of 1024 counters, which may lack a 1024th of all rows in every count, more than
tests of drift take for drift.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_DISTINCT = 131_072
"""Values whose counts are held; 2 MB, 4 MB where a column needs wider numbers."""

Ints = NDArray[np.int64]

_LARGEST_VALUE, _LARGEST_SUM = np.iinfo(np.uint32).max, np.iinfo(np.uint32).max


class ValueCounts:
    """Sums per value of one column.

    Held in four numbers of 32 bits per value, which categories and most windows fit in; a column with a larger value or
    sum is held in 64 bits from then on. What is asked for comes in 64 bits.

    >>> counts = ValueCounts(2)
    >>> counts.add(np.array([7, 7, 7, 5, 5, 9]))
    >>> counts.values.tolist(), counts.counts.tolist(), counts.lost
    ([5, 7], [1, 2], 1)
    """

    def __init__(self, capacity: int = MAX_DISTINCT) -> None:
        self._capacity = capacity
        self._values: NDArray[Any] = np.zeros(0, np.uint32)
        self._sums: NDArray[Any] = np.zeros((0, 3), np.uint32)
        self._largest = 0
        """No sum is above it."""
        self.lost = 0
        """At most the rows added divided by `capacity` + 1; also what a value that is not held may have had."""

    @property
    def values(self) -> Ints:
        """[k] ascending."""
        return self._values.astype(np.int64)

    @property
    def sums(self) -> Ints:
        """[k, 3] rows of each value; sum over requests of its squared rows, and of its rows times the request's rows.

        Of those, the ones that have a value. The rows are too low by at most `lost`; the other two are whole.
        """
        return self._sums.astype(np.int64)

    @property
    def counts(self) -> Ints:
        """[k] rows of each value."""
        return self._sums[:, 0].astype(np.int64)

    @property
    def held_bytes(self) -> int:
        """Bytes that the values and their sums take."""
        return self._values.nbytes + self._sums.nbytes

    def add(self, values: Ints) -> None:
        """Counts values [n] in, each a request of its own."""
        found, counts = np.unique(values, return_counts=True)
        self.add_sums(found, np.stack([counts] * 3, axis=1))

    def add_sums(self, values: Ints, sums: Ints) -> None:
        """Adds sums [n, 3], none negative, of distinct ascending values [n]."""
        if not len(values):
            return
        self._widen(values, sums)
        # Of one type: NumPy would copy all that is held to compare it with another.
        values, sums = values.astype(self._values.dtype, copy=False), sums.astype(self._sums.dtype, copy=False)
        # Both sides are sorted: to insert what is new takes a third of the time of sorting all again.
        places = np.searchsorted(self._values, values)
        known = np.zeros(len(values), np.bool_)
        inside = places < len(self._values)
        known[inside] = self._values[places[inside]] == values[inside]
        self._sums[places[known]] += sums[known]
        if not known.all():
            self._values = np.insert(self._values, places[~known], values[~known])
            self._sums = np.insert(self._sums, places[~known], sums[~known], axis=0)
        if len(self._values) > self._capacity:
            self._drop()

    def _widen(self, values: Ints, sums: Ints) -> None:
        """Takes 64 bits where these ascending values or sums need them."""
        self._largest += int(sums.max())
        if values[0] < 0 or values[-1] > _LARGEST_VALUE:
            self._values = self._values.astype(np.int64, copy=False)
        if self._largest > _LARGEST_SUM:
            self._sums = self._sums.astype(np.int64, copy=False)

    def _drop(self) -> None:
        """Drops the rarest values beyond the capacity, and their rows from every count."""
        counts = self._sums[:, 0]
        least = np.partition(counts, -self._capacity - 1)[-self._capacity - 1]
        held = counts > least
        self._values, self._sums = self._values[held], self._sums[held]
        self._sums[:, 0] -= least
        self.lost += int(least)

    def merge(self, other: ValueCounts) -> None:
        """Takes in the counts of other rows."""
        self.lost += other.lost
        self.add_sums(other.values, other.sums)

    def listed(self, limit: int) -> tuple[Ints, Ints]:
        """The most frequent values and their sums [k, 3], most frequent first, ties by value."""
        order = np.lexsort((self._values, -self.counts))[:limit]
        return self._values[order].astype(np.int64), self._sums[order].astype(np.int64)

    def of(self, values: Ints) -> Ints:
        """The count of each of `values` [n]; 0 for one that is not held."""
        held = self.values
        if not len(held):
            return np.zeros(len(values), np.int64)
        places = np.minimum(np.searchsorted(held, values), len(held) - 1)
        return np.where(held[places] == values, self.counts[places], 0)
