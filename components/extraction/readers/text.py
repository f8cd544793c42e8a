"""Criteo's text forms by pyarrow.csv: TSV without header (Criteo 1TB), CSV or TSV with one (Kaggle); gzip or plain.

A file is read in blocks of whole lines; pyarrow.csv splits a block, and each distinct value of a column is checked
against the contract once. A malformed line is recorded with its number and reason, and the rest of its block stays.
Which form a file has is decided by `forms`. Quoting does not exist in these forms.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv

from components.contracts.criteo import CATEGORICAL, DENSE, FEATURES
from components.contracts.raw_rows import LABEL
from components.extraction.malformed_rows import MalformedRows
from components.extraction.raw_schema import CLICK_COLUMNS, raw_batch, without_rows
from components.runtime.errors import ContractError

NUM_TSV_FIELDS = 1 + len(FEATURES)
INTEGER_PATTERN = r"^-?[0-9]{1,18}(\.0*)?$"
"""An integer as text: `.0` because pandas writes an integer column with missing values so; 18 digits fit an int64."""
HEX_PATTERN = r"^[0-9a-fA-F]{1,8}$"
"""A category as text."""
EXPECTED_TEXT = {
    LABEL: "0 or 1",
    **dict.fromkeys(DENSE, "an integer or nothing"),
    **dict.fromkeys(CATEGORICAL, "1 to 8 hex digits or nothing"),
}
"""What each column of a text file holds."""
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
    columns: tuple[str, ...]
    """The raw column in each field, in file order; fields with other names are ignored."""
    has_header: bool
    """Whether the first line holds names."""

    @classmethod
    def of_header(cls, line: str, *, path: Path) -> TextLayout | None:
        """The layout that a header line states; None if the line is no header.

        Columns may be named in any case and any order; unknown ones (`Id`) are ignored.

        Raises:
            ContractError: a Criteo column is missing or named twice.
        """
        delimiter = "\t" if "\t" in line else ","
        names = [name.strip().lower() for name in line.split(delimiter)]
        if LABEL not in names:
            return None
        if missing := [name for name in CLICK_COLUMNS if names.count(name.lower()) != 1]:
            raise ContractError(
                f"{path} has a header that names {missing} not exactly once, expected every Criteo column"
            )
        known = {name.lower(): name for name in CLICK_COLUMNS}
        columns = tuple(known.get(name, f"field {i}") for i, name in enumerate(names))
        return cls(delimiter=delimiter, columns=columns, has_header=True)

    @classmethod
    def of_fields(cls, line: str) -> TextLayout | None:
        """The layout of a file without header, judged by a line's number of fields; None if it is none of ours."""
        if line.count("\t") + 1 == NUM_TSV_FIELDS:
            return cls(delimiter="\t", columns=CLICK_COLUMNS, has_header=False)
        num_fields = 0 if "\t" in line else line.count(",") + 1
        if num_fields not in (NUM_TSV_FIELDS, NUM_TSV_FIELDS + 1):
            return None
        columns = CLICK_COLUMNS if num_fields == NUM_TSV_FIELDS else ("id", *CLICK_COLUMNS)
        return cls(delimiter=",", columns=columns, has_header=False)


@dataclass(frozen=True, kw_only=True)
class CriteoText:
    """One text file; see `forms.Reader`."""

    path: Path
    layout: TextLayout

    def batches(self, malformed: MalformedRows) -> Iterator[Any]:
        """See `Reader.batches`. Empty lines do not count."""
        for block in blocks(self.path):
            parsed = parse_block(block, self.layout)
            for line, reason, text in parsed.malformed:
                malformed.add(self.path, line, reason, text=text)
            malformed.count(self.path, parsed.batch.num_rows + len(parsed.malformed))
            if parsed.batch.num_rows:
                yield parsed.batch


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
                raise ContractError(f"{path} has a line longer than {MAX_LINE_BYTES} bytes, expected Criteo rows")
            if end:
                yield Block(first_line, content[:end])
                first_line, pending = first_line + content.count(b"\n", 0, end), bytearray(content[end:])
            if not chunk:
                return


def parse_block(block: Block, layout: TextLayout) -> ParsedBlock:
    """The rows of a block."""
    if layout.has_header and block.first_line == 1:
        block = Block(2, block.content.partition(b"\n")[2])
    content = block.content
    if b"\r" in content:
        # pyarrow would end a line at a lone carriage return; as a character it makes its field malformed.
        content = content.replace(b"\r\n", b"\n").replace(b"\r", b"?")
    is_ragged = False
    try:
        table = _split_fields(content, layout)
    except pa.ArrowInvalid:
        # A line has another number of fields: the only reason, since the types take any bytes. pyarrow's
        # invalid_row_handler would fail on such a line if it were not UTF-8.
        is_ragged, num_delimiters = True, len(layout.columns) - 1
        lines = content.splitlines(keepends=True)
        content = b"".join(line for line in lines if line.count(layout.delimiter.encode()) == num_delimiters)
        table = _split_fields(content, layout)
    columns, reasons = _parse_columns(table)
    malformed = list(_malformed_lines(block, layout, reasons)) if is_ragged or reasons else []
    return ParsedBlock(without_rows(raw_batch(columns), reasons), malformed)


def _split_fields(content: bytes, layout: TextLayout) -> Any:
    """The fields of all lines as dictionary-encoded bytes.

    Raises:
        pa.ArrowInvalid: a line has another number of fields.
    """
    if not content.strip(b"\n"):
        return pa.table({name: pa.array([], _ENCODED) for name in CLICK_COLUMNS})
    return pv.read_csv(
        pa.BufferReader(content),
        # One thread: more of them save no time, since the distinct values are checked in one anyway.
        read_options=pv.ReadOptions(column_names=list(layout.columns), block_size=len(content) + 1, use_threads=False),
        parse_options=pv.ParseOptions(delimiter=layout.delimiter, quote_char=False),
        convert_options=pv.ConvertOptions(
            column_types=dict.fromkeys(CLICK_COLUMNS, _ENCODED),
            include_columns=list(CLICK_COLUMNS),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


def _parse_columns(table: Any) -> tuple[dict[str, Any], dict[int, str]]:
    """Typed columns, null where a value is malformed; and the first reason for each malformed row."""
    columns: dict[str, Any] = {}
    reasons: dict[int, str] = {}
    for name in CLICK_COLUMNS:
        encoded = table.column(name).unify_dictionaries().combine_chunks()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], _ENCODED)
        columns[name] = PARSERS[name](encoded.dictionary).take(encoded.indices)
        if columns[name].null_count > (0 if name == LABEL else encoded.null_count):
            wrong = pc.is_null(columns[name])
            wrong = wrong if name == LABEL else pc.and_(encoded.indices.is_valid(), wrong)
            for at in np.flatnonzero(wrong.to_numpy(zero_copy_only=False)):
                text = (encoded[int(at)].as_py() or b"").decode(errors="backslashreplace")
                reasons.setdefault(int(at), f"{name} is {text!r}, expected {EXPECTED_TEXT[name]}")
    return columns, reasons


def _malformed_lines(block: Block, layout: TextLayout, reasons: dict[int, str]) -> Iterator[tuple[int, str, str]]:
    """Line number, reason and original text of the block's malformed lines."""
    row, delimiter = 0, layout.delimiter.encode()
    for number, line in enumerate(block.content.split(b"\n"), start=block.first_line):
        stripped = line.removesuffix(b"\r")
        if not stripped:
            continue
        num_fields = stripped.count(delimiter) + 1
        reason: str | None = f"{num_fields} columns, expected {len(layout.columns)}"
        if num_fields == len(layout.columns):
            reason = reasons.get(row)
            row += 1
        if reason:
            yield number, reason, stripped.decode(errors="backslashreplace")


def parse_hex(distinct: Any) -> Any:
    """The int64 values of categories (binary array); null where a value is not 1 to 8 hex digits.

    >>> parse_hex(pa.array([b"ff", b"0x1f", None])).to_pylist()
    [255, None, None]
    """
    return pc.binary_join_element_wise("0x", _matching(distinct, HEX_PATTERN), "").cast(pa.int64())


def _parse_integers(distinct: Any) -> Any:
    return _matching(distinct, INTEGER_PATTERN).cast(pa.float64()).cast(pa.float32())


def _parse_labels(distinct: Any) -> Any:
    return _matching(distinct, "^[01]$").cast(pa.int32())


def _matching(distinct: Any, pattern: str) -> Any:
    """The values that match, as strings; null elsewhere."""
    matches = pc.match_substring_regex(distinct, pattern)
    return pc.if_else(matches, distinct, pa.scalar(None, distinct.type)).cast(pa.string())


PARSERS = {
    LABEL: _parse_labels,
    **dict.fromkeys(DENSE, _parse_integers),
    **dict.fromkeys(CATEGORICAL, parse_hex),
}
"""By column: distinct values (binary array) to an array of the raw type, null where a value is malformed."""
