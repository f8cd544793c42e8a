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
from collections.abc import Iterator, Sequence
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
        opened: The file as an open binary stream. None = the function opens `part.path`.

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
) -> Any:
    """Read Parquet files once, and return the `DatasetFeatureStatisticsList` of their rows.

    Without files the statistics have zero examples. Copies of `counter` count the rows, and are
    merged into `counter` in the order of the rows. By default, there are `usual_processes`
    processes. There are fewer if a process would otherwise get less than `_ROWS_PER_PROCESS` rows.

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
        # A process may get a second share.
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
    return stats_impl.extract_statistics_output(merged, generators)


def _add_to_partials(
    generators: Sequence[Any], partials: Sequence[Any], lists: pa.RecordBatch
) -> list[Any]:
    """Add one batch to TFDV's partial statistics.

    The lists made from the batch take four times its memory, and are freed when this call returns.
    """
    return [generator.add_input(partial, lists) for generator, partial in zip(generators, partials)]


# -- reading statistics


def read_statistics(path: Path) -> Any:
    """Read the statistics in the binary file `path`.

    Raises:
        ContractError: The file is absent, or does not contain the statistics of one data set.
    """
    try:
        return parse_statistics(path.read_bytes())
    except Exception as error:  # DecodeError of protobuf has no public base class except Exception
        raise ContractError(f"statistics {path} cannot be read: {error}") from error


def parse_statistics(content: bytes) -> Any:
    """Parse the serialized statistics of one data set.

    Raises:
        ValueError: There is not exactly one data set. Corrupt bytes raise protobuf's own error.
    """
    statistics = statistics_pb2.DatasetFeatureStatisticsList()
    statistics.ParseFromString(content)
    if len(statistics.datasets) != 1:
        raise ValueError(f"there are {len(statistics.datasets)} data sets, expected 1")
    return statistics


def by_feature(statistics: Any | None) -> dict[str, Any]:
    """Return the feature statistics by column name.

    Returns an empty dict if the argument is None.
    """
    if statistics is None:
        return {}
    return {feature.path.step[0]: feature for feature in statistics.datasets[0].features}


def num_rows(statistics: Any) -> int:
    """Return the number of rows that the statistics describe."""
    return int(statistics.datasets[0].num_examples) if statistics.datasets else 0


def num_values(feature: Any) -> int:
    """Return the number of rows in which the column has a value. 0 without statistics."""
    return int(_common_statistics(feature).num_non_missing) if feature is not None else 0


def num_missing(feature: Any) -> int:
    """Return the number of rows in which the column has no value. 0 without statistics."""
    return int(_common_statistics(feature).num_missing) if feature is not None else 0


def missing_share(feature: Any) -> float | None:
    """Return the share of rows in which the column has no value, or None without rows."""
    present, missing = num_values(feature), num_missing(feature)
    return missing / (present + missing) if present + missing else None


def _common_statistics(feature: Any) -> Any:
    return getattr(feature, feature.WhichOneof("stats") or "num_stats").common_stats
