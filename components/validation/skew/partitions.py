"""Rows split by their request id into parts that fit into memory, on both sides alike.

In: Parquet files in the raw schema. Out: for each part, the rows of both sides whose request ids have its hash. Parts
lie in a scratch folder as Arrow files; comparing them is `joined`'s.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts import criteo
from components.runtime.errors import ContractError, first_line

PART_ROWS = 262_144
"""Rows of both sides together in a part, on average; 280 bytes each."""
_BATCH_ROWS = 65_536


def columns_of(features: Sequence[str]) -> list[str]:
    """What is read of a row: its name, its time and the features."""
    return [criteo.REQUEST_ID, criteo.ROW, criteo.EVENT_TIME, *features]


def count_rows(files: Sequence[Path]) -> int:
    """Rows of `files`, by their footers.

    Raises:
        ContractError: a file is not Parquet.
    """
    try:
        return sum(int(pq.read_metadata(path).num_rows) for path in files)
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"a file cannot be read as Parquet: {first_line(error)}") from error


def read_rows(files: Sequence[Path], features: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of `files` in batches, in the raw types.

    Raises:
        ContractError: a file is damaged, or lacks a column or holds it in another type.
    """
    names = columns_of(features)
    for path in files:
        try:
            file = pq.ParquetFile(path)
            for name in names:
                expected = _arrow_type(name)
                found = file.schema_arrow.field(name).type if name in file.schema_arrow.names else None
                if found != expected:
                    told = "is missing" if found is None else f"is {found}"
                    raise ContractError(f"column {name} {told} in {path}, expected {expected}")
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=names):
                yield batch.select(names) if hasattr(batch, "select") else _selected(batch, names)
        except (pa.ArrowException, OSError) as error:
            raise ContractError(f"{path} cannot be read as Parquet: {first_line(error)}") from error


def split(
    sides: Sequence[Iterator[pa.RecordBatch]], rows: int, scratch: Path, *, part_rows: int = PART_ROWS
) -> Iterator[list[pa.Table]]:
    """For each part, one table per side.

    Args:
        sides: The rows of each side.
        rows: How many there are in all, about: decides the number of parts.
        scratch: Folder for the parts; each file goes when it was read. Nothing is written where there is one part.
        part_rows: See `PART_ROWS`.
    """
    num_parts = max(1, -(-rows // part_rows))
    if num_parts == 1:
        yield [_table(list(side)) for side in sides]
        return
    for number, side in enumerate(sides):
        _write_parts(side, num_parts, scratch, number)
    for part in range(num_parts):
        yield [_read_part(scratch / f"{number}-{part}.arrow") for number in range(len(sides))]


def _write_parts(batches: Iterator[pa.RecordBatch], num_parts: int, scratch: Path, side: int) -> None:
    writers: dict[int, Any] = {}
    with ExitStack() as stack:
        for batch in batches:
            part_of = _part_of(batch.column(0), num_parts)
            for part in np.unique(part_of).tolist():
                if part not in writers:
                    path = str(scratch / f"{side}-{part}.arrow")
                    writers[part] = stack.enter_context(pa.ipc.new_file(path, batch.schema))
                writers[part].write_batch(batch.take(pa.array(np.flatnonzero(part_of == part))))


def _part_of(request_ids: Any, num_parts: int) -> NDArray[np.int64]:
    encoded = request_ids.dictionary_encode()
    parts = np.array([zlib.crc32(text.encode()) % num_parts for text in encoded.dictionary.to_pylist()], np.int64)
    found: NDArray[np.int64] = parts[encoded.indices.to_numpy(zero_copy_only=False)]
    return found


def _read_part(path: Path) -> pa.Table:
    if not path.exists():
        return _table([])
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    path.unlink()
    return table


def _table(batches: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches) if batches else pa.table({})


def _selected(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """What `RecordBatch.select` does, which pyarrow 10 has not."""
    return pa.RecordBatch.from_arrays([batch.column(name) for name in names], list(names))


def _arrow_type(name: str) -> Any:
    text = criteo.RAW_TYPES[name]
    return pa.timestamp("us", tz="UTC") if text.startswith("timestamp") else pa.type_for_alias(text)
