"""Counts the training rows for `contracts.reference_statistics`, while TFDV counts them for itself.

TFDV's own counts will not do: of a column with more than 1024 distinct values it keeps a sketch of 1024 counters, which
may lack a 1024th of all rows in every count, more than the monitor's tests take for drift. Here a column is counted
exactly up to `MAX_DISTINCT` distinct values; beyond, the rarest are dropped as a Misra-Gries summary drops them
(Agarwal et al., Mergeable summaries, 2013), which costs any count at most a 131072nd of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.contracts import criteo
from components.contracts.reference_statistics import (
    DENSE_EDGES,
    LISTED_VALUES,
    CategoryColumn,
    DenseColumn,
    ReferenceStatistics,
    count_between,
)

MAX_DISTINCT = 131_072
"""Values whose counts are held per column and half; 2 MB."""
BLOCK_ROWS = 1024
"""Rows in a row that fall into one half."""


class ValueCounts:
    """Rows per value of one column.

    >>> counts = ValueCounts(2)
    >>> counts.add(np.array([7, 7, 7, 5, 5, 9]))
    >>> counts.values.tolist(), counts.counts.tolist()
    ([5, 7], [1, 2])
    """

    def __init__(self, capacity: int = MAX_DISTINCT) -> None:
        self._capacity = capacity
        self.values = np.zeros(0, np.int64)
        """[k] ascending."""
        self.counts = np.zeros(0, np.int64)
        """[k] rows of each, too low by at most the rows added divided by `capacity` + 1."""

    def add(self, values: NDArray[np.int64]) -> None:
        """Counts values [n] in."""
        new, new_counts = np.unique(values, return_counts=True)
        merged, place = np.unique(np.concatenate([self.values, new]), return_inverse=True)
        counts = np.zeros(len(merged), np.int64)
        counts[place[: len(self.values)]] = self.counts
        counts[place[len(self.values) :]] += new_counts
        if len(merged) > self._capacity:
            counts -= np.partition(counts, -self._capacity - 1)[-self._capacity - 1]
            merged, counts = merged[counts > 0], counts[counts > 0]
        self.values, self.counts = merged, counts

    def listed(self, limit: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The most frequent values and their counts, most frequent first, ties by value."""
        order = np.lexsort((self.values, -self.counts))[:limit]
        return self.values[order], self.counts[order]

    def of(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The count of each of `values` [n]; 0 for one that is not held."""
        if not len(self.values):
            return np.zeros(len(values), np.int64)
        places = np.minimum(np.searchsorted(self.values, values), len(self.values) - 1)
        return np.where(self.values[places] == values, self.counts[places], 0)


class ReferenceCounter:
    """Counts batches of rows with all features."""

    def __init__(self) -> None:
        """No rows yet."""
        self._rows = 0
        # Two of each: for the rows that choose what is listed, and for the others.
        self._dense = {name: np.zeros((2, len(DENSE_EDGES) - 1), np.int64) for name in criteo.DENSE}
        self._categorical = {name: (ValueCounts(), ValueCounts()) for name in criteo.CATEGORICAL}
        self._present = {name: np.zeros(2, np.int64) for name in criteo.FEATURES}

    def counted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Passes `batches` on, each after it was counted in."""
        for batch in batches:
            self.add(batch)
            yield batch

    def add(self, batch: pa.RecordBatch) -> None:
        """Counts a batch in; null and NaN are missing, as in a log record."""
        # By blocks, for rows of one request lie together and are alike: cut between them, no half would be fair.
        half = (np.arange(self._rows, self._rows + batch.num_rows) // BLOCK_ROWS) % 2
        self._rows += batch.num_rows
        dense = criteo.feature_matrix(batch, criteo.DENSE, "float32", np.nan)
        categorical = criteo.feature_matrix(batch, criteo.CATEGORICAL, "int64", criteo.MISSING_CATEGORY)
        for fair in range(2):
            self._add_half(fair, dense[half == fair], categorical[half == fair])

    def _add_half(self, fair: int, dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> None:
        for i, name in enumerate(criteo.DENSE):
            found = count_between(DENSE_EDGES, dense[:, i])
            self._dense[name][fair] += found
            self._present[name][fair] += found.sum()
        for i, name in enumerate(criteo.CATEGORICAL):
            values = categorical[:, i]
            values = values[values != criteo.MISSING_CATEGORY]
            self._categorical[name][fair].add(values)
            self._present[name][fair] += len(values)

    def statistics(self) -> ReferenceStatistics:
        """What was counted."""
        return ReferenceStatistics(
            rows=self._rows,
            dense_edges=DENSE_EDGES,
            dense={
                name: DenseColumn.of(choosing, fair, self._missing(name))
                for name, (choosing, fair) in self._dense.items()
            },
            categorical={name: self._category(name) for name in criteo.CATEGORICAL},
        )

    def _missing(self, name: str) -> int:
        return self._rows - int(self._present[name].sum())

    def _category(self, name: str) -> CategoryColumn:
        choosing, fair = self._categorical[name]
        values, counts = choosing.listed(LISTED_VALUES)
        fair_counts = fair.of(values)
        fair_others = int(self._present[name][1] - fair_counts.sum())
        return CategoryColumn(
            values=values,
            counts=counts + fair_counts,
            others=int(self._present[name][0] - counts.sum()) + fair_others,
            fair_counts=fair_counts,
            fair_others=fair_others,
            missing=self._missing(name),
        )
