"""Delimited text to raw rows: what every text form shares. One form differs from another by its `Layout` alone.

pyarrow splits the fields and encodes each column as a dictionary; values are then checked and parsed once per distinct
value. Only a block that holds something malformed is looked at line by line. Quoting does not exist in these forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE, EXPECTED_TEXT, HEX_PATTERN, INTEGER_PATTERN, LABEL
from components.extraction.raw_schema import CLICK_COLUMNS, raw_batch, without_rows
from components.extraction.readers.blocks import Block, blocks
from components.extraction.set_aside import SetAside

_NIBBLE = np.zeros(256, dtype=np.int64)
_NIBBLE[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_NIBBLE[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)
_PLACES = 16 ** np.arange(7, -1, -1, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one text form writes a row."""

    delimiter: str
    columns: tuple[str, ...]
    """The raw column in each field, in file order; fields of other names are passed over."""
    has_header: bool
    """Whether the first line holds names."""


def read_rows(path: Path, layout: Layout, set_aside: SetAside) -> Iterator[Any]:
    """Raw record batches of a text file; empty lines do not count.

    Raises:
        ContractError: see `Reader.batches`.
    """
    for block in blocks(path):
        if layout.has_header and block.first_line == 1:
            block = Block(2, block.content.partition(b"\n")[2])
        if not block.content.strip(b"\r\n"):
            continue
        table, num_ragged = _split(block.content, layout)
        columns, reasons = _parse(table)
        if num_ragged or reasons:
            for line, reason, text in _malformed(block, layout, reasons):
                set_aside.add(path, line, reason, text)
        set_aside.saw(path, table.num_rows + num_ragged)
        batch = without_rows(raw_batch(columns), reasons)
        if batch.num_rows:
            yield batch


def _split(content: bytes, layout: Layout) -> tuple[Any, int]:
    """The fields of all lines with the right number of them, dictionary-encoded, and how many lines have another."""
    if b"\r" in content:
        # pyarrow would end a line at a lone carriage return; as a character it makes its field malformed.
        content = content.replace(b"\r\n", b"\n").replace(b"\r", b"?")
    num_ragged = 0

    def skip(_: Any) -> str:
        nonlocal num_ragged
        num_ragged += 1
        return "skip"

    table = pv.read_csv(
        pa.BufferReader(content),
        read_options=pv.ReadOptions(column_names=list(layout.columns), block_size=len(content) + 1),
        parse_options=pv.ParseOptions(delimiter=layout.delimiter, quote_char=False, invalid_row_handler=skip),
        convert_options=pv.ConvertOptions(
            # Binary, because a byte that is not UTF-8 must spoil its line and not the file.
            column_types=dict.fromkeys(CLICK_COLUMNS, pa.dictionary(pa.int32(), pa.binary())),
            include_columns=list(CLICK_COLUMNS),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    return table, num_ragged


def _parse(table: Any) -> tuple[dict[str, Any], dict[int, str]]:
    """Typed columns, null where a value is malformed; and per malformed row the first reason."""
    columns: dict[str, Any] = {}
    reasons: dict[int, str] = {}
    for name in CLICK_COLUMNS:
        encoded = table.column(name).unify_dictionaries().combine_chunks()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], encoded.type)
        distinct, indices = encoded.dictionary, encoded.indices
        values = _PARSERS[name](distinct)
        columns[name] = values.take(indices)
        if values.null_count or name == LABEL:
            wrong = pc.is_null(columns[name]) if name == LABEL else pc.and_(indices.is_valid(), columns[name].is_null())
            for at in np.flatnonzero(wrong.to_numpy(zero_copy_only=False)):
                text = (encoded[int(at)].as_py() or b"").decode(errors="backslashreplace")
                reasons.setdefault(int(at), f"{name} is {text!r}, expected {EXPECTED_TEXT[name]}")
    return columns, reasons


def _malformed(block: Block, layout: Layout, reasons: dict[int, str]) -> Iterator[tuple[int, str, str]]:
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
    """The int64 values of categories (binary array); null where one is not 1 to 8 hex digits.

    `contracts.criteo.parse_category` on arrays.
    """
    text = _matching(distinct, HEX_PATTERN)
    if not len(text):
        return pa.array([], pa.int64())
    padded = pc.ascii_lpad(text.fill_null("0"), 8, "0")
    digits: NDArray[np.uint8] = np.frombuffer(padded.buffers()[2], np.uint8)[: 8 * len(text)].reshape(-1, 8)
    return pa.array(_NIBBLE[digits] @ _PLACES, mask=text.is_null().to_numpy(zero_copy_only=False))


def _parse_integers(distinct: Any) -> Any:
    return _matching(distinct, INTEGER_PATTERN).cast(pa.float64()).cast(pa.float32())


def _parse_labels(distinct: Any) -> Any:
    return _matching(distinct, "^[01]$").cast(pa.int32())


def _matching(distinct: Any, pattern: str) -> Any:
    """The values that match, as strings; null elsewhere."""
    matches = pc.match_substring_regex(distinct, pattern)
    return pc.if_else(matches, distinct, pa.scalar(None, distinct.type)).cast(pa.string())


_PARSERS = {
    LABEL: _parse_labels,
    **dict.fromkeys(DENSE, _parse_integers),
    **dict.fromkeys(CATEGORICAL, parse_hex),
}
