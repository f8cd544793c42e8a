"""Stream TFDV's statistics over all training rows, with one batch per process in memory.

As in TFDV's Beam pipeline, TFDV's in-memory generators receive the rows batch by batch. Processes
are forked, so that TFDV is imported once. `generate_statistics_from_dataframe` gives the same
numbers but needs all rows in memory. Counts do not depend on the division into batches and
processes. Moments differ only by rounding. Quantiles, and top values of columns with more than 1024
distinct values, come from TFDV's mergeable sketches. `beam_job` uses Beam's runners, and `windows`
has the histograms for comparisons.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import tensorflow_data_validation as tfdv
from tensorflow_data_validation.statistics import stats_impl
from tensorflow_metadata.proto.v0 import schema_pb2, statistics_pb2
from tfx_bsl.arrow.table_util import CanonicalizeRecordBatch

from components.validation.rows import FilePart, checked_columns, read_part, row_groups
from evergreen.config.features import Features
from evergreen.contracts import raw_rows
from evergreen.runtime.errors import ContractError
from evergreen.runtime.forked import run_all, shares, usual_processes
from evergreen.statistics.profile_counter import ProfileCounter

_ROWS_PER_PROCESS = 25_000
"""Minimum number of rows for each additional process."""


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
