"""Read the training rows once, and compute TFDV's statistics of them.

As in TFDV's Beam pipeline, TFDV's in-memory generators receive the rows batch by batch. A process
keeps one batch in memory: 10 MB with 39 features. `generate_statistics_from_dataframe` gives the
same numbers but needs all rows in memory. Processes are forked, so that TFDV is imported once.

Counts do not depend on the division into batches and processes. Moments differ only by rounding.
Quantiles, and top values of columns with more than 1024 distinct values, come from TFDV's mergeable
sketches. `beam_job` computes the same statistics on a runner of Beam. A `ProfileCounter` counts the
histograms for comparisons in the same pass.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow_data_validation as tfdv
from tensorflow_data_validation.statistics import stats_impl
from tensorflow_metadata.proto.v0 import schema_pb2, statistics_pb2
from tfx_bsl.arrow.table_util import CanonicalizeRecordBatch

from evergreen.config.features import Features
from evergreen.contracts import raw_rows
from evergreen.rows.archived_rows import parquet_file, reading_parquet
from evergreen.rows.raw_schema import BATCH_ROWS
from evergreen.runtime.errors import ContractError
from evergreen.runtime.forked import run_all, shares, usual_processes
from evergreen.statistics.profile_counter import ProfileCounter

_ROWS_PER_PROCESS = 25_000
"""Minimum number of rows for each additional process."""


@dataclass(frozen=True, kw_only=True)
class ColumnStatistics:
    """TFDV's statistics of one column. A number that does not exist is None."""

    num_values: int
    """Number of rows in which the column has a value."""
    num_missing: int
    """Number of rows in which the column has no value."""
    distinct: int | None
    """Approximate number of categories. None if the column is numeric."""
    least: float | None
    most: float | None
    median: float | None
    mean: float | None
    std: float | None

    @property
    def num_rows(self) -> int:
        """Number of rows, with and without a value."""
        return self.num_values + self.num_missing

    @property
    def missing_share(self) -> float | None:
        """Share of rows in which the column has no value. None if there are no rows."""
        return self.num_missing / self.num_rows if self.num_rows else None


@dataclass(frozen=True)
class TableStatistics:
    """TFDV's statistics of a table."""

    message: Any
    """The statistics as TFDV's `DatasetFeatureStatisticsList` of one data set."""

    @property
    def num_rows(self) -> int:
        """Number of rows that the statistics describe."""
        return int(self.message.datasets[0].num_examples) if self.message.datasets else 0

    @cached_property
    def columns(self) -> dict[str, ColumnStatistics]:
        """Statistics of each column, by its name."""
        features = self.message.datasets[0].features
        return {feature.path.step[0]: _column_statistics(feature) for feature in features}

    def write(self, path: Path) -> None:
        """Write the statistics to a binary file, which `read_statistics` reads."""
        path.write_bytes(self.message.SerializeToString(deterministic=True))


# -- reading rows


def checked_columns(features: Features) -> tuple[str, ...]:
    """Return the columns that validation checks, in the order of files."""
    return (raw_rows.LABEL, *features.names)


class FilePart(NamedTuple):
    """One row group of a file."""

    path: Path
    row_group: int
    num_rows: int
    first_row: int
    """Position of the part's first row in the sequence of all files."""


def row_groups(files: Sequence[Path]) -> list[FilePart]:
    """Return the row groups of `files`, in order.

    Raises:
        ContractError: A file is not Parquet.
    """
    parts: list[FilePart] = []
    first = 0
    for path in files:
        with reading_parquet(path):
            metadata = pq.read_metadata(path)
        for group in range(metadata.num_row_groups):
            parts.append(FilePart(path, group, metadata.row_group(group).num_rows, first))
            first += parts[-1].num_rows
    return parts


def read_part(
    part: FilePart, features: Features, *, opened: Any = None
) -> Iterator[pa.RecordBatch]:
    """Yield the checked columns and the dictionary-encoded request ids of `part`, in batches.

    Args:
        part: The row group.
        features: The recommender's features.
        opened: The file as an open binary stream. None means that the function opens `part.path`.

    Raises:
        ContractError: The file is corrupt.
    """
    columns = [*checked_columns(features), raw_rows.REQUEST_ID]
    with reading_parquet(part.path):
        file = parquet_file(
            part.path if opened is None else opened, read_dictionary=[raw_rows.REQUEST_ID]
        )
        # Threads are off, because a forked process would inherit the thread pool but not the
        # threads.
        yield from file.iter_batches(
            BATCH_ROWS, row_groups=[part.row_group], columns=columns, use_threads=False
        )


# -- computing statistics


def make_options(features: Features) -> Any:
    """Return TFDV's options for the training rows: its defaults, and the type of each column."""
    types = {raw_rows.LABEL: schema_pb2.INT}
    types |= dict.fromkeys(features.numeric, schema_pb2.FLOAT)
    types |= dict.fromkeys(features.categorical + features.lists, schema_pb2.BYTES)
    typed = [schema_pb2.Feature(name=name, type=kind) for name, kind in types.items()]
    return tfdv.StatsOptions(schema=schema_pb2.Schema(feature=typed))


def as_lists(batch: pa.RecordBatch, features: Features) -> pa.RecordBatch:
    """Return the checked columns of `batch` as TFDV needs them: a list of values per row.

    Categories become decimal strings. TFDV counts strings as categories without further hints, and
    faster than integers.
    """
    columns = {name: batch.column(name) for name in checked_columns(features)}
    columns |= {name: columns[name].cast(pa.string()) for name in features.categorical}
    columns |= {name: columns[name].cast(pa.list_(pa.string())) for name in features.lists}
    return CanonicalizeRecordBatch(
        pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    )


def summarize_files(
    files: Sequence[Path], counter: ProfileCounter, *, processes: int | None = None
) -> TableStatistics:
    """Read Parquet files once, and return TFDV's statistics of their rows.

    Without files, the statistics describe 0 rows. Copies of `counter` count the rows, and are
    merged into `counter` in the order of the rows. By default, there are `usual_processes`
    processes. There are fewer processes if a process would otherwise get less than
    `_ROWS_PER_PROCESS` rows.

    Raises:
        ContractError: A file cannot be read.
        TemporaryError: A process was killed.
    """
    parts = [part for part in row_groups(files) if part.num_rows]
    if processes is None:
        total = sum(part.num_rows for part in parts)
        processes = max(1, min(usual_processes(), total // _ROWS_PER_PROCESS))
    generators = stats_impl.get_generators(make_options(counter.features), in_memory=True)

    def count(share: list[FilePart]) -> tuple[list[Any], ProfileCounter]:
        # Copy the counter, because one process may count several shares.
        counted = copy.deepcopy(counter)
        partials = [generator.create_accumulator() for generator in generators]
        for part in share:
            first_row = part.first_row
            for batch in read_part(part, counted.features):
                partials = _add_to_partials(generators, partials, as_lists(batch, counted.features))
                counted.add(batch, first_row)
                first_row += batch.num_rows
                del batch  # free the batch before the next batch is read
        return partials, counted

    divided = shares(parts, processes, weight=lambda part: part.num_rows) if parts else [[]]
    partials, counters = zip(*run_all(count, divided, processes=processes))
    for each in counters:
        counter.merge(each)
    merged = [
        g.merge_accumulators(list(of_shares)) for g, of_shares in zip(generators, zip(*partials))
    ]
    return TableStatistics(stats_impl.extract_statistics_output(merged, generators))


def _add_to_partials(
    generators: Sequence[Any], partials: Sequence[Any], lists: pa.RecordBatch
) -> list[Any]:
    """Add one batch to TFDV's partial statistics.

    The lists need four times the memory of their batch, and are freed when this call returns.
    """
    return [generator.add_input(partial, lists) for generator, partial in zip(generators, partials)]


# -- reading statistics


def read_statistics(path: Path) -> TableStatistics:
    """Read the statistics in the binary file `path`.

    Raises:
        ContractError: The file is absent, or does not contain the statistics of one data set.
    """
    try:
        return parse_statistics(path.read_bytes())
    except Exception as error:  # DecodeError of protobuf has no public base class except Exception
        raise ContractError(f"statistics {path} cannot be read: {error}") from error


def parse_statistics(content: bytes) -> TableStatistics:
    """Parse the serialized statistics of one data set.

    Raises:
        ValueError: There is not exactly one data set. Corrupt bytes raise protobuf's own error.
    """
    statistics = statistics_pb2.DatasetFeatureStatisticsList()
    statistics.ParseFromString(content)
    if len(statistics.datasets) != 1:
        raise ValueError(f"there are {len(statistics.datasets)} data sets, expected 1")
    return TableStatistics(statistics)


def _column_statistics(feature: Any) -> ColumnStatistics:
    """Return the statistics in TFDV's message about one column."""
    kind = feature.WhichOneof("stats") or "num_stats"
    found = getattr(feature, kind)
    num_values = int(found.common_stats.num_non_missing)

    def number(value: float) -> float | None:
        return float(value) if num_values and math.isfinite(value) else None

    is_number = kind == "num_stats"
    return ColumnStatistics(
        num_values=num_values,
        num_missing=int(found.common_stats.num_missing),
        distinct=int(found.unique) if kind == "string_stats" else None,
        least=number(found.min) if is_number else None,
        most=number(found.max) if is_number else None,
        median=number(found.median) if is_number else None,
        mean=number(found.mean) if is_number else None,
        std=number(found.std_dev) if is_number else None,
    )
