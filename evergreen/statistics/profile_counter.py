"""Counters of the values in a table's columns.

These counters are the source of the table's profile and of a model's training reference.

Counters of two parts of a table can be added, without access to the rows. Categories are counted
exactly up to a maximum number. Above the maximum, the least frequent categories are dropped as in a
Misra-Gries summary (Agarwal et al., Mergeable summaries, 2013). After the drop, a count may be too
low by at most 1/131,072 of the rows. TFDV's counts are not used, because they are not exact enough.
For a column with more than 1024 distinct values, TFDV uses a sketch of 1024 counters, whose counts
may be too low by 1/1024 of all rows. An error of 1/1024 would be larger than the threshold for
drift.

Rows are counted in two halves, block by block (see `reference`). A request whose rows are in two
batches or blocks counts as two requests. The double counting slightly lowers the measured
correlation. For example, 2 % of requests of 64 rows are in two blocks.
"""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evergreen.config.features import LENGTH, MISSING_CATEGORY, Features
from evergreen.contracts import raw_rows
from evergreen.runtime.errors import ContractError, first_line
from evergreen.statistics.column_profile import (
    DENSE_EDGES,
    LISTED,
    NUM_BUCKETS,
    ColumnProfile,
    Ints,
    RowTotal,
    TableProfile,
    bucket_of,
    cell_sums,
    find_sums,
    most_frequent,
    request_totals,
)
from evergreen.statistics.reference import LISTED_VALUES, TrainingReference, inner_buckets

BLOCK_ROWS = 1024
"""Number of consecutive rows that are assigned to the same half."""
_MAX_DISTINCT = 131_072
"""Maximum number of categories that are counted in memory, for each column and half. The counts of
each category take 32 bytes."""
_SELECTION, _ESTIMATION = 0, 1
"""Indexes of the two halves of the rows. The cells are selected by the rows of the selection half.
The rows of the estimation half give unbiased counts of these cells."""


class ValueCounts:
    """Sums of one column by value, exact up to `capacity` distinct values.

    >>> counts = ValueCounts(2)
    >>> counts.add_sums(np.array([5, 7, 9]), np.array([[2, 2, 2], [3, 3, 3], [1, 1, 1]]))
    >>> counts.values.tolist(), counts.counts.tolist(), counts.lost
    ([5, 7], [1, 2], 1)
    """

    def __init__(self, capacity: int = _MAX_DISTINCT) -> None:
        self._capacity = capacity
        self.values: Ints = np.zeros(0, np.int64)
        """[k] distinct values in ascending order."""
        self.sums: Ints = np.zeros((0, 3), np.int64)
        """[k, 3] totals as in `ColumnProfile.sums`. The total of r may be too low by at most
        `lost`. The totals of r x r and r x v are exact."""
        self.lost = 0
        """Maximum error of a row count. A value that is not counted occurs in at most `lost` rows.
        The error is at most the number of added rows divided by `capacity` + 1."""

    @property
    def counts(self) -> Ints:
        """Return the number of rows of each value, [k]."""
        return self.sums[:, 0]

    def add_sums(self, values: Ints, sums: Ints) -> None:
        """Add the totals of some values to the totals counted so far.

        Args:
            values: Distinct values in ascending order, [n].
            sums: Totals of these values, as in `ColumnProfile.sums`, [n, 3].
        """
        # `self.values` and `values` are both sorted. Inserting the new values into the sorted array
        # takes a third of the time of a complete sort.
        indexes = np.searchsorted(self.values, values)
        known = np.zeros(len(values), np.bool_)
        inside = indexes < len(self.values)
        known[inside] = self.values[indexes[inside]] == values[inside]
        self.sums[indexes[known]] += sums[known]
        if not known.all():
            self.values = np.insert(self.values, indexes[~known], values[~known])
            self.sums = np.insert(self.sums, indexes[~known], sums[~known], axis=0)
        if len(self.values) > self._capacity:
            self._drop_rarest()

    def _drop_rarest(self) -> None:
        """Drop the least frequent values beyond the capacity.

        All remaining counts are lowered by the count of the most frequent dropped value.
        """
        least = np.partition(self.counts, -self._capacity - 1)[-self._capacity - 1]
        held = self.counts > least
        self.values, self.sums = self.values[held], self.sums[held]
        self.sums[:, 0] -= least
        self.lost += int(least)

    def merge(self, other: "ValueCounts") -> None:
        """Add the counts of other rows."""
        self.lost += other.lost
        self.add_sums(other.values, other.sums)


class _BatchRequests:
    """Requests of one batch, with the rows ordered by half, block and request."""

    def __init__(self, batch: pa.RecordBatch, first_row: int) -> None:
        """Sort the rows of a batch.

        Args:
            batch: Batch of at least one row.
            first_row: Number of the batch's first row in the table.
        """
        column = batch.column(raw_rows.REQUEST_ID)
        encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        blocks = np.arange(first_row, first_row + batch.num_rows) // BLOCK_ROWS
        # Number the blocks so that all blocks of the selection half come first.
        ranks = blocks // 2 + blocks % 2 * (int(blocks[-1]) + 1)
        keys = ranks * len(encoded.dictionary) + encoded.indices.to_numpy()
        self.order: Ints = np.argsort(keys, kind="stable")
        """[n] row numbers, sorted by half, block and request."""
        self.starts = _run_starts(keys[self.order])
        """[g] first row of each request, in `order`."""
        self.sizes = np.diff(np.append(self.starts, batch.num_rows))
        """[g] number of rows of each request."""
        self.of_row = np.repeat(np.arange(len(self.sizes)), self.sizes)
        """[n] index of the request to which each row of `order` belongs. The indices are
        ascending."""
        second = int((blocks[self.order[self.starts]] % 2 == _SELECTION).sum())
        self.halves = (slice(0, second), slice(second, len(self.sizes)))
        """Ranges of the requests of each half."""

    def sums(self, rows: NDArray[Any]) -> Ints:
        """Return the sum of `rows` in each request, [g, ...].

        Args:
            rows: Values of the rows in `order`, [n, ...].
        """
        return np.add.reduceat(rows, self.starts, axis=0, dtype=np.int64)


class ProfileCounter:
    """Counter that builds the profile of a table, batch by batch.

    The table has columns for the label, the features and the request ids.
    """

    def __init__(self, features: Features, excluded: Sequence[str] = ()) -> None:
        """Create an empty counter.

        Features in `excluded` are neither read nor counted.
        """
        self.features = features
        self._excluded = tuple(name for name in features.names if name in excluded)
        self._numeric, self._plain, self._lists = (
            tuple(name for name in names if name not in excluded)
            for names in (features.numeric, features.categorical, features.lists)
        )
        self._dense = self._numeric + tuple(LENGTH.format(name=name) for name in self._lists)
        self._categorical = self._plain + self._lists
        self._names = self._dense + self._categorical
        columns, num_dense = len(self._names), len(self._dense)
        self._column_of = np.repeat(np.arange(num_dense), NUM_BUCKETS)
        # Each sum is stored as an array with one part per half.
        self._values = {name: (ValueCounts(), ValueCounts()) for name in self._categorical}
        self._sums = {
            # For each half: number of rows, number of requests, and `TableProfile.sizes`.
            "rows": np.zeros((2, 3), np.int64),
            "clicks": np.zeros((2, 1, 3), np.int64),
            # For each half and column: rows, `ColumnProfile.present_sizes`, and requests.
            "present": np.zeros((2, columns, 3), np.int64),
            "missing": np.zeros((2, columns, 3), np.int64),
            "buckets": np.zeros((2, num_dense * NUM_BUCKETS, 3), np.int64),
            "bucket_sums": np.zeros((2, num_dense, 3), np.int64),
        }

    @property
    def rows(self) -> int:
        """Return the number of rows counted."""
        return int(self._sums["rows"][:, 0].sum())

    def add(self, batch: pa.RecordBatch, first_row: int | None = None) -> None:
        """Count a batch. Null and NaN are missing, as in a log record.

        Args:
            batch: Rows with the columns of the features, label and request id.
            first_row: Number of the batch's first row in the table. If None, the number of rows
                counted so far is used.
        """
        if not batch.num_rows:
            return
        # The halves are split by block, not by row. Rows of one request are adjacent and
        # correlated. A split within requests would make the halves dependent.
        requests = _BatchRequests(batch, self.rows if first_row is None else first_row)
        numeric = raw_rows.feature_matrix(batch, self._numeric, "float32", missing=np.nan)
        plain = raw_rows.feature_matrix(batch, self._plain, "int64", missing=MISSING_CATEGORY)[
            requests.order
        ]
        options = map(self.features.list_options_of, self._lists)
        matrices = [
            raw_rows.list_matrix(batch.column(name), each)
            for name, each in zip(self._lists, options)
        ]
        lists = [each[requests.order] for each in matrices]
        lengths = [(each != MISSING_CATEGORY).sum(axis=1, keepdims=True) for each in lists]
        dense = np.concatenate([numeric[requests.order], *lengths], axis=1, dtype=np.float32)
        categorical = [*plain.T, *lists]
        # Each element of a list counts as one value. An empty list is not missing.
        num_values = np.concatenate([~np.isnan(dense), plain != MISSING_CATEGORY, *lengths], axis=1)
        misses = num_values == 0
        misses[:, len(self._dense) + len(self._plain) :] = False
        with_value = requests.sums(num_values)
        label = batch.column(raw_rows.LABEL).fill_null(0).to_numpy(zero_copy_only=False)
        clicks = requests.sums(label[requests.order] == 1)[:, None]
        self._add_rows(
            requests, with_value=with_value, without=requests.sums(misses), clicks=clicks
        )
        self._add_dense(dense, requests, with_value[:, : len(self._dense)])
        for i, name in enumerate(self._categorical):
            column = len(self._dense) + i
            values = categorical[i][categorical[i] != MISSING_CATEGORY]
            of_value = np.repeat(requests.of_row, num_values[:, column])
            self._add_values(
                name, values, of_value, with_value=with_value[:, column], halves=requests.halves
            )

    def _add_rows(
        self, requests: _BatchRequests, *, with_value: Ints, without: Ints, clicks: Ints
    ) -> None:
        for half, part in enumerate(requests.halves):
            sizes, found = requests.sizes[part, None], with_value[part]
            self._sums["rows"][half] += [sizes.sum(), len(sizes), (sizes**2).sum()]
            self._sums["clicks"][half] += request_totals(clicks[part], sizes)
            self._sums["missing"][half] += request_totals(without[part], sizes)
            self._sums["present"][half] += np.stack(
                [found.sum(axis=0), (found**2).sum(axis=0), (found > 0).sum(axis=0)], axis=1
            )

    def _add_dense(
        self, dense: NDArray[np.float32], requests: _BatchRequests, with_value: Ints
    ) -> None:
        present, buckets = ~np.isnan(dense), bucket_of(DENSE_EDGES, dense)
        bucket_sums = requests.sums(np.where(present, buckets, 0))
        cells = buckets + np.arange(len(self._dense)) * NUM_BUCKETS
        for half, part in enumerate(requests.halves):
            self._sums["bucket_sums"][half] += request_totals(bucket_sums[part], with_value[part])
            rows = slice(*np.searchsorted(requests.of_row, [part.start, part.stop]))
            of_value = np.broadcast_to(requests.of_row[rows, None] - part.start, cells[rows].shape)
            self._sums["buckets"][half] += cell_sums(
                cells[rows][present[rows]],
                of_value[present[rows]],
                totals=with_value[part],
                column_of=self._column_of,
            )

    def _add_values(
        self,
        name: str,
        values: Ints,
        requests: Ints,
        *,
        with_value: Ints,
        halves: tuple[slice, slice],
    ) -> None:
        """Count the values of a column.

        Args:
            name: The column.
            values: Values, [n].
            requests: Request of each value, [n].
            with_value: Number of values of each request, [g].
            halves: Ranges of the requests of each half.
        """
        if not len(values):
            return
        bits = len(with_value).bit_length()
        distinct = None
        if int(values.max()).bit_length() + bits > 63:  # the key would need more than 63 bits
            distinct, values = np.unique(values, return_inverse=True)
        # A single sort is sufficient. After the sort, rows that agree in value and request are
        # adjacent. Rows that agree in value and half are adjacent as well.
        keys = np.sort((values << bits) | requests)
        starts = _run_starts(keys)
        runs, rows = keys[starts], np.diff(np.append(starts, len(keys)))
        of_request = runs & ((1 << bits) - 1)
        is_estimation = of_request >= halves[_ESTIMATION].start
        run_values = runs >> bits
        groups = _run_starts(run_values * 2 + is_estimation)
        parts = (rows, rows * rows, rows * with_value[of_request])
        sums = np.stack([np.add.reduceat(part, groups) for part in parts], axis=1)
        found, in_estimation = run_values[groups], is_estimation[groups]
        found = found if distinct is None else distinct[found]
        for counts, chosen in zip(self._values[name], (~in_estimation, in_estimation)):
            counts.add_sums(found[chosen], sums[chosen])

    def merge(self, other: "ProfileCounter") -> None:
        """Add the counts of other rows of the table."""
        for name, sums in self._sums.items():
            sums += other._sums[name]
        for name, halves in self._values.items():
            for mine, theirs in zip(halves, other._values[name]):
                mine.merge(theirs)

    def dumps(self) -> bytes:
        """Return the counts as NumPy's .npz.

        The file contains only numbers, so reading it runs no code.
        """
        content = io.BytesIO()
        np.savez(content, **self._arrays())
        return content.getvalue()

    def merge_dumped(self, content: bytes) -> None:
        """Add the counts of another counter that was serialized with `dumps`.

        The other counter must have the same columns.

        Raises:
            ContractError: The content is corrupt, or does not fit the columns of this counter.
        """
        other = ProfileCounter(self.features, self._excluded)
        expected = other._arrays()
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in expected}
        except (
            Exception
        ) as error:  # NumPy, zipfile and zlib raise many types of errors for a corrupt archive
            raise ContractError(
                f"counts of a worker cannot be read: {first_line(error)}"
            ) from error
        for name, sums in other._sums.items():
            sums += _counts_like(found[name], name, sums.shape)
        for i, name in enumerate(self._categorical):
            for half, counts in enumerate(other._values[name]):
                values = _counts_like(found[f"values {i} {half}"], name, (None,))
                counts.values, counts.lost = (
                    values,
                    int(_counts_like(found[f"lost {i} {half}"], name, ())),
                )
                counts.sums = _counts_like(found[f"sums {i} {half}"], name, (len(values), 3))
        self.merge(other)

    def _arrays(self) -> dict[str, Any]:
        arrays: dict[str, Any] = dict(self._sums)
        for i, name in enumerate(self._categorical):
            for half, counts in enumerate(self._values[name]):
                arrays[f"values {i} {half}"], arrays[f"sums {i} {half}"] = (
                    counts.values,
                    counts.sums,
                )
                arrays[f"lost {i} {half}"] = np.int64(counts.lost)
        return arrays

    # -- results

    def profile(
        self, *, digest: str = "", first_event_time: str = "", last_event_time: str = ""
    ) -> TableProfile:
        """Return the profile of all rows.

        The arguments have the same meaning as the fields of `RawDataset`.
        """
        listed = {}
        for name, halves in self._values.items():
            both = ValueCounts()
            for half in halves:
                both.merge(half)
            values, sums, dropped = most_frequent(both.values, both.sums, LISTED)
            listed[name] = (values, sums, dropped + both.lost)
        found = self._profile(slice(None), listed)
        return replace(
            found, digest=digest, first_event_time=first_event_time, last_event_time=last_event_time
        )

    def reference(self) -> TrainingReference:
        """Return the reference for served rows.

        The cells are selected by the rows of the selection half. The rows of the estimation half
        are counted in these cells.
        """
        listed = {}
        for name, (selection, estimation) in self._values.items():
            values, _, _ = most_frequent(selection.values, selection.sums, LISTED_VALUES)
            listed[name] = (
                values,
                find_sums(values, estimation.values, estimation.sums),
                estimation.lost,
            )
        selection_buckets = self._sums["buckets"][_SELECTION, :, 0].reshape(-1, NUM_BUCKETS)
        return TrainingReference(
            rows=self.rows,
            profile=self._profile(slice(_ESTIMATION, _ESTIMATION + 1), listed),
            bounds={
                name: inner_buckets(buckets)
                for name, buckets in zip(self._dense, selection_buckets)
            },
            numeric=self.features.numeric,
            categorical=self.features.categorical,
            lists={name: self.features.list_options_of(name).max for name in self.features.lists},
        )

    def _profile(self, halves: slice, listed: dict[str, tuple[Ints, Ints, int]]) -> TableProfile:
        """Return the profile of the rows in the halves `halves`.

        Args:
            halves: The halves.
            listed: For each column, three results: the listed values, the sums of these values, and
                the floor.
        """
        sums = {name: found[halves].sum(axis=0) for name, found in self._sums.items()}
        columns = {}
        for i, name in enumerate(self._names):
            values, cells, floor = listed.get(name, (None, None, 0))
            bucket_sums = (0, 0)
            if cells is None:
                cells = sums["buckets"].reshape(-1, NUM_BUCKETS, 3)[i]
                bucket_sums = sums["bucket_sums"][i, 1:].tolist()
            present, sizes, requests = sums["present"][i].tolist()
            columns[name] = ColumnProfile(
                values=values,
                sums=cells,
                present=present,
                present_sizes=sizes,
                present_requests=requests,
                missing=RowTotal(*sums["missing"][i].tolist()),
                bucket_squares=bucket_sums[0],
                bucket_products=bucket_sums[1],
                floor=floor,
            )
        rows, requests, sizes = sums["rows"].tolist()
        clicks = RowTotal(*sums["clicks"][0].tolist())
        return TableProfile(
            rows=rows, requests=requests, sizes=sizes, clicks=clicks, columns=columns
        )


def _counts_like(found: NDArray[Any], name: str, shape: tuple[int | None, ...]) -> Ints:
    """Return the array of counts after checking its shape. In `shape`, None means any length.

    Raises:
        ContractError: The array does not have whole numbers in this shape.
    """
    fits = len(found.shape) == len(shape) and all(
        n in (None, m) for n, m in zip(shape, found.shape)
    )
    if found.dtype != np.int64 or not fits:
        raise ContractError(
            f"counts of {name} are {found.dtype} {found.shape}, expected int64 {shape}"
        )
    return found


def _run_starts(ascending: Ints) -> Ints:
    """Return the start of each run of equal numbers in the sorted array `ascending`, [n > 0]."""
    return np.flatnonzero(np.append(True, ascending[1:] != ascending[:-1]))
