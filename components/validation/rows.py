"""The training rows as a stream of Arrow batches, and whether each file has the columns that were agreed on.

Reads the folder that `RawDataset.train_uri` names; what the values mean is left to TFDV. The log columns
(request id, event time, ...) are neither read nor judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from components.contracts import criteo
from components.contracts.errors import ContractError, first_line

COLUMNS = (criteo.LABEL, *criteo.FEATURES)
"""The columns that validation judges."""
BATCH_ROWS = 65_536
"""Rows in memory at a time; 10 MB of Criteo columns."""


class ColumnFault(NamedTuple):
    """A column that a file lacks or holds in another type."""

    column: str
    description: str


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files of `folder` in the order of their names.

    Raises:
        ContractError: `folder` is not a folder.
    """
    if not folder.is_dir():
        raise ContractError(f"training rows {folder} is not a folder")
    return sorted(folder.glob("*.parquet"))


def find_column_faults(files: Sequence[Path]) -> list[ColumnFault]:
    """Every judged column that some file lacks or holds in another type, one fault per column, the first seen.

    Raises:
        ContractError: a file is not Parquet.
    """
    faults: dict[str, ColumnFault] = {}
    for path in files:
        try:
            schema = pq.read_schema(path)
        except (pa.ArrowException, OSError) as error:
            raise ContractError(f"{path} cannot be read as Parquet: {first_line(error)}") from error
        for column in COLUMNS:
            expected = pa.type_for_alias(criteo.RAW_TYPES[column])
            if column not in schema.names:
                fault = f"column {column} is missing in {path.name}, expected {expected}"
            elif schema.field(column).type != expected:
                fault = f"column {column} is {schema.field(column).type} in {path.name}, expected {expected}"
            else:
                continue
            faults.setdefault(column, ColumnFault(column, fault))
    return [faults[column] for column in COLUMNS if column in faults]


def read_batches(
    files: Sequence[Path], columns: Sequence[str], *, batch_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The rows of `files` in order, in batches of at most `batch_rows`.

    Raises:
        ContractError: a file is damaged.
    """
    for path in files:
        try:
            yield from pq.ParquetFile(path).iter_batches(batch_size=batch_rows, columns=list(columns))
        except (pa.ArrowException, OSError) as error:
            raise ContractError(f"{path} cannot be read as Parquet: {first_line(error)}") from error
