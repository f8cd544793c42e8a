"""Where each value of a row is counted: one number per column and row, the cell, in one flat array for all columns.

In: a model's training statistics. Out: cells of a batch's values. A dense column has a cell per bucket of the
reference, a categorical one a cell per listed value and one for what is not listed; each has one for missing values;
the score has its buckets. Counting is left to `monitoring.drift.sketch`.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, FEATURES, NUM_DENSE
from components.contracts.features import MISSING_CATEGORY
from components.contracts.reference_statistics import ReferenceStatistics, bucket_of

SCORE = "score"
COLUMNS = (*FEATURES, SCORE)
"""The judged columns, in the order of a cell matrix's columns."""
NUM_COLUMNS = len(COLUMNS)


class Layout:
    """The cells of one reference."""

    def __init__(self, reference: ReferenceStatistics) -> None:
        """Builds the tables, 0.5 MB."""
        self.reference = reference
        sizes = [len(reference.dense_edges)] * NUM_DENSE
        sizes += [len(reference.categorical[name].values) + 2 for name in CATEGORICAL]
        sizes.append(len(reference.scores.counts) if reference.scores else 1)
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        """[41] first cell of each column, and the number of cells."""
        self.missing = self.starts[1:] - 1
        """[40] cell of each column's missing values; -1, no cell, for the score."""
        self.missing[-1] = -1
        self.unlisted = self.starts[NUM_DENSE + 1 : NUM_COLUMNS] - 2
        """[26] cell of each categorical column's values that are not listed."""
        self.digest = _digest(reference)
        """Identifies the layout over restarts."""
        self._listed = [self._sorted_values(name) for name in CATEGORICAL]

    def _sorted_values(self, column: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The listed values of a categorical column and the missing one, ascending, and the cell of each."""
        start, values = self.slice_of(column).start, self.reference.categorical[column].values
        wanted = np.append(values, MISSING_CATEGORY)
        cells = start + np.append(np.arange(len(values)), len(values) + 1)
        order = np.argsort(wanted)
        return wanted[order], cells[order]

    def slice_of(self, column: str) -> slice:
        """The cells of `column`."""
        number = COLUMNS.index(column)
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def cells(
        self, dense: NDArray[np.float32], categorical: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> NDArray[np.int32]:
        """The cell of every value: [n, 40] from [n, 13], [n, 26] and [n]."""
        found = np.empty((len(scores), NUM_COLUMNS), np.int32)
        buckets = bucket_of(self.reference.dense_edges, dense)
        buckets[np.isnan(dense)] = len(self.reference.dense_edges) - 1
        found[:, :NUM_DENSE] = buckets + self.starts[:NUM_DENSE]
        for i, (values, cells) in enumerate(self._listed):
            column = categorical[:, i]
            nearest = np.minimum(np.searchsorted(values, column), len(values) - 1)
            found[:, NUM_DENSE + i] = np.where(values[nearest] == column, cells[nearest], self.unlisted[i])
        of_scores = self.reference.scores
        found[:, -1] = self.starts[NUM_COLUMNS - 1] + (bucket_of(of_scores.edges, scores) if of_scores else 0)
        return found


def _digest(reference: ReferenceStatistics) -> str:
    parts = [reference.dense_edges, *(reference.categorical[name].values for name in CATEGORICAL)]
    if reference.scores:
        parts.append(reference.scores.edges)
    return hashlib.sha256(b"".join(b"%d:" % len(part) + part.tobytes() for part in parts)).hexdigest()
