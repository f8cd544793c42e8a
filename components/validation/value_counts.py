"""Rows per category of one column, exactly up to a bound, with what tells how alike the rows of a request are.

Beyond the bound the rarest values are dropped as a Misra-Gries summary drops them (Agarwal et al., Mergeable summaries,
2013), which costs any count at most a 131072nd of the rows. TFDV's own counts will not do: of a column with more than
1024 distinct values it keeps a sketch of 1024 counters, which may lack a 1024th of all rows in every count, more than
tests of drift take for drift.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_DISTINCT = 131_072
"""Values whose counts are held; 4 MB."""

Ints = NDArray[np.int64]


class ValueCounts:
    """Sums per value of one column.

    >>> counts = ValueCounts(2)
    >>> counts.add(np.array([7, 7, 7, 5, 5, 9]))
    >>> counts.values.tolist(), counts.counts.tolist(), counts.lost
    ([5, 7], [1, 2], 1)
    """

    def __init__(self, capacity: int = MAX_DISTINCT) -> None:
        self._capacity = capacity
        self.values = np.zeros(0, np.int64)
        """[k] ascending."""
        self.sums = np.zeros((0, 3), np.int64)
        """[k, 3] rows of each value; sum over requests of its squared rows, and of its rows times the request's rows
        that have a value. The rows are too low by at most `lost`; the other two are whole."""
        self.lost = 0
        """At most the rows added divided by `capacity` + 1; also what a value that is not held may have had."""

    @property
    def counts(self) -> Ints:
        """[k] rows of each value."""
        return self.sums[:, 0]

    def add(self, values: Ints) -> None:
        """Counts values [n] in, each a request of its own."""
        found, counts = np.unique(values, return_counts=True)
        self.add_sums(found, np.stack([counts] * 3, axis=1))

    def add_sums(self, values: Ints, sums: Ints) -> None:
        """Adds sums [n, 3] of distinct ascending values [n]."""
        # Both sides are sorted: to insert what is new takes a third of the time of sorting all again.
        places = np.searchsorted(self.values, values)
        known = np.zeros(len(values), np.bool_)
        inside = places < len(self.values)
        known[inside] = self.values[places[inside]] == values[inside]
        self.sums[places[known]] += sums[known]
        if not known.all():
            self.values = np.insert(self.values, places[~known], values[~known])
            self.sums = np.insert(self.sums, places[~known], sums[~known], axis=0)
        if len(self.values) > self._capacity:
            least = int(np.partition(self.counts, -self._capacity - 1)[-self._capacity - 1])
            held = self.counts > least
            self.values, self.sums = self.values[held], self.sums[held]
            self.sums[:, 0] -= least
            self.lost += least

    def merge(self, other: ValueCounts) -> None:
        """Takes in the counts of other rows."""
        self.lost += other.lost
        self.add_sums(other.values, other.sums)

    def listed(self, limit: int) -> tuple[Ints, Ints]:
        """The most frequent values and their sums [k, 3], most frequent first, ties by value."""
        order = np.lexsort((self.values, -self.counts))[:limit]
        return self.values[order], self.sums[order]

    def of(self, values: Ints) -> Ints:
        """The count of each of `values` [n]; 0 for one that is not held."""
        if not len(self.values):
            return np.zeros(len(values), np.int64)
        places = np.minimum(np.searchsorted(self.values, values), len(self.values) - 1)
        return np.where(self.values[places] == values, self.counts[places], 0)
