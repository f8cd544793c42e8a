"""TFDV's statistics by a Beam pipeline, for windows that the cores of one machine take too long for.

The same batches, options and counters as in `tfdv_statistics`, on whatever runner the options name. Files and results
pass through `--temp_location` if that is an address (`gs://...`), because a runner's machines do not see this one's
disk; otherwise in place, for a runner whose machines share it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import pickle
import shlex
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
import tensorflow_data_validation as tfdv
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import (
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.runners.runner import create_runner

from components.runtime.errors import ContractError, TemporaryError, first_line
from components.storage.uris import is_bucket_uri
from components.validation.rows import FilePart, divide, read_part
from components.validation.tfdv_statistics import (
    RowCounter,
    as_lists,
    make_options,
    parse_statistics,
    summarize_files,
)

logger = logging.getLogger(__name__)


class _FileSource(NamedTuple):
    """Rows of a file, as a runner's machine finds them."""

    address: str
    part: FilePart


Numbered = tuple[int, pa.RecordBatch]
"""Number of a batch's first row in all files, and the batch."""


def parse_options(text: str) -> PipelineOptions:
    """Beam's options as given on a command line, such as `--runner=DataflowRunner --project=p --region=r`.

    Raises:
        ContractError: an option is unknown or wrong, no runner is named, or one lacks what it needs to begin.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            options = PipelineOptions(shlex.split(text))
            given = options.get_all_options(drop_default=True, retain_unknown_options=True)
    except (SystemExit, ValueError) as error:  # argparse prints its reason after its usage, and ends the program
        reason = printed.getvalue().strip().rpartition("error: ")[2] or first_line(error)
        raise ContractError(f"beam options {text!r} cannot be parsed: {reason}") from None
    unknown = sorted(set(given) - set(options.get_all_options()))
    if unknown:
        raise ContractError(f"beam options {text!r} hold unknown ones: {', '.join(unknown)}")
    runner = options.view_as(StandardOptions).runner
    if not runner:
        raise ContractError(f"beam options {text!r} name no runner, expected --runner=DataflowRunner or another")
    try:
        made = create_runner(runner)
    except (ImportError, ValueError, AttributeError) as error:
        raise ContractError(f"beam runner {runner!r} cannot be made: {first_line(error)}") from error
    # Beam's own validator asks Google for a bucket, and for credentials minutes long where there are none.
    on_dataflow = "dataflow" in runner.lower()
    faults = _dataflow_faults(options) if on_dataflow else PipelineOptionsValidator(options, made).validate()
    if faults:
        raise ContractError(f"beam options {text!r}: {' '.join(dict.fromkeys(faults))}")
    place = str(options.view_as(GoogleCloudOptions).temp_location or "")
    try:
        FileSystems.get_filesystem(place)
    except ValueError as error:
        raise ContractError(f"beam options {text!r}: temp_location {place!r} is unknown to Beam here") from error
    # Workers import everything by name; they need nothing that the program that starts the job holds.
    options.view_as(SetupOptions).save_main_session = False
    return options


def _dataflow_faults(options: PipelineOptions) -> list[str]:
    google = options.view_as(GoogleCloudOptions)
    # Beam would take its own image, which lacks our code.
    image = options.view_as(WorkerOptions).sdk_container_image
    needed = {"project": google.project, "region": google.region, "sdk_container_image": image}
    faults = [f"Missing required option: {name} (docs/validation.md)." for name, value in needed.items() if not value]
    if not is_bucket_uri(str(google.temp_location or "")):
        faults.append(f"Invalid GCS path ({google.temp_location}), given for the option: temp_location.")
    return faults


def summarize_on_beam(
    files: Sequence[Path],
    columns: Sequence[str],
    counters: Sequence[RowCounter] = (),
    *,
    options: PipelineOptions,
    scratch: Path,
) -> Any:
    """The result of `summarize_files`, from the runner that `options` name.

    Args:
        files: Parquet files of raw rows.
        columns: Those to read.
        counters: Copies of them are given every row, and are merged into them in any order.
        options: From `parse_options`.
        scratch: A folder for what passes between the runner's machines and this one, if `temp_location` is not an
            address; both must see it, and the files.

    Raises:
        ContractError: a file cannot be read.
        TemporaryError: the job failed or could not be started.
    """
    (parts,) = divide(files, 1)
    if not parts:
        return summarize_files(files, columns, counters)
    temporary = str(options.view_as(GoogleCloudOptions).temp_location or "")
    place = temporary.rstrip("/") if "://" in temporary else str(scratch)
    shared = f"{place}/evergreen-{uuid.uuid4().hex}"
    try:
        FileSystems.mkdirs(shared)
        addresses = {
            path: _upload(path, shared, i) if "://" in temporary else str(path) for i, path in enumerate(files)
        }
        sources = [_FileSource(addresses[part.path], part) for part in parts]
        _run_pipeline(sources, columns, counters, options=options, shared=shared)
        return _fetch_results(shared, counters)
    except (ContractError, TemporaryError):
        raise
    except Exception as error:  # runners raise what they like
        raise TemporaryError(f"beam job failed: {first_line(error)}") from error
    finally:
        _remove_shared(shared)


def _run_pipeline(
    sources: list[_FileSource],
    columns: Sequence[str],
    counters: Sequence[RowCounter],
    *,
    options: PipelineOptions,
    shared: str,
) -> None:
    with beam.Pipeline(options=options) as pipeline:
        batches = (
            pipeline
            | "Parts" >> beam.Create(sources)
            | "Spread" >> beam.Reshuffle()
            | "Read" >> beam.FlatMap(_read_source, list(columns)).with_output_types(Numbered)
        )
        (
            batches
            | "Lists" >> beam.Map(_without_number).with_output_types(pa.RecordBatch)
            | "Statistics" >> tfdv.GenerateStatistics(make_options())
            | "WriteStatistics" >> tfdv.WriteStatisticsToBinaryFile(f"{shared}/{_STATISTICS}")
        )
        (
            batches
            | "Count" >> beam.CombineGlobally(_CountRows(counters))
            | "Pickle" >> beam.Map(pickle.dumps)
            | "WriteCounters"
            >> beam.io.WriteToText(
                f"{shared}/{_COUNTERS}",
                shard_name_template="",
                append_trailing_newlines=False,
                coder=beam.coders.BytesCoder(),
            )
        )


_STATISTICS, _COUNTERS = "statistics.pb", "counters.pickle"


def _upload(path: Path, shared: str, number: int) -> str:
    address = f"{shared}/{number:05d}-{path.name}"
    with path.open("rb") as source, FileSystems.create(address, "application/octet-stream") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return address


def _fetch_results(shared: str, counters: Sequence[RowCounter]) -> Any:
    with FileSystems.open(f"{shared}/{_COUNTERS}") as stream:
        for counter, counted in zip(counters, pickle.load(stream)):
            counter.merge(counted)
    with FileSystems.open(f"{shared}/{_STATISTICS}") as stream:
        return parse_statistics(stream.read(), f"{shared}/{_STATISTICS}")


def _remove_shared(shared: str) -> None:
    try:
        if "://" in shared:
            # A bucket has no folders: to Beam none exists, and only a name that ends so is deleted with all below it.
            FileSystems.delete([f"{shared}/"])
        else:
            shutil.rmtree(shared)
    except Exception as error:  # must hide neither the job's own failure nor its success
        logger.warning("%s could not be removed and may hold rows: %s", shared, first_line(error))


def _read_source(source: _FileSource, columns: list[str]) -> Iterator[Numbered]:
    first_row = source.part.first_row
    with FileSystems.open(source.address, "application/octet-stream") as stream:
        for batch in read_part(source.part, columns, opened=stream):
            yield first_row, batch
            first_row += batch.num_rows


def _without_number(numbered: Numbered) -> pa.RecordBatch:
    return as_lists(numbered[1])


class _CountRows(beam.CombineFn):  # type: ignore[misc]  # Beam's classes are Any here
    """Gives batches to copies of the counters, and merges these."""

    def __init__(self, counters: Sequence[RowCounter]) -> None:
        self._counters = list(counters)

    def create_accumulator(self) -> list[RowCounter]:
        return copy.deepcopy(self._counters)

    def add_input(self, accumulator: list[RowCounter], numbered: Numbered) -> list[RowCounter]:
        for counter in accumulator:
            counter.add(numbered[1], numbered[0])
        return accumulator

    def merge_accumulators(self, accumulators: Any) -> list[RowCounter]:
        merged = self.create_accumulator()
        for accumulator in accumulators:
            for mine, theirs in zip(merged, accumulator):
                mine.merge(theirs)
        return merged

    def extract_output(self, accumulator: list[RowCounter]) -> list[RowCounter]:
        return accumulator
