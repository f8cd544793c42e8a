"""What one bucket of predictions looked like: counts alone, so that the order of the records leaves no trace.

In: prediction batches of one model version. Out: the rows of every cell of a `layout.Layout`; how alike two rows of one
request are; and which values, of those the reference does not list, are frequent. Memory is at most 2.5 MB, whatever
comes in. What the counts say is left to `monitoring.drift.comparison`.

A Misra-Gries summary depends on the order of what it sees. Frequent unlisted values are found by group testing instead
(Cormode and Muthukrishnan, What's hot and what's not, 2005): values are spread over 128 groups, and each group counts
its rows and, for each of the 32 bits, the rows whose value has it. Of a value that is most of its group the bits can be
read off, so whatever is a 64th of the unlisted rows is likely to be found.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.contracts.records import PredictionBatch
from monitoring.drift.layout import NUM_COLUMNS, Layout

PENDING_ROWS = 4096
"""Rows counted at a time: a request's 64 alone would cost ten times as much each."""
_GROUPS = 128
_UNLISTED = 2**16 - 1
"""Most unlisted values counted at a time, 0.4 MB: no sum of 16 bits can run over."""
_THREE_BITS = np.array([sum((number >> i & 1) << (16 * i) for i in range(3)) for number in range(8)], np.float64)
"""Each of a number's three bits in 16 bits of its own."""
_FACTOR = np.uint32(0x9E3779B1)


class UnlistedValue(NamedTuple):
    """A frequent value that the reference does not list."""

    value: int
    rows: int
    """Exact where it is alone in its group, else an estimate."""


class Sketch:
    """Counts of one bucket."""

    def __init__(self, layout: Layout) -> None:
        """No rows yet."""
        self.layout = layout
        self.rows = 0
        self.requests = 0
        self.squares = 0
        """Sum of the squared number of rows over requests."""
        self._pending: list[PredictionBatch] = []
        self._pending_rows = 0
        self._unlisted: list[tuple[NDArray[np.uint16], NDArray[np.uint32]]] = []
        """Groups and values of the unlisted ones that are not counted yet."""
        self._num_unlisted = 0
        self._arrays = {
            "cells": np.zeros(int(layout.starts[-1]), np.int64),
            "groups": np.zeros((NUM_CATEGORICAL * _GROUPS, 33), np.int64),
            "both_present": np.zeros(NUM_COLUMNS, np.int64),
            "both_missing": np.zeros(NUM_COLUMNS, np.int64),
            "same_cell": np.zeros(NUM_COLUMNS, np.int64),
            "pairs": np.zeros(1, np.int64),
        }

    def add(self, batch: PredictionBatch) -> None:
        """Counts a request's rows in, at the latest with the `PENDING_ROWS`-th."""
        self.rows += len(batch)
        self.requests += 1
        self.squares += len(batch) ** 2
        self._pending.append(batch)
        self._pending_rows += len(batch)
        if self._pending_rows >= PENDING_ROWS:
            self._count_pending()

    def merge(self, other: Sketch) -> None:
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

    def mean_request_rows(self) -> float:
        """Rows of the request that a random row belongs to, at least 1; 1 without rows."""
        return self.squares / self.rows if self.rows else 1.0

    def same_cell(self, column: int) -> tuple[int, int]:
        """Of the pairs of one request's rows that both have a value: how many have the same cell, and how many pairs.

        Each row is paired with the one some places on, by a distance that the request's id decides: all pairs of rows
        are equally likely, whatever order a ranking put them in.
        """
        self._count()
        return int(self._arrays["same_cell"][column]), int(self._arrays["both_present"][column])

    def same_missing(self, column: int) -> tuple[int, int]:
        """Of the pairs of one request's rows: in how many both or neither has a value, and how many pairs."""
        self._count()
        alike = self._arrays["both_missing"][column] + self._arrays["both_present"][column]
        return int(alike), int(self._arrays["pairs"][0])

    # -- unlisted values

    def unlisted_values(self, column: int) -> list[UnlistedValue]:
        """Values of a categorical column (0..25) that are most of their group, the most frequent first."""
        self._count()
        counts = self._arrays["groups"][column * _GROUPS : (column + 1) * _GROUPS]
        total, ones = counts[:, 0], counts[:, 1:]
        values = ((2 * ones > total[:, None]) << np.arange(32)).sum(axis=1)
        disagree = np.minimum(ones, total[:, None] - ones)
        # Others agree by chance in half of their bits: the mean disagreement is half of their rows, the largest at most
        # all of them.
        rows = np.minimum(total - disagree.sum(axis=1) // 16, total - disagree.max(axis=1))
        is_most = (2 * rows > total) & (_group_of(values.astype(np.uint32)) == np.arange(_GROUPS))
        found = [UnlistedValue(int(values[group]), int(rows[group])) for group in np.flatnonzero(is_most)]
        return sorted(found, key=lambda item: (-item.rows, item.value))

    # -- memory

    def memory(self) -> dict[str, Any]:
        """The sketch as JSON takes it; some 100 kB."""
        self._count()
        packed = b"".join(array.astype("<i8").tobytes() for array in self._arrays.values())
        counted = {"rows": self.rows, "requests": self.requests, "squares": self.squares}
        return {**counted, "arrays": base64.b64encode(zlib.compress(packed, 1)).decode()}

    @classmethod
    def restore(cls, layout: Layout, memory: dict[str, Any]) -> Sketch:
        """The sketch that `memory()` told of, over the same layout.

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
        """Counts everything that was put off; whoever reads counts calls it first."""
        self._count_pending()
        self._count_unlisted()

    def _count_pending(self) -> None:
        if not self._pending:
            return
        batches = self._pending
        self._pending = []
        self._pending_rows = 0
        dense = np.concatenate([batch.dense for batch in batches])
        categorical = np.concatenate([batch.categorical for batch in batches])
        scores = np.concatenate([batch.scores for batch in batches])
        cells = self.layout.cells(dense, categorical, scores)
        counts = self._arrays["cells"]
        counts += np.bincount(cells.reshape(-1), minlength=len(counts))
        self._count_pairs(cells, batches)
        self._note_unlisted(categorical, cells[:, NUM_DENSE:-1])

    def _count_pairs(self, cells: NDArray[np.int32], batches: list[PredictionBatch]) -> None:
        lengths = np.array([len(batch) for batch in batches])
        hashes = np.array([zlib.crc32(batch.request_id.encode()) for batch in batches])
        strides = 1 + hashes % np.maximum(lengths - 1, 1)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        of_row = np.repeat(lengths, lengths)
        partners = starts + (np.arange(len(cells)) - starts + np.repeat(strides, lengths)) % of_row
        several = of_row > 1
        if not several.all():
            cells, partners = cells[several], np.cumsum(several)[partners[several]] - 1
        missing = cells == self.layout.missing
        missing_there = missing[partners]
        both_missing = (missing & missing_there).sum(axis=0)
        either_missing = (missing | missing_there).sum(axis=0)
        self._arrays["both_missing"] += both_missing
        self._arrays["both_present"] += len(cells) - either_missing
        self._arrays["same_cell"] += (cells == cells[partners]).sum(axis=0) - both_missing
        self._arrays["pairs"] += len(cells)

    def _note_unlisted(self, categorical: NDArray[np.int64], cells: NDArray[np.int32]) -> None:
        found = np.flatnonzero(cells == self.layout.unlisted)
        values = categorical.reshape(-1)[found].astype(np.uint32)
        for start in range(0, len(values), _UNLISTED):
            part = slice(start, start + _UNLISTED)
            if self._num_unlisted + len(values[part]) > _UNLISTED:
                self._count_unlisted()
            groups = found[part] % NUM_CATEGORICAL * _GROUPS + _group_of(values[part])
            self._unlisted.append((groups.astype(np.uint16), values[part]))
            self._num_unlisted += len(values[part])

    def _count_unlisted(self) -> None:
        if not self._unlisted:
            return
        groups = np.concatenate([each for each, _ in self._unlisted]).astype(np.intp)
        values = np.concatenate([each for _, each in self._unlisted])
        self._unlisted, self._num_unlisted = [], 0
        counts, size = self._arrays["groups"], len(self._arrays["groups"])
        counts[:, 0] += np.bincount(groups, minlength=size)
        # Three sums at once in a float64, which is exact below 2^53: a sort and `reduceat` take half as long again.
        for bit in range(0, 32, 3):
            taken = ((values >> np.uint32(bit)) & np.uint32(7)).astype(np.intp)
            sums = np.bincount(groups, _THREE_BITS[taken], size).astype(np.int64)
            for place in range(min(3, 32 - bit)):
                counts[:, 1 + bit + place] += (sums >> (16 * place)) & 0xFFFF


def _group_of(values: NDArray[np.uint32]) -> NDArray[np.int64]:
    return ((values * _FACTOR) >> np.uint32(25)).astype(np.int64)
