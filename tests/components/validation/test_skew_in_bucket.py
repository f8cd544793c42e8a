"""Served rows in a bucket give what a folder gives, and nothing stays; retries are storage's tests.

Google's client is an older one here than where `tests/components/storage` tests it: Beam holds it back.
"""

import datetime as dt
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from components.contracts.criteo import CRITEO, RAW_TYPES
from components.contracts.words import ShownValues
from components.validation.rules import ValidationSettings
from components.validation.skew import EventSpan, measure_skew, open_served, read_served
from tests.support.archives import day_folders

URI = "gs://models/a lake"
DAY = dt.datetime(2026, 3, 1, tzinfo=dt.timezone.utc)
TYPES = {name: RAW_TYPES[name] for name in ("request_id", "row", "event_time", "I1", "C5")}
SPAN = EventSpan(DAY + dt.timedelta(hours=6), DAY + dt.timedelta(hours=30))


@pytest.fixture
def put(cloud_storage):
    """Makes bytes an object, by the service's own interface: this environment's client is for reading."""
    import requests

    session = requests.Session()
    session.trust_env = False

    def write(name: str, content: bytes) -> None:
        session.post(
            f"{cloud_storage.host}/upload/storage/v1/b/models/o",
            params={"uploadType": "media", "name": name},
            data=content,
            headers={"Content-Type": "application/octet-stream"},
        ).raise_for_status()

    return write


@pytest.fixture
def served_rows(raw_table):
    """Three days of rows, from the day before `DAY` on."""
    return raw_table(3000, start=(DAY - dt.timedelta(days=1)).timestamp(), seconds=3 * 86_400)


@pytest.fixture
def in_both(served_rows, tmp_path, put):
    """The rows as an archive, in a folder and in the bucket, several files a day; gives the folder."""
    for rows, folder in day_folders(tmp_path / "archive", served_rows):
        for n in range(3):
            pq.write_table(rows.slice(n * 334, 334), folder / f"part-{n}.parquet")
    for path in sorted((tmp_path / "archive").rglob("*.parquet")):
        put(f"a lake/{path.relative_to(tmp_path / 'archive')}", path.read_bytes())
    return tmp_path / "archive"


@pytest.fixture
def training(served_rows, tmp_path):
    """The rows of `SPAN`, of which every third was served with another C5."""
    times = pc.cast(served_rows.column("event_time"), pa.int64()).to_pylist()
    first, last = (int(end.timestamp() * 1e6) for end in SPAN)
    rows = served_rows.filter(pa.array([first <= time <= last for time in times]))
    values = [None if n % 3 == 0 else value for n, value in enumerate(rows.column("C5").to_pylist())]
    rows = rows.set_column(rows.schema.get_field_index("C5"), "C5", pa.array(values, pa.int64()))
    pq.write_table(rows, tmp_path / "train.parquet")
    return [tmp_path / "train.parquet"]


def measured(training, archive, tmp_path):
    return measure_skew(training, archive, features=CRITEO, settings=ValidationSettings(), shown=ShownValues())


def kept_rows(archive, tmp_path):
    return pa.Table.from_batches(read_served(archive, SPAN, TYPES))


def test_an_archive_in_a_bucket_gives_what_the_same_one_in_a_folder_gives(training, in_both, tmp_path):
    in_bucket, in_folder = (measured(training, open_served(uri), tmp_path) for uri in (URI, str(in_both)))
    assert in_bucket.entries == in_folder.entries
    assert replace(in_bucket.facts, served_uri=in_folder.facts.served_uri) == in_folder.facts
    (found,) = [entry for entry in in_bucket.entries if entry.drifted]
    rows = pq.read_table(training[0])
    assert found.feature == "C5"
    assert in_bucket.facts.num_joined == rows.num_rows
    assert found.differing == rows.num_rows // 3 + (rows.num_rows % 3 > 0)
    assert in_bucket.facts.served_uri == URI


def test_only_the_spans_days_are_fetched_each_file_once_and_only_the_spans_rows_are_kept(
    in_both, served_rows, cloud_storage, tmp_path
):
    found = kept_rows(open_served(URI), tmp_path)
    asked = [request.name for request in cloud_storage.seen if request.is_download]
    assert sorted(asked) == [f"a lake/day=2026-03-0{day}/part-{n}.parquet" for day in (1, 2) for n in range(3)]
    times = [time for time in served_rows.column("event_time").to_pylist() if SPAN.first <= time <= SPAN.last]
    assert found.column("event_time").to_pylist() == times
    assert found.column_names == ["request_id", "row", "event_time", "I1", "C5"]


def test_a_bucket_that_refuses_the_step_is_a_failure_that_a_retry_may_mend(
    step, write_rows, in_both, raw_table, cloud_storage, notes_of, capsys
):
    cloud_storage.fail(lambda request: True, "status", status=403, message="no access", times=10**6)
    code, report = step(write_rows(raw_table(300)), f"--served={URI}", champion="none")
    assert (code, report) == (3, None)
    assert "refused (403 no access)" in capsys.readouterr().err
    assert notes_of("r1").state == "failed"
