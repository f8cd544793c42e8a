"""Text fields to typed values, on arrays: one column's distinct values at a time.

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
"""Digits of a category at most."""
_NIBBLE = np.zeros(256, dtype=np.int64)
_NIBBLE[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_NIBBLE[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)
_PLACES = 16 ** np.arange(HEX_WIDTH - 1, -1, -1, dtype=np.int64)


def parse_hex(distinct: Any) -> Any:
    """The int64 values of categories (binary array); null where one is not 1 to 8 hex digits."""
    text = _matching(distinct, HEX_PATTERN)
    if not len(text):
        return pa.array([], pa.int64())
    padded = pc.ascii_lpad(text.fill_null("0"), HEX_WIDTH, "0")
    digits: NDArray[np.uint8] = np.frombuffer(padded.buffers()[2], np.uint8)[: HEX_WIDTH * len(text)]
    codes = _NIBBLE[digits.reshape(-1, HEX_WIDTH)] @ _PLACES
    return pa.array(codes, mask=text.is_null().to_numpy(zero_copy_only=False))


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
