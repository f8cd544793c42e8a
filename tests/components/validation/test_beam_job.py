"""Tests of Beam statistics: DirectRunner and the step give the same result.

Dataflow itself is not tested.
"""

import io
import os
import pickle
import sys
from typing import ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest
from apache_beam.io.filesystem import FileMetadata, FileSystem

from components.validation import beam_job
from components.validation.beam_job import parse_options, summarize_on_beam
from components.validation.tfdv_statistics import summarize_files
from evergreen.contracts import criteo
from evergreen.runtime.errors import ContractError, TemporaryError
from evergreen.statistics.profile_counter import ProfileCounter
from evergreen.storage.uris import local_path
from tests.support.validation_statistics import by_feature, value_counts

DATAFLOW = (
    "--runner=DataflowRunner --project=a-project --region=europe-west1 "
    "--temp_location=gs://bucket/tmp"
)
IMAGE = "--sdk_container_image=registry/validation-beam:1"


@pytest.fixture
def files(tmp_path, raw_table):
    (tmp_path / "rows").mkdir()
    for i, rows in enumerate((1500, 700)):
        pq.write_table(
            raw_table(rows, seed=i), tmp_path / "rows" / f"{i}.parquet", row_group_size=600
        )
    return sorted((tmp_path / "rows").glob("*.parquet"))


@pytest.fixture
def shared(tmp_path):
    """The folder of `--temp_location`."""
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


@pytest.fixture(autouse=True)
def plain_path(tmp_path, monkeypatch):
    """This environment's Python under a path without spaces, as DirectRunner requires."""
    (tmp_path / "environment").symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/environment/bin/python")


TWO_PROCESSES = "--direct_running_mode=multi_processing --direct_num_workers=2"


@pytest.mark.parametrize(
    "workers", ["", pytest.param(TWO_PROCESSES, marks=pytest.mark.slow)], ids=["one", "two"]
)
def test_direct_runner_gives_statistics_and_counts_of_one_process(files, shared, tmp_path, workers):
    ours, theirs = ProfileCounter(criteo.CRITEO), ProfileCounter(criteo.CRITEO)
    expected = by_feature(summarize_files(files, ours))
    options = parse_options(f"--runner=DirectRunner --temp_location={shared} {workers}")
    found = by_feature(summarize_on_beam(files, theirs, options=options))
    assert list(found) == list(expected)
    for name in criteo.CATEGORICAL:
        assert value_counts(found[name]) == value_counts(expected[name])
        assert found[name].string_stats == expected[name].string_stats
    for name in criteo.DENSE:
        ours_, theirs_ = expected[name].num_stats, found[name].num_stats
        assert (theirs_.common_stats, theirs_.min, theirs_.max) == (
            ours_.common_stats,
            ours_.min,
            ours_.max,
        )
        assert theirs_.mean == pytest.approx(ours_.mean, rel=1e-12)
        assert theirs_.std_dev == pytest.approx(ours_.std_dev, rel=1e-9)
    ours.reference().write(tmp_path / "ours.json")
    theirs.reference().write(tmp_path / "theirs.json")
    assert (tmp_path / "theirs.json").read_bytes() == (tmp_path / "ours.json").read_bytes()
    assert list(shared.iterdir()) == []


@pytest.mark.slow
def test_step_reports_same_whoever_counts(step, write_rows, raw_table, release_model, shared):
    rows = write_rows(raw_table(1000, seed=1), raw_table(900, seed=2))
    release_model(
        step(write_rows(raw_table(2000), name="before"), champion="none", run="before")[1]
    )
    options = f"--runner=DirectRunner --temp_location={shared} {TWO_PROCESSES}"
    here, there = step(rows), step(rows, f"--beam-options={options}", run="there")
    assert (here[0], here[1].num_rows) == (0, 1900)
    assert here[1].drift
    for name in ("decision", "num_rows", "findings", "drift"):
        assert getattr(here[1], name) == getattr(there[1], name)
    pages = [local_path(report.report_uri).read_text() for _, report in (here, there)]
    assert pages[0] == pages[1].replace("there", "r1")


def test_failed_job_is_temporary_error_that_leaves_nothing(files, shared):
    class Failing(ProfileCounter):
        def add(self, batch, first_row=None):
            raise OSError("the worker's disk is full")

    with pytest.raises(TemporaryError, match="beam job failed"):
        summarize_on_beam(
            files,
            Failing(criteo.CRITEO),
            options=parse_options(f"--runner=DirectRunner --temp_location={shared}"),
        )
    assert list(shared.iterdir()) == []


class Codes:
    """An object that would run a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_file_in_place_of_counter_runs_no_code(files, shared, tmp_path, monkeypatch):
    """Anybody who can write to `--temp_location` could put any file there."""
    opened, ran = beam_job.FileSystems.open, tmp_path / "ran"
    planted = pickle.dumps(Codes(ran))

    def planting(path, *more):
        return io.BytesIO(planted) if path.endswith("/counter.npz") else opened(path, *more)

    monkeypatch.setattr(beam_job.FileSystems, "open", planting)
    options = parse_options(f"--runner=DirectRunner --temp_location={shared}")
    with pytest.raises(TemporaryError, match="beam job failed: counts of a worker cannot be read"):
        summarize_on_beam(files[:1], ProfileCounter(criteo.CRITEO), options=options)
    assert not ran.exists()
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": np.array([Codes("ran")], object)},
        {"rows": np.zeros(4, np.int64)},
        {"clicks": np.zeros(3)},
        {"values 0 1": np.zeros(2, np.int64)},
        {"lost 3 0": np.zeros(1, np.int64)},
    ],
    ids=str,
)
def test_counts_of_another_shape_or_type_are_refused(changed):
    counter = ProfileCounter(criteo.CRITEO)
    with pytest.raises(ContractError, match="counts of "):
        counter.merge_dumped(saved(changed))
    assert counter.rows == 0


def saved(changed):
    """Return a counter of zero rows in serialized form.

    The arrays in `changed` replace the counter's arrays of the same names.
    """
    with np.load(io.BytesIO(ProfileCounter(criteo.CRITEO).dumps())) as arrays:
        content = io.BytesIO()
        np.savez(content, **{**arrays, **changed})
    return content.getvalue()


def test_counts_that_were_written_and_read_are_same(raw_table, tmp_path):
    counter, merged = ProfileCounter(criteo.CRITEO), ProfileCounter(criteo.CRITEO)
    for batch in raw_table(900).to_batches(max_chunksize=100):
        (merged if counter.rows > 500 else counter).add(batch, counter.rows + merged.rows)
    again = ProfileCounter(criteo.CRITEO)
    again.merge_dumped(counter.dumps())
    again.merge_dumped(merged.dumps())
    counter.merge(merged)
    for each, name in ((counter, "there.json"), (again, "again.json")):
        each.reference().write(tmp_path / name)
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "there.json").read_bytes()


class Bucket(FileSystem):
    """Objects by name, as in a bucket. There are no folders, so a folder never exists.

    `delete` of a name that ends in a slash is recursive, as in Beam's `GCSFileSystem`.
    """

    objects: ClassVar[dict[str, bytes]] = {}
    created: ClassVar[list[str]] = []

    @classmethod
    def scheme(cls):
        return "flat"

    def join(self, basepath, *paths):
        return "/".join([basepath.rstrip("/"), *paths])

    def split(self, path):
        return tuple(path.rsplit("/", 1))

    def mkdirs(self, path):
        pass

    def has_dirs(self):
        return False

    def _list(self, dir_or_prefix):
        for name, content in list(self.objects.items()):
            if name.startswith(dir_or_prefix):
                yield FileMetadata(name, len(content), 0.0)

    def create(self, path, mime_type="", compression_type=None):
        stored, created = self.objects, self.created

        class Written(io.BytesIO):
            def close(self):
                if not self.closed:
                    stored[path] = self.getvalue()
                    created.append(path)
                super().close()

        return Written()

    def open(self, path, mime_type="", compression_type=None):
        return io.BytesIO(self.objects[path])

    def rename(self, sources, destinations):
        for source, destination in zip(sources, destinations):
            self.objects[destination] = self.objects.pop(source)

    def exists(self, path):
        return path in self.objects

    def delete(self, paths):
        for path in paths:
            for name in list(self.objects):
                if name == path or (path.endswith("/") and name.startswith(path)):
                    del self.objects[name]


Bucket.__abstractmethods__ = frozenset()  # a job never calls the missing methods


@pytest.fixture
def bucket():
    Bucket.objects.clear(), Bucket.created.clear()
    Bucket.objects["flat://bucket/tmp/of another job"] = b"kept"
    return Bucket


def test_rows_and_results_pass_through_bucket_that_is_emptied_afterwards(files, bucket):
    ours, theirs = ProfileCounter(criteo.CRITEO), ProfileCounter(criteo.CRITEO)
    expected = summarize_files(files, ours)
    options = parse_options("--runner=DirectRunner --temp_location=flat://bucket/tmp")
    contents = [path.read_bytes() for path in files]
    found = summarize_on_beam(files, theirs, options=options)
    assert found.num_rows == expected.num_rows == 2200
    for name in criteo.CATEGORICAL:
        assert value_counts(by_feature(found)[name]) == value_counts(by_feature(expected)[name])
    assert theirs.profile().clicks == ours.profile().clicks
    assert len([name for name in bucket.created if name.rsplit("/", 1)[1].isdigit()]) == len(files)
    assert set(bucket.objects) == {"flat://bucket/tmp/of another job"}
    assert [path.read_bytes() for path in files] == contents


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--project=p", "missing options are --runner, --temp_location"),
        ("--runner=NoRunner --temp_location=/tmp", "cannot be used: .*NoRunner"),
        ("--runner=DirectRunner --bogus=1", "unknown options are bogus"),
        ("--runner=DirectRunner --temp_location=nowhere://b/t", "nowhere"),
        ("--runner=DataflowRunner --num_workers=many", "invalid int value: 'many'"),
        ("--runner='DirectRunner", "No closing quotation"),
        ("--runner=DataflowRunner", "project"),
        (
            DATAFLOW.replace("gs://bucket/tmp", "/tmp") + " " + IMAGE,
            "temp_location is '/tmp', expected gs://",
        ),
        (DATAFLOW, "sdk_container_image"),
    ],
)
def test_options_that_runner_lacks_are_refused_before_anything_runs(text, message):
    with pytest.raises(ContractError, match=message) as refused:
        parse_options(text)
    assert "\n" not in str(refused.value)


def test_python_under_path_with_space_starts_no_processes(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/home/a user/bin/python")
    with pytest.raises(
        ContractError, match="'/home/a user/bin/python', expected a path without spaces"
    ):
        parse_options(f"--runner=DirectRunner --temp_location=/tmp {TWO_PROCESSES}")


@pytest.mark.parametrize(
    "text",
    [
        f"{DATAFLOW} {IMAGE}",
        "--runner=PortableRunner --job_endpoint=flink-job-server.flink:8099 "
        "--environment_type=EXTERNAL "
        "--environment_config=localhost:50000 --temp_location=/evergreen/work/beam",
    ],
    ids=["dataflow", "flink"],
)
def test_options_of_page_are_taken(text):
    assert parse_options(text).get_all_options(drop_default=True)["runner"] in text
