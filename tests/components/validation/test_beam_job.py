"""Statistics by Beam: DirectRunner gives ours; what a runner lacks is said before anything runs. Dataflow never ran."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import GoogleCloudOptions, SetupOptions, StandardOptions, WorkerOptions

from components.contracts import criteo
from components.contracts.errors import ContractError, TemporaryError
from components.validation.beam_job import parse_options, summarize_on_beam
from components.validation.reference import ReferenceCounter
from components.validation.rows import COLUMNS, parquet_files
from components.validation.summarize import by_feature, summarize_files, value_counts

DATAFLOW = "--runner=DataflowRunner --project=a-project --region=europe-west1 --temp_location=gs://bucket/tmp"
IMAGE = "--sdk_container_image=registry/validation-beam:1"


@pytest.fixture
def files(tmp_path, raw_table):
    (tmp_path / "rows").mkdir()
    for i, rows in enumerate((1500, 700)):
        pq.write_table(raw_table(rows, seed=i), tmp_path / "rows" / f"{i}.parquet", row_group_size=600)
    return parquet_files(tmp_path / "rows")


@pytest.fixture
def scratch(tmp_path):
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def test_direct_runner_gives_the_statistics_and_counts_of_this_machines_processes(files, scratch, tmp_path):
    ours, theirs = ReferenceCounter(), ReferenceCounter()
    expected = by_feature(summarize_files(files, COLUMNS, [ours], processes=1))
    options = parse_options("--runner=DirectRunner")
    found = by_feature(summarize_on_beam(files, COLUMNS, [theirs], options=options, scratch=scratch))
    assert list(found) == list(expected)
    for name in criteo.CATEGORICAL:
        assert value_counts(found[name]) == value_counts(expected[name])
        assert found[name].string_stats == expected[name].string_stats
    for name in criteo.DENSE:
        ours_, theirs_ = expected[name].num_stats, found[name].num_stats
        assert (theirs_.common_stats, theirs_.min, theirs_.max) == (ours_.common_stats, ours_.min, ours_.max)
        assert theirs_.mean == pytest.approx(ours_.mean, rel=1e-12)
        assert theirs_.std_dev == pytest.approx(ours_.std_dev, rel=1e-9)
        assert found[name].custom_stats == expected[name].custom_stats
    ours.statistics().write(tmp_path / "ours.json")
    theirs.statistics().write(tmp_path / "theirs.json")
    assert (tmp_path / "theirs.json").read_bytes() == (tmp_path / "ours.json").read_bytes()
    assert list(scratch.iterdir()) == []


def test_the_step_runs_on_the_runner_that_it_is_given(step, write_rows, raw_table):
    code, report = step(write_rows(raw_table(1000)), "--beam-options=--runner=DirectRunner")
    assert (code, report.num_rows) == (0, 1000)


def test_a_failed_job_is_a_temporary_error_that_leaves_nothing(files, scratch):
    class Failing(ReferenceCounter):
        def add(self, batch, first_row=None):
            raise OSError("the worker's disk is full")

    with pytest.raises(TemporaryError, match="beam job failed"):
        summarize_on_beam(files, COLUMNS, [Failing()], options=parse_options("--runner=DirectRunner"), scratch=scratch)
    assert list(scratch.iterdir()) == []


def test_no_file_needs_no_job(scratch):
    options = parse_options("--runner=DirectRunner")
    assert summarize_on_beam([], COLUMNS, options=options, scratch=scratch).datasets[0].num_examples == 0


def test_dataflows_options_arrive_where_beam_looks_for_them():
    options = parse_options(f"{DATAFLOW} {IMAGE} --max_num_workers=20 --worker_machine_type n2-standard-4")
    google, worker = options.view_as(GoogleCloudOptions), options.view_as(WorkerOptions)
    assert options.view_as(StandardOptions).runner == "DataflowRunner"
    assert (google.project, google.region, google.temp_location) == ("a-project", "europe-west1", "gs://bucket/tmp")
    assert (worker.max_num_workers, worker.machine_type) == (20, "n2-standard-4")
    assert worker.sdk_container_image == "registry/validation-beam:1"
    assert options.view_as(SetupOptions).save_main_session is False


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--project=p", "name no runner"),
        ("--runner=NoRunner", "beam runner 'NoRunner' cannot be made"),
        ("--runner=DirectRunner --bogus=1", "unknown ones: bogus"),
        ("--runner=DataflowRunner --num_workers=many", "invalid int value: 'many'"),
        ("--runner='DirectRunner", "cannot be parsed: No closing quotation"),
        ("--runner=DataflowRunner", "project"),
        (DATAFLOW.replace("--project=a-project", "") + IMAGE, "project"),
        (DATAFLOW.replace("gs://bucket/tmp", "/tmp") + " " + IMAGE, "Invalid GCS path"),
        (DATAFLOW, "sdk_container_image"),
    ],
)
def test_what_a_runner_lacks_is_said_before_anything_runs(text, told):
    with pytest.raises(ContractError, match=told) as refused:
        parse_options(text)
    assert "\n" not in str(refused.value)
