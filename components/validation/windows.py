"""What the rows of a window looked like, column by column, and the windows that a model's line learned from.

`ReferenceCounter` counts the training rows in one pass, beside TFDV, for two readers. `statistics` is what the monitor
compares served rows with (`contracts.reference_statistics`): the rows in two fair halves, block by block. `window` is
what the next round's rows are compared with, by `drift`. Summaries and counters of parts merge by addition, without
rows.

Categories are counted exactly up to a bound. Beyond it the rarest are dropped as a Misra-Gries summary drops them
(Agarwal et al., Mergeable summaries, 2013), which costs any count at most a 131,072nd of the rows. TFDV's own counts do
not suffice: of a column with more than 1024 distinct values it keeps a sketch of 1024 counters, whose counts may lack a
1024th of all rows, more than the drift tests call drift.

A list is counted as two columns: its elements, those that count, each as if it were a row, and their number, see
`contracts.reference_statistics`.

Rows of one request share their user and are alike; how much is measured by sums over requests, which separates chance
from change. A request that a batch or a block of rows cuts counts as two, which lowers the measured likeness a little
(measured: 2 % of requests of 64 rows lie across blocks).

A categorical column of a summary lists its `LISTED` most frequent values; the others are one cell. What that costs: a
value that is not listed is only known to have had at most `floor` rows, and a listed count may lack as many; so a
comparison gives a value its own cell only if `floor` is a small part of its rows. Merging adds the floors.

`KeptWindows` are stored with the model (`manifests.Model.WINDOWS`): the newest, and all older ones merged into one, at
most 2 MB each. The file is NumPy's .npz: the array `head` holds JSON (UTF-8), and each column of a window has its own
arrays. The same windows give the same bytes.
"""

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.config.features import LENGTH, MISSING_CATEGORY, Features
from components.contracts import raw_rows
from components.contracts.reference_statistics import (
    DENSE_EDGES,
    LISTED_VALUES,
    CategoryColumn,
    DenseColumn,
    ReferenceStatistics,
    bucket_of,
)
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError, first_line

LISTED = 2000
"""Most values that a summary lists of a column."""
NUM_BUCKETS = len(DENSE_EDGES) - 1
KIND, FORMAT_VERSION = "TrainingWindows", 1

Ints = NDArray[np.int64]


class RowTotal(NamedTuple):
    """A number of rows of a kind, and how they are distributed over requests."""

    rows: int = 0
    squares: int = 0
    """Sum over requests of its squared rows of the kind."""
    products: int = 0
    """Sum over requests of its rows of the kind times all its rows."""

    def __add__(self, other: "RowTotal") -> "RowTotal":  # type: ignore[override]
        return RowTotal(*(mine + theirs for mine, theirs in zip(self, other)))


@dataclass(frozen=True, kw_only=True, eq=False)
class ColumnSummary:
    """One column. Cells are the buckets of a dense column over `DENSE_EDGES`, or the listed values of a categorical."""

    values: Ints | None
    """[k] most frequent first, ties by value; None for a dense column."""
    sums: Ints
    """[k, 3] per cell, as `ValueCounts.sums`."""
    present: int
    """Rows with a value; those in no cell are the others."""
    present_sizes: int
    """Sum over requests of the squared rows with a value."""
    present_requests: int
    """Requests with a value."""
    missing: RowTotal
    place_squares: int = 0
    """Sum over requests of the squared sum of its rows' bucket numbers; 0 for a categorical column."""
    place_products: int = 0
    """Sum over requests of that sum times its rows with a value."""
    floor: int = 0
    """Most rows that a value may have that is not listed, and that may be lacking from the count of one that is."""

    @property
    def rows(self) -> int:
        """Rows of the windows that have the column: fewer than a merged window's if one of them left it out."""
        return self.present + self.missing.rows

    @property
    def counts(self) -> Ints:
        """[k] rows of each cell."""
        return self.sums[:, 0]

    def __add__(self, other: "ColumnSummary") -> "ColumnSummary":
        """The rows of both; of the same column."""
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
        return ColumnSummary(values=values, sums=sums, floor=floor, **both)


def find_sums(wanted: Ints, values: Ints, sums: Ints) -> Ints:
    """The sums [n, 3] of the `wanted` ones [n] among distinct values [k] with `sums` [k, 3]; zeros for any other."""
    found = np.zeros((len(wanted), 3), np.int64)
    _, at_wanted, at_values = np.intersect1d(wanted, values, assume_unique=True, return_indices=True)
    found[at_wanted] = sums[at_values]
    return found


def most_frequent(values: Ints, sums: Ints, limit: int) -> tuple[Ints, Ints, int]:
    """The `limit` most frequent of distinct values [n] with their sums [n, 3], and the rows of the next one."""
    order = np.lexsort((values, -sums[:, 0]))
    kept, rest = order[:limit], order[limit:]
    return values[kept], sums[kept], int(sums[rest[0], 0]) if len(rest) else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowSummary:
    """The rows of a window, or of several merged."""

    digest: str
    """Of the newest window's rows (`manifests.RawDataset.digest`)."""
    first_event_time: str
    last_event_time: str
    rows: int
    requests: int
    """Requests that the rows came in."""
    sizes: int
    """Sum over requests of the squared rows."""
    clicks: RowTotal
    columns: dict[str, ColumnSummary]
    """The judged features; one that the run left out is absent. Of a list, its elements, which are the rows of their
    column, and how many a row has (`features.LENGTH`)."""

    def __add__(self, newer: "WindowSummary") -> "WindowSummary":
        """The rows of both. A column that one of them left out has the rows of the other."""
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


@dataclass(frozen=True)
class KeptWindows:
    """Windows in the order in which they were learned, the newest last; older ones may be merged into one."""

    windows: tuple[WindowSummary, ...]

    @cached_property
    def merged(self) -> WindowSummary:
        """All windows as one."""
        return reduce(WindowSummary.__add__, self.windows)

    @property
    def newest(self) -> WindowSummary:
        """The window that the model itself was trained on."""
        return self.windows[-1]

    def followed_by(self, window: WindowSummary) -> "KeptWindows":
        """These as one window, and `window`, which replaces the newest of them if both hold the same rows."""
        before = self.windows
        if before and window.digest and before[-1].digest == window.digest:
            before = before[:-1]
        return KeptWindows((KeptWindows(before).merged, window) if before else (window,))

    def expect_kinds(self, features: Features) -> None:
        """Refuses features that cannot be compared.

        Raises:
            ContractError: a numeric feature was a categorical one in these windows, or the other way round.
        """
        for name, column in self.merged.columns.items():
            if name in (features.numeric if column.values is not None else features.categorical + features.lists):
                now, before = ("numeric", "categorical") if column.values is not None else ("categorical", "numeric")
                raise ContractError(f"feature {name} is {now}, was {before} in the champion's rows: give it a new name")

    def write(self, path: Path) -> None:
        """Writes the windows to `path`, whole or not at all."""
        head = {"kind": KIND, "format_version": FORMAT_VERSION, "dense_edges": DENSE_EDGES.tolist(), "windows": []}
        arrays: dict[str, Any] = {}
        for number, window in enumerate(self.windows):
            columns = {name: _plain_fields(column) for name, column in window.columns.items()}
            head["windows"].append({**_plain_fields(window), "columns": columns})
            for name, column in window.columns.items():
                arrays[f"{number}/{name}/sums"] = column.sums
                if column.values is not None:
                    arrays[f"{number}/{name}/values"] = column.values
        content = io.BytesIO()
        np.savez_compressed(content, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
        write_whole(path, content.getvalue())


def _plain_fields(summary: ColumnSummary | WindowSummary) -> dict[str, Any]:
    """The fields that JSON takes as they are."""
    names = [field.name for field in fields(summary) if field.name not in ("columns", "values", "sums")]
    return {name: getattr(summary, name) for name in names}


def read_windows(path: Path) -> KeptWindows:
    """The windows in `path`.

    Raises:
        ContractError: the file is absent, damaged, or of another kind, version or bucket edges.
    """
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        head = json.loads(arrays["head"].tobytes())
        if (head["kind"], head["format_version"]) != (KIND, FORMAT_VERSION):
            raise ContractError(
                f"{path} is {head['kind']} version {head['format_version']}, expected {KIND} version {FORMAT_VERSION}"
            )
        edges = np.array(head["dense_edges"])
        # NumPy's powers differ in their last digits between its versions.
        if edges.shape != DENSE_EDGES.shape or not np.allclose(edges, DENSE_EDGES, rtol=1e-9):
            raise ContractError(f"{path} counts dense columns between other edges than this version's")
        return KeptWindows(tuple(_make_window(each, arrays, number) for number, each in enumerate(head["windows"])))
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ContractError(f"{path} holds no training windows: {error!r}") from error


def _make_window(head: dict[str, Any], arrays: dict[str, NDArray[Any]], number: int) -> WindowSummary:
    columns = {}
    for name, known in head.pop("columns").items():
        values, sums = arrays.get(f"{number}/{name}/values"), arrays[f"{number}/{name}/sums"]
        columns[name] = ColumnSummary(values=values, sums=sums, missing=RowTotal(*known.pop("missing")), **known)
    return WindowSummary(clicks=RowTotal(*head.pop("clicks")), columns=columns, **head)


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


def _counts_like(found: NDArray[Any], name: str, shape: tuple[int | None, ...]) -> Ints:
    """Return the array if it holds whole numbers in this shape; None stands for any length.

    Raises:
        ContractError: it does not.
    """
    fits = len(found.shape) == len(shape) and all(n in (None, m) for n, m in zip(shape, found.shape))
    if found.dtype != np.int64 or not fits:
        raise ContractError(f"counts of {name} are {found.dtype} {found.shape}, expected int64 {shape}")
    return found


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

    def dumps(self) -> bytes:
        """Return the counts as NumPy's .npz, which holds numbers alone: reading it runs no code."""
        content = io.BytesIO()
        np.savez(content, **self._arrays())
        return content.getvalue()

    def merge_dumped(self, content: bytes) -> None:
        """Add the counts that `dumps` of a counter of the same columns wrote.

        Raises:
            ContractError: the content is no such counts.
        """
        other = ReferenceCounter(self.features, self._excluded)
        expected = other._arrays()
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in expected}
        except Exception as error:  # A damaged archive fails as NumPy, zipfile or zlib find it, in a dozen types.
            raise ContractError(f"counts of a worker cannot be read: {first_line(error)}") from error
        for name, sums in other._sums.items():
            sums += _counts_like(found[name], name, sums.shape)
        for i, name in enumerate(self._categorical):
            for half, counts in enumerate(other._values[name]):
                values = _counts_like(found[f"values {i} {half}"], name, (None,))
                counts.values, counts.lost = values, int(_counts_like(found[f"lost {i} {half}"], name, ()))
                counts.sums = _counts_like(found[f"sums {i} {half}"], name, (len(values), 3))
        self.merge(other)

    def _arrays(self) -> dict[str, Any]:
        arrays: dict[str, Any] = dict(self._sums)
        for i, name in enumerate(self._categorical):
            for half, counts in enumerate(self._values[name]):
                arrays[f"values {i} {half}"], arrays[f"sums {i} {half}"] = counts.values, counts.sums
                arrays[f"lost {i} {half}"] = np.int64(counts.lost)
        return arrays

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
