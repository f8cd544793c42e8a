"""Negative down-sampling: of the rows without a click that are to be learned, a share is kept, the same in every try.

It is done here and not in extraction, so that validation judges, and the monitor's reference counts, the rows as they
are: feature distributions, click rates and quarantine need no correction, and a later round may compare its windows
with this one's whatever rate either had. What costs most, encoding and learning, is spared all the same. Replayed rows
are thinned at the same rate, for one bias corrects them all (`training.calibration`); held-out rows never are.
Categories are counted in the rows that are kept: an id is for a category that has rows to be learned from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.contracts.criteo import FEATURES, LABEL, RAW_TYPES, REQUEST_ID, ROW
from components.contracts.row_hash import row_identities, uniforms
from components.runtime.errors import ContractError, first_line

SALT = 0x5EED0F7415
"""Another than replay's (its salt is a time), so that the rows drawn to be replayed are thinned like all others."""
GROUP_ROWS = 65_536
_COLUMNS = [LABEL, *FEATURES, REQUEST_ID, ROW]


def thin(source: Path, into: Path, negative_rate: float, *, expected_rows: int) -> int:
    """Copies label and features of the raw rows of a folder, without those that the rate leaves out; returns how many.

    Rows keep their order, row groups are full but for the last, and a row group's rows are in memory at a time.

    Args:
        source: Folder of raw Parquet files, in the order of their names.
        into: Created; has one file, and none where no row is kept.
        negative_rate: Probability with which a row without a click is kept, in (0, 1].
        expected_rows: Rows that the folder has by its manifest.

    Raises:
        ContractError: the rate is out of range, a file cannot be read or has not the raw schema's types, or the folder
            has another number of rows.
    """
    if not 0 < negative_rate <= 1:
        raise ContractError(f"negative_rate is {negative_rate}, expected more than 0 and at most 1")
    into.mkdir(parents=True)
    num_read = num_rows = 0
    pending = _Groups(into / "part-00000.parquet")
    with pending:
        for path in sorted(source.glob("*.parquet")):
            for batch in _batches(path):
                kept = pa.Table.from_batches([batch]).filter(pa.array(kept_rows(batch, negative_rate)))
                num_read, num_rows = num_read + batch.num_rows, num_rows + kept.num_rows
                pending.write(kept.select([LABEL, *FEATURES]))
    if num_read != expected_rows:
        raise ContractError(f"raw folder {source} has {num_read} rows, expected the manifest's {expected_rows}")
    return num_rows


def kept_rows(batch: Any, negative_rate: float) -> Any:
    """Which rows of an Arrow batch with label, request id and row are kept: all clicks, and a share of the others.

    Decided by the row's identity alone: not by its place, nor by the rows beside it.
    """
    identities = row_identities(batch.column(REQUEST_ID), batch.column(ROW).to_numpy(zero_copy_only=False))
    clicked = pc.equal(batch.column(LABEL), 1).fill_null(True).to_numpy(zero_copy_only=False)
    return clicked | (uniforms(identities, SALT) < negative_rate)


def _batches(path: Path) -> Any:
    try:
        file = pq.ParquetFile(path)
        types = {name: file.schema_arrow.field(name).type for name in _COLUMNS if name in file.schema_arrow.names}
        if missing := [name for name in _COLUMNS if name not in types]:
            raise ContractError(f"raw file {path} lacks the columns {missing}, expected the raw schema")
        if wrong := [name for name, found in types.items() if _spelt(found) != RAW_TYPES[name]]:
            raise ContractError(f"column {wrong[0]} of {path} is {types[wrong[0]]}, expected {RAW_TYPES[wrong[0]]}")
        yield from file.iter_batches(batch_size=GROUP_ROWS, columns=_COLUMNS)
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"raw file {path} cannot be read as Parquet: {first_line(error)}") from error


def _spelt(found: Any) -> str:
    return "float32" if str(found) == "float" else str(found)


class _Groups:
    """A Parquet file that is written in full row groups."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_rows = path, 0
        self._pending: list[Any] = []
        self._writer: Any = None

    def __enter__(self) -> _Groups:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        if kind is None and self._num_rows:
            self._write_group(self._num_rows)
        if self._writer is not None:
            self._writer.close()

    def write(self, table: Any) -> None:
        """Adds rows."""
        self._pending.append(table)
        self._num_rows += table.num_rows
        while self._num_rows >= GROUP_ROWS:
            self._write_group(GROUP_ROWS)

    def _write_group(self, num_rows: int) -> None:
        table = pa.concat_tables(self._pending)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema)
        group, rest = table.slice(0, num_rows), table.slice(num_rows)
        self._writer.write_table(group.combine_chunks(), row_group_size=num_rows)
        self._pending, self._num_rows = [rest], rest.num_rows
