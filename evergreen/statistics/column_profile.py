"""Profiles of a table's columns: what its rows look like, and how alike rows of one request are.

Joins validation, which profiles the rows of a run, to the monitor, which profiles what is served. Profiles of disjoint
rows merge by addition, without rows. What two profiles differ in is left to `comparison`.

A profile counts rows in cells: the buckets of a numeric column, the listed values of a categorical column. For each
cell it holds sums over requests, because rows of one request are not independent. A list is two columns: its elements,
each counted as if it were a row, under the list's name, and how many a row has under another (`features.LENGTH`).

A categorical column lists at most `LISTED` values, and the others are one cell. A value that is not listed has at most
`floor` rows, and a listed count may lack as many. Merging adds the floors.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

LISTED = 2000
"""Most values that a profile lists of a column."""


def _make_dense_edges() -> NDArray[np.float64]:
    limit = 1e12
    small = np.arange(-3.5, 11)
    growing = 10.5 * 1.3 ** np.arange(1, 97)
    return np.concatenate([[-limit], small, growing[growing < limit], [limit]])


def _make_score_edges() -> NDArray[np.float64]:
    logits = np.arange(-10.0, 10.25, 0.25)
    return np.concatenate([[0.0], 1 / (1 + np.exp(-logits)), [1.0]])


DENSE_EDGES = _make_dense_edges()
"""One bucket per integer from -3 to 10, then buckets that grow by 30 %; the outer two take the rest, infinity too."""
NUM_BUCKETS = len(DENSE_EDGES) - 1
SCORE_EDGES = _make_score_edges()
"""Steps of a quarter in the logit from -10 to 10: at a click rate of 0.1 % scores differ by factors, not by amounts."""


def count_between(edges: NDArray[np.float64], values: NDArray[Any]) -> Ints:
    """Return how many values [n] each bucket has, [len(edges) - 1].

    NaN is in no bucket. A value outside the edges is in the first or the last bucket.

    >>> count_between(np.array([0.0, 1.0, 2.0]), np.array([-5.0, 1.0, 1.5, np.nan])).tolist()
    [1, 2]
    """
    return np.bincount(bucket_of(edges, values[~np.isnan(values)]), minlength=len(edges) - 1)


def bucket_of(edges: NDArray[np.float64], values: NDArray[Any]) -> Ints:
    """Return the bucket of each value, of `values`' shape. A bucket has its lower edge and not its upper one.

    NaN gets the last bucket.
    """
    return np.searchsorted(edges[1:-1], values, side="right")


# -- sums over requests


class RowTotal(NamedTuple):
    """Number of rows of a kind, and how they are distributed over requests."""

    rows: int = 0
    squares: int = 0
    """Sum over requests of its squared rows of the kind."""
    products: int = 0
    """Sum over requests of its rows of the kind times all its rows."""

    def __add__(self, other: "RowTotal") -> "RowTotal":  # type: ignore[override]
        return RowTotal(*(mine + theirs for mine, theirs in zip(self, other)))


def request_totals(rows: Ints, of: Ints) -> Ints:
    """Return the rows, squares and products of kinds of rows, [c, 3].

    Args:
        rows: Rows of each kind in each request, [g, c].
        of: Rows of the request that the kind is a part of, [g, c] or [g, 1].
    """
    return np.stack([rows.sum(axis=0), (rows * rows).sum(axis=0), (rows * of).sum(axis=0)], axis=1)


def cell_sums(cells: Ints, requests: Ints, *, totals: Ints, column_of: Ints) -> Ints:
    """Return the rows, squares and products of each cell, [k, 3].

    Args:
        cells: Cell of each value, [n].
        requests: Number of each value's request, [n].
        totals: Values of each request in each column, [g, c].
        column_of: Column of each cell, [k].
    """
    num_cells = len(column_of)
    # A run of equal keys is a request's rows of a cell.
    keys, rows = np.unique(requests * num_cells + cells, return_counts=True)
    of_request, of_cell = np.divmod(keys, num_cells)
    parts = (rows, rows * rows, rows * totals[of_request, column_of[of_cell]])
    # Sums of floats are exact up to 2^53.
    return np.stack([np.bincount(of_cell, part, num_cells) for part in parts], axis=1).astype(np.int64)


# -- profiles


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnProfile:
    """One column. Cells are buckets of a numeric column, or the listed values of a categorical one."""

    values: Ints | None
    """[k] listed values, distinct; None for a numeric column."""
    sums: Ints
    """[k, 3] rows of each cell; sum over requests of its squared rows, and of its rows times the request's rows that
    have a value."""
    present: int
    """Rows with a value; those in no cell are the others."""
    present_sizes: int
    """Sum over requests of the squared rows with a value."""
    present_requests: int
    """Requests with a value; 0 = not known."""
    missing: RowTotal
    place_squares: int = 0
    """Sum over requests of the squared sum of its rows' bucket numbers; 0 where no mean is compared."""
    place_products: int = 0
    """Sum over requests of that sum times its rows with a value."""
    floor: int = 0
    """Most rows that a value may have that is not listed, and that may be lacking from the count of one that is."""

    @property
    def rows(self) -> int:
        """Rows that have the column: fewer than a merged table's if one of its parts left it out."""
        return self.present + self.missing.rows

    @property
    def counts(self) -> Ints:
        """[k] rows of each cell."""
        return self.sums[:, 0]

    def __add__(self, other: "ColumnProfile") -> "ColumnProfile":
        """Return the profile of both samples' rows; of the same column."""
        values, sums, floor = None, None, 0
        if self.values is None or other.values is None:
            sums = self.sums + other.sums
        else:
            values = np.union1d(self.values, other.values)
            sums = find_sums(values, self.values, self.sums) + find_sums(values, other.values, other.sums)
            values, sums, dropped = most_frequent(values, sums, LISTED)
            floor = dropped + self.floor + other.floor
        added = ("present", "present_sizes", "present_requests", "missing", "place_squares", "place_products")
        both = {name: getattr(self, name) + getattr(other, name) for name in added}
        return ColumnProfile(values=values, sums=sums, floor=floor, **both)


def histogram_profile(counts: Ints) -> ColumnProfile:
    """Return the profile of a histogram [k] of which no request is known."""
    sums = np.zeros((len(counts), 3), np.int64)
    sums[:, 0] = counts
    present = int(counts.sum())
    return ColumnProfile(
        values=None, sums=sums, present=present, present_sizes=0, present_requests=0, missing=RowTotal()
    )


def find_sums(wanted: Ints, values: Ints, sums: Ints) -> Ints:
    """Return the sums [n, 3] of wanted values [n] among distinct values [k] with sums [k, 3]; zeros for any other."""
    found = np.zeros((len(wanted), 3), np.int64)
    _, at_wanted, at_values = np.intersect1d(wanted, values, assume_unique=True, return_indices=True)
    found[at_wanted] = sums[at_values]
    return found


def most_frequent(values: Ints, sums: Ints, limit: int) -> tuple[Ints, Ints, int]:
    """Return the `limit` most frequent of distinct values [n] with their sums [n, 3], and the rows of the next one."""
    order = np.lexsort((values, -sums[:, 0]))
    kept, rest = order[:limit], order[limit:]
    return values[kept], sums[kept], int(sums[rest[0], 0]) if len(rest) else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TableProfile:
    """Rows of one sample, or of several merged."""

    digest: str = ""
    """Of the newest part's rows (`manifests.RawDataset.digest`); "" = not known, likewise the times."""
    first_event_time: str = ""
    last_event_time: str = ""
    rows: int
    requests: int
    """Requests that the rows came in."""
    sizes: int
    """Sum over requests of the squared rows."""
    clicks: RowTotal = RowTotal()
    columns: dict[str, ColumnProfile]
    """By name; a column that was left out is absent. Of a list, its elements, and how many a row has
    (`features.LENGTH`)."""

    def __add__(self, newer: "TableProfile") -> "TableProfile":
        """Return the profile of the rows of both. A column that one of them left out has the rows of the other."""
        both = {
            name: self.columns[name] + newer.columns[name]
            if name in self.columns and name in newer.columns
            else self.columns.get(name) or newer.columns[name]
            for name in {**self.columns, **newer.columns}
        }
        return replace(
            newer,
            first_event_time=min(self.first_event_time, newer.first_event_time),
            last_event_time=max(self.last_event_time, newer.last_event_time),
            rows=self.rows + newer.rows,
            requests=self.requests + newer.requests,
            sizes=self.sizes + newer.sizes,
            clicks=self.clicks + newer.clicks,
            columns=both,
        )
