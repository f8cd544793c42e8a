"""Test double of HugeCTR's Parquet reader, which does not validate its input.

Columns are selected by sorted index, never by name. A label or dense column of another 4-byte type
is reinterpreted as float. Keys are shifted by their slot's offset and not checked against the
slot's size. In a slot of lists, the number of keys varies by row. HugeCTR accepts nulls and lists
with too many keys. The test double reads a null as 0, and drops additional keys. Each worker forms
batches from its own files.

HugeCTR reads the metadata in the calling thread, and aborts if row counts differ or a listed file
is absent. HugeCTR reads rows in separate threads. An error in a reading thread ends the thread, and
the next `train` waits for ever (`double_fate`).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import double_fate
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


class Reader:
    """The reader of training rows."""

    def __init__(
        self,
        *,
        source: str,
        most_keys: list[int],
        label_dim: int,
        dense_dim: int,
        batch_size: int,
        slot_sizes,
        num_workers: int,
        num_gpus: int,
        i64: bool,
    ) -> None:
        """Open the source. `most_keys` is the maximum number of keys of each slot."""
        self.source, self.batch_size, self._most_keys = source, batch_size, most_keys
        num_slots = len(most_keys)
        self._label_dim, self._dense_dim = label_dim, dense_dim
        if slot_sizes and len(slot_sizes) != num_slots:
            raise RuntimeError(
                f"slot_size_array has {len(slot_sizes)} entries for {num_slots} slots"
            )
        sizes = np.array(slot_sizes or [0] * num_slots, dtype=np.int64)
        self._offsets = np.cumsum(sizes) - sizes
        files = _listed(source)
        self._num_workers = max(1, min(num_workers, len(files), num_gpus))
        self._key_type = np.int64 if i64 else np.int32
        self._batches: Iterator | None = None
        self._ended = False
        # Buffers are sized for the largest row group of the first source.
        self._room = max((_largest_group(path) for path, _ in files), default=0)

    @property
    def is_started(self) -> bool:
        """Whether `set_source` was called."""
        return self._batches is not None

    def set_source(self, file_name: str) -> None:
        """Start to read another source.

        HugeCTR allows this call even before the previous source has been read to its end.
        """
        if not file_name:
            raise RuntimeError("invalid file_name")
        self.source = file_name
        self._batches, self._ended = self._read(_listed(file_name)), False

    def next(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return labels, dense values and keys of the next batch.

        Returns None once at the end of the source.

        The last batch may be incomplete.

        Keys are [n, sum of `most_keys`]. Absent keys are -1.
        """
        if self._batches is None:
            raise RuntimeError(
                "Start the data reader first before calling Model::train() or Model::eval()"
            )
        if self._ended:
            double_fate.hang("the data reader is past its end, set_source comes first")
        try:
            batch = next(self._batches, None)
        except _ThreadError as error:
            double_fate.hang(f"the reader's thread ended: {error}")
            raise
        self._ended = batch is None
        return batch

    def _read(
        self, files: list[tuple[Path, dict]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        # The first source determines the number of reading threads. A thread without a file ends at
        # once.
        workers = [
            self._worker(files[number :: self._num_workers]) for number in range(self._num_workers)
        ]
        while workers:
            for worker in list(workers):
                batch = next(worker, None)
                if batch is None:
                    workers.remove(worker)
                else:
                    yield batch

    def _worker(
        self, files: list[tuple[Path, dict]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        held: list[np.ndarray] | None = None
        for path, metadata in files:
            read = self._file(path, metadata)
            held = read if held is None else [np.concatenate(pair) for pair in zip(held, read)]
            while len(held[0]) >= self.batch_size:
                yield tuple(part[: self.batch_size] for part in held)
                held = [part[self.batch_size :] for part in held]
        if held is not None and len(held[0]):
            yield tuple(held)

    def _file(self, path: Path, metadata: dict) -> list[np.ndarray]:
        try:
            group, table = _largest_group(path), pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise _ThreadError(f"{path} cannot be read: {error}") from error
        if group > self._room:
            double_fate.abort(
                f"{path} has a row group of {group} rows, which HugeCTR writes past buffers of "
                f"{self._room}"
            )

        def columns(kind: str) -> list[pa.Array]:
            found = [
                table.column(index) for index in sorted(entry["index"] for entry in metadata[kind])
            ]
            return [_without_nulls(column.combine_chunks()) for column in found]

        floats = [
            _bits_as_float(column.to_numpy(zero_copy_only=False), path)
            for column in columns("labels") + columns("conts")
        ]
        keys = columns("cats")
        if len(floats) != self._label_dim + self._dense_dim or len(keys) != len(self._most_keys):
            raise _ThreadError(
                "Parquet reader: Dense dim of given file and dense dim doesn't match"
            )
        matrix = np.stack(floats, axis=1)
        shifted = np.concatenate(
            [self._padded(column, i, path) for i, column in enumerate(keys)], axis=1
        )
        return [matrix[:, : self._label_dim], matrix[:, self._label_dim :], shifted]

    def _padded(self, column: pa.Array, slot: int, path: Path) -> np.ndarray:
        """Return the keys of a slot [n, most keys], with the slot's offset added.

        Absent keys are -1.
        """
        is_list = str(column.type).startswith("list")
        keys = _without_nulls(column.flatten() if is_list else column).to_numpy()
        if keys.dtype.itemsize != np.dtype(self._key_type).itemsize:
            raise _ThreadError(
                f"{path} has keys of {keys.dtype}, expected {self._key_type.__name__}"
            )
        lengths = np.diff(column.offsets.to_numpy()) if is_list else np.ones(len(column), int)
        most = self._most_keys[slot]
        is_used = np.arange(lengths.max(initial=most)) < lengths[:, None]
        padded = np.full(is_used.shape, -1, np.int64)
        padded[is_used] = keys.view(self._key_type).astype(np.int64) + self._offsets[slot]
        return padded[:, :most]


class _ThreadError(Exception):
    """An error that ends a reader's thread and nothing else."""


def _without_nulls(column: pa.Array) -> pa.Array:
    return (
        column.fill_null(0) if column.null_count and not pa.types.is_list(column.type) else column
    )


def _largest_group(path: Path) -> int:
    metadata = pq.ParquetFile(path).metadata
    return max(
        (metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)),
        default=0,
    )


def _bits_as_float(column: np.ndarray, path: Path) -> np.ndarray:
    if column.dtype.itemsize != 4:
        raise _ThreadError(f"{path} has a column of {column.dtype} where floats are expected")
    return column.view(np.float32)


def _listed(file_list: str) -> list[tuple[Path, dict]]:
    """Return path and metadata of each listed file."""
    try:
        count, *names = Path(file_list).read_text().split("\n")
    except OSError as error:
        raise RuntimeError(f"file list open failed: {file_list}: {error}") from error
    paths = [Path(name) for name in names[: int(count)]]
    if not paths or paths[0].suffix != ".parquet":
        raise RuntimeError(f"{file_list} lists no .parquet file first")
    try:
        metadata = json.loads((paths[0].parent / "_metadata.json").read_text())
    except OSError as error:
        raise RuntimeError(f"file_stream.is_open() failed: {error}") from error
    rows = {Path(entry["file_name"]).name: entry["num_rows"] for entry in metadata["file_stats"]}
    for path in paths:
        if path.name not in rows or not path.exists():
            double_fate.abort(f"getting file{path.name} stats out of range")
        if (found := pq.read_metadata(path).num_rows) != rows[path.name]:
            double_fate.abort(
                f"Parquet file number of rows mismatch with _metadata.json: {path} has {found}, "
                f"expected {rows[path.name]}"
            )
    return [(path, metadata) for path in paths]
