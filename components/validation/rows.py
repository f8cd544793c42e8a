"""The training rows as a stream of Arrow batches, and whether each file has the columns that were agreed on.

Reads the folder that `RawDataset.train_uri` names; what the values mean is left to TFDV. The log columns
(request id, event time, ...) are neither read nor judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from components.contracts import criteo
from components.contracts.manifests import RawDataset
from components.runtime.errors import ContractError, first_line

COLUMNS = (criteo.LABEL, *criteo.FEATURES)
"""The columns that validation judges."""
BATCH_ROWS = 65_536
"""Rows in memory at a time; 10 MB of Criteo columns."""


class ColumnFault(NamedTuple):
    """A column that a file lacks, holds in another type, or has beyond the agreed ones."""

    column: str
    description: str
    rule: str
    """Name of the rule that it breaks (`rules.catalogue`)."""
    arrow_type: str = ""
    """Of a new column."""


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
        schema = _read_arrow_schema(path)
        for column in COLUMNS:
            expected = pa.type_for_alias(criteo.RAW_TYPES[column])
            if column not in schema.names:
                fault, rule = f"column {column} is missing in {path.name}, expected {expected}", "column_missing"
            elif schema.field(column).type != expected:
                found = schema.field(column).type
                fault, rule = f"column {column} is {found} in {path.name}, expected {expected}", "column_retyped"
            else:
                continue
            faults.setdefault(column, ColumnFault(column, fault, rule))
    return [faults[column] for column in COLUMNS if column in faults]


def find_new_columns(files: Sequence[Path]) -> list[ColumnFault]:
    """Every column of some file that is neither a raw one nor of an agreed optional group, in the order first seen.

    Raises:
        ContractError: a file is not Parquet.
    """
    new: dict[str, ColumnFault] = {}
    for path in files:
        for field in _read_arrow_schema(path):
            if field.name not in criteo.KNOWN_COLUMNS:
                new.setdefault(field.name, _new_column(field.name, str(field.type), path.name))
    return list(new.values())


def find_lake_faults(dataset: RawDataset) -> tuple[list[ColumnFault], list[ColumnFault]]:
    """Columns of the lake's files that were retyped, whose values extraction has cast, and new ones."""
    retyped, new = [], []
    for each in dataset.schema_mismatches:
        column, found, expected, file = (each[name] for name in ("column", "arrow_type", "expected", "file"))
        if expected is None:
            new.append(_new_column(column, found, file))
        else:
            text = f"column {column} is {found} in {file}, expected {expected}"
            retyped.append(ColumnFault(column, text, "column_retyped"))
    return retyped, new


def _new_column(name: str, arrow_type: str, file: str) -> ColumnFault:
    text = f"column {name} ({arrow_type}) of {file} is new: nobody agreed on it, it is not read"
    return ColumnFault(name, text, "column_new", arrow_type)


def without_known(new: Sequence[ColumnFault], schema: Any | None) -> list[ColumnFault]:
    """New columns, each once, that people have not accepted into `schema`; None = there is none yet."""
    known = {feature.name for feature in schema.feature} if schema is not None else set()
    return list({fault.column: fault for fault in reversed(new) if fault.column not in known}.values())[::-1]


def _read_arrow_schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"{path} cannot be read as Parquet: {first_line(error)}") from error


class Part(NamedTuple):
    """Rows of one row group of a file."""

    path: Path
    row_group: int
    skipped: int
    """Rows of the group before these."""
    num_rows: int
    first_row: int
    """Number of the first of these in all files."""


def divide(files: Sequence[Path], number: int) -> list[list[Part]]:
    """The rows of `files`, in order, in `number` shares of as many rows each, plus or minus one.

    Raises:
        ContractError: a file is not Parquet.
    """
    groups = [(path, i, rows) for path in files for i, rows in enumerate(_rows_of_groups(path))]
    total = sum(rows for *_, rows in groups)
    shares: list[list[Part]] = [[] for _ in range(number)]
    first = 0
    for path, row_group, rows in groups:
        for k, share in enumerate(shares):
            begin, end = max(first, total * k // number), min(first + rows, total * (k + 1) // number)
            if begin < end:
                share.append(Part(path, row_group, begin - first, end - begin, begin))
        first += rows
    return shares


def _rows_of_groups(path: Path) -> list[int]:
    try:
        metadata = pq.read_metadata(path)
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"{path} cannot be read as Parquet: {first_line(error)}") from error


def read_part(
    part: Part, columns: Sequence[str], *, batch_rows: int = BATCH_ROWS, opened: Any = None
) -> Iterator[pa.RecordBatch]:
    """The rows of `part` in batches of at most `batch_rows`; request ids come dictionary-encoded.

    Args:
        part: Where they are.
        columns: Those to read.
        batch_rows: Rows in memory at a time.
        opened: The file as an open binary stream, where it is not to be opened as `part.path`.

    Raises:
        ContractError: the file is damaged.
    """
    begin, end, at = part.skipped, part.skipped + part.num_rows, 0
    try:
        # Without threads: a process forked later would inherit their pool without the threads themselves.
        dictionaries = [name for name in columns if name == criteo.REQUEST_ID]
        file = pq.ParquetFile(part.path if opened is None else opened, read_dictionary=dictionaries)
        batches = file.iter_batches(batch_rows, row_groups=[part.row_group], columns=list(columns), use_threads=False)
        for batch in batches:
            kept = batch.slice(max(begin - at, 0), max(min(end, at + batch.num_rows) - max(begin, at), 0))
            at += batch.num_rows
            del batch
            if kept.num_rows:
                yield kept
            if at >= end:
                return
            del kept  # before the next batch is read
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"{part.path} cannot be read as Parquet: {first_line(error)}") from error
