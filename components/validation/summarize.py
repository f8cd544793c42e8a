"""TFDV statistics over all training rows, streamed: each process holds one batch at a time.

Feeds TFDV's own in-memory generators batch by batch, as its Beam pipeline does, on the cores there are; processes are
forked, so TFDV is imported once. `generate_statistics_from_dataframe` on the same rows gives the same numbers but needs
all rows at once, and imports TFDV in each of its processes. Counts, and moments but for rounding, do not depend on
batches and processes; quantiles, and top values of columns with more than 1024 distinct values, come from mergeable
sketches. Runners of Beam are left to `beam_job`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from components.runtime.errors import ContractError
from components.runtime.forked import MAX_PROCESSES, available_cores, run_all
from components.validation.lists import as_lists
from components.validation.log_histogram import NAME, LogHistogramGenerator
from components.validation.rows import Part, divide, read_part
from components.validation.schema import make_type_schema
from components.validation.tfdv import BasicStatsGenerator, statistics_pb2, stats_impl, tfdv
from components.validation.top_values import TopValuesGenerator

NUM_RANKED_VALUES = 1000
"""Categories per column whose counts are kept."""
CERTAIN_ROWS = 10
"""Expected rows from which on absence is no accident (e^-10)."""
ROWS_PER_PROCESS = 50_000
"""Fewer are not worth another process."""


class Counter(Protocol):
    """What counts the rows along with TFDV; instances are pickled."""

    def add(self, batch: pa.RecordBatch, first_row: int) -> None:
        """Counts raw rows in, the first of which is row `first_row` of all."""

    def merge(self, other: Any) -> None:
        """Takes in what another of its kind counted, of other rows."""


def make_options() -> Any:
    """TFDV's options for the training rows: 20 top values and a histogram of the 1000 most frequent per category."""
    return tfdv.StatsOptions(
        schema=make_type_schema(),
        add_default_generators=False,
        generators=[
            BasicStatsGenerator(schema=make_type_schema()),
            TopValuesGenerator(num_top_values=20, num_rank_histogram_buckets=NUM_RANKED_VALUES),
            LogHistogramGenerator(),
        ],
    )


def summarize_files(
    files: Sequence[Path], columns: Sequence[str], counters: Sequence[Counter] = (), *, processes: int | None = None
) -> Any:
    """The `DatasetFeatureStatisticsList` of the rows of Parquet files, read once.

    Args:
        files: Parquet files of raw rows; no files give zero examples.
        columns: Those to read; of them, TFDV is given the judged ones.
        counters: Copies of them are given every row, and are merged into them in the rows' order.
        processes: Rows are divided among as many; None = one per core, `MAX_PROCESSES` at most, and fewer where there
            are not `ROWS_PER_PROCESS` for each.

    Raises:
        ContractError: a file cannot be read.
        TemporaryError: a process was killed.
    """
    if processes is None:
        total = sum(part.num_rows for share in divide(files, 1) for part in share)
        processes = max(1, min(available_cores(), MAX_PROCESSES, total // ROWS_PER_PROCESS))
    generators = stats_impl.get_generators(make_options(), in_memory=True)

    def count(share: list[Part]) -> tuple[list[Any], Sequence[Counter]]:
        # A process may be given a second share.
        copies = copy.deepcopy(counters)
        partials = [generator.create_accumulator() for generator in generators]
        for part in share:
            first_row = part.first_row
            for batch in read_part(part, columns):
                partials = _fed(generators, partials, as_lists(batch))
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


def _fed(generators: Sequence[Any], partials: Sequence[Any], lists: pa.RecordBatch) -> list[Any]:
    """The accumulators with a batch counted in. Only this call holds the lists, four times as large as the batch."""
    return [generator.add_input(partial, lists) for generator, partial in zip(generators, partials)]


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
