"""Matured rows scored by both arms of a canary, as the monitor archives them."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TYPES = {
    "request_id": pa.string(),
    "row": pa.int32(),
    "event_time": pa.timestamp("us", tz="UTC"),
    "label": pa.int32(),
    "model_version": pa.int32(),
    "score": pa.float32(),
    "shadow_version": pa.int32(),
    "shadow_score": pa.float32(),
    "user": pa.int64(),
}


def write_shadow_rows(path, **columns):
    """Write the columns as a Parquet file, atomically. A scalar fills a whole column."""
    num_rows = len(columns["request_id"])
    arrays = {}
    for name, values in columns.items():
        one_of_all = not np.ndim(values)
        arrays[name] = pa.array(
            [values] * num_rows if one_of_all else list(values), TYPES[name], from_pandas=False
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    pq.write_table(pa.table(arrays), aside)
    aside.rename(path)
