"""The windows that a model's line learnt from, kept with the model in one file: the newest apart, older ones as one.

Joins a round's validation, which adds its window, to the next one's, which compares with them; training copies the file
into the model (`manifests.Model.WINDOWS`). Bounded whatever the line's length: `NEWEST` + 1 summaries of at most 2 MB.

The file is NumPy's .npz: the array `head` holds JSON (UTF-8), and each window has five arrays. The same windows give
the same bytes.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts import criteo
from components.contracts.reference_statistics import DENSE_EDGES
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError
from components.validation.windows import NUM_BUCKETS, ColumnSummary, Total, WindowSummary

KIND, FORMAT_VERSION = "TrainingWindows", 1
NEWEST = 6
"""Windows that are kept apart."""

_SCALARS = ("present", "present_sizes", "present_requests", "place_squares", "place_products", "floor")
_HEAD = ("digest", "first_event_time", "last_event_time", "num_windows", "rows", "requests", "sizes")


@dataclass(frozen=True)
class KeptWindows:
    """Windows in the order in which they were learnt, the newest last; never empty where it is compared with."""

    windows: tuple[WindowSummary, ...]

    @cached_property
    def merged(self) -> WindowSummary:
        """All windows as one."""
        return reduce(WindowSummary.__add__, self.windows)

    @property
    def newest(self) -> WindowSummary:
        """The window that the model itself was trained on."""
        return self.windows[-1]

    def followed_by(self, window: WindowSummary) -> KeptWindows:
        """With one more window; it takes the newest one's place if both hold the same rows."""
        before = self.windows
        if before and window.digest and before[-1].digest == window.digest:
            before = before[:-1]
        kept = (*before, window)
        oldest = kept[: max(len(kept) - NEWEST, 0)]
        return KeptWindows((*([reduce(WindowSummary.__add__, oldest)] if oldest else []), *kept[len(oldest) :]))

    def write(self, path: Path) -> None:
        """Writes the windows to `path`, whole or not at all."""
        head = {"kind": KIND, "format_version": FORMAT_VERSION, "dense_edges": DENSE_EDGES.tolist()}
        head["windows"] = [_head(window) for window in self.windows]
        arrays: dict[str, Any] = {"head": np.frombuffer(json.dumps(head).encode(), np.uint8)}
        for number, window in enumerate(self.windows):
            arrays |= {f"{number}/{name}": array for name, array in _arrays(window).items()}
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_whole(path, content.getvalue())


def read_windows(path: Path) -> KeptWindows:
    """The windows in `path`.

    Raises:
        ContractError: the file is absent, of another kind or version, or its sums do not fit together.
    """
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        head = json.loads(arrays["head"].tobytes())
        if (head["kind"], head["format_version"]) != (KIND, FORMAT_VERSION):
            raise ContractError(
                f"{path} is {head['kind']} version {head['format_version']}, expected {KIND} version {FORMAT_VERSION}"
            )
        if head["dense_edges"] != DENSE_EDGES.tolist():
            raise ContractError(f"{path} counts dense columns between other edges than this version's")
        found = [_window(each, _part(arrays, number)) for number, each in enumerate(head["windows"])]
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror or error}") from error
    except (KeyError, IndexError, TypeError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ContractError(f"{path} holds no training windows: {error!r}") from error
    if not found:
        raise ContractError(f"{path} holds no window, expected at least 1")
    for window in found:
        _expect_sums(path, window)
    return KeptWindows(tuple(found))


def _head(window: WindowSummary) -> dict[str, Any]:
    clicks = window.clicks
    return {
        **{name: getattr(window, name) for name in _HEAD},
        "clicks": [clicks.rows, clicks.squares, clicks.products],
        "columns": list(window.columns),
    }


def _arrays(window: WindowSummary) -> dict[str, NDArray[np.int64]]:
    columns = list(window.columns.values())
    dense = [column for column in columns if column.values is None]
    listed = [(column.values, column.sums) for column in columns if column.values is not None]
    return {
        "scalars": np.array([[getattr(c, name) for name in _SCALARS] for c in columns], np.int64).reshape(-1, 6),
        "missing": np.array(
            [[c.missing.rows, c.missing.squares, c.missing.products] for c in columns], np.int64
        ).reshape(-1, 3),
        "buckets": np.array([c.sums for c in dense], np.int64).reshape(-1, NUM_BUCKETS, 3),
        "lengths": np.array([len(values) for values, _ in listed], np.int64),
        "values": np.concatenate([np.zeros((0, 4), np.int64), *(np.column_stack(pair) for pair in listed)]),
    }


def _part(arrays: dict[str, NDArray[Any]], number: int) -> dict[str, NDArray[Any]]:
    return {name: arrays[f"{number}/{name}"] for name in ("scalars", "missing", "buckets", "lengths", "values")}


def _window(head: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> WindowSummary:
    names = head["columns"]
    dense = [name for name in names if name in criteo.DENSE]
    ends = np.cumsum(arrays["lengths"])
    listed = dict(zip([name for name in names if name not in dense], np.split(arrays["values"], ends[:-1])))
    if len(arrays["lengths"]) != len(names) - len(dense) or (len(ends) and ends[-1] != len(arrays["values"])):
        raise ValueError("lengths that are not those of the columns")
    columns = {}
    for number, name in enumerate(names):
        values = None if name in dense else listed[name][:, 0]
        sums = arrays["buckets"][dense.index(name)] if name in dense else listed[name][:, 1:]
        scalars = dict(zip(_SCALARS, arrays["scalars"][number].tolist()))
        missing = _total(arrays["missing"][number].tolist())
        columns[name] = ColumnSummary(values=values, sums=sums, missing=missing, **scalars)
    known = {name: head[name] for name in _HEAD}
    return WindowSummary(**known, clicks=_total(head["clicks"]), columns=columns)


def _total(sums: list[int]) -> Total:
    rows, squares, products = sums
    return Total(rows=rows, squares=squares, products=products)


def _expect_sums(path: Path, window: WindowSummary) -> None:
    for name, column in window.columns.items():
        cells = int(column.counts.sum())
        # Of windows that were merged, some may have left the column out.
        rows = column.rows == window.rows if window.num_windows == 1 else column.rows <= window.rows
        holds = rows and bool((column.sums >= 0).all())
        whole = cells == column.present if column.values is None else cells <= column.present
        if not holds or not whole:
            raise ContractError(f"{path}: {name} is damaged, expected the rows of its cells within {window.rows} rows")
