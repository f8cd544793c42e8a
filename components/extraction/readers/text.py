"""Files of delimited text by pyarrow.csv, one row a line; gzip or plain.

A file is read in blocks of whole lines; pyarrow.csv splits a block, and each distinct value of a column is checked
against the contract once. A malformed line is recorded with its number and reason, and the rest of its block stays.
Which form a file has is decided by `forms`; what a column holds is said by `criteo` and `named`.
"""

import csv
import gzip
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv

from components.extraction.raw_schema import MalformedRows, raw_batch, without_rows
from components.runtime.errors import ContractError
from components.runtime.forked import available_cores

BLOCK_BYTES = 2 << 20
"""About 8,700 Criteo lines."""
MAX_LINE_BYTES = 1 << 20
_READ_BYTES = 256 << 10
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_ENCODED = pa.dictionary(pa.int32(), pa.binary())
"""Binary, because a byte that is not UTF-8 must make its line malformed and not the file."""


@dataclass(frozen=True, kw_only=True)
class TextLayout:
    """How one text form writes a row."""

    delimiter: str
    fields: tuple[str, ...]
    """The name of each field, in file order; those that no column reads are ignored."""
    has_header: bool
    """Whether the first line holds names."""
    has_quotes: bool = False
    """Whether a field may stand in double quotes. A line break in quotes makes its lines malformed."""
    missing: tuple[str, ...] = ("",)
    """What stands for no value."""

    def num_fields(self, line: bytes) -> int:
        """How many fields a line has; 0 where a quote is not closed."""
        if not self.has_quotes:
            return line.count(self.delimiter.encode()) + 1
        if line.count(b'"') % 2:
            return 0
        return len(next(csv.reader([line.decode(errors="replace")], delimiter=self.delimiter)))


class TextColumn(NamedTuple):
    """A raw column in a text file."""

    field: str
    """Its name in the layout."""
    parse: Callable[[Any], Any]
    """Distinct values (binary array) to an array of the raw type, null where a value is malformed."""
    expected: str
    """What a value is, for people."""
    is_required: bool
    """Whether an empty field is malformed."""


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """One text file; see `forms.Reader`."""

    path: Path
    layout: TextLayout
    columns: Mapping[str, TextColumn]
    """By raw column; the others are null."""
    schema: Any
    """The raw schema."""
    has_times: bool = False
    """See `Reader.has_times`."""

    def batches(self, malformed: MalformedRows) -> Iterator[Any]:
        """See `Reader.batches`. Empty lines do not count."""
        for parsed in self._parsed_blocks():
            for line, reason, text in parsed.malformed:
                malformed.add(self.path, line, reason, text=text)
            malformed.count(self.path, parsed.batch.num_rows + len(parsed.malformed))
            if parsed.batch.num_rows:
                yield parsed.batch

    def _parsed_blocks(self) -> Iterator["ParsedBlock"]:
        """All blocks in order, as many at a time as there are cores: pyarrow lets other threads work meanwhile."""
        waiting = deque[Future[ParsedBlock]]()
        with ThreadPoolExecutor(cores := available_cores()) as pool:
            for block in blocks(self.path):
                waiting.append(pool.submit(self.parse, block))
                if len(waiting) > cores:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def parse(self, block: "Block") -> "ParsedBlock":
        """The rows of a block."""
        if self.layout.has_header and block.first_line == 1:
            block = Block(2, block.content.partition(b"\n")[2])
        content = block.content
        if b"\r" in content:
            # pyarrow would end a line at a lone carriage return; as a character it makes its field malformed.
            content = content.replace(b"\r\n", b"\n").replace(b"\r", b"?")
        is_ragged = False
        try:
            table = self._split_fields(content)
        except pa.ArrowInvalid:
            # A line has another number of fields: the only reason, since the types take any bytes. pyarrow's
            # invalid_row_handler would fail on such a line if it were not UTF-8.
            is_ragged = True
            lines, num_fields = content.splitlines(keepends=True), len(self.layout.fields)
            whole = [line for line in lines if self.layout.num_fields(line.rstrip(b"\n")) == num_fields]
            table = self._split_fields(b"".join(whole))
        columns, reasons = self._parse_columns(table)
        malformed = list(self._malformed_lines(block, reasons)) if is_ragged or reasons else []
        return ParsedBlock(without_rows(raw_batch(columns, self.schema), reasons), malformed)

    def _split_fields(self, content: bytes) -> Any:
        """The fields of all lines as dictionary-encoded bytes; `pa.ArrowInvalid` where a line has more or fewer."""
        wanted = list(dict.fromkeys(column.field for column in self.columns.values()))
        if not content.strip(b"\n"):
            return pa.table({name: pa.array([], _ENCODED) for name in wanted})
        names = list(self.layout.fields)
        return pv.read_csv(
            pa.BufferReader(content),
            # One thread: other blocks have the others.
            read_options=pv.ReadOptions(column_names=names, block_size=len(content) + 1, use_threads=False),
            parse_options=pv.ParseOptions(
                delimiter=self.layout.delimiter, quote_char='"' if self.layout.has_quotes else False
            ),
            convert_options=pv.ConvertOptions(
                column_types=dict.fromkeys(wanted, _ENCODED),
                include_columns=wanted,
                null_values=list(self.layout.missing),
                strings_can_be_null=True,
            ),
        )

    def _parse_columns(self, table: Any) -> tuple[dict[str, Any], dict[int, str]]:
        """Typed columns, null where a value is malformed; and the first reason for each malformed row."""
        columns: dict[str, Any] = {}
        reasons: dict[int, str] = {}
        for name, column in self.columns.items():
            encoded = table.column(column.field).unify_dictionaries().combine_chunks()
            if isinstance(encoded, pa.ChunkedArray):
                encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], _ENCODED)
            columns[name] = column.parse(encoded.dictionary).take(encoded.indices)
            if columns[name].null_count > (0 if column.is_required else encoded.null_count):
                wrong = pc.is_null(columns[name])
                wrong = wrong if column.is_required else pc.and_(encoded.indices.is_valid(), wrong)
                for at in np.flatnonzero(wrong.to_numpy(zero_copy_only=False)):
                    text = (encoded[int(at)].as_py() or b"").decode(errors="backslashreplace")
                    reasons.setdefault(int(at), f"{column.field} is {text!r}, expected {column.expected}")
        return columns, reasons

    def _malformed_lines(self, block: "Block", reasons: dict[int, str]) -> Iterator[tuple[int, str, str]]:
        """Line number, reason and original text of the block's malformed lines."""
        row, expected = 0, len(self.layout.fields)
        for number, line in enumerate(block.content.split(b"\n"), start=block.first_line):
            stripped = line.removesuffix(b"\r")
            if not stripped:
                continue
            num_fields = self.layout.num_fields(stripped)
            reason: str | None = f"{num_fields} columns, expected {expected}" if num_fields else "a quote is not closed"
            if num_fields == expected:
                reason = reasons.get(row)
                row += 1
            if reason:
                yield number, reason, stripped.decode(errors="backslashreplace")


class Block(NamedTuple):
    """Whole lines of a file; only the file's last line may lack its newline."""

    first_line: int
    """Number of its first line in the file, from 1."""
    content: bytes


class ParsedBlock(NamedTuple):
    """A block's rows."""

    batch: Any
    """The well-formed ones, in the raw schema."""
    malformed: list[tuple[int, str, str]]
    """Line number, reason and original text of each of the others."""


def blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """The blocks of `path`, in order, without a UTF-8 byte order mark; memory is bounded by a block.

    Raises:
        ContractError: the gzip stream is truncated or damaged, or a line is longer than `MAX_LINE_BYTES`.
    """
    with open(path, "rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    first_line, pending = 1, bytearray()
    with gzip.open(path) if is_gzip else open(path, "rb") as file:
        while True:
            try:
                chunk = file.read1(_READ_BYTES)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                damage = "truncated" if isinstance(error, EOFError) else f"damaged ({error})"
                num_lines = first_line - 1 + pending.count(b"\n")
                raise ContractError(
                    f"{path} is {damage}: {num_lines} whole lines were read before, expected a complete gzip file"
                ) from error
            pending += chunk
            if chunk and len(pending) < block_bytes:
                continue
            content = bytes(pending).removeprefix(_BOM) if first_line == 1 else bytes(pending)
            end = content.rfind(b"\n") + 1 if chunk else len(content)
            if len(content) - end > MAX_LINE_BYTES:
                raise ContractError(
                    f"{path} has a line longer than {MAX_LINE_BYTES} bytes, expected rows of a click log"
                )
            if end:
                yield Block(first_line, content[:end])
                first_line, pending = first_line + content.count(b"\n", 0, end), bytearray(content[end:])
            if not chunk:
                return


def matching(distinct: Any, pattern: str) -> Any:
    """The values (binary array) that match, as strings; null elsewhere."""
    matches = pc.match_substring_regex(distinct, pattern)
    return pc.if_else(matches, distinct, pa.scalar(None, distinct.type)).cast(pa.string())
