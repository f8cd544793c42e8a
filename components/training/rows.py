"""Encoded rows from HugeCTR's Parquet folders: decoded once, into flat files that are mapped and not held in memory.

A row takes 160 bytes (ids as int32). What the fit then touches are pages that the kernel may drop again, so rows may
outgrow memory; decoding holds some ten thousand rows at a time. What the columns mean is `contracts.criteo`'s; what is
wrong with a folder is said here, before a long fit starts. The order in which rows are learnt is `passes`'.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE, LABEL, NUM_CATEGORICAL, NUM_DENSE
from components.contracts.errors import ContractError, first_line
from components.contracts.hugectr_folder import listed_files

_DECODED_ROWS = 1 << 13
"""Rows decoded at a time: 2 MB of columns. Four times as many were no faster, and left 15 MB more with Arrow."""
_TURNED_ROWS = 1 << 12
"""Rows turned from columns into rows at a time, so that the part written lies in a core's cache (0.4 MB)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows in time order."""

    labels: NDArray[np.float32]
    """0 or 1, [n]."""
    dense: NDArray[np.float32]
    """Normalised values, [n, 13]."""
    ids: NDArray[np.int32]
    """Slot-local ids, [n, 26]."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def __getitem__(self, part: slice) -> Rows:
        """The rows of a slice, without a copy."""
        return Rows(labels=self.labels[part], dense=self.dense[part], ids=self.ids[part])


@dataclass(frozen=True, kw_only=True)
class RowFolder:
    """A HugeCTR Parquet folder and what its manifest says of it."""

    path: Path
    """Folder with Parquet files and `_file_list.txt`, whose paths may be those of another machine."""
    num_rows: int


def open_rows(folder: Path, num_rows: int, slot_sizes: list[int], cache: Path) -> Rows:
    """All rows of one folder; see `open_folders`."""
    return open_folders([RowFolder(path=folder, num_rows=num_rows)], slot_sizes, cache)


def open_folders(folders: Sequence[RowFolder], slot_sizes: list[int], cache: Path) -> Rows:
    """All rows of the folders, one after another, each in the order of its `_file_list.txt`.

    The flat files have no name once they are open: they end with the arrays, however the process ends, and no later
    process can take them for those of another set. It decodes again, in less than a tenth of the time of one epoch.

    Args:
        folders: Folders to read.
        slot_sizes: Number of ids per column.
        cache: Folder, created where it is absent, on the disk that shall hold the flat files.

    Raises:
        ContractError: a file is absent, damaged, has other columns or types, or nulls; another number of rows; a value
            that is not finite; a label other than 0 and 1; an id outside its slot.
    """
    cache.mkdir(parents=True, exist_ok=True)
    num_rows = sum(folder.num_rows for folder in folders)
    rows = Rows(
        labels=_mapped(cache, (num_rows,), np.float32),
        dense=_mapped(cache, (num_rows, NUM_DENSE), np.float32),
        ids=_mapped(cache, (num_rows, NUM_CATEGORICAL), np.int32),
    )
    at = 0
    for folder in folders:
        _decode_folder(folder, rows[at : at + folder.num_rows], slot_sizes)
        at += folder.num_rows
    # Arrow keeps what it freed, some 100 MB here, which the fit can use.
    pa.default_memory_pool().release_unused()
    return rows


def place_of_rows(folders: Sequence[RowFolder], numbers: Sequence[int]) -> str:
    """Where rows, counted over all `folders`, lie in the data: `part_0.parquet rows [3, 9]; ...`, rows from 0."""
    found: dict[str, list[int]] = {}
    for number in numbers:
        for folder in folders:
            if number < folder.num_rows:
                name, row = _in_folder(folder.path, number)
                found.setdefault(name, []).append(row)
                break
            number -= folder.num_rows
    return "; ".join(f"{name} rows {sorted(rows)}" for name, rows in found.items())


def _in_folder(folder: Path, number: int) -> tuple[str, int]:
    for path in listed_files(folder):
        num_rows = pq.read_metadata(path).num_rows
        if number < num_rows:
            return str(path), number
        number -= num_rows
    raise ContractError(f"{folder} lacks row {number} past its end")


def _mapped(cache: Path, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
    """An array of zeros over a nameless file in `cache`."""
    if not shape[0]:
        return np.zeros(shape, dtype)  # no empty file can be mapped
    with tempfile.TemporaryFile(dir=cache) as file:
        mapped: NDArray[Any] = np.memmap(file, dtype, "w+", shape=shape)
    return mapped.view(np.ndarray)


def _decode_folder(folder: RowFolder, into: Rows, slot_sizes: list[int]) -> None:
    at = 0
    for path in listed_files(folder.path):
        for batch in _batches(path):
            if at + batch.num_rows > folder.num_rows:
                raise ContractError(f"{folder.path} holds more than the {folder.num_rows} rows of its manifest")
            _decode(batch, into[at : at + batch.num_rows], slot_sizes, source=f"{path}")
            at += batch.num_rows
    if at != folder.num_rows:
        raise ContractError(f"{folder.path} holds {at} rows, expected the {folder.num_rows} of its manifest")


def _batches(path: Path) -> Iterator[Any]:
    columns = [LABEL, *DENSE, *CATEGORICAL]
    try:
        # Mapped: else each column's compressed pages of a whole row group are copied first (290 against 140 MB).
        with pq.ParquetFile(path, memory_map=True) as file:
            if missing := set(columns) - set(file.schema_arrow.names):
                raise ContractError(f"{path} has no columns {sorted(missing)}")
            # Columns decode in as many threads as there are cores.
            yield from file.iter_batches(_DECODED_ROWS, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise ContractError(f"training rows {path} cannot be read: {first_line(error)}") from error


def _decode(batch: Any, into: Rows, slot_sizes: list[int], *, source: str) -> None:
    """Copies one batch's columns into `into`, checking each value's range once, here and not per step."""

    def column(name: str, expected: Any) -> NDArray[Any]:
        values = batch.column(batch.schema.get_field_index(name))
        if values.type != expected or values.null_count:
            raise ContractError(
                f"column {name} of {source} is {values.type} with {values.null_count} nulls, not {expected}"
            )
        decoded: NDArray[Any] = values.to_numpy()
        return decoded

    labels = column(LABEL, pa.float32())
    if len(wrong := labels[(labels != 0) & (labels != 1)]):
        raise ContractError(f"label in {source} is {wrong[0]}, expected 0 or 1")
    dense = [column(name, pa.float32()) for name in DENSE]
    for name, values in zip(DENSE, dense):
        if not np.isfinite(values).all():
            raise ContractError(f"column {name} of {source} holds NaN or infinity, expected finite values")
    ids = [column(name, pa.int64()) for name in CATEGORICAL]
    for name, size, values in zip(CATEGORICAL, slot_sizes, ids):
        if len(values) and (values.min() < 0 or values.max() >= size):
            raise ContractError(f"ids of {name} in {source} are {values.min()}..{values.max()}, expected 0..{size - 1}")
    into.labels[:] = labels
    _turn(dense, into.dense)
    _turn(ids, into.ids)


def _turn(columns: list[NDArray[Any]], into: NDArray[Any]) -> None:
    """Writes columns [n] each into the rows of `into` [n, columns]."""
    for start in range(0, len(into), _TURNED_ROWS):
        part = into[start : start + _TURNED_ROWS]
        for number, values in enumerate(columns):
            part[:, number] = values[start : start + _TURNED_ROWS]
