"""Where each value of a row is counted: one number per column and row, the cell, in one flat array for all columns.

In: a model's training statistics. Out: cells of a batch's values. A dense column has a cell per bucket of the
reference, a categorical one a cell per listed value and one for what is not listed; each has one for missing values;
the score has its buckets. A list is two columns: its elements, each with a cell, and their number, which is dense.
Counting is left to `monitoring.drift.sketch`.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from components.contracts.features import MISSING_CATEGORY, Features
from components.contracts.records import PredictionBatch
from components.contracts.reference_statistics import ReferenceStatistics, bucket_of
from components.contracts.serving import ColumnMap

SCORE = "score"
Ints = NDArray[np.int64]


class Layout:
    """The cells of one reference."""

    def __init__(self, reference: ReferenceStatistics, *, rows: Features | None = None) -> None:
        """Builds the tables, 0.5 MB.

        `rows` are the columns of the batches, found by their names; None = those of the training rows.
        """
        self.reference = reference
        rows = rows or reference.features
        self._lost = rows.places_lost(reference.features)
        self._columns = ColumnMap(rows.columns, reference.features.columns)
        self._widths = (len(rows.numeric), len(rows.places.slots))
        self.columns = (*reference.dense, *reference.categorical, SCORE)
        """The judged columns: d numeric ones and lengths of lists, c categorical ones and lists, the score."""
        self.plain = np.array([i for i, name in enumerate(self.columns) if name not in reference.lists])
        """[k] numbers of the columns that have one value a row: all but the lists."""
        self._places = reference.features.places
        self._num_dense = num_dense = len(reference.dense)
        sizes = [len(reference.dense_edges)] * num_dense
        sizes += [len(column.values) + 2 for column in reference.categorical.values()]
        sizes.append(len(reference.scores.counts) if reference.scores else 1)
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        """[d + c + 2] first cell of each column, and the number of cells."""
        self.missing = self.starts[1:] - 1
        """[d + c + 1] cell of each column's missing values; -1, no cell, for the score."""
        self.missing[-1] = -1
        self.unlisted = self.starts[num_dense + 1 : len(self.columns)] - 2
        """[c] cell of each categorical column's values that are not listed."""
        self.digest = _digest(reference)
        """Identifies the layout over restarts."""
        self._listed = [self._sorted_values(name) for name in reference.categorical]

    def _sorted_values(self, column: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The listed values of a categorical column and the missing one, ascending, and the cell of each."""
        start, values = self.slice_of(column).start, self.reference.categorical[column].values
        wanted = np.append(values, MISSING_CATEGORY)
        cells = start + np.append(np.arange(len(values)), len(values) + 1)
        order = np.argsort(wanted)
        return wanted[order], cells[order]

    def slice_of(self, column: str) -> slice:
        """The cells of `column`."""
        number = self.columns.index(column)
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def fits(self, batch: PredictionBatch) -> bool:
        """Whether the rows have the training rows' columns, and the batch as many as it should have."""
        return not self._lost and (batch.dense.shape[1], batch.categorical.shape[1]) == self._widths

    def columns_of(
        self, dense: NDArray[np.float32], categorical: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The training rows' columns of a batch's [n, d] and [n, places]."""
        return self._columns.rows(dense, categorical)

    def cells(
        self, dense: NDArray[np.float32], categorical: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> NDArray[np.int32]:
        """The cell of each value of the `plain` columns, [n, k], from the [n, d] and [n, places] of `columns_of`."""
        num_dense = self._num_dense
        lengths = [
            (categorical[:, start:stop] != MISSING_CATEGORY).sum(axis=1) for start, stop, _ in self._places.lists
        ]
        dense = np.column_stack([dense, *lengths]) if lengths else dense
        found = np.empty((len(scores), len(self.plain)), np.int32)
        buckets = bucket_of(self.reference.dense_edges, dense)
        buckets[np.isnan(dense)] = len(self.reference.dense_edges) - 1
        found[:, :num_dense] = buckets + self.starts[:num_dense]
        for i in range(len(self._listed) - len(lengths)):
            found[:, num_dense + i] = self._category_cells(i, categorical[:, i])
        of_scores = self.reference.scores
        found[:, -1] = self.starts[-2] + (bucket_of(of_scores.edges, scores) if of_scores else 0)
        return found

    def element_cells(self, categorical: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int32], Ints]]:
        """The cell of each element of the lists, rows one after another, [elements]; and how many a row has, [n].

        Each with the number of its column in `columns`.
        """
        num_plain = len(self._listed) - len(self._places.lists)
        for i, (start, stop, _) in enumerate(self._places.lists, start=num_plain):
            places = categorical[:, start:stop]
            held = places != MISSING_CATEGORY
            yield self._num_dense + i, self._category_cells(i, places[held]), held.sum(axis=1)

    def _category_cells(self, number: int, values: NDArray[np.int64]) -> NDArray[np.int32]:
        listed, cells = self._listed[number]
        nearest = np.minimum(np.searchsorted(listed, values), len(listed) - 1)
        return np.where(listed[nearest] == values, cells[nearest], self.unlisted[number]).astype(np.int32)


def _digest(reference: ReferenceStatistics) -> str:
    parts = [reference.dense_edges, *(column.values for column in reference.categorical.values())]
    if reference.scores:
        parts.append(reference.scores.edges)
    found = hashlib.sha256(repr(reference.features).encode())
    for part in parts:
        found.update(b"%d:" % len(part) + part.tobytes())
    return found.hexdigest()
