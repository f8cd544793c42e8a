"""TFDV statistics over all training rows, streamed: one batch is in memory at a time.

Feeds TFDV's own in-memory generators batch by batch, as its Beam pipeline does; `generate_statistics_from_dataframe`
on the same rows and options gives the same numbers but needs all rows at once. Counts and moments do not depend on the
batches; quantiles, and top values of columns with more than 1024 distinct values, come from mergeable sketches.

Categories go in as decimal strings: TFDV takes strings as categories without being told, and counts the bytes of an
integer category in Python, value by value (measured: 123k rows/s instead of 192k).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.contracts import criteo
from components.contracts.errors import ContractError
from components.validation.log_histogram import NAME, LogHistogramGenerator
from components.validation.schema import make_type_schema
from components.validation.tfdv import statistics_pb2, stats_impl, table_util, tfdv

NUM_RANKED_VALUES = 1000
"""Categories per column whose counts are kept."""
CERTAIN_ROWS = 10
"""Expected rows from which on absence is no accident (e^-10)."""


def make_options() -> Any:
    """TFDV's options for the training rows: 20 top values and a histogram of the 1000 most frequent per category."""
    return tfdv.StatsOptions(
        schema=make_type_schema(),
        generators=[LogHistogramGenerator()],
        num_top_values=20,
        num_rank_histogram_buckets=NUM_RANKED_VALUES,
    )


def summarize(batches: Iterable[pa.RecordBatch]) -> Any:
    """The `DatasetFeatureStatisticsList` of all rows; null counts as missing. No batches give zero examples."""
    generators = stats_impl.get_generators(make_options(), in_memory=True)
    partials = [generator.create_accumulator() for generator in generators]
    for batch in batches:
        lists = table_util.CanonicalizeRecordBatch(_with_strings(batch))
        partials = [g.add_input(partial, lists) for g, partial in zip(generators, partials)]
    return stats_impl.extract_statistics_output(partials, generators)


def _with_strings(batch: pa.RecordBatch) -> pa.RecordBatch:
    names = batch.schema.names
    columns = [c.cast(pa.string()) if n in criteo.CATEGORICAL else c for n, c in zip(names, batch.columns)]
    return pa.RecordBatch.from_arrays(columns, names)


def read_statistics(path: Path) -> Any:
    """The statistics in the binary file `path`.

    Raises:
        ContractError: the file is absent or does not hold the statistics of one data set.
    """
    statistics = statistics_pb2.DatasetFeatureStatisticsList()
    try:
        statistics.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError has no public base but Exception
        raise ContractError(f"statistics {path} cannot be read: {error}") from error
    if len(statistics.datasets) != 1:
        raise ContractError(f"statistics {path} hold {len(statistics.datasets)} data sets, expected 1")
    return statistics


def by_feature(statistics: Any) -> dict[str, Any]:
    """The feature statistics by column name."""
    return {feature.path.step[0]: feature for feature in statistics.datasets[0].features}


def num_rows(statistics: Any) -> int:
    """Number of rows that the statistics describe."""
    return int(statistics.datasets[0].num_examples) if statistics.datasets else 0


def num_values(feature: Any) -> int:
    """Number of rows in which the column has a value; 0 for a column without statistics."""
    return int(_common(feature).num_non_missing) if feature is not None else 0


def num_missing(feature: Any) -> int:
    """Number of rows in which the column has no value; 0 for a column without statistics."""
    return int(_common(feature).num_missing) if feature is not None else 0


def missing_share(feature: Any) -> float | None:
    """Share of rows in which the column has no value; None without rows."""
    present, missing = num_values(feature), num_missing(feature)
    return missing / (present + missing) if present + missing else None


def log_histogram(feature: Any) -> Any | None:
    """The dense column's histogram over `log_histogram.EDGES`; None where it was not computed."""
    for statistic in feature.custom_stats if feature is not None else ():
        if statistic.name == NAME:
            return statistic.histogram
    return None


def value_counts(feature: Any) -> dict[str, float]:
    """Rows per category for the 1000 most frequent ones, most frequent first; empty without values."""
    if feature is None or feature.WhichOneof("stats") != "string_stats":
        return {}
    return {bucket.label: bucket.sample_count for bucket in feature.string_stats.rank_histogram.buckets}


def _common(feature: Any) -> Any:
    return getattr(feature, feature.WhichOneof("stats") or "num_stats").common_stats
