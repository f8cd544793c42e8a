"""Counts that describe one bucket of predictions. The counts do not depend on the order of records.

The input is prediction batches of one model version and the model's training profile. The output is
a histogram of the bucket's values for each column, with the same cells as in the training profile.
`monitoring.drift.comparison` compares the two profiles. pyarrow is imported only when values are
counted, because command lines import this module for settings.

A cell counts values of one column. All cells are in one flat array. A numeric column has one cell
per bucket of the reference. A categorical column has one cell per listed value, and one cell for
all other values. The score has one cell per bucket of the reference's score histogram. A list
feature becomes two columns: a categorical column of its elements, and a numeric column of its
lengths. A missing value is in no cell.
"""

import base64
import hashlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import LENGTH, MISSING_CATEGORY, Features
from evergreen.contracts.records import Predictions
from evergreen.contracts.serving import ColumnMap
from evergreen.statistics.column_profile import (
    DENSE_EDGES,
    NUM_BUCKETS,
    SCORE_EDGES,
    ColumnProfile,
    Ints,
    RowTotal,
    TableProfile,
    bucket_of,
    cell_sums,
    request_totals,
)
from evergreen.statistics.reference import TrainingReference

SCORE = "score"
FORMAT_VERSION = 2
"""Version of the format of saved sketches. Saved sketches in another format are dropped."""


class Layout:
    """Cells that count the values of each compared column."""

    def __init__(self, reference: TrainingReference, *, rows: Features | None = None) -> None:
        """Build the look-up tables of the cells, which take 0.5 MB.

        Args:
            reference: Training profile.
            rows: Columns of the batches, matched by name. None means the columns of the training
                rows.
        """
        self.reference = reference
        rows, known = rows or reference.features, reference.profile.columns
        compared = reference.compared
        self._missing = rows.missing_columns(compared)
        self._columns = ColumnMap(rows.columns, compared.columns)
        self._widths = (len(rows.numeric), len(rows.positions.slots))
        lengths = [LENGTH.format(name=name) for name in compared.lists]
        self._dense = (*compared.numeric, *lengths)
        self._categorical = (*compared.categorical, *compared.lists)
        self.columns = (*self._dense, *self._categorical, *([SCORE] if reference.scores else []))
        """Compared columns in order: d numeric columns, c categorical columns, and the score. The
        lengths of lists are numeric columns, and lists are categorical columns."""
        self.plain = np.array(
            [i for i, name in enumerate(self.columns) if name not in compared.lists], np.int64
        )
        """Indexes of the compared columns that are no lists, shape [k]. These columns have one
        value per row."""
        self._positions = compared.positions
        sizes = [NUM_BUCKETS] * len(self._dense)
        sizes += [len(_values(known[name])) + 1 for name in self._categorical]
        sizes += [len(reference.scores.counts)] if reference.scores else []
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        """Index of the first cell of each column. The last entry is the number of cells."""
        self.column_of = np.repeat(np.arange(len(sizes)), sizes)
        """Column of each cell, shape [cells]."""
        self.digest = _digest(reference)
        """Hash that identifies the layout across restarts."""
        self._listed = [self._listed_values(name) for name in self._categorical]

    def _listed_values(self, column: str) -> tuple[Any, NDArray[np.int32]]:
        """Return the listed values of a categorical column as Arrow int64, and their cells.

        The last value is `MISSING_CATEGORY`, and its cell is `_NO_CELL`. The last cell counts all
        unlisted values.
        """
        import pyarrow as pa

        start, values = self.slice_of(column).start, _values(self.reference.profile.columns[column])
        cells = np.append(start + np.arange(len(values)), [_NO_CELL, start + len(values)])
        return pa.array(np.append(values, MISSING_CATEGORY)), cells.astype(np.int32)

    def slice_of(self, column: str) -> slice:
        """Return the cells of `column`."""
        number = self.columns.index(column)
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def fits(self, rows: Predictions) -> bool:
        """Return whether the rows have all columns of the training rows and the expected widths."""
        return (
            not self._missing and (rows.dense.shape[1], rows.categorical.shape[1]) == self._widths
        )

    def columns_of(
        self, dense: NDArray[np.float32], categorical: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Select from a batch the columns that the training rows have.

        The arrays `dense` and `categorical` have the shapes [n, d] and [n, slots].
        """
        return self._columns.rows(dense, categorical)

    def cells(
        self,
        dense: NDArray[np.float32],
        categorical: NDArray[np.int64],
        scores: NDArray[np.float32],
    ) -> NDArray[np.int32]:
        """Return the cell of each value of the columns `plain`, shape [n, k].

        The cell of a missing value is -1. `columns_of` gives `dense` [n, d] and `categorical` [n,
        slots].
        """
        num_dense = len(self._dense)
        lengths = [
            (categorical[:, start:stop] != MISSING_CATEGORY).sum(axis=1)
            for start, stop, _ in self._positions.lists
        ]
        dense = np.column_stack([dense, *lengths]) if lengths else dense
        found = np.empty((len(scores), len(self.plain)), np.int32)
        found[:, :num_dense] = np.where(
            np.isnan(dense), _NO_CELL, bucket_of(DENSE_EDGES, dense) + self.starts[:num_dense]
        )
        for i in range(len(self._listed) - len(lengths)):
            found[:, num_dense + i] = self._category_cells(i, categorical[:, i])
        if self.reference.scores:
            found[:, -1] = self.starts[-2] + bucket_of(self.reference.scores.edges, scores)
        return found

    def element_cells(
        self, categorical: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.int32], Ints]]:
        """Yield for each list the column index, the cells of elements, and the list lengths [n].

        The cells of all rows are concatenated.
        """
        num_plain = len(self._listed) - len(self._positions.lists)
        for i, (start, stop, _) in enumerate(self._positions.lists, start=num_plain):
            elements = categorical[:, start:stop]
            is_present = elements != MISSING_CATEGORY
            yield (
                len(self._dense) + i,
                self._category_cells(i, elements[is_present]),
                is_present.sum(axis=1),
            )

    def _category_cells(self, number: int, values: NDArray[np.int64]) -> NDArray[np.int32]:
        import pyarrow as pa
        import pyarrow.compute as pc

        listed, cells = self._listed[number]
        # A hash table takes half the time of np.searchsorted. With np.searchsorted, the look-up
        # took a fifth of the monitor's time.
        indexes = pc.index_in(pa.array(values), value_set=listed).fill_null(len(listed))
        found: NDArray[np.int32] = cells[indexes.to_numpy()]
        return found


_NO_CELL = -1


def _values(column: ColumnProfile) -> Ints:
    """Return the values of a categorical column that have their own cell."""
    assert column.values is not None
    return column.values


def _digest(reference: TrainingReference) -> str:
    listed = [
        column.values for column in reference.profile.columns.values() if column.values is not None
    ]
    parts = [DENSE_EDGES, *listed, *([SCORE_EDGES] if reference.scores else [])]
    found = hashlib.sha256(repr((FORMAT_VERSION, reference.compared)).encode())
    for part in parts:
        found.update(b"%d:" % len(part) + part.tobytes())
    return found.hexdigest()


_PENDING_ROWS = 4096
"""Number of rows that are counted in one call. With one call for each request of 64 rows, counting
would take ten times as long."""


class Sketch:
    """Counts of one bucket."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rows = 0
        self.requests = 0
        self.squares = 0
        """Total of n x n over all requests, if a request has n rows."""
        self._pending: list[Predictions] = []
        self._pending_rows = 0
        num_columns = len(layout.columns)
        self._arrays = {
            "cells": np.zeros(
                (int(layout.starts[-1]), 3), np.int64
            ),  # columns as in `ColumnProfile.sums`
            "present": np.zeros(
                (num_columns, 3), np.int64
            ),  # number of rows, sum over requests of squared number of rows, number of requests
            "missing": np.zeros((num_columns, 3), np.int64),
        }

    def add(self, predictions: Predictions) -> None:
        """Add the rows of requests.

        The rows stay pending until there are `_PENDING_ROWS` of them. When the limit is reached,
        all pending rows are counted.
        """
        self.rows += predictions.num_rows
        self.requests += len(predictions)
        self.squares += int((predictions.sizes**2).sum())
        self._pending.append(predictions)
        self._pending_rows += predictions.num_rows
        if self._pending_rows >= _PENDING_ROWS:
            self._count()

    def merge(self, other: "Sketch") -> None:
        """Add the counts of another bucket with the same layout. Do not use `other` afterwards."""
        other._count()
        self.rows += other.rows
        self.requests += other.requests
        self.squares += other.squares
        for name, array in self._arrays.items():
            array += other._arrays[name]

    @property
    def cells(self) -> Ints:
        """Number of rows in each cell of the layout."""
        self._count()
        return self._arrays["cells"][:, 0]

    def profile(self) -> TableProfile:
        """Return the profile of the bucket's rows, in the cells of the reference."""
        self._count()
        known, columns = self.layout.reference.profile.columns, {}
        for i, name in enumerate(self.layout.columns):
            values = known[name].values if name in known else None
            cells = self._arrays["cells"][self.layout.slice_of(name)]
            present, sizes, requests = self._arrays["present"][i].tolist()
            columns[name] = ColumnProfile(
                values=values,
                sums=cells if values is None else cells[:-1],
                present=present,
                present_sizes=sizes,
                present_requests=requests,
                missing=RowTotal(*self._arrays["missing"][i].tolist()),
            )
        return TableProfile(
            rows=self.rows, requests=self.requests, sizes=self.squares, columns=columns
        )

    # -- save and restore

    def state_dict(self) -> dict[str, Any]:
        """Return the sketch as a JSON object of about 60 kB."""
        self._count()
        flat = np.concatenate([array.reshape(-1) for array in self._arrays.values()]).astype("<i8")
        # Group bytes by significance, because most high bytes are zero and compress well.
        packed = flat.view(np.uint8).reshape(-1, 8).T.tobytes()
        counted = {"rows": self.rows, "requests": self.requests, "squares": self.squares}
        return {**counted, "arrays": base64.b64encode(zlib.compress(packed, 1)).decode()}

    @classmethod
    def restore(cls, layout: Layout, saved: dict[str, Any]) -> "Sketch":
        """Restore a sketch that `state_dict()` saved, with the same layout.

        Raises:
            ValueError: The array sizes of the saved sketch do not match the layout.
        """
        sketch = cls(layout)
        sketch.rows = saved["rows"]
        sketch.requests = saved["requests"]
        sketch.squares = saved["squares"]
        packed = np.frombuffer(zlib.decompress(base64.b64decode(saved["arrays"])), np.uint8)
        flat = np.ascontiguousarray(packed.reshape(8, -1).T).view("<i8").reshape(-1)
        if len(flat) != sum(array.size for array in sketch._arrays.values()):
            raise ValueError(f"sketch has {len(flat)} counts, expected those of its reference")
        at = 0
        for array in sketch._arrays.values():
            array += flat[at : at + array.size].reshape(array.shape)
            at += array.size
        return sketch

    # -- count rows

    def _count(self) -> None:
        """Count all pending rows."""
        if not self._pending:
            return
        rows = Predictions.joined(self._pending)
        self._pending = []
        self._pending_rows = 0
        dense, categorical = self.layout.columns_of(rows.dense, rows.categorical)
        sizes = rows.sizes
        starts = np.cumsum(sizes) - sizes
        of_row = np.repeat(np.arange(len(sizes)), sizes)
        cells, plain = self.layout.cells(dense, categorical, rows.scores), self.layout.plain
        present = cells != _NO_CELL
        with_value = np.zeros((len(sizes), len(self.layout.columns)), np.int64)
        with_value[:, plain] = np.add.reduceat(present, starts, axis=0, dtype=np.int64)
        self._arrays["missing"][plain] += request_totals(
            sizes[:, None] - with_value[:, plain], sizes[:, None]
        )
        found, requests = [cells[present]], [np.broadcast_to(of_row[:, None], cells.shape)[present]]
        for column, elements, num_elements in self.layout.element_cells(categorical):
            with_value[:, column] = np.add.reduceat(num_elements, starts)
            found.append(elements)
            requests.append(np.repeat(of_row, num_elements))
        self._arrays["present"] += np.stack(
            [with_value.sum(axis=0), (with_value**2).sum(axis=0), (with_value > 0).sum(axis=0)],
            axis=1,
        )
        self._arrays["cells"] += cell_sums(
            np.concatenate(found),
            np.concatenate(requests),
            totals=with_value,
            column_of=self.layout.column_of,
        )
