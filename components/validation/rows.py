"""Read the training rows as Arrow batches, in the raw schema that extraction writes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from evergreen.config.features import Features
from evergreen.contracts import raw_rows
from evergreen.rows.archived_rows import parquet_file, reading_parquet
from evergreen.runtime.errors import ContractError

BATCH_ROWS = 65_536
"""Rows in memory at a time: 10 MB with 39 features."""


def checked_columns(features: Features) -> tuple[str, ...]:
    """Return the columns that validation checks, in the order of files."""
    return (raw_rows.LABEL, *features.names)


def parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files of `folder`, sorted by name.

    Raises:
        ContractError: `folder` is not a folder.
    """
    if not folder.is_dir():
        raise ContractError(f"training rows {folder} is not a folder")
    return sorted(folder.glob("*.parquet"))


class FilePart(NamedTuple):
    """One row group of a file."""

    path: Path
    row_group: int
    num_rows: int
    first_row: int
    """Position of the part's first row in the sequence of all files."""


def row_groups(files: Sequence[Path]) -> list[FilePart]:
    """Return the row groups of `files`, in order.

    Raises:
        ContractError: A file is not Parquet.
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


def read_part(
    part: FilePart, features: Features, *, opened: Any = None
) -> Iterator[pa.RecordBatch]:
    """Yield the checked columns and the dictionary-encoded request ids of `part`, in batches.

    Args:
        part: The row group.
        features: The recommender's features.
        opened: The file as an open binary stream. None = the function opens `part.path`.

    Raises:
        ContractError: The file is corrupt.
    """
    columns = [*checked_columns(features), raw_rows.REQUEST_ID]
    with reading_parquet(part.path):
        file = parquet_file(
            part.path if opened is None else opened, read_dictionary=[raw_rows.REQUEST_ID]
        )
        # Threads are off, because a forked process would inherit the thread pool but not the
        # threads.
        yield from file.iter_batches(
            BATCH_ROWS, row_groups=[part.row_group], columns=columns, use_threads=False
        )


def read_all_columns(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield all columns of a Parquet file in batches of rows.

    Raises:
        ContractError: The file is corrupt.
    """
    with reading_parquet(path):
        yield from parquet_file(path).iter_batches(batch_size=BATCH_ROWS)
