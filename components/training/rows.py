"""Training rows, decoded once from HugeCTR's Parquet folders into flat, memory-mapped files.

A row takes 4 bytes for each column (ids as int32). The kernel can drop mapped pages again, so the
rows may be larger than memory. Decoding needs memory for some ten thousand rows per thread.
`evergreen.config.features` defines the columns. Errors in a folder are reported here, before a long
fit starts. `row_order` decides the training order.
"""

import math
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evergreen.config.data import WEIGHT
from evergreen.config.features import Features
from evergreen.contracts.hugectr_folder import listed_files
from evergreen.contracts.raw_rows import LABEL
from evergreen.rows.archived_rows import parquet_file, reading_parquet
from evergreen.runtime.errors import ContractError, PermanentError

_DECODED_ROWS = 1 << 14
"""Number of rows that each thread decodes at a time: 4 MB of columns. With half as many rows,
decoding took 5 % longer."""
_TRANSPOSED_ROWS = 1 << 12
"""Number of rows that are transposed at a time. The target array of these rows fits into the cache
of a core (0.4 MB)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows in time order."""

    labels: NDArray[np.float32]
    """Labels, 0 or 1, [n]."""
    dense: NDArray[np.float32]
    """Normalised values, [n, numeric columns]."""
    ids: NDArray[np.int32]
    """Slot-local ids, [n, `Features.id_positions`]."""
    weights: NDArray[np.float32] | None = None
    """Sample weights, finite and at least 0, [n]. None if all rows count equally."""
    group_starts: NDArray[np.int64] | None = None
    """Index of the first row of each row group, among all rows. None if the rows are a
    selection."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice) -> "Rows":
        """Return the rows of a slice, without a copy."""
        return self._selected(part)

    def take(self, numbers: NDArray[np.int64]) -> "Rows":
        """Return a copy of the rows with these numbers."""
        return self._selected(numbers)

    def _selected(self, which: slice | NDArray[np.int64]) -> "Rows":
        weights = None if self.weights is None else self.weights[which]
        return Rows(
            labels=self.labels[which], dense=self.dense[which], ids=self.ids[which], weights=weights
        )


@dataclass(frozen=True, kw_only=True)
class RowFolder:
    """A Parquet folder in HugeCTR's form, and the facts of its manifest."""

    path: Path
    """Folder with Parquet files and `_file_list.txt`. The list may contain paths of another
    machine."""
    num_rows: int
    features: Features
    weighted: bool = False
    """Whether the rows have weights."""

    @property
    def columns(self) -> list[str]:
        """Columns that are read."""
        weight = [WEIGHT] if self.weighted else []
        return [LABEL, *self.features.dense_inputs, *self.features.id_names, *weight]


class Share(NamedTuple):
    """The row groups that one process decodes: every `of`-th row group, starting at `number`."""

    number: int = 0
    of: int = 1


_WHOLE = Share()


def open_rows(
    folders: Sequence[RowFolder], slot_sizes: list[int], cache: Path, *, share: Share = _WHOLE
) -> Rows:
    """Return all rows of the folders, one folder after another, in the order of `_file_list.txt`.

    Row groups outside the `share` are zeros, which take no room on disk or in memory. The flat
    files have no name once they are open. The flat files disappear with the arrays, even if the
    process is killed. A later process cannot find the flat files and decodes the rows again.
    Decoding takes less than a tenth of the time of one pass.

    Args:
        folders: At least one folder. All folders have the same features, and either all or none
            have weights.
        slot_sizes: Number of ids of each slot.
        cache: Folder on the disk for the flat files, created if it is absent.
        share: Row groups that this process decodes.

    Raises:
        ContractError: a file is absent or corrupt, has unexpected columns, types or nulls, or its
            number of rows differs from the manifest. The error is also raised for a number that is
            not finite, a wrong label, a negative weight, or an id outside its slot.
        PermanentError: the flat files cannot be written, for example because the disk is full.
    """
    cache.mkdir(parents=True, exist_ok=True)
    groups = [group for folder in folders for group in _row_groups(folder)]
    starts = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
    parts = [slice(*bounds) for bounds in zip(starts, starts[1:])][share.number :: share.of]
    rows = _map_temporary_files(cache, starts[-1], alike=folders[0], written=parts)
    # Arrow and NumPy release the GIL while they work. If several row groups fail, the error of the
    # first failed group is raised.
    with ThreadPoolExecutor(pa.cpu_count(), "decode") as pool:
        own = zip(groups[share.number :: share.of], parts)
        deque(
            pool.map(lambda each: _decode_group(each[0], rows[each[1]], slot_sizes), own), maxlen=0
        )
    # Arrow does not return freed memory by itself. The fit can use this memory.
    pa.default_memory_pool().release_unused()
    return replace(rows, group_starts=np.array(starts[:-1], np.int64))


def _map_temporary_files(
    folder: Path, num_rows: int, *, alike: RowFolder, written: Sequence[slice]
) -> Rows:
    """Return zeroed arrays for `num_rows` rows, each in a memory-mapped temporary file.

    The arrays have the same columns as the rows in `alike`. Disk space is allocated for the rows
    `written` by this process, and for all labels and weights. The allocation reports a full disk as
    an error. Without the allocation, a write to a mapped page would kill the process on a full
    disk.
    """

    def mapped(dtype: type[Any], *shape: int) -> NDArray[Any]:
        if 0 in shape:  # an empty file cannot be mapped
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile(dir=folder) as file:
            row_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
            os.truncate(file.fileno(), num_rows * row_bytes)
            for each in written if shape[1:] else [slice(0, num_rows)]:
                if num_bytes := (each.stop - each.start) * row_bytes:
                    os.posix_fallocate(file.fileno(), each.start * row_bytes, num_bytes)
            return np.memmap(file, dtype, "r+", shape=shape).view(np.ndarray)

    features = alike.features
    try:
        return Rows(
            labels=mapped(np.float32, num_rows),
            dense=mapped(np.float32, num_rows, len(features.dense_inputs)),
            ids=mapped(np.int32, num_rows, len(features.id_names)),
            weights=mapped(np.float32, num_rows) if alike.weighted else None,
        )
    except OSError as error:
        raise PermanentError(
            f"decoded rows cannot be written to {folder}: {error.strerror}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class _RowGroup:
    """A row group of a file."""

    path: Path
    metadata: Any
    number: int
    folder: RowFolder

    @property
    def num_rows(self) -> int:
        return int(self.metadata.row_group(self.number).num_rows)


def _row_groups(folder: RowFolder) -> list[_RowGroup]:
    groups: list[_RowGroup] = []
    for path in listed_files(folder.path):
        metadata = _read_metadata(path, folder)
        for number in range(metadata.num_row_groups):
            groups.append(_RowGroup(path=path, metadata=metadata, number=number, folder=folder))
    if (found := sum(group.num_rows for group in groups)) != folder.num_rows:
        raise ContractError(
            f"{folder.path} has {found} rows, expected the manifest's {folder.num_rows}"
        )
    return groups


def _read_metadata(path: Path, folder: RowFolder) -> Any:
    with reading_parquet(path):
        metadata = pq.read_metadata(path, memory_map=True)
    if missing := set(folder.columns) - set(metadata.schema.names):
        raise ContractError(f"{path} lacks the columns {sorted(missing)}")
    return metadata


def _decode_group(group: _RowGroup, into: Rows, slot_sizes: list[int]) -> None:
    at = 0
    for batch in _iterate_batches(group):
        part = into[at : at + batch.num_rows]
        _decode(batch, part, slot_sizes, features=group.folder.features, source=f"{group.path}")
        at += batch.num_rows
    if at != len(into):
        raise ContractError(
            f"row group {group.number} of {group.path} has {at} rows, expected {len(into)}"
        )


def _iterate_batches(group: _RowGroup) -> Iterator[Any]:
    # Without memory mapping, the compressed pages of each column of a row group are copied first.
    # The process would then need 290 MB instead of 140 MB.
    with (
        reading_parquet(group.path),
        parquet_file(group.path, metadata=group.metadata, memory_map=True) as file,
    ):
        columns, numbers = group.folder.columns, [group.number]
        yield from file.iter_batches(
            _DECODED_ROWS, row_groups=numbers, columns=columns, use_threads=False
        )


def _decode(
    batch: Any, into: Rows, slot_sizes: list[int], *, features: Features, source: str
) -> None:
    """Copy one batch's columns into `into` and check the range of every value.

    The check is done once here, and not in every step.
    """

    def column(name: str, expected: Any, dtype: type) -> NDArray[Any]:
        values = batch.column(batch.schema.get_field_index(name))
        if values.type != expected or values.null_count:
            raise ContractError(
                f"column {name} of {source} is {values.type} with {values.null_count} nulls, "
                f"expected {expected} without nulls"
            )
        # Arrow's to_numpy imports pandas if pandas is installed. The import takes 0.4 s and 25 MB.
        return np.frombuffer(values.buffers()[1], dtype)[values.offset :][: len(values)]

    labels = column(LABEL, pa.float32(), np.float32)
    if len(wrong := labels[(labels != 0) & (labels != 1)]):
        raise ContractError(f"label in {source} is {wrong[0]}, expected 0 or 1")
    dense = [column(name, pa.float32(), np.float32) for name in features.dense_inputs]
    for name, values in zip(features.dense_inputs, dense):
        if not np.isfinite(values).all():
            raise ContractError(
                f"column {name} of {source} has NaN or infinity, expected finite values"
            )
    ids = [column(name, pa.int64(), np.int64) for name in features.id_names]
    sizes = (slot_sizes[slot] for slot in features.id_positions.slots)
    for name, size, values in zip(features.id_names, sizes, ids):
        if len(values) and (values.min() < 0 or values.max() >= size):
            raise ContractError(
                f"ids of {name} in {source} are {values.min()}..{values.max()}, expected "
                f"0..{size - 1}"
            )
    if into.weights is not None:
        weights = column(WEIGHT, pa.float32(), np.float32)
        if len(wrong := weights[~(np.isfinite(weights) & (weights >= 0))]):
            raise ContractError(
                f"{WEIGHT} in {source} is {wrong[0]}, expected a finite number of at least 0"
            )
        into.weights[:] = weights
    into.labels[:] = labels
    _transpose(dense, into.dense)
    _transpose(ids, into.ids)


def _transpose(columns: list[NDArray[Any]], into: NDArray[Any]) -> None:
    """Transpose the columns, each [n], into `into`, which is [n, columns]."""
    for start in range(0, len(into), _TRANSPOSED_ROWS):
        part = into[start : start + _TRANSPOSED_ROWS]
        for number, values in enumerate(columns):
            part[:, number] = values[start : start + _TRANSPOSED_ROWS]
