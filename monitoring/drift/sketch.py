"""What one bucket of predictions looked like: counts alone, so that the order of the records leaves no trace.

In: prediction batches of one model version, and the model's training statistics. Out: the rows of every cell of a
`Layout`, and how alike two rows of one request are. What the counts say is left to `monitoring.drift.comparison`.
pyarrow is imported when values are counted: command lines and the search read settings through this module.

A cell is where a value is counted: one number per column and row, in one flat array for all columns. A dense column has
a cell per bucket of the reference, a categorical one a cell per listed value and one for what is not listed; each has
one for missing values; the score has its buckets. A list is two columns: its elements, each with a cell, and their
number, which is dense.
"""

import base64
import hashlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.config.features import MISSING_CATEGORY, Features
from components.contracts.records import Predictions
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
        self.digest = _digest(reference)
        """Identifies the layout over restarts."""
        self._listed = [self._listed_values(name) for name in reference.categorical]

    def _listed_values(self, column: str) -> tuple[Any, NDArray[np.int32]]:
        """The listed values of a categorical column and the missing one (Arrow int64); each one's cell, and others'."""
        import pyarrow as pa

        start, values = self.slice_of(column).start, self.reference.categorical[column].values
        cells = start + np.append(np.arange(len(values)), [len(values) + 1, len(values)])
        return pa.array(np.append(values, MISSING_CATEGORY)), cells.astype(np.int32)

    def slice_of(self, column: str) -> slice:
        """The cells of `column`."""
        number = self.columns.index(column)
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def fits(self, rows: Predictions) -> bool:
        """Whether the rows have the training rows' columns, and as many as they should have."""
        return not self._lost and (rows.dense.shape[1], rows.categorical.shape[1]) == self._widths

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
        import pyarrow as pa
        import pyarrow.compute as pc

        listed, cells = self._listed[number]
        # By a hash table: half the time of np.searchsorted, which was a fifth of the monitor's.
        places = pc.index_in(pa.array(values), value_set=listed).fill_null(len(listed))
        found: NDArray[np.int32] = cells[places.to_numpy()]
        return found


def _digest(reference: ReferenceStatistics) -> str:
    parts = [reference.dense_edges, *(column.values for column in reference.categorical.values())]
    if reference.scores:
        parts.append(reference.scores.edges)
    found = hashlib.sha256(repr(reference.features).encode())
    for part in parts:
        found.update(b"%d:" % len(part) + part.tobytes())
    return found.hexdigest()


PENDING_ROWS = 4096
"""Rows counted at a time: a request's 64 alone would cost ten times as much each."""


class Sketch:
    """Counts of one bucket."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rows = 0
        self.requests = 0
        self.squares = 0
        """Sum of the squared number of rows over requests."""
        self._pending: list[Predictions] = []
        self._pending_rows = 0
        num_columns = len(layout.columns)
        self._arrays = {
            "cells": np.zeros(int(layout.starts[-1]), np.int64),
            "both_present": np.zeros(num_columns, np.int64),
            "both_missing": np.zeros(num_columns, np.int64),
            "same_cell": np.zeros(num_columns, np.int64),
            "pairs": np.zeros(1, np.int64),
            "elements": np.zeros(num_columns, np.int64),
            "element_squares": np.zeros(num_columns, np.int64),
        }

    def add(self, predictions: Predictions) -> None:
        """Counts the rows of requests in, at the latest with the `PENDING_ROWS`-th."""
        self.rows += predictions.num_rows
        self.requests += len(predictions)
        self.squares += int((predictions.sizes**2).sum())
        self._pending.append(predictions)
        self._pending_rows += predictions.num_rows
        if self._pending_rows >= PENDING_ROWS:
            self._count()

    def merge(self, other: "Sketch") -> None:
        """Takes in another bucket of the same layout, which is spent."""
        other._count()
        self.rows += other.rows
        self.requests += other.requests
        self.squares += other.squares
        for name, array in self._arrays.items():
            array += other._arrays[name]

    @property
    def cells(self) -> NDArray[np.int64]:
        """Rows in each cell of the layout."""
        self._count()
        return self._arrays["cells"]

    # -- rows of one request

    def mean_request_rows(self, column: int) -> float:
        """Rows of the request that a random row belongs to, at least 1; of a list, elements. 1 without any."""
        self._count()
        if elements := int(self._arrays["elements"][column]):
            return int(self._arrays["element_squares"][column]) / elements
        return self.squares / self.rows if self.rows else 1.0

    def same_cell(self, column: int) -> tuple[int, int]:
        """Of the pairs of one request's rows that both have a value: how many have the same cell, and how many pairs.

        Of a list, of its elements. Each row is paired with the one some places on, by a distance that the request's id
        decides: all pairs of rows are equally likely, whatever order a ranking put them in.
        """
        self._count()
        return int(self._arrays["same_cell"][column]), int(self._arrays["both_present"][column])

    def same_missing(self, column: int) -> tuple[int, int]:
        """Of the pairs of one request's rows: in how many both or neither has a value, and how many pairs."""
        self._count()
        alike = self._arrays["both_missing"][column] + self._arrays["both_present"][column]
        return int(alike), int(self._arrays["pairs"][0])

    # -- memory

    def memory(self) -> dict[str, Any]:
        """The sketch as JSON takes it; some 10 kB."""
        self._count()
        packed = b"".join(array.astype("<i8").tobytes() for array in self._arrays.values())
        counted = {"rows": self.rows, "requests": self.requests, "squares": self.squares}
        return {**counted, "arrays": base64.b64encode(zlib.compress(packed, 1)).decode()}

    @classmethod
    def restore(cls, layout: Layout, memory: dict[str, Any]) -> "Sketch":
        """The sketch that `memory()` describes, over the same layout.

        Raises:
            ValueError: its arrays have other sizes.
        """
        sketch = cls(layout)
        sketch.rows = memory["rows"]
        sketch.requests = memory["requests"]
        sketch.squares = memory["squares"]
        flat = np.frombuffer(zlib.decompress(base64.b64decode(memory["arrays"])), "<i8")
        if len(flat) != sum(array.size for array in sketch._arrays.values()):
            raise ValueError(f"sketch has {len(flat)} counts, expected those of its reference")
        at = 0
        for array in sketch._arrays.values():
            array += flat[at : at + array.size].reshape(array.shape)
            at += array.size
        return sketch

    # -- counting

    def _count(self) -> None:
        """Counts everything that was put off; every method that reads counts calls it first."""
        if not self._pending:
            return
        rows = Predictions.joined(self._pending)
        self._pending = []
        self._pending_rows = 0
        dense, categorical = self.layout.columns_of(rows.dense, rows.categorical)
        cells = self.layout.cells(dense, categorical, rows.scores)
        counts = self._arrays["cells"]
        counts += np.bincount(cells.reshape(-1), minlength=len(counts))
        hashes = np.array([zlib.crc32(request_id.encode()) for request_id in rows.ids])
        sizes = rows.sizes
        self._count_pairs(cells, hashes, sizes)
        for column, elements, num_elements in self.layout.element_cells(categorical):
            counts += np.bincount(elements, minlength=len(counts))
            of_requests = np.add.reduceat(num_elements, np.cumsum(sizes) - sizes)
            self._arrays["elements"][column] += len(elements)
            self._arrays["element_squares"][column] += (of_requests**2).sum()
            elements, partners = _pairs(elements, hashes, of_requests)
            self._arrays["both_present"][column] += len(elements)
            self._arrays["same_cell"][column] += (elements == elements[partners]).sum()

    def _count_pairs(self, cells: NDArray[np.int32], hashes: Ints, sizes: Ints) -> None:
        plain = self.layout.plain
        cells, partners = _pairs(cells, hashes, sizes)
        missing = cells == self.layout.missing[plain]
        missing_there = missing[partners]
        both_missing = (missing & missing_there).sum(axis=0)
        either_missing = (missing | missing_there).sum(axis=0)
        self._arrays["both_missing"][plain] += both_missing
        self._arrays["both_present"][plain] += len(cells) - either_missing
        self._arrays["same_cell"][plain] += (cells == cells[partners]).sum(axis=0) - both_missing
        self._arrays["pairs"] += len(cells)


def _pairs(cells: NDArray[np.int32], hashes: Ints, sizes: Ints) -> tuple[NDArray[np.int32], Ints]:
    """The rows of requests that have several, and the number of each one's partner among them.

    The `hashes` of the requests' ids decide how far on a partner is.
    """
    strides = 1 + hashes % np.maximum(sizes - 1, 1)
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    of_row = np.repeat(sizes, sizes)
    partners = starts + (np.arange(len(cells)) - starts + np.repeat(strides, sizes)) % of_row
    several = of_row > 1
    if several.all():
        return cells, partners
    return cells[several], np.cumsum(several)[partners[several]] - 1
