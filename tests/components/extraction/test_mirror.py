"""A lake in a bucket against the same lake in a folder: the same rows, fetched once, at one generation."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from components.contracts.manifests import RawDataset
from components.contracts.records import CLICK
from components.extraction.__main__ import main
from components.extraction.backfill import BackfillSettings, backfill
from components.extraction.lake import Lake
from components.extraction.lake_folder import opened_lake
from components.extraction.raw_schema import RAW_SCHEMA, arrow_type
from components.extraction.source import find_source
from components.extraction.times import TimeSpan, parse_day, parse_time, to_iso
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from tests.support.bucket_lakes import URI, cached, extract_lake, fetched, open_storage, put

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
DAY = timedelta(days=1)
OUTCOMES = pa.schema([(name, arrow_type(text)) for name, text in criteo.OUTCOME_TYPES.items()])
WINDOW = TimeSpan(parse_time("start", "2026-03-05T06:00:00Z"), parse_time("end", "2026-03-06T18:00:00Z"))


def day(number: int) -> str:
    """Of March 2026."""
    return f"2026-03-{number:02d}"


def part(number: int, k: int = 0) -> str:
    return f"day={day(number)}/part-{k}.parquet"


@pytest.fixture
def folder(tmp_path, raw_table, write_lake):
    """Seven days of 200 rows in two files each, late clicks on every day's rows, and what nobody may read."""
    table = raw_table(1400, start=START.timestamp(), seconds=7 * 86_400)
    lake = write_lake(tmp_path / "la ke", table, num_files=2)
    rows = table.select([criteo.REQUEST_ID, criteo.ROW, criteo.EVENT_TIME]).to_pylist()[::7]
    for number in range(1, 8):
        told = [row for row in rows if row[criteo.EVENT_TIME].date().isoformat() == day(number)]
        late = lake / criteo.OUTCOME_PARTITION.format(day=day(number))
        late.mkdir(parents=True)
        outcomes = [
            {"request_id": row[criteo.REQUEST_ID], "row": row[criteo.ROW], "event": CLICK, "window_seconds": 1800.0}
            | {"outcome_time": row[criteo.EVENT_TIME] + timedelta(minutes=1), "stored_at": START + 9 * DAY}
            for row in told
        ]
        pq.write_table(pa.Table.from_pylist(outcomes, OUTCOMES), late / "part-0.parquet")
    (lake / f"day={day(5)}" / "_unfinished.parquet").write_bytes(b"someone's")
    (lake / "notes.txt").write_text("of the lake\n")
    return lake


@pytest.fixture
def lake(folder, cloud_storage):
    """The same lake in a bucket; gives the service."""
    put(folder)
    cloud_storage.seen.clear()
    return cloud_storage


def num_listings(lake) -> int:
    """Whole ones: one object is asked for where only the bucket's existence is in doubt."""
    listings = [request for request in lake.seen if request.method == "GET" and request.path.endswith("/o")]
    return sum("maxResults" not in request.query for request in listings)


def same_but_place(dataset: RawDataset) -> RawDataset:
    """Without what says where it lies."""
    return replace(
        dataset,
        source_uri="",
        train_uri="",
        holdout_uri="",
        malformed_uri=None,
        replay_uri=None,
        replay_holdout_uri=None,
    )


@pytest.mark.parametrize(
    ("window", "settings"),
    [
        (TimeSpan(), {}),
        (WINDOW, {}),
        (WINDOW, {"replay_share": 0.5, "replay_days": 2}),
        (WINDOW, {"replay_days": 0}),
        (TimeSpan(WINDOW.start, None), {"replay_share": 0.3}),
        (TimeSpan(None, WINDOW.end), {}),
    ],
)
def test_a_lake_in_a_bucket_gives_the_dataset_of_the_same_lake_in_a_folder(lake, folder, tmp_path, window, settings):
    expected = extract_lake(str(folder), tmp_path / "work", window, run="folder", **settings)
    found = extract_lake(URI, tmp_path / "work", window, run="bucket", **settings)
    assert same_but_place(found) == same_but_place(expected)
    assert found.source_uri == URI
    assert found.digest
    assert found.num_late_clicks > 0
    assert found.outcomes_digest == expected.outcomes_digest is not None


def test_the_command_line_takes_a_bucket_and_says_so_in_the_manifest(lake, folder, tmp_path):
    flags = ["--store", str(tmp_path / "store"), "--work", str(tmp_path / "work"), "--champion", "none"]
    for run, where in (("folder", folder.as_uri()), ("bucket", f"{URI}/")):
        output = ["--run", run, "--lake", where, "--output", str(tmp_path / f"{run}.json")]
        assert main([*flags, *output, "--replay-share", "0.2", "--window-start", "2026-03-04"]) == 0
    expected, found = (RawDataset.read(tmp_path / f"{run}.json") for run in ("folder", "bucket"))
    assert same_but_place(found) == same_but_place(expected)
    assert found.source_uri == URI


def test_only_what_the_window_its_replay_and_their_late_clicks_need_is_fetched(lake, tmp_path):
    extract_lake(URI, tmp_path / "work", WINDOW, replay_days=2)
    rows = [part(number, k) for number in (3, 4, 5, 6) for k in (0, 1)]
    late = [f"outcomes/day={day(number)}/part-0.parquet" for number in (2, 3, 4, 5, 6, 7)]
    assert fetched(lake.seen) == dict.fromkeys([*rows, *late], 1)
    assert sorted(cached(tmp_path / "work")) == sorted([*rows, *late])


def test_what_is_here_at_its_generation_is_not_fetched_again(lake, folder, tmp_path, raw_table):
    first = extract_lake(URI, tmp_path / "work", WINDOW, replay_days=2)
    lake.seen.clear()
    assert extract_lake(URI, tmp_path / "work", WINDOW, replay_days=2) == first
    assert fetched(lake.seen) == {}
    pq.write_table(raw_table(100, seed=4, start=WINDOW.start / 1e6, seconds=3600), folder / part(5, 1))
    open_storage(URI).write(part(5, 1), folder / part(5, 1))
    other = extract_lake(URI, tmp_path / "work", WINDOW, replay_days=2)
    assert fetched(lake.seen) == {part(5, 1): 1}
    assert other.digest == extract_lake(str(folder), tmp_path / "work", WINDOW, run="folder", replay_days=2).digest


def test_of_a_back_filled_day_the_newest_complete_version_is_fetched(lake, folder, tmp_path, raw_table):
    for version in (1, 2):
        newer = tmp_path / f"newer-{version}.parquet"
        start = parse_time("start", day(5)) / 1e6
        pq.write_table(raw_table(300, seed=20 + version, start=start, seconds=86_000), newer)
        backfill([newer], lake=str(folder), settings=BackfillSettings(day=parse_day("day", day(5)), reason="late rows"))
    put(folder)
    # Of a third one the marker has not come.
    open_storage(URI).write(f"day={day(5)}/version=3/part-00000.parquet", b"half")
    lake.seen.clear()
    (folder / f"day={day(5)}" / "version=3").mkdir()
    (folder / f"day={day(5)}" / "version=3" / "part-00000.parquet").write_bytes(b"half")
    expected = extract_lake(str(folder), tmp_path / "work", WINDOW, run="folder", replay_days=1)
    found = extract_lake(URI, tmp_path / "work", WINDOW, run="bucket", replay_days=1)
    assert same_but_place(found) == same_but_place(expected)
    assert {entry["day"]: entry["version"] for entry in found.days} == {day(5): 2, day(6): 0}
    versions = {name.split("/")[1] for name in fetched(lake.seen) if f"/{day(5)}/" in name or "version" in name}
    assert versions == {"version=2"}


def test_days_without_rows_do_not_count_as_days_to_replay(lake, folder, tmp_path):
    for number in (3, 4):
        for k in (0, 1):
            pq.write_table(RAW_SCHEMA.empty_table(), folder / part(number, k))
    put(folder)
    lake.seen.clear()
    settings = {"replay_share": 0.4, "replay_days": 2}
    window = TimeSpan(parse_time("start", day(5)), None)
    expected = extract_lake(str(folder), tmp_path / "work", window, run="folder", **settings)
    found = extract_lake(URI, tmp_path / "work", window, **settings)
    assert [entry["day"] for entry in found.replay_days] == [day(1), day(2)]
    assert same_but_place(found) == same_but_place(expected)


def test_an_object_replaced_between_listing_and_fetch_is_noticed_and_the_lake_listed_anew(
    lake, folder, tmp_path, raw_table
):
    newer = tmp_path / "newer.parquet"
    pq.write_table(raw_table(50, seed=3, start=WINDOW.start / 1e6, seconds=3600), newer)

    def replace_before_the_first_download(request):
        if request.is_download:
            lake.before = lambda request: None
            open_storage(URI).write(part(5), newer)

    lake.before = replace_before_the_first_download
    found = extract_lake(URI, tmp_path / "work", WINDOW)
    shutil.copy(newer, folder / part(5))
    assert found.digest == extract_lake(str(folder), tmp_path / "work", WINDOW, run="folder").digest
    assert num_listings(lake) == 2


def test_a_lake_that_never_stands_still_is_temporary_and_leaves_the_window_before(lake, folder, tmp_path):
    before = extract_lake(str(folder), tmp_path / "work", WINDOW)

    def replace_before_each_download(request):
        if request.is_download and request.name.endswith(part(5)):
            open_storage(URI).write(part(5), folder / part(5))

    lake.before = replace_before_each_download
    with pytest.raises(TemporaryError, match=rf"lake {URI} changed while it was read, 3 times: .*{part(5)}"):
        extract_lake(URI, tmp_path / "work", WINDOW)
    assert (tmp_path / "work" / "run" / "extraction" / "train").is_dir()
    assert same_but_place(extract_lake(str(folder), tmp_path / "work", WINDOW)) == same_but_place(before)


@pytest.mark.parametrize(
    ("uri", "kind", "told"),
    [
        ("gs://models/nowhere", ContractError, "lake gs://models/nowhere holds no object"),
        ("gs://models", ContractError, "lake gs://models holds no object"),
        ("gs://elsewhere/lake", PermanentError, "expected bucket elsewhere to exist"),
        ("s3://models/lake", ContractError, "lake is .s3://models/lake., expected gs://bucket/prefix, file:"),
    ],
)
def test_a_lake_that_is_not_there_is_told(cloud_storage, tmp_path, uri, kind, told):
    with pytest.raises(kind, match=told):
        extract_lake(uri, tmp_path / "work", TimeSpan())


def test_rows_set_aside_are_named_by_the_object_they_came_from(cloud_storage, tmp_path, criteo_rows, write_text):
    rows = criteo_rows(200)
    rows[7] = ["not a row"]
    write_text(tmp_path / "criteo" / "day_3.gz", rows)
    put(tmp_path / "criteo")
    extract_lake(URI, tmp_path / "work", TimeSpan())
    (line,) = (tmp_path / "work" / "run" / "extraction" / "malformed.jsonl").read_text().splitlines()
    assert (json.loads(line)["file"], json.loads(line)["line"]) == (f"{URI}/day_3.gz", 8)


def test_the_newest_day_with_rows_is_brought_before_a_window_is_known(lake, folder, tmp_path):
    for number, k in ((6, 0), (6, 1), (7, 0), (7, 1)):
        pq.write_table(RAW_SCHEMA.empty_table(), folder / part(number, k))
    put(folder)
    lake.seen.clear()
    with opened_lake(URI, work=tmp_path / "work", open_storage=open_storage) as opened:
        opened.fetch_newest()
        days = {str(each): files for each, files in Lake(folder=opened.path).days().items()}
        assert sorted(days) == [day(5), day(6), day(7)]
        newest = max(pq.read_table(days[day(5)], partitioning=None).column(criteo.EVENT_TIME).to_pylist())
        opened.fetch(TimeSpan(None, parse_time("end", day(3))), replay_days=0)
        # Still there: the window may be judged by the lake's end.
        assert sorted(str(each) for each in Lake(folder=opened.path).days()) == [day(n) for n in (1, 2, 5, 6, 7)]
    assert newest.date().isoformat() == day(5)
    assert fetched(lake.seen).most_common(1)[0][1] == 1


def test_progress_is_told_at_intervals_by_the_clock_given(lake, tmp_path, caplog):
    ticks = iter(range(10**6))
    with caplog.at_level(logging.INFO, logger="components.extraction.download_cache"):
        extract_lake(URI, tmp_path / "work", WINDOW, opened={"clock": lambda: float(next(ticks)), "num_transfers": 1})
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("download_cache")]
    done = [int(line.split(": ")[1].split(" of ")[0]) for line in lines]
    assert len(lines) > 2
    assert done == sorted(done)
    assert all(line.startswith(f"{URI}: ") and " MB/s" in line for line in lines)
    assert lines[0].endswith("s left")
    assert not lines[-1].endswith("s left")


def test_criteo_files_in_a_bucket_keep_their_days_though_only_the_windows_are_fetched(
    cloud_storage, tmp_path, criteo_rows, write_text
):
    for number in range(12):
        write_text(tmp_path / "criteo" / f"part_{number}.tsv.gz", criteo_rows(50, seed=number))
    (tmp_path / "criteo" / "readme.txt").write_text("nothing")
    put(tmp_path / "criteo")
    cloud_storage.seen.clear()
    window = TimeSpan(parse_time("start", "1970-01-11"), parse_time("end", "1970-01-12"))
    expected = extract_lake(str(tmp_path / "criteo"), tmp_path / "work", window, run="folder")
    found = extract_lake(URI, tmp_path / "work", window, run="bucket")
    assert same_but_place(found) == same_but_place(expected)
    assert found.first_event_time == to_iso(window.start)
    assert fetched(cloud_storage.seen) == {"part_10.tsv.gz": 1}


def test_one_criteo_file_of_a_bucket_is_a_lake(cloud_storage, tmp_path, criteo_rows, write_text):
    for number in (3, 30):
        write_text(tmp_path / "criteo" / f"day_{number}.gz", criteo_rows(50, seed=number))
    put(tmp_path / "criteo")
    cloud_storage.seen.clear()
    uri = f"{URI}/day_3.gz"
    expected = extract_lake(str(tmp_path / "criteo" / "day_3.gz"), tmp_path / "work", TimeSpan(), run="folder")
    found = extract_lake(uri, tmp_path / "work", TimeSpan(), run="bucket")
    assert same_but_place(found) == same_but_place(expected)
    assert found.source_uri == uri
    assert fetched(cloud_storage.seen) == {"day_3.gz": 1}
    with opened_lake(uri, work=tmp_path / "work", open_storage=open_storage) as lake:
        lake.fetch_newest()
        assert find_source(lake.path).describe().endswith("holds days 1970-01-04 to 1970-01-04")
    assert fetched(cloud_storage.seen) == {"day_3.gz": 1}, "names tell the days"
