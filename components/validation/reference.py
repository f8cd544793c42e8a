"""Counts the training rows in one pass, beside TFDV, for two readers.

`statistics` is what the monitor compares served rows with (`contracts.reference_statistics`): the rows in two fair
halves, block by block. `window` is what the next round's rows are compared with (`windows`). Counters of parts of a
window merge into that of the whole.

Categories are counted exactly up to a bound. Beyond it the rarest are dropped as a Misra-Gries summary drops them
(Agarwal et al., Mergeable summaries, 2013), which costs any count at most a 131,072nd of the rows. TFDV's own counts do
not suffice: of a column with more than 1024 distinct values it keeps a sketch of 1024 counters, whose counts may lack a
1024th of all rows, more than the drift tests call drift.

A list is counted as two columns: its elements, those that count, each as if it were a row, and their number, see
`contracts.reference_statistics`.

Rows of one request share their user and are alike; how much is measured by sums over requests. A request that a batch
or a block of rows cuts counts as two, which lowers the measured likeness a little (measured: 2 % of requests of 64 rows
lie across blocks).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.contracts import raw_rows
from components.contracts.features import LENGTH, MISSING_CATEGORY, Features
from components.contracts.reference_statistics import (
    DENSE_EDGES,
    LISTED_VALUES,
    CategoryColumn,
    DenseColumn,
    ReferenceStatistics,
    bucket_of,
)
from components.validation.windows import (
    LISTED,
    NUM_BUCKETS,
    ColumnSummary,
    Ints,
    RowTotal,
    WindowSummary,
    find_sums,
    most_frequent,
)

BLOCK_ROWS = 1024
"""Consecutive rows that fall into one half."""
MAX_DISTINCT = 131_072
"""Categories per column and half whose counts are held, 32 bytes each."""


class ValueCounts:
    """Sums per value of one column, exact up to `capacity` distinct values.

    >>> counts = ValueCounts(2)
    >>> counts.add_sums(np.array([5, 7, 9]), np.array([[2, 2, 2], [3, 3, 3], [1, 1, 1]]))
    >>> counts.values.tolist(), counts.counts.tolist(), counts.lost
    ([5, 7], [1, 2], 1)
    """

    def __init__(self, capacity: int = MAX_DISTINCT) -> None:
        self._capacity = capacity
        self.values: Ints = np.zeros(0, np.int64)
        """[k] ascending."""
        self.sums: Ints = np.zeros((0, 3), np.int64)
        """[k, 3] rows of each value; sum over requests of its squared rows, and of its rows times the request's rows
        that have a value. The rows are too low by at most `lost`; the other two are exact."""
        self.lost = 0
        """At most the rows added divided by `capacity` + 1; also the most that a value that is not held may have."""

    @property
    def counts(self) -> Ints:
        """[k] rows of each value."""
        return self.sums[:, 0]

    def add_sums(self, values: Ints, sums: Ints) -> None:
        """Adds sums [n, 3], none negative, of distinct ascending values [n]."""
        # Both sides are sorted: inserting what is new takes a third of the time of sorting all again.
        places = np.searchsorted(self.values, values)
        known = np.zeros(len(values), np.bool_)
        inside = places < len(self.values)
        known[inside] = self.values[places[inside]] == values[inside]
        self.sums[places[known]] += sums[known]
        if not known.all():
            self.values = np.insert(self.values, places[~known], values[~known])
            self.sums = np.insert(self.sums, places[~known], sums[~known], axis=0)
        if len(self.values) > self._capacity:
            self._drop_rarest()

    def _drop_rarest(self) -> None:
        """Drops the rarest values beyond the capacity, and their rows from every count."""
        least = np.partition(self.counts, -self._capacity - 1)[-self._capacity - 1]
        held = self.counts > least
        self.values, self.sums = self.values[held], self.sums[held]
        self.sums[:, 0] -= least
        self.lost += int(least)

    def merge(self, other: "ValueCounts") -> None:
        """Adds the counts of other rows."""
        self.lost += other.lost
        self.add_sums(other.values, other.sums)


class BatchRequests:
    """The rows of one batch by request."""

    def __init__(self, batch: pa.RecordBatch, first_row: int) -> None:
        """Sorts the rows of a batch, at least one, whose first has the number `first_row` in the window."""
        column = batch.column(raw_rows.REQUEST_ID)
        encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        blocks = np.arange(first_row, first_row + batch.num_rows) // BLOCK_ROWS
        keys = blocks * len(encoded.dictionary) + encoded.indices.to_numpy()
        self.order: Ints = np.argsort(keys, kind="stable")
        """[n] rows by block and request."""
        self.starts = _run_starts(keys[self.order])
        """[g] first row of each request, in that order."""
        self.sizes = np.diff(np.append(self.starts, batch.num_rows))
        """[g] rows of each."""
        self.of_row = np.repeat(np.arange(len(self.sizes)), self.sizes)
        """[n] request of each row, ascending."""
        self.halves = blocks[self.order[self.starts]] % 2
        """[g] the half that each belongs to."""

    def sums(self, rows: NDArray[Any]) -> Ints:
        """Sums [g, ...] over each request of `rows` [n, ...], which are in `order`."""
        return np.add.reduceat(rows, self.starts, axis=0, dtype=np.int64)


class ReferenceCounter:
    """Counts batches of rows with label, features and request ids."""

    def __init__(self, features: Features, excluded: Sequence[str] = ()) -> None:
        """No rows yet; those of `features` that are `excluded` are neither read nor counted."""
        self.features = features
        self._excluded = tuple(name for name in features.names if name in excluded)
        self._numeric, self._plain, self._lists = (
            tuple(name for name in names if name not in excluded)
            for names in (features.numeric, features.categorical, features.lists)
        )
        self._dense = self._numeric + tuple(LENGTH.format(name=name) for name in self._lists)
        self._categorical = self._plain + self._lists
        self._names = self._dense + self._categorical
        columns = len(self._names)
        # Two of each: for the rows that choose what is listed, and for the others.
        self._values = {name: (ValueCounts(), ValueCounts()) for name in self._categorical}
        self._sums = {
            "rows": np.zeros(3, np.int64),  # rows, requests, sum of squared rows over requests
            "clicks": np.zeros(3, np.int64),
            "present": np.zeros((4, columns), np.int64),  # by half; squared over requests; requests
            "missing": np.zeros((3, columns), np.int64),
            "buckets": np.zeros((4, len(self._dense), NUM_BUCKETS), np.int64),  # by half; squares; products
            "places": np.zeros((2, len(self._dense)), np.int64),
        }

    @property
    def rows(self) -> int:
        """Rows counted in."""
        return int(self._sums["rows"][0])

    def add(self, batch: pa.RecordBatch, first_row: int | None = None) -> None:
        """Counts a batch; null and NaN are missing, as in a log record.

        `first_row` is the number of its first row in the window; None = its rows follow those counted before.
        """
        if not batch.num_rows:
            return
        # By blocks, because rows of one request lie together and are alike: cut between them, no half would be fair.
        requests = BatchRequests(batch, self.rows if first_row is None else first_row)
        numeric = raw_rows.feature_matrix(batch, self._numeric, "float32", missing=np.nan)
        plain = raw_rows.feature_matrix(batch, self._plain, "int64", missing=MISSING_CATEGORY)[requests.order]
        options = map(self.features.list_options_of, self._lists)
        matrices = [raw_rows.list_matrix(batch.column(name), each) for name, each in zip(self._lists, options)]
        lists = [each[requests.order] for each in matrices]
        lengths = [(each != MISSING_CATEGORY).sum(axis=1, keepdims=True) for each in lists]
        dense = np.concatenate([numeric[requests.order], *lengths], axis=1, dtype=np.float32)
        categorical = [*plain.T, *lists]
        # A row has as many values of a list as elements, and where it has none, none is missing.
        num_values = np.concatenate([~np.isnan(dense), plain != MISSING_CATEGORY, *lengths], axis=1)
        misses = num_values == 0
        misses[:, len(self._dense) + len(self._plain) :] = False
        with_value = requests.sums(num_values)
        self._add_rows(batch, requests, with_value=with_value, without=requests.sums(misses))
        for i in range(len(self._dense)):
            self._add_dense(i, dense[:, i], num_values[:, i] > 0, requests=requests, with_value=with_value[:, i])
        # Numbered anew, those of the first half first.
        order = np.argsort(requests.halves, kind="stable")
        of_row, second = np.argsort(order)[requests.of_row], int((requests.halves == 0).sum())
        for i, name in enumerate(self._categorical):
            column = len(self._dense) + i
            values = categorical[i][categorical[i] != MISSING_CATEGORY]
            of_value = np.repeat(of_row, num_values[:, column])
            self._add_values(name, values, of_value, with_value=with_value[order, column], second=second)

    def _add_rows(self, batch: pa.RecordBatch, requests: BatchRequests, *, with_value: Ints, without: Ints) -> None:
        sizes, halves = requests.sizes, requests.halves
        self._sums["rows"] += [batch.num_rows, len(sizes), (sizes**2).sum()]
        label = batch.column(raw_rows.LABEL).fill_null(0).to_numpy(zero_copy_only=False)
        clicks = requests.sums(label[requests.order] == 1)
        self._sums["clicks"] += _request_totals(clicks[:, None], sizes)[:, 0]
        self._sums["missing"] += _request_totals(without, sizes)
        self._sums["present"] += [
            with_value[halves == 0].sum(axis=0),
            with_value[halves == 1].sum(axis=0),
            (with_value**2).sum(axis=0),
            (with_value > 0).sum(axis=0),
        ]

    def _add_dense(
        self,
        i: int,
        values: NDArray[np.float32],
        present: Ints,
        *,
        requests: BatchRequests,
        with_value: Ints,
    ) -> None:
        cells = requests.of_row[present] * NUM_BUCKETS + bucket_of(DENSE_EDGES, values[present])
        rows = np.bincount(cells, minlength=len(with_value) * NUM_BUCKETS).reshape(-1, NUM_BUCKETS)
        self._sums["buckets"][:2, i] += [rows[requests.halves == half].sum(axis=0) for half in (0, 1)]
        self._sums["buckets"][2:, i] += [(rows**2).sum(axis=0), with_value @ rows]
        places = rows @ np.arange(NUM_BUCKETS)
        self._sums["places"][:, i] += [(places**2).sum(), (places * with_value).sum()]

    def _add_values(self, name: str, values: Ints, requests: Ints, *, with_value: Ints, second: int) -> None:
        """Counts a column's values [n] in requests [n]; those numbered from `second` on are in the second half."""
        if not len(values):
            return
        bits = len(with_value).bit_length()
        distinct = None
        if int(values.max()).bit_length() + bits > 63:  # of hashes: their places among the distinct ones are shorter
            distinct, values = np.unique(values, return_inverse=True)
        # Sorted once: a value's rows in a request are a run, and its runs in a half lie together.
        keys = np.sort((values << bits) | requests)
        starts = _run_starts(keys)
        runs, rows = keys[starts], np.diff(np.append(starts, len(keys)))
        of_request = runs & ((1 << bits) - 1)
        is_second = of_request >= second
        run_values = runs >> bits
        groups = _run_starts(run_values * 2 + is_second)
        parts = (rows, rows * rows, rows * with_value[of_request])
        sums = np.stack([np.add.reduceat(part, groups) for part in parts], axis=1)
        found, in_second = run_values[groups], is_second[groups]
        found = found if distinct is None else distinct[found]
        for counts, chosen in zip(self._values[name], (~in_second, in_second)):
            counts.add_sums(found[chosen], sums[chosen])

    def merge(self, other: "ReferenceCounter") -> None:
        """Adds the counts of other rows of the window."""
        for name, sums in self._sums.items():
            sums += other._sums[name]
        for name, halves in self._values.items():
            for mine, theirs in zip(halves, other._values[name]):
                mine.merge(theirs)

    # -- for the monitor

    def statistics(self) -> ReferenceStatistics:
        """What the monitor compares served rows with."""
        rows, none = self.rows, np.zeros(NUM_BUCKETS, np.int64)
        lengths = (LENGTH.format(name=name) for name in self.features.lists)
        dense = {name: DenseColumn.of(none, none, rows) for name in (*self.features.numeric, *lengths)}
        for i, name in enumerate(self._dense):
            choosing, fair = self._sums["buckets"][:2, i]
            dense[name] = DenseColumn.of(choosing.copy(), fair.copy(), self._num_missing(name))
        return ReferenceStatistics(
            rows=rows,
            dense_edges=DENSE_EDGES,
            dense=dense,
            categorical={name: self._category_column(name) for name in self.features.categorical + self.features.lists},
            lists={name: self.features.list_options_of(name).max for name in self.features.lists},
            excluded=self._excluded,
        )

    def _num_missing(self, name: str) -> int:
        return int(self._sums["missing"][0, self._names.index(name)])

    def _category_column(self, name: str) -> CategoryColumn:
        choosing, fair = self._values.get(name, (ValueCounts(), ValueCounts()))
        values, sums, _ = most_frequent(choosing.values, choosing.sums, LISTED_VALUES)
        counts, fair_counts = sums[:, 0], find_sums(values, fair.values, fair.sums)[:, 0]
        present = self._sums["present"][:2, self._names.index(name)] if name in self._names else np.zeros(2, np.int64)
        fair_others = int(present[1] - fair_counts.sum())
        return CategoryColumn(
            values=values,
            counts=counts + fair_counts,
            others=int(present[0] - counts.sum()) + fair_others,
            fair_counts=fair_counts,
            fair_others=fair_others,
            missing=self._num_missing(name) if name in self._names else self.rows,
        )

    # -- for the next round

    def window(self, *, digest: str = "", first_event_time: str = "", last_event_time: str = "") -> WindowSummary:
        """What the next round compares with; the arguments are those of the rows' `RawDataset`."""
        rows, requests, sizes = self._sums["rows"].tolist()
        return WindowSummary(
            digest=digest,
            first_event_time=first_event_time,
            last_event_time=last_event_time,
            rows=rows,
            requests=requests,
            sizes=sizes,
            clicks=RowTotal(*self._sums["clicks"].tolist()),
            columns={name: self._summarize_column(i, name) for i, name in enumerate(self._names)},
        )

    def _summarize_column(self, i: int, name: str) -> ColumnSummary:
        choosing, fair, sizes, requests = self._sums["present"][:, i].tolist()
        values, floor, places = None, 0, (0, 0)
        if name in self._values:
            both = ValueCounts()
            for half in self._values[name]:
                both.merge(half)
            values, sums, dropped = most_frequent(both.values, both.sums, LISTED)
            floor = dropped + both.lost
        else:
            buckets = self._sums["buckets"][:, i]
            sums = np.stack([buckets[0] + buckets[1], buckets[2], buckets[3]], axis=1)
            places = self._sums["places"][:, i].tolist()
        return ColumnSummary(
            values=values,
            sums=sums,
            present=choosing + fair,
            present_sizes=sizes,
            present_requests=requests,
            missing=RowTotal(*self._sums["missing"][:, i].tolist()),
            place_squares=places[0],
            place_products=places[1],
            floor=floor,
        )


def _run_starts(ascending: Ints) -> Ints:
    """Where each distinct number of `ascending` [n > 0] begins."""
    return np.flatnonzero(np.append(True, ascending[1:] != ascending[:-1]))


def _request_totals(rows: Ints, sizes: Ints) -> Ints:
    """Rows, squares and products, [3, c], of rows of a kind [g, c] in requests of `sizes` [g] rows."""
    return np.stack([rows.sum(axis=0), (rows**2).sum(axis=0), (rows * sizes[:, None]).sum(axis=0)])
