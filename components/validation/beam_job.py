"""Compute TFDV's statistics in a Beam pipeline, if they take too long on one machine.

The batches, TFDV's options and the row counter come from `tfdv_statistics`. Beam's options name the
runner that processes the batches. The job returns its results through files in `--temp_location`.
If the location is a bucket, the input files are copied into the bucket, because a runner's machines
cannot read this machine's disk. If that location is a folder, the machines read the input files
directly.
"""

import contextlib
import copy
import io
import logging
import shlex
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apache_beam as beam
import pyarrow as pa
import tensorflow_data_validation as tfdv
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import (
    GoogleCloudOptions,
    PipelineOptions,
    StandardOptions,
    WorkerOptions,
)

from components.validation.tfdv_statistics import (
    FilePart,
    TableStatistics,
    as_lists,
    checked_columns,
    make_options,
    parse_statistics,
    read_part,
    row_groups,
    summarize_files,
)
from evergreen.config.features import Features
from evergreen.runtime.errors import ContractError, TemporaryError, first_line
from evergreen.statistics.profile_counter import ProfileCounter
from evergreen.storage.uris import is_bucket_uri

logger = logging.getLogger(__name__)

NumberedBatch = tuple[int, pa.RecordBatch]
"""Index of the first row of a batch, and the batch. The index counts the rows of all files."""
_AddressedPart = tuple[str, FilePart]
"""Address from which a runner's machine reads a file, and the row group to read."""

_UPLOADS = 8
"""Number of files that are copied to a bucket in parallel."""
_STATISTICS, _COUNTER = "statistics.pb", "counter.npz"


def parse_options(text: str) -> PipelineOptions:
    """Parse Beam's options, such as `--runner=DataflowRunner --project=p --region=r`.

    Raises:
        ContractError: An option is unknown or wrong, no runner is named, or the runner lacks a
            required option.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            options = PipelineOptions(shlex.split(text))
            given = options.get_all_options(drop_default=True, retain_unknown_options=True)
        if unknown := sorted(set(given) - set(options.get_all_options())):
            raise ValueError(f"unknown options are {', '.join(unknown)}")
        _check_runner(options)
    except (SystemExit, ImportError, ValueError, AttributeError) as error:
        # argparse prints the error after its usage and exits.
        reason = printed.getvalue().strip().rpartition("error: ")[2] or first_line(error)
        raise ContractError(f"beam options {text!r} cannot be used: {reason}") from error
    return options


def _check_runner(options: PipelineOptions) -> None:
    """Check that the job can start.

    Raises ValueError or the runner's own error if the job cannot start.
    """
    runner, google = options.view_as(StandardOptions).runner, options.view_as(GoogleCloudOptions)
    needed = {"runner": runner, "temp_location": google.temp_location}
    if is_dataflow := "dataflow" in str(runner).lower():
        # Without this option, Beam would use its own image, which lacks this package.
        image = options.view_as(WorkerOptions).sdk_container_image
        needed |= {"project": google.project, "region": google.region, "sdk_container_image": image}
    if missing := [f"--{name}" for name, value in needed.items() if not value]:
        raise ValueError(
            f"missing options are {', '.join(missing)} (docs/kubernetes/large-windows.md)"
        )
    # Beam passes `sys.executable` unquoted to a shell. With a space in the path, the job would wait
    # forever.
    if (
        options.get_all_options()["direct_running_mode"] == "multi_processing"
        and " " in sys.executable
    ):
        raise ValueError(
            f"direct_running_mode is multi_processing under {sys.executable!r}, expected a "
            "path without spaces"
        )
    FileSystems.get_filesystem(google.temp_location)
    # Beam's own check asks Google for the bucket, and waits minutes for credentials if there are
    # none.
    if not is_dataflow:
        beam.Pipeline(options=options)
    elif not is_bucket_uri(google.temp_location):
        raise ValueError(f"temp_location is {google.temp_location!r}, expected gs://bucket/prefix")


def summarize_on_beam(
    files: Sequence[Path], counter: ProfileCounter, *, options: PipelineOptions
) -> TableStatistics:
    """Compute the result of `summarize_files` on the runner that `options` name.

    Copies of `counter` count the rows, and are merged into `counter` in any order.

    Raises:
        ContractError: A file cannot be read.
        TemporaryError: The job failed.
    """
    parts = row_groups(files)
    if not parts:
        return summarize_files(files, counter)
    shared = f"{options.view_as(GoogleCloudOptions).temp_location.rstrip('/')}/evergreen-{uuid.uuid4().hex}"  # noqa: E501
    try:
        FileSystems.mkdirs(shared)
        addresses = {path: str(path) for path in files}
        if "://" in shared:
            addresses = {path: f"{shared}/{i}" for i, path in enumerate(files)}
            with ThreadPoolExecutor(_UPLOADS) as pool:
                list(pool.map(_upload_file, addresses, addresses.values()))
        _run_pipeline(
            [(addresses[part.path], part) for part in parts],
            counter,
            options=options,
            shared=shared,
        )
        with FileSystems.open(f"{shared}/{_COUNTER}") as stream:
            counter.merge_dumped(stream.read())
        with FileSystems.open(f"{shared}/{_STATISTICS}") as stream:
            statistics = parse_statistics(stream.read())
        # Workers return the columns in any order.
        order = {name: position for position, name in enumerate(checked_columns(counter.features))}
        features = statistics.message.datasets[0].features
        features.sort(key=lambda feature: order[feature.path.step[0]])
        return statistics
    except Exception as error:  # runners raise any type of error
        raise TemporaryError(f"beam job failed: {first_line(error)}") from error
    finally:
        _remove_shared(shared)


def _upload_file(path: Path, address: str) -> None:
    with (
        path.open("rb") as source,
        FileSystems.create(address, "application/octet-stream") as target,
    ):
        shutil.copyfileobj(source, target, 1 << 20)


def _run_pipeline(
    sources: list[_AddressedPart], counter: ProfileCounter, *, options: PipelineOptions, shared: str
) -> None:
    with beam.Pipeline(options=options) as pipeline:
        batches = (
            pipeline
            | "Parts" >> beam.Create(sources)
            | "Spread" >> beam.Reshuffle()
            | "Read"
            >> beam.FlatMap(_read_source, counter.features).with_output_types(NumberedBatch)
        )
        (
            batches
            | "Lists" >> beam.Map(_make_lists, counter.features).with_output_types(pa.RecordBatch)
            | "Statistics" >> tfdv.GenerateStatistics(make_options(counter.features))
            | "WriteStatistics" >> tfdv.WriteStatisticsToBinaryFile(f"{shared}/{_STATISTICS}")
        )
        (
            batches
            | "Count" >> beam.CombineGlobally(_CountRows(counter))
            | "Dump" >> beam.Map(ProfileCounter.dumps)
            | "WriteCounter"
            >> beam.io.WriteToText(
                f"{shared}/{_COUNTER}",
                shard_name_template="",
                append_trailing_newlines=False,
                coder=beam.coders.BytesCoder(),
            )
        )


def _remove_shared(shared: str) -> None:
    try:
        # Buckets have no folders. Beam deletes the objects of a bucket as a folder only if the name
        # ends with a slash.
        FileSystems.delete([f"{shared}/" if "://" in shared else shared])
    except Exception as error:  # an error in the cleanup must not hide the error of the job
        logger.warning("%s could not be removed and may hold rows: %s", shared, first_line(error))


def _read_source(source: _AddressedPart, features: Features) -> Iterator[NumberedBatch]:
    address, part = source
    first_row = part.first_row
    with FileSystems.open(address, "application/octet-stream") as stream:
        for batch in read_part(part, features, opened=stream):
            yield first_row, batch
            first_row += batch.num_rows


def _make_lists(numbered: NumberedBatch, features: Features) -> pa.RecordBatch:
    return as_lists(numbered[1], features)


class _CountRows(beam.CombineFn):  # type: ignore[misc]  # Beam's classes are Any here
    """Beam step that counts batches in copies of the counter, and merges the copies."""

    def __init__(self, counter: ProfileCounter) -> None:
        self._counter = counter

    def create_accumulator(self) -> ProfileCounter:
        return copy.deepcopy(self._counter)

    def add_input(self, accumulator: ProfileCounter, numbered: NumberedBatch) -> ProfileCounter:
        first_row, batch = numbered
        accumulator.add(batch, first_row)
        return accumulator

    def merge_accumulators(self, accumulators: Iterable[ProfileCounter]) -> ProfileCounter:
        merged = self.create_accumulator()
        for accumulator in accumulators:
            merged.merge(accumulator)
        return merged

    def extract_output(self, accumulator: ProfileCounter) -> ProfileCounter:
        return accumulator
