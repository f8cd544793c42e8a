"""TFDV's statistics by a Beam pipeline, for windows that the cores of one machine take too long for.

The same batches, options and counters as in `summarize`, on whatever runner the options name. Files and results pass
through `--temp_location` where that is an address (`gs://...`), since a runner's machines do not see this one's
disk; else in place, for a runner whose machines share it. This module is imported before `tfdv`: see there.
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

from components.runtime.errors import ContractError, TemporaryError, first_line
from components.validation.deferred import quietly

with quietly():
    import apache_beam as beam
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

    with contextlib.suppress(ImportError):
        # gs:// is known once this is imported. Beam does it itself, unless TFDV was imported before: see `tfdv`.
        import apache_beam.io.gcp.gcsfilesystem

# isort: split
import pyarrow as pa

from components.storage.uris import is_bucket_uri
from components.validation.lists import as_lists
from components.validation.rows import Part, divide, read_part
from components.validation.summarize import Counter, make_options, parse_statistics, summarize_files
from components.validation.tfdv import tfdv

logger = logging.getLogger(__name__)


class _Source(NamedTuple):
    """Rows of a file, as a runner's machine finds them."""

    address: str
    part: Part


Numbered = tuple[int, pa.RecordBatch]
"""Number of a batch's first row in all files, and the batch."""


def parse_options(text: str) -> PipelineOptions:
    """Beam's options as given on a command line, such as `--runner=DataflowRunner --project=p --region=r`.

    Raises:
        ContractError: an option is unknown or wrong, no runner is named, or one lacks what it needs to begin.
    """
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            options = PipelineOptions(shlex.split(text))
            given = options.get_all_options(drop_default=True, retain_unknown_options=True)
    except (SystemExit, ValueError) as error:  # argparse tells its reason after its usage, and ends the program
        reason = told.getvalue().strip().rpartition("error: ")[2] or first_line(error)
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
    faults = _faults_on_dataflow(options) if on_dataflow else PipelineOptionsValidator(options, made).validate()
    if faults:
        raise ContractError(f"beam options {text!r}: {' '.join(dict.fromkeys(faults))}")
    _expect_file_system(text, str(options.view_as(GoogleCloudOptions).temp_location or ""))
    # All that runs is imported by name; what the program that starts the job holds concerns no worker.
    options.view_as(SetupOptions).save_main_session = False
    return options


def _expect_file_system(text: str, place: str) -> None:
    try:
        FileSystems.get_filesystem(place)
    except ValueError as error:
        raise ContractError(f"beam options {text!r}: temp_location {place!r} is unknown to Beam here") from error


def _faults_on_dataflow(options: PipelineOptions) -> list[str]:
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
    counters: Sequence[Counter] = (),
    *,
    options: PipelineOptions,
    scratch: Path,
) -> Any:
    """What `summarize_files` gives, from the runner that `options` name.

    Args:
        files: Parquet files of raw rows.
        columns: Those to read.
        counters: Copies of them are given every row, and are merged into them in any order.
        options: From `parse_options`.
        scratch: A folder for what passes between the runner's machines and this one, where `temp_location` is no
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
        addresses = {path: _put(path, shared, i) if "://" in temporary else str(path) for i, path in enumerate(files)}
        sources = [_Source(addresses[part.path], part) for part in parts]
        _run(sources, columns, counters, options, shared)
        return _fetch(shared, counters)
    except (ContractError, TemporaryError):
        raise
    except Exception as error:  # runners raise what they like
        raise TemporaryError(f"beam job failed: {first_line(error)}") from error
    finally:
        _remove(shared)


def _run(
    sources: list[_Source], columns: Sequence[str], counters: Sequence[Counter], options: PipelineOptions, shared: str
) -> None:
    with beam.Pipeline(options=options) as pipeline:
        batches = (
            pipeline
            | "Parts" >> beam.Create(sources)
            | "Spread" >> beam.Reshuffle()
            | "Read" >> beam.FlatMap(_read, list(columns)).with_output_types(Numbered)
        )
        (
            batches
            | "Lists" >> beam.Map(_lists_of).with_output_types(pa.RecordBatch)
            | "Statistics" >> tfdv.GenerateStatistics(make_options())
            | "WriteStatistics" >> tfdv.WriteStatisticsToBinaryFile(f"{shared}/{_STATISTICS}")
        )
        (
            batches
            | "Count" >> beam.CombineGlobally(_Count(counters))
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


def _put(path: Path, shared: str, number: int) -> str:
    address = f"{shared}/{number:05d}-{path.name}"
    with path.open("rb") as source, FileSystems.create(address, "application/octet-stream") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return address


def _fetch(shared: str, counters: Sequence[Counter]) -> Any:
    with FileSystems.open(f"{shared}/{_COUNTERS}") as stream:
        for counter, counted in zip(counters, pickle.load(stream)):
            counter.merge(counted)
    with FileSystems.open(f"{shared}/{_STATISTICS}") as stream:
        return parse_statistics(stream.read(), f"{shared}/{_STATISTICS}")


def _remove(shared: str) -> None:
    try:
        if "://" in shared:
            # A bucket has no folders: to Beam none exists, and only a name that ends so is deleted with all below it.
            FileSystems.delete([f"{shared}/"])
        else:
            shutil.rmtree(shared)
    except Exception as error:  # must hide neither the job's own failure nor its success
        logger.warning("%s could not be removed and may hold rows: %s", shared, first_line(error))


def _read(source: _Source, columns: list[str]) -> Iterator[Numbered]:
    first_row = source.part.first_row
    with FileSystems.open(source.address, "application/octet-stream") as stream:
        for batch in read_part(source.part, columns, opened=stream):
            yield first_row, batch
            first_row += batch.num_rows


def _lists_of(numbered: Numbered) -> pa.RecordBatch:
    return as_lists(numbered[1])


class _Count(beam.CombineFn):  # type: ignore[misc]  # Beam's classes are Any here
    """Gives batches to copies of counters, and merges them."""

    def __init__(self, counters: Sequence[Counter]) -> None:
        self._counters = list(counters)

    def create_accumulator(self) -> list[Counter]:
        return copy.deepcopy(self._counters)

    def add_input(self, accumulator: list[Counter], numbered: Numbered) -> list[Counter]:
        for counter in accumulator:
            counter.add(numbered[1], numbered[0])
        return accumulator

    def merge_accumulators(self, accumulators: Any) -> list[Counter]:
        merged = self.create_accumulator()
        for accumulator in accumulators:
            for mine, theirs in zip(merged, accumulator):
                mine.merge(theirs)
        return merged

    def extract_output(self, accumulator: list[Counter]) -> list[Counter]:
        return accumulator
