"""Request ids, rows and times for rows that come without, by their place in the source: the same every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from components.contracts.criteo import EVENT_TIME, REQUEST_ID, ROW
from components.extraction.raw_schema import CLICK_COLUMNS, RAW_SCHEMA, raw_batch

ROWS_PER_REQUEST = 100


def with_origin(batch: Any, *, source: str, first_row: int, times: NDArray[np.int64]) -> Any:
    """The click columns of `batch` as rows of requests `<source>-<n>`, 100 rows each.

    Args:
        batch: Has the click columns.
        source: Names where the rows come from.
        first_row: Place of the first row in the source, from 0.
        times: Event times in microseconds, one a row.
    """
    places = first_row + np.arange(batch.num_rows, dtype=np.int64)
    numbers = pc.ascii_lpad(pa.array(places // ROWS_PER_REQUEST).cast(pa.string()), 9, "0")
    return raw_batch(
        {
            **{name: batch.column(name) for name in CLICK_COLUMNS},
            REQUEST_ID: pc.binary_join_element_wise(source, numbers, "-"),
            ROW: pa.array((places % ROWS_PER_REQUEST).astype(np.int32)),
            EVENT_TIME: pa.array(times).cast(RAW_SCHEMA.field(EVENT_TIME).type),
        }
    )


def spread(first_row: int, num_rows: int, *, start: int, length: int, total: int) -> NDArray[np.int64]:
    """Times of rows `first_row` .. when `total` rows lie evenly in [start, start + length) microseconds.

    Row i lies at start + floor(i * length / total).

    >>> spread(1, 3, start=100, length=10, total=4).tolist()
    [102, 105, 107]
    """
    # Whole files have more rows times microseconds than an int64; what is left per batch has not.
    whole, rest = divmod(first_row * length, total)
    return start + whole + (rest + np.arange(num_rows, dtype=np.int64) * length) // total
