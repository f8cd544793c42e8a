"""TFDV's statistics of a table by the code that the step runs: from a Parquet file, batch by batch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.validation.rows import BATCH_ROWS, COLUMNS
from components.validation.tfdv_statistics import summarize_files


def statistics_of(table: pa.Table, *, batch_rows: int = BATCH_ROWS) -> Any:
    """The statistics of the judged columns of `table`, counted by one process in batches of `batch_rows`."""
    columns = [name for name in table.column_names if name in COLUMNS]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part-0.parquet"
        pq.write_table(table, path, row_group_size=batch_rows)
        return summarize_files([path], columns)
