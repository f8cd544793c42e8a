"""TFDV's statistics of a table in memory.

The validation step computes statistics of a file, batch by batch.
"""

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.validation.tfdv_statistics import TableStatistics, summarize_files
from evergreen.config.features import Features
from evergreen.contracts.criteo import CRITEO
from evergreen.rows.raw_schema import BATCH_ROWS
from evergreen.statistics.profile_counter import ProfileCounter


def statistics_of(
    table: pa.Table, *, batch_rows: int = BATCH_ROWS, features: Features = CRITEO
) -> TableStatistics:
    """Return the statistics of the checked columns of `table`.

    The statistics are computed in one process, in batches of `batch_rows`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part-0.parquet"
        pq.write_table(table, path, row_group_size=batch_rows)
        return summarize_files([path], ProfileCounter(features))


def by_feature(statistics: TableStatistics) -> dict[str, Any]:
    """Return TFDV's message about each column, by the column's name."""
    return {each.path.step[0]: each for each in statistics.message.datasets[0].features}


def value_counts(feature: Any) -> dict[str, float]:
    """Return the row counts of the 1000 most frequent categories, most frequent first.

    Returns an empty list if the column has no values.
    """
    if feature is None or feature.WhichOneof("stats") != "string_stats":
        return {}
    return {
        bucket.label: bucket.sample_count for bucket in feature.string_stats.rank_histogram.buckets
    }
