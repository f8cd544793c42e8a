"""Listing and opening of the Parquet files with served rows, in an archive or a lake.

`reading_parquet` reports files that are not readable Parquet. `open_parquet` also refuses files
that would fill the memory.

Every reader of archived rows uses this module: the backtest, the canary's evidence, the
verification of a version and validation's skew. `monitoring.state.archive` writes the files of the
archive and moves them. Archives and lakes consist of files `day=YYYY-MM-DD/*.parquet` with the
types of `contracts.raw_rows`, in a folder or a bucket. A back-filled version of a day
(`day=D/version=N/`) is left out, because it corrects the served rows. The callers decide which
parts of a file they read.
"""

import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from evergreen.contracts.raw_rows import DAY_PARTITION, is_visible
from evergreen.runtime.errors import ContractError, TemporaryError, first_line
from evergreen.storage.objects import ObjectInfo, Objects, local_copy


@contextmanager
def reading_parquet(name: object) -> Iterator[None]:
    """Convert errors to `ContractError` while the Parquet file `name` is read."""
    try:
        yield
    except (
        pa.ArrowException,
        OSError,
        UnicodeDecodeError,
    ) as error:  # UnicodeDecodeError: a column's name is not UTF-8
        raise ContractError(
            f"{name} is not a readable Parquet file: {first_line(error)}"
        ) from error


def _supports_checksums() -> bool:
    """Return whether this version of pyarrow supports page checksums.

    The preprocessing step has an older version of pyarrow, because NVTabular requires it.
    """
    return int(pa.__version__.split(".")[0]) >= 13


_VERIFIED = {"page_checksum_verification": True} if _supports_checksums() else {}
_CHECKED = {"write_page_checksum": True} if _supports_checksums() else {}


def parquet_file(source: Any, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file whose pages are verified by their checksums while they are read.

    Files from other writers may lack checksums. The function raises pyarrow's own errors (see
    `reading_parquet`).
    """
    return pq.ParquetFile(source, **_VERIFIED, **options)


def parquet_writer(target: Any, schema: Any, **options: Any) -> pq.ParquetWriter:
    """Open a Parquet file for writing, with a checksum for each page to detect flipped bits."""
    return pq.ParquetWriter(target, schema, **_CHECKED, **options)


def write_parquet(table: Any, target: Any, **options: Any) -> None:
    """Write a table with the options of `parquet_writer`."""
    pq.write_table(table, target, **_CHECKED, **options)


_MAX_ROWS_PER_BYTE = 100
"""Maximum number of rows for each byte of a file. A valid file has fewer rows per byte, even after
compression."""
_FREE_ROWS = 65_536
"""Number of rows that a file of any size may have, in addition to `_MAX_ROWS_PER_BYTE` per byte."""
_MAX_GROUP_ROWS = 1 << 24
_MAX_GROUP_BYTES = 4 << 30
"""Maximum number of bytes of a row group before compression."""
_MAX_RATIO = 1_000
"""Maximum compression ratio of a row group. Row groups of up to `_FREE_BYTES` may exceed this
ratio."""
_FREE_BYTES = 64 << 20
_MAX_TEXT_BYTES = 256 << 20
"""Maximum number of bytes of the texts of one column in one batch."""


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file, unless it would fill the memory.

    Raises:
        ContractError: the file is not a regular file or not complete Parquet, or its footer states
            more rows or bytes than a file of this size can have.
        FileNotFoundError: the file is absent.
    """
    size, mode = (status := path.stat()).st_size, status.st_mode
    if not stat.S_ISREG(mode):
        raise ContractError(f"{path} is not a regular file, expected Parquet")
    file = parquet_file(path)
    metadata = file.metadata
    if metadata.num_rows > _MAX_ROWS_PER_BYTE * size + _FREE_ROWS:
        raise ContractError(
            f"{path} states {metadata.num_rows} rows in {size} bytes, expected at most "
            f"{_MAX_ROWS_PER_BYTE} per byte"
        )
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        sizes = [group.column(i).total_uncompressed_size for i in range(group.num_columns)]
        num_bytes, limit = (
            max(sum(sizes), group.total_byte_size),
            min(max(_MAX_RATIO * size, _FREE_BYTES), _MAX_GROUP_BYTES),
        )
        if group.num_rows > _MAX_GROUP_ROWS or num_bytes > limit:
            raise ContractError(
                f"{path} has a row group of {group.num_rows} rows and {num_bytes} bytes before "
                "compression, expected "
                f"at most {_MAX_GROUP_ROWS} rows and {limit} bytes in a file of {size}"
            )
    return file


def bounded_batches(
    path: Path, columns: list[str], *, group: int, batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Read some columns of one row group in batches of bounded size.

    A batch has at most `_MAX_TEXT_BYTES` of text in a column. If the file stores texts as a
    dictionary, the texts remain dictionary-encoded. A long text that many rows share is therefore
    in memory only once.

    Args:
        path: File that `open_parquet` accepted.
        columns: Names of columns of the file.
        group: Number of the row group.
        batch_rows: Maximum rows of a batch.

    Raises:
        ContractError: a batch has more than `_MAX_TEXT_BYTES` of text.
        pa.ArrowException: the file is corrupt.
    """
    metadata = pq.read_metadata(path)
    chunks = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
    texts = [
        each.path_in_schema
        for each in chunks
        if each.physical_type == "BYTE_ARRAY" and each.has_dictionary_page
    ]
    with parquet_file(path, metadata=metadata, read_dictionary=texts) as file:
        for batch in file.iter_batches(batch_size=batch_rows, row_groups=[group], columns=columns):
            for name, values in zip(batch.schema.names, batch.columns):
                found = values.flatten() if is_list(values.type) else values
                if not pa.types.is_dictionary(found.type) or not _has_lengths(
                    found.type.value_type
                ):
                    continue
                lengths = pc.binary_length(found.dictionary).take(found.indices)
                if (num_bytes := pc.sum(lengths.cast(pa.int64())).as_py() or 0) > _MAX_TEXT_BYTES:
                    raise ContractError(
                        f"{path} has {num_bytes} bytes of text in {name} of {batch.num_rows} rows, "
                        "expected at most "
                        f"{_MAX_TEXT_BYTES}"
                    )
            yield batch


def is_list(found: pa.DataType) -> bool:
    """Return whether an Arrow type is a list type."""
    return bool(
        pa.types.is_list(found)
        or pa.types.is_large_list(found)
        or pa.types.is_fixed_size_list(found)
    )


def _has_lengths(found: pa.DataType) -> bool:
    kinds = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(is_kind(found) for is_kind in kinds)


class MovedAway(TemporaryError):
    """Error about a file that was listed and is now absent.

    The uploader has moved the file, or an operator has removed it.
    """


@dataclass(frozen=True)
class ArchivedFile:
    """One file of served rows."""

    archive: Objects
    info: ObjectInfo

    @property
    def name(self) -> str:
        """Return the file's name relative to the archive: `day=YYYY-MM-DD/part.parquet`."""
        return self.info.name

    @property
    def day(self) -> str:
        """Return the UTC day of the file's rows, YYYY-MM-DD."""
        return _split_name(self.info.name)[0]

    @property
    def uri(self) -> str:
        """Return the full address of the file, for messages."""
        return f"{self.archive.uri}/{self.info.name}"

    @contextmanager
    def opened(self) -> Iterator[pq.ParquetFile]:
        """Open the file.

        A file of a bucket is downloaded first, and its copy is deleted afterwards.

        Raises:
            MovedAway: the file is no longer in the folder.
            ContractError: the file is not Parquet, is corrupt, or lacks data that the caller reads.
                The message names the file.
            TemporaryError, PermanentError: the file cannot be downloaded.
        """
        with local_copy(self.archive, self.info.name) as path, reading_parquet(self.uri):
            try:
                with open_parquet(path) as file:
                    yield file
            except FileNotFoundError as error:
                raise MovedAway(f"{self.uri} has moved away since it was listed") from error


def archived_files(
    archive: Objects, *, days: Collection[str] | None = None, first_day: str | None = None
) -> list[ArchivedFile]:
    """Return the files of served rows, ordered by day and name.

    Args:
        archive: The archive.
        days: UTC days to list, YYYY-MM-DD. The storage is listed once for each day. None = all
            days.
        first_day: Earliest day to return. None = no limit.

    Raises:
        TemporaryError, PermanentError: the bucket cannot be listed.
    """
    prefixes = (
        [DAY_PARTITION.format(day="")]
        if days is None
        else [f"{DAY_PARTITION.format(day=d)}/" for d in days]
    )
    found = [
        ArchivedFile(archive, info) for prefix in sorted(prefixes) for info in archive.list(prefix)
    ]
    return [
        each
        for each in found
        if _holds_served_rows(each.name) and (first_day is None or each.day >= first_day)
    ]


def arrow_schema(types: dict[str, str]) -> pa.Schema:
    """Return the Arrow schema of columns. The types have the names that `contracts.raw_rows` uses.

    >>> str(arrow_schema({"a": "int32", "b": "bool"})).split()
    ['a:', 'int32', 'b:', 'bool']
    """
    return pa.schema([(name, _arrow_type(text)) for name, text in types.items()])


def is_alike(found: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether two Arrow types are equal. Names of list elements are ignored."""
    if pa.types.is_list(found) and pa.types.is_list(expected):
        return is_alike(found.value_type, expected.value_type)
    return bool(found == expected)


def _holds_served_rows(name: str) -> bool:
    _, file = _split_name(name)
    return file.endswith(".parquet") and "/" not in file and is_visible(file)


def _split_name(name: str) -> tuple[str, str]:
    """Return the day from the name of the file's folder, and the name of the file."""
    folder, _, file = name.partition("/")
    return folder.removeprefix(DAY_PARTITION.format(day="")), file


def _arrow_type(text: str) -> pa.DataType:
    if text.startswith("timestamp"):
        return pa.timestamp("us", tz="UTC")
    if text.startswith("list<"):
        return pa.list_(_arrow_type(text[5:-1]))
    return pa.bool_() if text == "bool" else getattr(pa, text)()
