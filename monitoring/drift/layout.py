"""Where each value of a row is counted: one number per column and row, the cell, in one flat array for all columns.

In: a model's training statistics. Out: cells of a batch's values. A dense column has a cell per bucket of the
reference, a categorical one a cell per listed value and one for what is not listed; each has one for missing values;
the score has its buckets. Counting is left to `monitoring.drift.sketch`.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import (
    CATEGORICAL,
    FEATURES,
    MISSING_CATEGORY,
    NUM_CATEGORICAL,
    NUM_DENSE,
)
from components.contracts.reference_statistics import CategoryColumn, ReferenceStatistics, bucket_of

SCORE = "score"
COLUMNS = (*FEATURES, SCORE)
"""The judged columns, in the order of a cell matrix's columns."""
NUM_COLUMNS = len(COLUMNS)
_NO_KEY = np.int64(-2)
"""In an empty place of a table: no category, and not the missing one."""
_FACTOR = np.uint32(0x85EBCA6B)


class Layout:
    """The cells of one reference."""

    def __init__(self, reference: ReferenceStatistics) -> None:
        """Builds the tables; about 10 ms and 1.8 MB."""
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
        """Tells layouts apart over restarts."""
        # Four places to a key: most values are decided at their first.
        self._bits = int(max(4 * size for size in sizes[NUM_DENSE:-1])).bit_length()
        tables = [
            _hashed(reference.categorical[name], self.starts[NUM_DENSE + i], self._bits)
            for i, name in enumerate(CATEGORICAL)
        ]
        self._keys = np.concatenate([keys for keys, _ in tables])
        self._cells = np.concatenate([cells for _, cells in tables])
        self._table_starts = np.arange(NUM_CATEGORICAL) << self._bits
        self._dense_buckets = _FloatBuckets(reference.dense_edges)

    def slice_of(self, column: str) -> slice:
        """The cells of `column`."""
        number = COLUMNS.index(column)
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def cells(
        self, dense: NDArray[np.float32], categorical: NDArray[np.int64], scores: NDArray[np.float32]
    ) -> NDArray[np.int32]:
        """The cell of every value: [n, 40] from [n, 13], [n, 26] and [n]."""
        found = np.empty((len(scores), NUM_COLUMNS), np.int32)
        np.add(self._dense_buckets.of(dense), self.starts[:NUM_DENSE], out=found[:, :NUM_DENSE], casting="same_kind")
        found[:, NUM_DENSE:-1] = self._cells_of(categorical)
        of_scores = self.reference.scores
        found[:, -1] = self.starts[NUM_COLUMNS - 1] + (bucket_of(of_scores.edges, scores) if of_scores else 0)
        return found

    def _cells_of(self, categorical: NDArray[np.int64]) -> NDArray[np.int32]:
        places = _first_places(categorical, self._bits) + self._table_starts
        cells = self._cells.take(places)
        # The few whose place another key took look at the next ones, until they find their own or an empty one.
        open_ = np.flatnonzero(self._keys.take(places) != categorical)
        flat, wanted, at = cells.reshape(-1), categorical.reshape(-1)[open_], places.reshape(-1)[open_]
        mask = (1 << self._bits) - 1
        while True:
            keys = self._keys[at]
            going = np.flatnonzero((keys != wanted) & (keys != _NO_KEY))
            if not len(going):
                return cells
            open_, wanted, at = open_[going], wanted[going], at[going]
            at = (at & ~mask) | ((at + 1) & mask)
            flat[open_] = self._cells[at]


class _FloatBuckets:
    """`bucket_of` by a table over the upper half of a float32's bits: an eighth of a binary search's time."""

    def __init__(self, edges: NDArray[np.float64]) -> None:
        self._edges, self._missing = edges, len(edges) - 1
        # A half stands for the floats between two bounds. Most lie in one bucket; of the others the edge decides.
        halves = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
        ends = np.stack([halves, halves | np.uint32(0xFFFF)]).view(np.float32)
        ends = np.where(np.isnan(ends), np.copysign(np.float32(np.inf), ends), ends)
        first, last = np.sort(bucket_of(edges, ends), axis=0)
        self._is_exact = bool((last <= first + 1).all())
        self._first = first.astype(np.int32)
        # The smallest float32 from the edge up, so that comparing in float32 is comparing in float64.
        upper = np.append(edges[1:-1], np.nan)[first]
        rounded = upper.astype(np.float32)
        rounded = np.where(rounded < upper, np.nextafter(rounded, np.float32(np.inf)), rounded)
        self._edge = np.where(last > first, rounded, np.float32(np.nan))

    def of(self, values: NDArray[np.float32]) -> NDArray[np.int32]:
        """The bucket of each value, of `values`' shape; the number of buckets for NaN."""
        if not self._is_exact:
            with np.errstate(invalid="ignore"):  # a signalling NaN is missing as any other
                found = bucket_of(self._edges, values).astype(np.int32)
        else:
            halves = (values.view(np.uint32) >> np.uint32(16)).astype(np.intp)
            found = self._first.take(halves)
            found += values >= self._edge.take(halves)
        np.copyto(found, self._missing, where=np.isnan(values))
        return found


def _first_places(values: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """Multiplicative hashing of the lower 32 bits to 2^bits places."""
    mixed = values.astype(np.uint32)
    # Values that are multiples of one number are else a sequence again, which may fill neighbouring places.
    mixed ^= mixed >> np.uint32(15)
    mixed *= _FACTOR
    mixed >>= np.uint32(32 - bits)
    return mixed.astype(np.int64)


def _hashed(column: CategoryColumn, start: np.int64, bits: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The keys of a column by their place (linear probing) and the cell of each; an empty place's is the unlisted."""
    keys = np.full(1 << bits, _NO_KEY, np.int64)
    cells = np.full(1 << bits, start + len(column.values), np.int32)
    wanted = np.append(column.values, MISSING_CATEGORY)
    of_wanted = start + np.append(np.arange(len(column.values)), len(column.values) + 1)
    places = _first_places(wanted, bits)
    for key, cell, place in zip(wanted.tolist(), of_wanted.tolist(), places.tolist()):
        while keys[place] != _NO_KEY:
            place = (place + 1) & ((1 << bits) - 1)
        keys[place], cells[place] = key, cell
    return keys, cells


def _digest(reference: ReferenceStatistics) -> str:
    parts = [reference.dense_edges, *(reference.categorical[name].values for name in CATEGORICAL)]
    if reference.scores:
        parts.append(reference.scores.edges)
    return hashlib.sha256(b"".join(b"%d:" % len(part) + part.tobytes() for part in parts)).hexdigest()
