"""Where each value of a row is counted: one number per column and row, the cell, in one flat array for all columns.

In: a model's training statistics. Out: cells of a batch's values. A dense column has a cell per bucket of the
reference, a categorical one a cell per listed value and one for what is not listed; each has one for missing values;
the score has its buckets. Counting is left to `monitoring.drift.sketch`.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from components.contracts.features import MISSING_CATEGORY
from components.contracts.records import PredictionBatch
from components.contracts.reference_statistics import ReferenceStatistics, bucket_of

SCORE = "score"


class Layout:
    """The cells of one reference."""

    def __init__(self, reference: ReferenceStatistics) -> None:
        """Builds the tables, 0.5 MB."""
        self.reference = reference
        self.columns = (*reference.features.names, SCORE)
        """The judged columns, in the order of a cell matrix's columns: d numeric, c categorical ones, the score."""
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
        """Whether the batch has as many columns of each kind as the training rows."""
        widths = len(self.reference.dense), len(self.reference.categorical)
        return (batch.dense.shape[1], batch.categorical.shape[1]) == widths

    def cells(
        self, dense: NDArray[np.float32], categorical: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> NDArray[np.int32]:
        """The cell of every value: [n, d + c + 1] from [n, d], [n, c] and [n]."""
        num_dense = self._num_dense
        found = np.empty((len(scores), len(self.columns)), np.int32)
        buckets = bucket_of(self.reference.dense_edges, dense)
        buckets[np.isnan(dense)] = len(self.reference.dense_edges) - 1
        found[:, :num_dense] = buckets + self.starts[:num_dense]
        for i, (values, cells) in enumerate(self._listed):
            column = categorical[:, i]
            nearest = np.minimum(np.searchsorted(values, column), len(values) - 1)
            found[:, num_dense + i] = np.where(values[nearest] == column, cells[nearest], self.unlisted[i])
        of_scores = self.reference.scores
        found[:, -1] = self.starts[-2] + (bucket_of(of_scores.edges, scores) if of_scores else 0)
        return found


def _digest(reference: ReferenceStatistics) -> str:
    parts = [reference.dense_edges, *(column.values for column in reference.categorical.values())]
    if reference.scores:
        parts.append(reference.scores.edges)
    found = hashlib.sha256(repr(reference.features).encode())
    for part in parts:
        found.update(b"%d:" % len(part) + part.tobytes())
    return found.hexdigest()
