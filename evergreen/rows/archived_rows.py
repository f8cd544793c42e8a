"""The Parquet files of an archive or a lake: which of them hold served rows, and each opened for reading.

`reading_parquet` reports what is no readable Parquet file, and `open_parquet` what would fill the memory.

Every reader of archived rows goes through here: the backtest, the canary's evidence, the verification of a version and
validation's skew. The files are those that `monitoring.state.archive` wrote and its uploader moved,
`day=YYYY-MM-DD/*.parquet` in the types of `contracts.raw_rows`, in a folder or a bucket. A later version of a day
(`day=D/version=N/`) is a correction of what was served, and is left out. What is read of a file is left to the callers.
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
    """Turns the errors of reading a Parquet file into `ContractError`, which calls the file `name`."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: a column's name that is no text
        raise ContractError(f"{name} is not a readable Parquet file: {first_line(error)}") from error


def _supports_checksums() -> bool:
    """Return whether this pyarrow knows page checksums; preprocessing's, by NVTabular's leave, is older."""
    return int(pa.__version__.split(".")[0]) >= 13


_VERIFIED = {"page_checksum_verification": True} if _supports_checksums() else {}
_CHECKED = {"write_page_checksum": True} if _supports_checksums() else {}


def parquet_file(source: Any, **options: Any) -> pq.ParquetFile:
    """Open a Parquet file whose pages are compared with their checksums as they are read.

    Files of other writers may have none. Errors are pyarrow's (`reading_parquet`).
    """
    return pq.ParquetFile(source, **_VERIFIED, **options)


def parquet_writer(target: Any, schema: Any, **options: Any) -> pq.ParquetWriter:
    """Open a Parquet file to write, with a checksum a page: a flipped bit is not read as another value."""
    return pq.ParquetWriter(target, schema, **_CHECKED, **options)


def write_parquet(table: Any, target: Any, **options: Any) -> None:
    """Write a table as `parquet_writer` does."""
    pq.write_table(table, target, **_CHECKED, **options)


MAX_ROWS_PER_BYTE = 100
"""Rows that a byte of a file may hold. Rows with a key and a time of their own take more than a hundredth of a byte."""
FREE_ROWS = 65_536
"""Rows that a file of any size may hold beyond that."""
MAX_GROUP_ROWS = 1 << 24
MAX_GROUP_BYTES = 4 << 30
"""Of a row group before compression."""
MAX_RATIO = 1_000
"""By how much compression may have made a row group smaller, where it is larger than `FREE_BYTES`."""
FREE_BYTES = 64 << 20
MAX_TEXT_BYTES = 256 << 20
"""Of the texts of one column in one batch."""


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file whose footer was read, and which is not made to fill the memory.

    Raises:
        ContractError: it is no regular file, not whole Parquet, or its footer names more rows or bytes than a file of
            rows has.
        FileNotFoundError: there is none.
    """
    size, mode = (status := path.stat()).st_size, status.st_mode
    if not stat.S_ISREG(mode):
        raise ContractError(f"{path} is no regular file, expected Parquet")
    file = parquet_file(path)
    metadata = file.metadata
    if metadata.num_rows > MAX_ROWS_PER_BYTE * size + FREE_ROWS:
        raise ContractError(
            f"{path} names {metadata.num_rows} rows in {size} bytes, expected at most {MAX_ROWS_PER_BYTE} a byte"
        )
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        sizes = [group.column(i).total_uncompressed_size for i in range(group.num_columns)]
        num_bytes, limit = (
            max(sum(sizes), group.total_byte_size),
            min(max(MAX_RATIO * size, FREE_BYTES), MAX_GROUP_BYTES),
        )
        if group.num_rows > MAX_GROUP_ROWS or num_bytes > limit:
            raise ContractError(
                f"{path} has a row group of {group.num_rows} rows and {num_bytes} bytes before compression, expected "
                f"at most {MAX_GROUP_ROWS} rows and {limit} bytes in a file of {size}"
            )
    return file


def bounded_batches(path: Path, columns: list[str], *, group: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Read some columns of one row group, of which no batch holds more text than `MAX_TEXT_BYTES` in a column.

    Texts are dictionary-encoded where they are in the file: one long text of many rows is one text in memory.

    Args:
        path: The file, which `open_parquet` took.
        columns: Names of columns that the file has.
        group: The row group.
        batch_rows: Rows of a batch, at most.

    Raises:
        ContractError: a batch has more text.
        pa.ArrowException: the file is corrupt.
    """
    metadata = pq.read_metadata(path)
    chunks = [metadata.row_group(group).column(i) for i in range(metadata.num_columns)]
    texts = [each.path_in_schema for each in chunks if each.physical_type == "BYTE_ARRAY" and each.has_dictionary_page]
    with parquet_file(path, metadata=metadata, read_dictionary=texts) as file:
        for batch in file.iter_batches(batch_size=batch_rows, row_groups=[group], columns=columns):
            for name, values in zip(batch.schema.names, batch.columns):
                found = values.flatten() if is_list(values.type) else values
                if not pa.types.is_dictionary(found.type) or not _has_lengths(found.type.value_type):
                    continue
                lengths = pc.binary_length(found.dictionary).take(found.indices)
                if (num_bytes := pc.sum(lengths.cast(pa.int64())).as_py() or 0) > MAX_TEXT_BYTES:
                    raise ContractError(
                        f"{path} has {num_bytes} bytes of text in {name} of {batch.num_rows} rows, expected at most "
                        f"{MAX_TEXT_BYTES}"
                    )
            yield batch


def is_list(found: pa.DataType) -> bool:
    """Return whether an Arrow type is one of lists."""
    return bool(pa.types.is_list(found) or pa.types.is_large_list(found) or pa.types.is_fixed_size_list(found))


def _has_lengths(found: pa.DataType) -> bool:
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_kind(found) for is_kind in kinds)


class MovedAway(TemporaryError):
    """The file was there when it was listed: the uploader has moved it since, or an operator has removed it."""


@dataclass(frozen=True)
class ArchivedFile:
    """One file of served rows."""

    archive: Objects
    info: ObjectInfo

    @property
    def name(self) -> str:
        """Below the archive: `day=YYYY-MM-DD/part.parquet`."""
        return self.info.name

    @property
    def day(self) -> str:
        """The UTC day of its rows, YYYY-MM-DD."""
        return _split_name(self.info.name)[0]

    @property
    def uri(self) -> str:
        """Its whole address, for messages."""
        return f"{self.archive.uri}/{self.info.name}"

    @contextmanager
    def opened(self) -> Iterator[pq.ParquetFile]:
        """Yields the file; one of a bucket is fetched whole first, and its copy is gone afterwards.

        Raises:
            MovedAway: it is not in the folder any more.
            ContractError: it is no Parquet file, is corrupt, or does not have what the caller reads of it; names it.
            TemporaryError, PermanentError: it cannot be fetched.
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
    """The files of served rows, by day and name.

    Only those of `days` (UTC, YYYY-MM-DD; each is listed by itself; None = all), and of `first_day` and later.

    Raises:
        TemporaryError, PermanentError: the bucket cannot be listed.
    """
    prefixes = [DAY_PARTITION.format(day="")] if days is None else [f"{DAY_PARTITION.format(day=d)}/" for d in days]
    found = [ArchivedFile(archive, info) for prefix in sorted(prefixes) for info in archive.list(prefix)]
    return [each for each in found if _holds_served_rows(each.name) and (first_day is None or each.day >= first_day)]


def arrow_schema(types: dict[str, str]) -> pa.Schema:
    """The schema of these columns, types as `contracts.raw_rows` spells them.

    >>> str(arrow_schema({"a": "int32", "b": "bool"})).split()
    ['a:', 'int32', 'b:', 'bool']
    """
    return pa.schema([(name, _arrow_type(text)) for name, text in types.items()])


def is_alike(found: pa.DataType, expected: pa.DataType) -> bool:
    """Whether two types are the same; what writers call the elements of lists does not count."""
    if pa.types.is_list(found) and pa.types.is_list(expected):
        return is_alike(found.value_type, expected.value_type)
    return bool(found == expected)


def _holds_served_rows(name: str) -> bool:
    _, file = _split_name(name)
    return file.endswith(".parquet") and "/" not in file and is_visible(file)


def _split_name(name: str) -> tuple[str, str]:
    """The day of a file's folder, and what follows the folder's name."""
    folder, _, file = name.partition("/")
    return folder.removeprefix(DAY_PARTITION.format(day="")), file


def _arrow_type(text: str) -> pa.DataType:
    if text.startswith("timestamp"):
        return pa.timestamp("us", tz="UTC")
    if text.startswith("list<"):
        return pa.list_(_arrow_type(text[5:-1]))
    return pa.bool_() if text == "bool" else getattr(pa, text)()
