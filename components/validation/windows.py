"""What the rows of a window looked like, column by column, and the windows that a model's line learned from.

`reference.ReferenceCounter` makes a summary. Summaries merge by addition, without rows: sums over requests measure how
alike the rows of a request are, which separates chance from change. Comparing them is left to `drift`.

A categorical column lists its `LISTED` most frequent values; the others are one cell. What that costs: a value that is
not listed is only known to have had at most `floor` rows, and a listed count may lack as many; so a comparison gives a
value its own cell only if `floor` is a small part of its rows. Merging adds the floors.

`KeptWindows` are stored with the model (`manifests.Model.WINDOWS`): the newest, and all older ones merged into one, at
most 2 MB each. The file is NumPy's .npz: the array `head` holds JSON (UTF-8), and each column of a window has its own
arrays. The same windows give the same bytes.
"""

import io
import json
import zipfile
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts.features import Features
from components.contracts.reference_statistics import DENSE_EDGES
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError

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
    """[k, 3] per cell, as `reference.ValueCounts.sums`."""
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
