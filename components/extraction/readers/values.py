"""Text fields to typed values, on arrays: one column's distinct values at a time, or fixed-width hex digits.

Follows `contracts.criteo.parse_integer` and `parse_category`; a value that they refuse is null here. Which line a
refused value stands in is left to `fields`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE, HEX_PATTERN, INTEGER_PATTERN, LABEL

HEX_WIDTH = 8
"""Digits of a category as Criteo writes every one."""
_NIBBLE = np.zeros(256, dtype=np.int64)
_NIBBLE[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_NIBBLE[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)
_PLACES = 16 ** np.arange(HEX_WIDTH - 1, -1, -1, dtype=np.int64)
_NO_DIGITS = 0x8000


def _byte_of_digits() -> NDArray[np.uint16]:
    """The byte that two hex digits spell, by the little-endian number that they are in memory; 0 for zero bytes."""
    table = np.full(1 << 16, _NO_DIGITS, np.uint16)
    digits = np.frombuffer(b"0123456789abcdefABCDEF", np.uint8).astype(np.int64)
    high, low = np.meshgrid(digits, digits, indexing="ij")
    table[high | low << 8] = _NIBBLE[high] << 4 | _NIBBLE[low]
    table[0] = 0
    return table


_BYTE_OF_DIGITS = _byte_of_digits()


def parse_hex(distinct: Any) -> Any:
    """The int64 values of categories (binary array); null where one is not 1 to 8 hex digits."""
    text = _matching(distinct, HEX_PATTERN)
    if not len(text):
        return pa.array([], pa.int64())
    padded = pc.ascii_lpad(text.fill_null("0"), HEX_WIDTH, "0")
    digits: NDArray[np.uint8] = np.frombuffer(padded.buffers()[2], np.uint8)[: HEX_WIDTH * len(text)]
    codes = _NIBBLE[digits.reshape(-1, HEX_WIDTH)] @ _PLACES
    return pa.array(codes, mask=text.is_null().to_numpy(zero_copy_only=False))


def parse_hex_of_width(fields: Any) -> Any | None:
    """The int64 values of categories of 8 characters (fixed-size binary array, nulls allowed).

    None where a value is not hex digits: zero bytes, with which Arrow fills a null's place, count as digits here and
    must have been ruled out. Faster than `parse_hex`: a table is asked about two characters at a time, and no
    dictionary is built.
    """
    start, end = fields.offset * HEX_WIDTH, (fields.offset + len(fields)) * HEX_WIDTH
    characters = np.frombuffer(fields.buffers()[1] or b"", "<u2")[start // 2 : end // 2]
    # "clip" spares numpy a check of bounds, which 16 bits cannot leave.
    found = _BYTE_OF_DIGITS.take(characters, mode="clip")
    if len(found) and found.max() == _NO_DIGITS:
        return None
    codes = found.astype(np.uint8).view(">u4").astype(np.int64)
    if not fields.null_count:
        return pa.array(codes)
    validity = fields.buffers()[0] if not fields.offset else fields.is_valid().buffers()[1]
    return pa.Array.from_buffers(pa.int64(), len(fields), [validity, pa.py_buffer(codes)], fields.null_count)


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
"""By column: distinct values (binary array) to an array of the raw type, null where one is malformed."""
