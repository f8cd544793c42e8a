"""Double of HugeCTR's Parquet reader, which trusts its input like the original.

Columns are selected by sorted index, never by name. A label or dense column of another 4-byte type
is reinterpreted as float. Keys are shifted by their slot's offset and not checked against its size.
A slot of lists has as many keys as a row's list. Absent files are skipped. Row counts must match
`_metadata.json`. Each worker forms batches from its own files.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq


class Reader:
    """The reader of training rows."""

    def __init__(
        self,
        *,
        source: str,
        most_keys: list[int],
        is_fixed: list[bool],
        label_dim: int,
        dense_dim: int,
        batch_size: int,
        slot_sizes,
        num_workers: int,
        num_gpus: int,
        i64: bool,
    ) -> None:
        """Open the source.

        `most_keys` is the maximum number of keys of each slot, and `is_fixed` says whether the slot
        always has that many.
        """
        self.source, self.batch_size, self._most_keys, self._is_fixed = (
            source,
            batch_size,
            most_keys,
            is_fixed,
        )
        num_slots = len(most_keys)
        self._label_dim, self._dense_dim = label_dim, dense_dim
        if slot_sizes and len(slot_sizes) != num_slots:
            raise RuntimeError(
                f"slot_size_array has {len(slot_sizes)} entries for {num_slots} slots"
            )
        sizes = np.array(slot_sizes or [0] * num_slots, dtype=np.int64)
        self._offsets = np.cumsum(sizes) - sizes
        self._num_workers = max(1, min(num_workers, len(_listed(source)), num_gpus))
        self._key_type = np.int64 if i64 else np.int32
        self._batches: Iterator | None = None
        self._ended = False
        # Buffers are sized for the largest row group of the first source.
        self._room = max((_largest_group(path) for path, _, _ in _listed(source)), default=0)

    def set_source(self, file_name: str) -> None:
        if self._batches is not None and not self._ended:
            raise RuntimeError(
                "IllegalCall: DataSource cannot be changed when a worker is not in the EOF state"
            )
        self.source = file_name or self.source
        self._batches, self._ended = self._read(), False

    def next(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return labels, dense values and keys of a batch, or None once at the end.

        The last batch may be incomplete.

        Keys are [n, sum of `most_keys`], with -1 for absent ones.
        """
        if self._batches is None:
            raise RuntimeError(
                "Start the data reader first before calling Model::train() or Model::eval()"
            )
        if self._ended:
            raise RuntimeError(
                "the data reader is past its end: HugeCTR would wait for ever; set_source comes "
                "first"
            )
        batch = next(self._batches, None)
        self._ended = batch is None
        return batch

    def _read(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        files = _listed(self.source)
        # There are as many workers as the first source needed. Workers without a file end at once.
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
        self, files: list[tuple[Path, dict, int]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        held: list[np.ndarray] | None = None
        for path, metadata, num_rows in files:
            read = self._file(path, metadata, num_rows)
            held = read if held is None else [np.concatenate(pair) for pair in zip(held, read)]
            while len(held[0]) >= self.batch_size:
                yield tuple(part[: self.batch_size] for part in held)
                held = [part[self.batch_size :] for part in held]
        if held is not None and len(held[0]):
            yield tuple(held)

    def _file(self, path: Path, metadata: dict, num_rows: int) -> list[np.ndarray]:
        if (group := _largest_group(path)) > self._room:
            raise RuntimeError(
                f"{path} has a row group of {group} rows, the buffers hold {self._room}"
            )
        table = pq.read_table(path)
        if table.num_rows != num_rows:
            raise RuntimeError(
                f"BrokenFile: {path} has {table.num_rows} rows, {num_rows} in _metadata.json"
            )

        def columns(kind: str) -> list[np.ndarray]:
            found = [
                table.column(index) for index in sorted(entry["index"] for entry in metadata[kind])
            ]
            if any(column.null_count for column in found):
                raise RuntimeError(f"{path} has nulls in its {kind}")
            return [column.combine_chunks() for column in found]

        floats = [
            _bits_as_float(column.to_numpy(), path)
            for column in columns("labels") + columns("conts")
        ]
        keys = columns("cats")
        if len(floats) != self._label_dim + self._dense_dim or len(keys) != len(self._most_keys):
            raise RuntimeError(
                "Parquet reader: Dense dim of given file and dense dim doesn't match"
            )
        matrix = np.stack(floats, axis=1)
        shifted = np.concatenate(
            [self._padded(column, i, path) for i, column in enumerate(keys)], axis=1
        )
        return [matrix[:, : self._label_dim], matrix[:, self._label_dim :], shifted]

    def _padded(self, column, slot: int, path: Path) -> np.ndarray:
        """Return the keys of a slot [n, most keys], shifted by its offset and padded with -1."""
        is_list = str(column.type).startswith("list")
        keys = column.flatten() if is_list else column
        if keys.null_count:
            raise RuntimeError(f"{path} has nulls in its cats")
        keys = keys.to_numpy()
        if keys.dtype.itemsize != np.dtype(self._key_type).itemsize:
            raise RuntimeError(
                f"{path} has keys of {keys.dtype}, expected {self._key_type.__name__}"
            )
        lengths = np.diff(column.offsets.to_numpy()) if is_list else np.ones(len(column), int)
        most = self._most_keys[slot]
        if len(lengths) and (
            lengths.max() > most or (self._is_fixed[slot] and lengths.min() < most)
        ):
            expected = f"{most} of each row" if self._is_fixed[slot] else f"at most {most}"
            raise RuntimeError(
                f"{path} has {lengths.min()}..{lengths.max()} keys in slot {slot}, expected "
                f"{expected}"
            )
        padded = np.full((len(lengths), most), -1, np.int64)
        padded[np.arange(most) < lengths[:, None]] = (
            keys.view(self._key_type).astype(np.int64) + self._offsets[slot]
        )
        return padded


def _largest_group(path: Path) -> int:
    metadata = pq.ParquetFile(path).metadata
    return max(
        (metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)),
        default=0,
    )


def _bits_as_float(column: np.ndarray, path: Path) -> np.ndarray:
    if column.dtype.itemsize != 4:
        raise RuntimeError(f"{path} has a column of {column.dtype} where floats are expected")
    return column.view(np.float32)


def _listed(file_list: str) -> list[tuple[Path, dict, int]]:
    """Return path, metadata and number of rows of each listed file that exists."""
    try:
        count, *names = Path(file_list).read_text().split("\n")
    except OSError as error:
        raise RuntimeError(f"FileCannotOpen: {file_list}: {error}") from error
    paths = [Path(name) for name in names[: int(count)]]
    if not paths or paths[0].suffix != ".parquet":
        raise RuntimeError(f"{file_list} lists no .parquet file first")
    try:
        metadata = json.loads((paths[0].parent / "_metadata.json").read_text())
    except OSError as error:
        raise RuntimeError(f"FileCannotOpen: _metadata.json of {file_list}: {error}") from error
    rows = {Path(entry["file_name"]).name: entry["num_rows"] for entry in metadata["file_stats"]}
    if absent := [path.name for path in paths if path.name not in rows]:
        raise RuntimeError(f"{absent} of {file_list} have no entry in _metadata.json")
    return [(path, metadata, rows[path.name]) for path in paths if path.exists()]
