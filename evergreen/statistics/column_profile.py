"""Profiles of a table's columns: counts of values, and correlation of the rows of a request.

Validation profiles the rows of a run, and the monitor profiles the served rows. Profiles of
disjoint rows can be added without access to the rows. The module `comparison` compares two
profiles.

A profile counts rows in cells: the buckets of a numeric column, or the listed values of a
categorical column. For each cell, the profile also has sums over requests, because rows of one
request are not independent. A list has two columns in the profile. One column has the name of the
list, and its rows are the elements of the list. The other column (`features.LENGTH`) contains the
number of elements per row.

A categorical column lists at most `LISTED` values, and all other values share one cell. `floor` is
the maximum error of the counts. An unlisted value occurs in at most `floor` rows. The count of a
listed value may be too low by at most `floor`. If two profiles are merged, their floors are added.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

LISTED = 2000
"""Maximum number of values that a profile lists for one column."""


def _make_dense_edges() -> NDArray[np.float64]:
    limit = 1e12
    small = np.arange(-3.5, 11)
    growing = 10.5 * 1.3 ** np.arange(1, 97)
    return np.concatenate([[-limit], small, growing[growing < limit], [limit]])


def _make_score_edges() -> NDArray[np.float64]:
    logits = np.arange(-10.0, 10.25, 0.25)
    return np.concatenate([[0.0], 1 / (1 + np.exp(-logits)), [1.0]])


DENSE_EDGES = _make_dense_edges()
"""Edges of the buckets of numeric columns. Between -3 and 10, there is one bucket per integer.
Above 10, each bucket is 30 % wider than the previous bucket. The first and the last bucket include
all values beyond the edges, even infinity."""
NUM_BUCKETS = len(DENSE_EDGES) - 1
SCORE_EDGES = _make_score_edges()
"""Edges of the buckets of scores. The logits of the edges go from -10 to 10 in steps of 0.25. With
equal steps of the logit, small scores such as 0.001 and 0.002 fall into different buckets."""


def count_between(edges: NDArray[np.float64], values: NDArray[Any]) -> Ints:
    """Return the number of values in each bucket, [len(edges) - 1].

    NaN values are not counted. A value outside the edges counts in the first or the last bucket.

    >>> count_between(np.array([0.0, 1.0, 2.0]), np.array([-5.0, 1.0, 1.5, np.nan])).tolist()
    [1, 2]
    """
    return np.bincount(bucket_of(edges, values[~np.isnan(values)]), minlength=len(edges) - 1)


def bucket_of(edges: NDArray[np.float64], values: NDArray[Any]) -> Ints:
    """Return the bucket of each value, in the shape of `values`.

    A value on an edge belongs to the bucket above the edge. NaN belongs to the last bucket.
    """
    return np.searchsorted(edges[1:-1], values, side="right")


# -- sums by request


class RowTotal(NamedTuple):
    """Number of rows with some property, and how these rows are distributed over requests."""

    rows: int = 0
    squares: int = 0
    """Total of r x r over all requests, if r rows of a request have the property."""
    products: int = 0
    """Total of r x n over all requests, if r of the n rows of a request have the property."""

    def __add__(self, other: "RowTotal") -> "RowTotal":  # type: ignore[override]
        return RowTotal(*(mine + theirs for mine, theirs in zip(self, other)))


def request_totals(rows: Ints, of: Ints) -> Ints:
    """Return the three sums of `ColumnProfile.sums` for each kind of rows, [c, 3].

    Args:
        rows: Number of rows of each kind in each request, [g, c].
        of: Number of rows of any kind in each request, [g, c] or [g, 1]. If each kind of rows has
            its own value in a column, rows without a value are not counted.
    """
    return np.stack([rows.sum(axis=0), (rows * rows).sum(axis=0), (rows * of).sum(axis=0)], axis=1)


def cell_sums(cells: Ints, requests: Ints, *, totals: Ints, column_of: Ints) -> Ints:
    """Return the three sums of `ColumnProfile.sums` for each cell, [k, 3].

    Args:
        cells: Cell of each value, [n].
        requests: Index of the request that contains each value, [n].
        totals: Number of values per request and column, [g, c].
        column_of: Index of the column to which each cell belongs, [k].
    """
    num_cells = len(column_of)
    # Each key stands for one request and one cell.
    keys, rows = np.unique(requests * num_cells + cells, return_counts=True)
    of_request, of_cell = np.divmod(keys, num_cells)
    parts = (rows, rows * rows, rows * totals[of_request, column_of[of_cell]])
    # Sums of floats are exact up to 2^53.
    return np.stack([np.bincount(of_cell, part, num_cells) for part in parts], axis=1).astype(
        np.int64
    )


# -- profiles


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnProfile:
    """Profile of one column.

    Cells are the buckets of a numeric column or the listed values of a categorical one.
    """

    values: Ints | None
    """[k] listed values, which are distinct. None for a numeric column."""
    sums: Ints
    """[k, 3] three totals over all requests for each cell. With r rows in the cell and v rows with
    any value in a request, the totals add up r, r x r and r x v."""
    present: int
    """Number of rows with a value. The number includes rows whose value is in no cell."""
    present_sizes: int
    """Total of v x v over all requests, if a request has v rows with a value."""
    present_requests: int
    """Number of requests with a value. 0 = unknown."""
    missing: RowTotal
    bucket_squares: int = 0
    """For each request, the sum of its rows' bucket numbers is squared. `bucket_squares` is the
    total of these squares. It is 0 if the profile is not used to compare means."""
    bucket_products: int = 0
    """For each request, the sum of its rows' bucket numbers is multiplied by its number of rows
    with a value. `bucket_products` is the total of these products."""
    floor: int = 0
    """Maximum number of rows in which an unlisted value occurs. The count of a listed value may be
    too low by at most `floor`."""

    @property
    def rows(self) -> int:
        """Return the number of rows in the tables that have this column.

        If the column is missing in some of the merged tables, their rows do not count.
        """
        return self.present + self.missing.rows

    @property
    def counts(self) -> Ints:
        """Return the number of rows in each cell, [k]."""
        return self.sums[:, 0]

    def __add__(self, other: "ColumnProfile") -> "ColumnProfile":
        """Return the profile of the rows of both samples.

        Both profiles must be of the same column.
        """
        values, sums, floor = None, None, 0
        if self.values is None or other.values is None:
            sums = self.sums + other.sums
        else:
            values = np.union1d(self.values, other.values)
            sums = find_sums(values, self.values, self.sums) + find_sums(
                values, other.values, other.sums
            )
            values, sums, dropped = most_frequent(values, sums, LISTED)
            floor = dropped + self.floor + other.floor
        added = (
            "present",
            "present_sizes",
            "present_requests",
            "missing",
            "bucket_squares",
            "bucket_products",
        )
        both = {name: getattr(self, name) + getattr(other, name) for name in added}
        return ColumnProfile(values=values, sums=sums, floor=floor, **both)


def histogram_profile(counts: Ints) -> ColumnProfile:
    """Return the profile of a histogram [k]. The profile contains no data about requests."""
    sums = np.zeros((len(counts), 3), np.int64)
    sums[:, 0] = counts
    present = int(counts.sum())
    return ColumnProfile(
        values=None,
        sums=sums,
        present=present,
        present_sizes=0,
        present_requests=0,
        missing=RowTotal(),
    )


def find_sums(wanted: Ints, values: Ints, sums: Ints) -> Ints:
    """Return the sums of the values `wanted`, [n, 3].

    The sums of an unlisted value are zeros.

    Args:
        wanted: Values to find, [n].
        values: Listed values, distinct, [k].
        sums: Sums of the listed values, [k, 3].
    """
    found = np.zeros((len(wanted), 3), np.int64)
    _, at_wanted, at_values = np.intersect1d(
        wanted, values, assume_unique=True, return_indices=True
    )
    found[at_wanted] = sums[at_values]
    return found


def most_frequent(values: Ints, sums: Ints, limit: int) -> tuple[Ints, Ints, int]:
    """Return the `limit` most frequent values.

    Returns three results: the values, their sums, and the number of rows with the most frequent
    dropped value. The last result is 0 if no value is dropped.

    Args:
        values: Distinct values, [n].
        sums: Sums of these values, [n, 3].
        limit: Maximum number of values returned.
    """
    order = np.lexsort((values, -sums[:, 0]))
    kept, rest = order[:limit], order[limit:]
    return values[kept], sums[kept], int(sums[rest[0], 0]) if len(rest) else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TableProfile:
    """Profile of the rows of one sample, or of several merged samples."""

    digest: str = ""
    """Digest of the newest rows (`manifests.RawDataset.digest`). The digest and the times are empty
    if they are unknown."""
    first_event_time: str = ""
    last_event_time: str = ""
    rows: int
    requests: int
    """Number of requests to which these rows belong."""
    sizes: int
    """Total of n x n over all requests, if a request has n rows."""
    clicks: RowTotal = RowTotal()
    columns: dict[str, ColumnProfile]
    """Profiles by column. Columns that were left out have no profile. A list has two profiles: its
    elements, and the number of elements per row (`features.LENGTH`)."""

    def __add__(self, newer: "TableProfile") -> "TableProfile":
        """Return the profile of the rows of both tables.

        If only one table has a column, the column's profile is copied unchanged.
        """
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
