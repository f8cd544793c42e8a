"""The training rows as a stream of Arrow batches, the check of each file's columns, and the requests of a batch.

Reads the folder that `RawDataset.train_uri` names. What the values mean is left to TFDV; of the log columns only
`request_id` is read.

Rows of one request share their user and are alike; how much is measured by sums over requests. A request that a batch
or a block of rows cuts counts as two, which lowers the measured likeness a little (measured: 2 % of requests of 64 rows
lie across blocks). Without a request id, `ALIKE_ROWS` consecutive rows stand for a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts import criteo
from components.contracts.manifests import RawDataset
from components.runtime.errors import ContractError, first_line

COLUMNS = (criteo.LABEL, *criteo.FEATURES)
"""The columns that validation judges."""
BATCH_ROWS = 65_536
"""Rows in memory at a time; 10 MB of Criteo columns."""
ALIKE_ROWS = 64
"""Rows that stand for a request without an id, and that count as one independent row where likeness is unknown."""

Ints = NDArray[np.int64]


class ColumnFault(NamedTuple):
    """A column that a file lacks, holds in another type, or has beyond the agreed ones."""

    column: str
    description: str
    rule: str
    """Name of the rule that it breaks."""
    arrow_type: str = ""
    """Of a new column."""


@dataclass(frozen=True, kw_only=True)
class ColumnCheck:
    """How the columns of the rows differ from the agreed ones."""

    faulty: list[ColumnFault]
    """Missing or of another type in the files to read, so that they cannot be measured; in column order."""
    cast: list[ColumnFault]
    """Of another type in the lake's files; extraction has cast them."""
    new: list[ColumnFault]
    """Neither agreed on nor accepted by people since, in the order first seen."""

    @property
    def all(self) -> list[ColumnFault]:
        """Every fault, the worst first."""
        return [*self.faulty, *self.cast, *self.new]


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files of `folder` in the order of their names.

    Raises:
        ContractError: `folder` is not a folder.
    """
    if not folder.is_dir():
        raise ContractError(f"training rows {folder} is not a folder")
    return sorted(folder.glob("*.parquet"))


def check_columns(dataset: RawDataset, files: Sequence[Path], schema: Any | None = None) -> ColumnCheck:
    """Compares the columns of `files`, and of the lake that they come from, with the agreed ones.

    Args:
        dataset: Lists what extraction found in the lake.
        files: The training rows.
        schema: In force; a column that it knows is not new.

    Raises:
        ContractError: a file is not Parquet.
    """
    faulty: dict[str, ColumnFault] = {}
    cast: list[ColumnFault] = []
    new: dict[str, ColumnFault] = {}
    for path in files:
        found = _read_parquet_schema(path)
        for column in COLUMNS:
            expected = pa.type_for_alias(criteo.RAW_TYPES[column])
            if column not in found.names:
                text = f"column {column} is missing in {path.name}, expected {expected}"
                faulty.setdefault(column, ColumnFault(column, text, "column_missing"))
            elif found.field(column).type != expected:
                text = f"column {column} is {found.field(column).type} in {path.name}, expected {expected}"
                faulty.setdefault(column, ColumnFault(column, text, "column_retyped"))
        for field in found:
            if field.name not in criteo.KNOWN_COLUMNS:
                new.setdefault(field.name, _new_column(field.name, str(field.type), path.name))
    for each in dataset.schema_mismatches:
        column, arrow_type, file = each["column"], each["arrow_type"], each["file"]
        if each["expected"] is None:
            new.setdefault(column, _new_column(column, arrow_type, file))
        else:
            text = f"column {column} is {arrow_type} in {file}, expected {each['expected']}"
            cast.append(ColumnFault(column, text, "column_retyped"))
    accepted = {feature.name for feature in schema.feature} if schema is not None else set()
    return ColumnCheck(
        faulty=[faulty[column] for column in COLUMNS if column in faulty],
        cast=cast,
        new=[fault for name, fault in new.items() if name not in accepted],
    )


def _new_column(name: str, arrow_type: str, file: str) -> ColumnFault:
    text = f"column {name} ({arrow_type}) of {file} is new: it was not agreed on and is not read"
    return ColumnFault(name, text, "column_new", arrow_type)


@contextmanager
def reading_parquet(path: Path) -> Iterator[None]:
    """Turns the errors of reading `path` as Parquet into `ContractError`."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ContractError(f"{path} cannot be read as Parquet: {first_line(error)}") from error


def _read_parquet_schema(path: Path) -> pa.Schema:
    with reading_parquet(path):
        return pq.read_schema(path)


class FilePart(NamedTuple):
    """One row group of a file."""

    path: Path
    row_group: int
    num_rows: int
    first_row: int
    """Number of the first of these rows in all files."""


def row_groups(files: Sequence[Path]) -> list[FilePart]:
    """The row groups of `files`, in order.

    Raises:
        ContractError: a file is not Parquet.
    """
    parts: list[FilePart] = []
    first = 0
    for path in files:
        with reading_parquet(path):
            metadata = pq.read_metadata(path)
        for group in range(metadata.num_row_groups):
            parts.append(FilePart(path, group, metadata.row_group(group).num_rows, first))
            first += parts[-1].num_rows
    return parts


def read_part(part: FilePart, columns: Sequence[str], *, opened: Any = None) -> Iterator[pa.RecordBatch]:
    """The rows of `part` in batches; request ids are dictionary-encoded.

    Args:
        part: Which rows.
        columns: Those to read.
        opened: The file as an open binary stream, if it is not to be opened as `part.path`.

    Raises:
        ContractError: the file is damaged.
    """
    dictionaries = [name for name in columns if name == criteo.REQUEST_ID]
    with reading_parquet(part.path):
        file = pq.ParquetFile(part.path if opened is None else opened, read_dictionary=dictionaries)
        # Without threads: a process forked later would inherit their pool without the threads themselves.
        yield from file.iter_batches(BATCH_ROWS, row_groups=[part.row_group], columns=list(columns), use_threads=False)


def read_all_columns(path: Path) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file with all columns, in batches.

    Raises:
        ContractError: the file is damaged.
    """
    with reading_parquet(path):
        yield from pq.ParquetFile(path).iter_batches(batch_size=BATCH_ROWS)


# -- requests


def request_columns(files: Sequence[Path]) -> tuple[str, ...]:
    """The columns to read beside the features so that requests are known; empty if a file lacks the id."""
    schemas = [_read_parquet_schema(path) for path in files]
    has_id = [
        criteo.REQUEST_ID in schema.names and pa.types.is_string(schema.field(criteo.REQUEST_ID).type)
        for schema in schemas
    ]
    return (criteo.REQUEST_ID,) if has_id and all(has_id) else ()


class BatchRequests:
    """The requests of one batch, in the order of their rows."""

    def __init__(self, batch: pa.RecordBatch, first_row: int, cut: int) -> None:
        """Reads `request_id`, if the batch has it.

        Args:
            batch: Rows.
            first_row: Number of the first of them in the window.
            cut: A multiple of `ALIKE_ROWS`; no request crosses a row whose number is a multiple of it.
        """
        rows = np.arange(first_row, first_row + batch.num_rows)
        ids, distinct = _request_numbers(batch, rows)
        change = np.flatnonzero((np.diff(ids) != 0) | (np.diff(rows // cut) != 0)) + 1
        self.order: Ints | None = None
        """[n] rows by request; None if they already lie so."""
        if len(change) + 1 > distinct + batch.num_rows // cut + 1:
            keys = rows // cut * (int(ids.max()) + 1) + ids
            self.order = np.argsort(keys, kind="stable")
            change = np.flatnonzero(np.diff(keys[self.order])) + 1
        self.starts = np.concatenate([[0], change]) if batch.num_rows else np.zeros(0, np.int64)
        """[g] first row of each request."""
        self.sizes = np.diff(np.append(self.starts, batch.num_rows))
        """[g] rows of each."""
        self.of_row = np.repeat(np.arange(len(self.sizes)), self.sizes)
        """[n] request of each row, ascending."""
        first = self.starts if self.order is None else self.order[self.starts]
        self.blocks = (first_row + first) // cut
        """[g] number of the block of `cut` rows that each lies in."""

    def ordered(self, rows: NDArray[Any]) -> NDArray[Any]:
        """`rows` [n, ...] in the order of the requests."""
        return rows if self.order is None else rows[self.order]

    def sums(self, rows: NDArray[Any]) -> Ints:
        """Sums [g, ...] of ordered `rows` [n, ...] over each request."""
        if not len(self.starts):
            return np.zeros((0, *rows.shape[1:]), np.int64)
        return np.add.reduceat(rows, self.starts, axis=0, dtype=np.int64)


def _request_numbers(batch: pa.RecordBatch, rows: Ints) -> tuple[Ints, int]:
    """A number per row that is its request's, and how many requests there are."""
    place = batch.schema.get_field_index(criteo.REQUEST_ID)
    if place < 0:
        ids = rows // ALIKE_ROWS - (rows[0] // ALIKE_ROWS if len(rows) else 0)
        return ids, len(rows) // ALIKE_ROWS + 2
    column = batch.column(place)
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    return encoded.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64), len(encoded.dictionary)
