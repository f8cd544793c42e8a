"""The short way to read a block of text: all fields of all lines at once, as numbers in NumPy arrays.

Every byte of every field is checked. A block that holds anything else than sound lines is None here, and `fields` reads
it the careful way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, DENSE, LABEL
from components.extraction.raw_schema import raw_batch
from components.extraction.readers.values import PARSERS
from components.extraction.readers.words import WIDTH, decimal_values, hex_values, words_at

_NEWLINE, _MINUS, _ZERO = b"\n-0"


class _Fields(NamedTuple):
    """Where the fields of some columns lie in a block; each [columns, lines]."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


def parse_sound(content: bytes, delimiter: str, columns: tuple[str, ...]) -> Any | None:
    """The rows of whole lines as a raw batch; None where a line is empty or a field not as the contract has it.

    Args:
        content: At least one line; ends with a newline. A carriage return is a character like any other.
        delimiter: Between fields.
        columns: The raw column in each field; fields of other names are passed over, whatever they hold.
    """
    fields = _fields(content, delimiter, len(columns))
    if fields is None or (labels := _labels(content, _of(fields, columns, (LABEL,)))) is None:
        return None
    dense, categorical = _of(fields, columns, DENSE), _of(fields, columns, CATEGORICAL)
    if (hashes := _hashes(content, categorical)) is None or (numbers := _numbers(content, dense)) is None:
        return None
    return raw_batch(
        {
            LABEL: pa.array(labels),
            **_arrays(DENSE, numbers, dense.lengths),
            **_arrays(CATEGORICAL, hashes, categorical.lengths),
        }
    )


def _fields(content: bytes, delimiter: str, num_columns: int) -> _Fields | None:
    """All fields; None unless every line has `num_columns` of them."""
    characters = np.frombuffer(content, np.uint8)
    is_newline = characters == _NEWLINE
    num_lines = int(np.count_nonzero(is_newline))
    is_end = characters == ord(delimiter)
    is_end |= is_newline
    ends = np.flatnonzero(is_end)
    if len(ends) != num_lines * num_columns or not is_newline[ends[num_columns - 1 :: num_columns]].all():
        return None
    starts = np.empty((num_columns + 1, num_lines), np.int64)
    np.add(ends.reshape(num_lines, num_columns).T, 1, out=starts[1:])
    starts[0, 0], starts[0, 1:] = 0, starts[-1, :-1]
    lengths = starts[1:] - starts[:-1]
    lengths -= 1
    return _Fields(starts[:-1], lengths)


def _of(fields: _Fields, columns: tuple[str, ...], names: tuple[str, ...]) -> _Fields:
    """The fields of these columns, in the order of `names`."""
    first = columns.index(names[0])
    if columns[first : first + len(names)] == names:
        # As Criteo's files have them: without a copy.
        return _Fields(*(each[first : first + len(names)] for each in fields))
    return _Fields(*(each[[columns.index(name) for name in names]] for each in fields))


def _labels(content: bytes, fields: _Fields) -> NDArray[np.int32] | None:
    labels = np.frombuffer(content, np.uint8)[fields.starts[0]] - np.uint8(_ZERO)
    return None if (labels > 1).any() or (fields.lengths != 1).any() else labels.astype(np.int32)


def _hashes(content: bytes, fields: _Fields) -> NDArray[np.int64] | None:
    """The categories, 0 for an empty field; None where one is malformed."""
    if fields.lengths.max() > WIDTH:
        return None
    values = hex_values(words_at(content, fields.starts), fields.lengths)
    return None if values is None else values.view(np.int64)


def _numbers(content: bytes, fields: _Fields) -> NDArray[np.float32] | None:
    """The integers, 0 for an empty field; None where one is malformed."""
    words = words_at(content, fields.starts)
    negative = words & 0xFF == _MINUS
    words >>= negative * np.uint64(8)
    numbers, odd = decimal_values(words, fields.lengths - negative)
    odd |= fields.lengths > WIDTH
    # A minus without digits is none, and before zero it makes a number of its own in floating point.
    odd |= negative & (numbers == 0)
    np.negative(numbers, out=numbers, where=negative)
    values = numbers.view(np.int64).astype(np.float32)
    for column in np.flatnonzero(odd.any(axis=1)):
        at = np.flatnonzero(odd[column])
        texts = _texts(content, fields.starts[column, at], fields.lengths[column, at]).dictionary_encode()
        parsed = PARSERS[DENSE[column]](texts.dictionary).take(texts.indices)
        if parsed.null_count:
            return None
        values[column, at] = parsed.to_numpy()
    return values


def _texts(content: bytes, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Any:
    """These fields of one column as a binary array."""
    # Arrow takes what lies between two of them for a field of its own.
    bounds = np.column_stack([starts, starts + lengths]).astype(np.int32)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(content)]
    with_between = pa.Array.from_buffers(pa.binary(), bounds.size - 1, buffers)
    return with_between.take(pa.array(np.arange(0, bounds.size, 2)))


def _arrays(names: tuple[str, ...], values: NDArray[Any], lengths: NDArray[np.int64]) -> dict[str, Any]:
    """The columns, null where a field is empty."""
    there, kind = lengths > 0, pa.from_numpy_dtype(values.dtype)
    num_nulls = (there.shape[1] - np.count_nonzero(there, axis=1)).tolist()
    validity = np.packbits(there, axis=1, bitorder="little")
    arrays = {}
    for name, row, bits, nulls in zip(names, values, validity, num_nulls):
        buffers = [pa.py_buffer(bits) if nulls else None, pa.py_buffer(row)]
        arrays[name] = pa.Array.from_buffers(kind, len(row), buffers, nulls)
    return arrays
