"""Encoded rows from HugeCTR's Parquet folders: decoded once, into flat files that are mapped and not held in memory.

A row takes 160 bytes (ids as int32). What the fit then touches are pages that the kernel may drop again, so rows may
outgrow memory; decoding holds some ten thousand rows per thread. What the columns mean is `contracts.criteo`'s; what is
wrong with a folder is said here, before a long fit starts. The order in which rows are learnt is `passes`'.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE, LABEL, NUM_CATEGORICAL, NUM_DENSE
from components.contracts.hugectr_folder import listed_files
from components.runtime.errors import ContractError, PermanentError, first_line

_DECODED_ROWS = 1 << 14
"""Rows decoded at a time by each thread: 4 MB of columns. Half as many took a twentieth longer."""
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


def open_rows(folders: Sequence[RowFolder], slot_sizes: list[int], cache: Path) -> Rows:
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
        PermanentError: the flat files cannot be written, as on a full disk.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with _FlatFiles(cache) as files:
        at = 0
        for folder in folders:
            _decode_folder(folder, files, first=at, slot_sizes=slot_sizes)
            at += folder.num_rows
        rows = files.mapped(at)
    # Arrow keeps what it freed, which the fit can use.
    pa.default_memory_pool().release_unused()
    return rows


class _FlatFiles:
    """Nameless files of labels, dense values and ids.

    They are written while they grow, and mapped once they are whole: on a full disk a write is an error, where a
    mapped page would kill the process; and 80 MB of new pages took 18 ms to map and touch, 11 ms to write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with ExitStack() as opened:
            self._files = [opened.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0)) for _ in range(3)]
            self._opened = opened.pop_all()

    def __enter__(self) -> _FlatFiles:
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()

    def write(self, first: int, rows: Rows) -> None:
        """Puts `rows` where row `first` begins; threads may do so at once."""
        for file, values in zip(self._files, (rows.labels, rows.dense, rows.ids)):
            left, at = values.data.cast("B"), first * values.strides[0]
            while len(left):
                try:
                    written = os.pwrite(file.fileno(), left, at)
                except OSError as error:
                    raise PermanentError(
                        f"decoded rows cannot be written to {self._folder}: {error.strerror}"
                    ) from error
                left, at = left[written:], at + written

    def mapped(self, num_rows: int) -> Rows:
        """All rows, in arrays that keep the files."""
        if not num_rows:
            return _empty_rows(0)  # no empty file can be mapped
        like = _empty_rows(1)
        mapped = [
            np.memmap(file, values.dtype, "r+", shape=(num_rows, *values.shape[1:])).view(np.ndarray)
            for file, values in zip(self._files, (like.labels, like.dense, like.ids))
        ]
        return Rows(labels=mapped[0], dense=mapped[1], ids=mapped[2])


def _empty_rows(num_rows: int) -> Rows:
    return Rows(
        labels=np.empty(num_rows, np.float32),
        dense=np.empty((num_rows, NUM_DENSE), np.float32),
        ids=np.empty((num_rows, NUM_CATEGORICAL), np.int32),
    )


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A row group of a file, and which rows it holds, counted over all folders."""

    path: Path
    metadata: Any
    group: int
    first: int

    @property
    def num_rows(self) -> int:
        return int(self.metadata.row_group(self.group).num_rows)


def _decode_folder(folder: RowFolder, files: _FlatFiles, *, first: int, slot_sizes: list[int]) -> None:
    pieces, at = [], 0
    for path in listed_files(folder.path):
        metadata = _metadata(path)
        for group in range(metadata.num_row_groups):
            pieces.append(_Piece(path=path, metadata=metadata, group=group, first=first + at))
            at += pieces[-1].num_rows
    if at != folder.num_rows:
        raise ContractError(f"{folder.path} holds {at} rows, expected the {folder.num_rows} of its manifest")
    # Arrow and NumPy let other threads run while they work. Of several errors the first in the folder's order is told.
    with ThreadPoolExecutor(pa.cpu_count(), "decode") as pool:
        deque(pool.map(lambda piece: _decode_piece(piece, files, slot_sizes), pieces), maxlen=0)


def _metadata(path: Path) -> Any:
    with _reading(path):
        metadata = pq.read_metadata(path, memory_map=True)
    if missing := {LABEL, *DENSE, *CATEGORICAL} - set(metadata.schema.names):
        raise ContractError(f"{path} has no columns {sorted(missing)}")
    return metadata


def _decode_piece(piece: _Piece, files: _FlatFiles, slot_sizes: list[int]) -> None:
    at, decoded = 0, _empty_rows(min(_DECODED_ROWS, piece.num_rows))
    for batch in _batches(piece):
        rows = decoded[: batch.num_rows]
        _decode(batch, rows, slot_sizes, source=f"{piece.path}")
        files.write(piece.first + at, rows)
        at += batch.num_rows
    if at != piece.num_rows:
        raise ContractError(f"row group {piece.group} of {piece.path} holds {at} rows, expected {piece.num_rows}")


def _batches(piece: _Piece) -> Iterator[Any]:
    # Mapped: else each column's compressed pages of a whole row group are copied first (290 against 140 MB).
    with _reading(piece.path), pq.ParquetFile(piece.path, metadata=piece.metadata, memory_map=True) as file:
        columns = [LABEL, *DENSE, *CATEGORICAL]
        yield from file.iter_batches(_DECODED_ROWS, row_groups=[piece.group], columns=columns, use_threads=False)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ContractError(f"training rows {path} cannot be read: {first_line(error)}") from error


def _decode(batch: Any, into: Rows, slot_sizes: list[int], *, source: str) -> None:
    """Copies one batch's columns into `into`, checking each value's range once, here and not per step."""

    def column(name: str, expected: Any, dtype: type) -> NDArray[Any]:
        values = batch.column(batch.schema.get_field_index(name))
        if values.type != expected or values.null_count:
            raise ContractError(
                f"column {name} of {source} is {values.type} with {values.null_count} nulls, not {expected}"
            )
        # Arrow's to_numpy imports pandas where that is installed: 0.4 s, and 25 MB that stay.
        return np.frombuffer(values.buffers()[1], dtype)[values.offset :][: len(values)]

    labels = column(LABEL, pa.float32(), np.float32)
    if len(wrong := labels[(labels != 0) & (labels != 1)]):
        raise ContractError(f"label in {source} is {wrong[0]}, expected 0 or 1")
    dense = [column(name, pa.float32(), np.float32) for name in DENSE]
    for name, values in zip(DENSE, dense):
        if not np.isfinite(values).all():
            raise ContractError(f"column {name} of {source} holds NaN or infinity, expected finite values")
    ids = [column(name, pa.int64(), np.int64) for name in CATEGORICAL]
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
