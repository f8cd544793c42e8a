"""TFDV's statistics over all training rows, streamed: each process holds one batch at a time.

Feeds TFDV's own in-memory generators batch by batch, as its Beam pipeline does, in forked processes, so that TFDV is
imported once. `generate_statistics_from_dataframe` gives the same numbers but needs all rows at once. Counts, and
moments except for rounding, do not depend on batches and processes; quantiles, and top values of columns with more than
1024 distinct values, come from TFDV's mergeable sketches. Beam's runners are left to `beam_job`.

One histogram is ours (`LogHistogramGenerator`), because TFDV's own do not carry a comparison of Criteo's integers: ten
equal widths put nearly all rows of a heavy-tailed column into the first bucket, whose width moves with the maximum
(measured: Jensen-Shannon divergence 0.18 between two samples of one distribution, 0.006 for a shift by half a standard
deviation), and quantile buckets flicker at the ties of small integers. It lies beside TFDV's in `custom_stats`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import tensorflow_data_validation as tfdv
from numpy.typing import NDArray
from tensorflow_data_validation.statistics import stats_impl
from tensorflow_data_validation.statistics.generators.stats_generator import CombinerStatsGenerator
from tensorflow_metadata.proto.v0 import schema_pb2, statistics_pb2
from tfx_bsl.arrow.table_util import CanonicalizeRecordBatch

from components.contracts import criteo
from components.contracts.reference_statistics import DENSE_EDGES, count_between
from components.runtime.errors import ContractError
from components.runtime.forked import MAX_PROCESSES, available_cores, run_all
from components.validation.rows import COLUMNS, FilePart, divide, read_part

LOG_HISTOGRAM = "log_histogram"
ROWS_PER_PROCESS = 50_000
"""Fewer are not worth another process."""


class RowCounter(Protocol):
    """What counts the rows along with TFDV; instances are pickled."""

    def add(self, batch: pa.RecordBatch, first_row: int) -> None:
        """Counts raw rows, of which the first is row `first_row` of all."""

    def merge(self, other: Any) -> None:
        """Adds what another counter of the same kind counted of other rows."""


class LogHistogramGenerator(CombinerStatsGenerator):
    """Counts the values of I1..I13 between `DENSE_EDGES`; NaN is in no bucket, infinity in an outer one."""

    def __init__(self) -> None:
        super().__init__(LOG_HISTOGRAM)

    def create_accumulator(self) -> dict[str, NDArray[np.int64]]:
        """No values yet."""
        return {}

    def add_input(self, accumulator: Any, input_record_batch: pa.RecordBatch) -> Any:
        """`accumulator` with the list columns of a batch counted in."""
        for name in set(criteo.DENSE) & set(input_record_batch.schema.names):
            values = np.asarray(input_record_batch.column(name).flatten(), dtype=np.float64)
            accumulator[name] = accumulator.get(name, 0) + count_between(DENSE_EDGES, values)
        return accumulator

    def merge_accumulators(self, accumulators: Any) -> Any:
        """The sums of several accumulators."""
        merged: dict[str, Any] = {}
        for accumulator in accumulators:
            for name, counts in accumulator.items():
                merged[name] = merged.get(name, 0) + counts
        return merged

    def extract_output(self, accumulator: Any) -> Any:
        """A `DatasetFeatureStatistics` with one custom statistic per dense column."""
        result = statistics_pb2.DatasetFeatureStatistics()
        for name, counts in accumulator.items():
            feature = result.features.add()
            feature.path.step.append(name)
            histogram = feature.custom_stats.add(name=LOG_HISTOGRAM).histogram
            for low, high, count in zip(DENSE_EDGES, DENSE_EDGES[1:], counts):
                histogram.buckets.add(low_value=low, high_value=high, sample_count=float(count))
        return result


def make_type_schema() -> Any:
    """A schema with types only, from which TFDV knows which columns hold categories."""
    schema = schema_pb2.Schema()
    schema.feature.add(name=criteo.LABEL, type=schema_pb2.INT)
    for name in criteo.DENSE:
        schema.feature.add(name=name, type=schema_pb2.FLOAT)
    for name in criteo.CATEGORICAL:
        schema.feature.add(name=name, type=schema_pb2.BYTES)
    return schema


def make_options() -> Any:
    """TFDV's options for the training rows: 20 top values and a histogram of the 1000 most frequent per category."""
    return tfdv.StatsOptions(
        schema=make_type_schema(),
        generators=[LogHistogramGenerator()],
        num_top_values=20,
        num_rank_histogram_buckets=1000,
    )


def as_lists(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The judged columns of `batch` as TFDV takes them: a list of values per row, categories as decimal strings.

    TFDV counts strings as categories without further hints, and faster than integers.
    """
    columns = {name: batch.column(name) for name in batch.schema.names if name in COLUMNS}
    columns |= {name: columns[name].cast(pa.string()) for name in criteo.CATEGORICAL if name in columns}
    return CanonicalizeRecordBatch(pa.RecordBatch.from_arrays(list(columns.values()), list(columns)))


def summarize_files(
    files: Sequence[Path],
    columns: Sequence[str],
    counters: Sequence[RowCounter] = (),
    *,
    processes: int | None = None,
) -> Any:
    """The `DatasetFeatureStatisticsList` of the rows of Parquet files, read once.

    Args:
        files: Parquet files of raw rows; no files give zero examples.
        columns: Those to read; TFDV is given the judged ones among them.
        counters: Copies of them are given every row, and are merged into them in the order of the rows.
        processes: Rows are divided among as many; None = one per core, at most `MAX_PROCESSES`, and fewer if there are
            not `ROWS_PER_PROCESS` rows for each.

    Raises:
        ContractError: a file cannot be read.
        TemporaryError: a process was killed.
    """
    if processes is None:
        total = sum(part.num_rows for share in divide(files, 1) for part in share)
        processes = max(1, min(available_cores(), MAX_PROCESSES, total // ROWS_PER_PROCESS))
    generators = stats_impl.get_generators(make_options(), in_memory=True)

    def count(share: list[FilePart]) -> tuple[list[Any], Sequence[RowCounter]]:
        # A process may be given a second share.
        copies = copy.deepcopy(counters)
        partials = [generator.create_accumulator() for generator in generators]
        for part in share:
            first_row = part.first_row
            for batch in read_part(part, columns):
                partials = _add_to_partials(generators, partials, as_lists(batch))
                for counter in copies:
                    counter.add(batch, first_row)
                first_row += batch.num_rows
                del batch  # before the next one is read
        return partials, copies

    counted = run_all(count, divide(files, processes), processes=processes)
    for _, others in counted:
        for counter, other in zip(counters, others):
            counter.merge(other)
    merged = [g.merge_accumulators(list(parts)) for g, parts in zip(generators, zip(*(p for p, _ in counted)))]
    return stats_impl.extract_statistics_output(merged, generators)


def _add_to_partials(generators: Sequence[Any], partials: Sequence[Any], lists: pa.RecordBatch) -> list[Any]:
    """The accumulators with a batch added. Only this call holds the lists, four times as large as the batch."""
    return [generator.add_input(partial, lists) for generator, partial in zip(generators, partials)]


# -- reading statistics


def read_statistics(path: Path) -> Any:
    """The statistics in the binary file `path`.

    Raises:
        ContractError: the file is absent or does not hold the statistics of one data set.
    """
    try:
        return parse_statistics(path.read_bytes(), path)
    except OSError as error:
        raise ContractError(f"statistics {path} cannot be read: {error}") from error


def parse_statistics(content: bytes, origin: object) -> Any:
    """The statistics whose serialized form is `content`.

    Raises:
        ContractError: they are not the statistics of one data set; the message names `origin`.
    """
    statistics = statistics_pb2.DatasetFeatureStatisticsList()
    try:
        statistics.ParseFromString(content)
    except Exception as error:  # protobuf's DecodeError has no public base but Exception
        raise ContractError(f"statistics {origin} cannot be read: {error}") from error
    if len(statistics.datasets) != 1:
        raise ContractError(f"statistics {origin} hold {len(statistics.datasets)} data sets, expected 1")
    return statistics


def by_feature(statistics: Any | None) -> dict[str, Any]:
    """The feature statistics by column name; empty for None."""
    if statistics is None:
        return {}
    return {feature.path.step[0]: feature for feature in statistics.datasets[0].features}


def num_rows(statistics: Any) -> int:
    """Number of rows that the statistics describe."""
    return int(statistics.datasets[0].num_examples) if statistics.datasets else 0


def num_values(feature: Any) -> int:
    """Number of rows in which the column has a value; 0 for a column without statistics."""
    return int(_common_statistics(feature).num_non_missing) if feature is not None else 0


def num_missing(feature: Any) -> int:
    """Number of rows in which the column has no value; 0 for a column without statistics."""
    return int(_common_statistics(feature).num_missing) if feature is not None else 0


def missing_share(feature: Any) -> float | None:
    """Share of rows in which the column has no value; None without rows."""
    present, missing = num_values(feature), num_missing(feature)
    return missing / (present + missing) if present + missing else None


def _common_statistics(feature: Any) -> Any:
    return getattr(feature, feature.WhichOneof("stats") or "num_stats").common_stats


def log_histogram(feature: Any) -> Any | None:
    """The dense column's histogram over `DENSE_EDGES`; None if it was not computed."""
    for statistic in feature.custom_stats if feature is not None else ():
        if statistic.name == LOG_HISTOGRAM:
            return statistic.histogram
    return None


def value_counts(feature: Any) -> dict[str, float]:
    """Rows per category for the 1000 most frequent ones, most frequent first; empty without values."""
    if feature is None or feature.WhichOneof("stats") != "string_stats":
        return {}
    return {bucket.label: bucket.sample_count for bucket in feature.string_stats.rank_histogram.buckets}


def dense_quantiles(statistics: Any, quantile: float) -> dict[str, tuple[float, float]]:
    """Per integer feature with values: a number at or below its (1 - q)-quantile, and one at or above its q-quantile.

    They are the outer edges of the log histogram's buckets that hold the quantiles, or the extremes if those are
    nearer; so at most a share `1 - quantile` of the values lies beyond each.
    """
    ends = {}
    for name, feature in by_feature(statistics).items():
        histogram = log_histogram(feature)
        if name not in criteo.DENSE or histogram is None or not num_values(feature):
            continue
        counts = np.array([bucket.sample_count for bucket in histogram.buckets])
        shares = np.cumsum(counts) / counts.sum()
        # Sums of floats end a little off their value; one bucket too few would put a limit too low.
        low = int(np.searchsorted(shares, 1 - quantile - 1e-12, side="left"))
        high = min(int(np.searchsorted(shares, quantile - 1e-12, side="left")), len(counts) - 1)
        least, most = feature.num_stats.min, feature.num_stats.max
        ends[name] = (max(histogram.buckets[low].low_value, least), min(histogram.buckets[high].high_value, most))
    return {name: pair for name, pair in ends.items() if all(map(math.isfinite, pair))}


# -- TFDV's own drift distances, for people who know them; nothing is decided by them


def tfdv_distances(now: Any, before: Any, excluded: Collection[str] = ()) -> dict[str, float]:
    """TFDV's distance per feature; absent if TFDV has none, or a side has no values.

    Categories: L-infinity, the largest change of one value's share of the rows that have a value, over the 1000 most
    frequent values of each side. Dense columns: Jensen-Shannon divergence in bits over `DENSE_EDGES`.
    """
    features_now, features_before = by_feature(now), by_feature(before)
    schema = schema_pb2.Schema()
    smallest = 1e-6  # TFDV measures only if there is a threshold; what it says about it is ignored
    for name in criteo.FEATURES:
        sides = (features_now.get(name), features_before.get(name))
        if name in excluded or not all(num_values(side) for side in sides):
            continue
        if name in criteo.CATEGORICAL:
            feature = schema.feature.add(name=name, type=schema_pb2.BYTES)
            feature.drift_comparator.infinity_norm.threshold = smallest
        elif all(log_histogram(side) is not None for side in sides):
            comparator = schema.feature.add(name=name, type=schema_pb2.FLOAT).drift_comparator.jensen_shannon_divergence
            comparator.threshold = smallest
            comparator.source.type = schema_pb2.HistogramSelection.STANDARD
    anomalies = tfdv.validate_statistics(
        _with_log_histograms(now), schema, previous_statistics=_with_log_histograms(before)
    )
    return {
        info.path.step[0]: measurement.value
        for info in anomalies.drift_skew_info
        for measurement in info.drift_measurements
        if math.isfinite(measurement.value)
    }


def _with_log_histograms(statistics: Any) -> Any:
    """A copy in which the dense columns' only histogram is the log histogram, where TFDV's comparator looks for it."""
    result = statistics_pb2.DatasetFeatureStatisticsList()
    result.CopyFrom(statistics)
    for name, feature in by_feature(result).items():
        histogram = log_histogram(feature)
        if name in criteo.DENSE and histogram is not None:
            del feature.num_stats.histograms[:]
            feature.num_stats.histograms.add().CopyFrom(histogram)
    return result
