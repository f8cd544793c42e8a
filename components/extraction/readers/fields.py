"""Delimited text to raw rows: what every text form shares. One form differs from another by its `Layout` alone.

A block in which all is well is read the short way (`sound`). Any other is split by pyarrow and checked by column and
distinct value, and what is malformed is then found line by line. Quoting does not exist in these forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv

from components.contracts.criteo import EXPECTED_TEXT, LABEL
from components.extraction.raw_schema import CLICK_COLUMNS, raw_batch, without_rows
from components.extraction.readers.ahead import in_order
from components.extraction.readers.blocks import Block, blocks
from components.extraction.readers.sound import parse_sound
from components.extraction.readers.values import PARSERS
from components.extraction.set_aside import SetAside
from components.runtime.allocator import keep_freed_memory

_ENCODED = pa.dictionary(pa.int32(), pa.binary())
"""Binary, because a byte that is not UTF-8 must spoil its line and not the file."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one text form writes a row."""

    delimiter: str
    columns: tuple[str, ...]
    """The raw column in each field, in file order; fields of other names are passed over."""
    has_header: bool
    """Whether the first line holds names."""


class Parsed(NamedTuple):
    """A block's rows."""

    batch: Any
    """The sound ones, in the raw schema."""
    malformed: list[tuple[int, str, str]]
    """Line number, reason and original text of each other."""


def read_rows(path: Path, layout: Layout, set_aside: SetAside) -> Iterator[Any]:
    """Raw record batches of a text file; empty lines do not count.

    Blocks are unpacked and parsed ahead by threads; what is set aside and counted is so in the order of the file, and
    not before the caller has come to it.

    Raises:
        ContractError: see `Reader.batches`.
    """
    # Every block makes and drops the same few megabytes: 28,000 page faults instead of 124,000 for 400,000 Criteo rows
    # read and written, 1.36 processor seconds instead of 1.71.
    keep_freed_memory()
    for parsed in in_order(blocks(path), partial(parse_block, layout=layout)):
        for line, reason, text in parsed.malformed:
            set_aside.add(path, line, reason, text)
        set_aside.saw(path, parsed.batch.num_rows + len(parsed.malformed))
        if parsed.batch.num_rows:
            yield parsed.batch


def parse_block(block: Block, layout: Layout) -> Parsed:
    """The rows of a block."""
    if layout.has_header and block.first_line == 1:
        block = Block(2, block.content.partition(b"\n")[2])
    # Not stripped at the end too, which would copy the block.
    if not block.content.lstrip(b"\r\n"):
        return Parsed(raw_batch({LABEL: pa.array([], pa.int32())}), [])
    if (batch := parse_sound(lines_of(block.content), layout.delimiter, layout.columns)) is not None:
        return Parsed(batch, [])
    return parse_carefully(block, layout)


def parse_carefully(block: Block, layout: Layout) -> Parsed:
    """The rows of any block."""
    content, is_ragged = lines_of(block.content), False
    try:
        table = _split(content, layout)
    except pa.ArrowInvalid:
        # Their only reason, since every type takes any bytes. pyarrow itself could pass over such lines, but not over
        # those that are no UTF-8: it decodes them for whoever is asked.
        is_ragged = True
        table = _split(_without_ragged_lines(content, layout), layout)
    columns, reasons = _parse(table)
    malformed = list(_malformed(block, layout, reasons)) if is_ragged or reasons else []
    return Parsed(without_rows(raw_batch(columns), reasons), malformed)


def _without_ragged_lines(content: bytes, layout: Layout) -> bytes:
    delimiter, num_delimiters = layout.delimiter.encode(), len(layout.columns) - 1
    return b"".join(line for line in content.splitlines(keepends=True) if line.count(delimiter) == num_delimiters)


def _split(content: bytes, layout: Layout) -> Any:
    """The fields of all lines as dictionary-encoded bytes.

    Raises:
        pa.ArrowInvalid: a line has another number of fields.
    """
    if not content:
        return pa.table({name: pa.array([], _ENCODED) for name in CLICK_COLUMNS})
    return pv.read_csv(
        pa.BufferReader(content),
        # Blocks are the threads' work already (`in_order`).
        read_options=pv.ReadOptions(column_names=list(layout.columns), block_size=len(content) + 1, use_threads=False),
        parse_options=pv.ParseOptions(delimiter=layout.delimiter, quote_char=False),
        convert_options=pv.ConvertOptions(
            column_types=dict.fromkeys(CLICK_COLUMNS, _ENCODED),
            include_columns=list(CLICK_COLUMNS),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


def lines_of(content: bytes) -> bytes:
    """`content` with each line ended by a newline alone, the last one too."""
    if b"\r" in content:
        # pyarrow would end a line at a lone carriage return; as a character it makes its field malformed.
        content = content.replace(b"\r\n", b"\n").replace(b"\r", b"?")
    return content if content.endswith(b"\n") else content + b"\n"


def _one_array(column: Any) -> Any:
    """A column of `_split` as one array."""
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        combined = combined.chunk(0) if combined.num_chunks else pa.array([], combined.type)
    return combined


def _values_of(name: str, encoded: Any) -> Any:
    """Typed values of a dictionary-encoded column, null where one is missing or malformed."""
    return PARSERS[name](encoded.dictionary).take(encoded.indices)


def _parse(table: Any) -> tuple[dict[str, Any], dict[int, str]]:
    """Typed columns, null where a value is malformed; and per malformed row the first reason."""
    columns: dict[str, Any] = {}
    reasons: dict[int, str] = {}
    for name in CLICK_COLUMNS:
        encoded = _one_array(table.column(name))
        columns[name] = _values_of(name, encoded)
        if columns[name].null_count > (0 if name == LABEL else encoded.null_count):
            wrong = pc.is_null(columns[name])
            wrong = wrong if name == LABEL else pc.and_(encoded.indices.is_valid(), wrong)
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
