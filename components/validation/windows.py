"""What a window's rows looked like, column by column: sums that tell two windows apart, and chance from change.

In: sums that `reference.ReferenceCounter` made. Out: a summary that merges with another by addition, without rows.
How summaries are kept with a model is `kept_windows`'s; comparing them `drift`'s.

A categorical column lists its `LISTED` most frequent values; the others are one cell. What that costs: of a value that
a summary does not list it is known only that it had at most `floor` rows, and a listed count may lack as many; whoever
compares takes values for one of their own only where `floor` is a small part of their rows. Merging adds the floors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from components.contracts import criteo
from components.contracts.reference_statistics import DENSE_EDGES

LISTED = 2000
"""Most values that a summary lists of a column."""
NUM_BUCKETS = len(DENSE_EDGES) - 1

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Total:
    """A number of rows of a kind, and how they lie in requests."""

    rows: int = 0
    squares: int = 0
    """Sum over requests of its squared rows of the kind."""
    products: int = 0
    """Sum over requests of its rows of the kind times all its rows."""

    def __add__(self, other: Total) -> Total:
        """The rows of both."""
        return Total(
            rows=self.rows + other.rows,
            squares=self.squares + other.squares,
            products=self.products + other.products,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnSummary:
    """One column. Cells are the buckets of a dense column over `DENSE_EDGES`, or the listed values of a categorical."""

    values: Ints | None
    """[k] most frequent first, ties by value; None for a dense column."""
    sums: Ints
    """[k, 3] per cell as `value_counts.ValueCounts.sums`."""
    present: int
    """Rows with a value; those of no cell are the others."""
    present_sizes: int
    """Sum over requests of the squared rows with a value."""
    present_requests: int
    """Requests with a value."""
    missing: Total
    place_squares: int = 0
    """Sum over requests of the squared sum of its rows' bucket numbers; 0 for a categorical column."""
    place_products: int = 0
    """Sum over requests of that sum times its rows with a value."""
    floor: int = 0
    """Most rows that a value may have that is not listed, and that may be lacking from the count of one that is."""

    @property
    def rows(self) -> int:
        """Rows of the windows that have the column: fewer than a merged window's where one of them left it out."""
        return self.present + self.missing.rows

    @property
    def counts(self) -> Ints:
        """[k] rows of each cell."""
        return self.sums[:, 0]

    def of(self, values: Ints) -> Ints:
        """The sums [n, 3] of `values` [n]; zeros for one that is not listed."""
        assert self.values is not None
        found = np.zeros((len(values), 3), np.int64)
        if len(self.values):
            order = np.argsort(self.values)
            places = order[np.minimum(np.searchsorted(self.values, values, sorter=order), len(order) - 1)]
            held = self.values[places] == values
            found[held] = self.sums[places[held]]
        return found

    def __add__(self, other: ColumnSummary) -> ColumnSummary:
        """The rows of both; of the same column."""
        values, sums, floor = None, None, 0
        if self.values is None or other.values is None:
            sums = self.sums + other.sums
        else:
            values = np.union1d(self.values, other.values)
            values, sums, dropped = most_frequent(values, self.of(values) + other.of(values))
            floor = dropped + self.floor + other.floor
        return ColumnSummary(
            values=values,
            sums=sums,
            present=self.present + other.present,
            present_sizes=self.present_sizes + other.present_sizes,
            present_requests=self.present_requests + other.present_requests,
            missing=self.missing + other.missing,
            place_squares=self.place_squares + other.place_squares,
            place_products=self.place_products + other.place_products,
            floor=floor,
        )


def most_frequent(values: Ints, sums: Ints) -> tuple[Ints, Ints, int]:
    """The `LISTED` most frequent of distinct values [n] with their sums [n, 3], and the rows of the next one."""
    order = np.lexsort((values, -sums[:, 0]))
    kept, rest = order[:LISTED], order[LISTED:]
    return values[kept], sums[kept], int(sums[rest[0], 0]) if len(rest) else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowSummary:
    """The rows of a window, or of several merged."""

    digest: str
    """Of the newest window's rows (`manifests.RawDataset.digest`)."""
    first_event_time: str
    last_event_time: str
    num_windows: int
    rows: int
    requests: int
    """Requests that the rows came in; 0 = not known."""
    sizes: int
    """Sum over requests of the squared rows."""
    clicks: Total
    columns: dict[str, ColumnSummary]
    """The judged features in column order; one that the run left out is absent."""

    def __add__(self, newer: WindowSummary) -> WindowSummary:
        """The rows of both. A column that one of them left out has the rows of the other."""
        both = {
            name: self.columns[name] + newer.columns[name]
            if name in self.columns and name in newer.columns
            else self.columns.get(name) or newer.columns[name]
            for name in criteo.FEATURES
            if name in self.columns or name in newer.columns
        }
        return replace(
            newer,
            first_event_time=min(self.first_event_time, newer.first_event_time),
            last_event_time=max(self.last_event_time, newer.last_event_time),
            num_windows=self.num_windows + newer.num_windows,
            rows=self.rows + newer.rows,
            requests=self.requests + newer.requests,
            sizes=self.sizes + newer.sizes,
            clicks=self.clicks + newer.clicks,
            columns=both,
        )
