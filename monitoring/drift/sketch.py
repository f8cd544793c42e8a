"""What one bucket of predictions looked like: counts alone, so that the order of the records leaves no trace.

In: prediction batches of one model version. Out: the rows of every cell of a `layout.Layout`, and how alike two rows of
one request are. What the counts say is left to `monitoring.drift.comparison`.
"""

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.records import PredictionBatch
from monitoring.drift.layout import Ints, Layout

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
        self._pending: list[PredictionBatch] = []
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

    def add(self, batch: PredictionBatch) -> None:
        """Counts a request's rows in, at the latest with the `PENDING_ROWS`-th."""
        self.rows += len(batch)
        self.requests += 1
        self.squares += len(batch) ** 2
        self._pending.append(batch)
        self._pending_rows += len(batch)
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
        batches = self._pending
        self._pending = []
        self._pending_rows = 0
        dense = np.concatenate([batch.dense for batch in batches])
        categorical = np.concatenate([batch.categorical for batch in batches])
        dense, categorical = self.layout.columns_of(dense, categorical)
        scores = np.concatenate([batch.scores for batch in batches])
        cells = self.layout.cells(dense, categorical, scores)
        counts = self._arrays["cells"]
        counts += np.bincount(cells.reshape(-1), minlength=len(counts))
        hashes = np.array([zlib.crc32(batch.request_id.encode()) for batch in batches])
        sizes = np.array([len(batch) for batch in batches])
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
