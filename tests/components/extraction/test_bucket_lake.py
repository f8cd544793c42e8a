"""Tests of a lake in a bucket: the rows equal a folder's rows, and each file is fetched once."""

import json
import logging
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.backfill import backfill
from components.extraction.lake import Lake
from components.extraction.lake_files import DownloadCache, opened_lake
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset
from evergreen.contracts.records import CLICK
from evergreen.rows.raw_schema import raw_schema
from evergreen.rows.times import TimeSpan, parse_day, parse_time
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.storage.objects import ObjectInfo
from testing.processes import wait_for
from testing.recommenders import SHOP, accept_into
from tests.support.errors import raises
from tests.support.lakes import (
    OUTCOMES,
    URI,
    cached,
    extract_lake,
    fetched,
    is_fetch_of,
    open_storage,
    put,
)

RAW_SCHEMA = raw_schema(SHOP.features)

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
DAY = timedelta(days=1)
WINDOW = TimeSpan(
    parse_time("start", "2026-03-05T06:00:00Z"), parse_time("end", "2026-03-06T18:00:00Z")
)
REPOSITORY = Path(__file__).resolve().parents[3]


def day(number: int) -> str:
    """Format a day of March 2026."""
    return f"2026-03-{number:02d}"


def part(number: int, k: int = 0) -> str:
    return f"day={day(number)}/part-{k}.parquet"


@pytest.fixture
def folder(tmp_path, raw_table, write_lake):
    """Seven days of 200 rows in two files each, late clicks on each day, and hidden files."""
    table = raw_table(1400, start=START.timestamp(), seconds=7 * 86_400)
    lake = write_lake(tmp_path / "la ke", table, num_files=2)
    rows = table.select([raw_rows.REQUEST_ID, raw_rows.ROW, raw_rows.EVENT_TIME]).to_pylist()[::7]
    for number in range(1, 8):
        late = lake / raw_rows.OUTCOME_PARTITION.format(day=day(number))
        late.mkdir(parents=True)
        outcomes = [
            {
                "request_id": row[raw_rows.REQUEST_ID],
                "row": row[raw_rows.ROW],
                "event": CLICK,
                "window_seconds": 1800.0,
            }
            | {
                "outcome_time": row[raw_rows.EVENT_TIME] + timedelta(minutes=1),
                "stored_at": START + 9 * DAY,
            }
            for row in rows
            if row[raw_rows.EVENT_TIME].date().isoformat() == day(number)
        ]
        pq.write_table(pa.Table.from_pylist(outcomes, OUTCOMES), late / "part-0.parquet")
    (lake / f"day={day(5)}" / "_unfinished.parquet").write_bytes(b"someone's")
    (lake / "_notes.txt").write_text("of the lake\n")
    return lake


@pytest.fixture
def lake(folder, cloud_storage):
    """The same lake in a bucket. Returns the double of the storage service."""
    put(folder)
    cloud_storage.seen.clear()
    return cloud_storage


def same_but_place(dataset: RawDataset) -> RawDataset:
    """Return the dataset without its locations."""
    places = ("train_uri", "holdout_uri", "malformed_uri", "replay_uri", "replay_holdout_uri")
    return replace(dataset, source_uri="", **dict.fromkeys(places))


@pytest.mark.parametrize(
    ("window", "settings"),
    [
        (TimeSpan(), {}),
        (WINDOW, {"replay_share": 0.5, "replay_days": 2}),
        (TimeSpan(None, WINDOW.end), {"replay_days": 0}),
    ],
)
def test_lake_in_bucket_gives_dataset_of_same_lake_in_folder(
    lake, folder, tmp_path, window, settings
):
    expected = extract_lake(str(folder), tmp_path / "work", window, run="folder", **settings)
    found = extract_lake(URI, tmp_path / "work", window, run="bucket", **settings)
    assert same_but_place(found) == same_but_place(expected)
    assert found.source_uri == URI
    assert found.num_late_clicks > 0
    assert found.outcomes_digest == expected.outcomes_digest is not None


def test_only_files_of_window_replay_and_their_late_clicks_are_fetched(lake, tmp_path):
    extract_lake(URI, tmp_path / "work", WINDOW, replay_days=2)
    rows = [part(number, k) for number in (4, 5, 6) for k in (0, 1)]
    late = [f"outcomes/day={day(number)}/part-0.parquet" for number in (3, 4, 5, 6, 7)]
    assert fetched(lake.seen) == dict.fromkeys([*rows, *late], 1)
    assert sorted(cached(tmp_path / "work")) == sorted([*rows, *late])


def test_what_is_here_at_its_generation_is_not_fetched_again(lake, folder, tmp_path, raw_table):
    first = extract_lake(URI, tmp_path / "work", WINDOW, replay_days=2)
    lake.seen.clear()
    assert extract_lake(URI, tmp_path / "work", WINDOW, replay_days=2) == first
    assert fetched(lake.seen) == {}
    pq.write_table(
        raw_table(100, seed=4, start=WINDOW.start / 1e6, seconds=3600), folder / part(5, 1)
    )
    open_storage(URI).write(part(5, 1), folder / part(5, 1))
    other = extract_lake(URI, tmp_path / "work", WINDOW, replay_days=2)
    assert fetched(lake.seen) == {part(5, 1): 1}
    assert (
        other.digest
        == extract_lake(str(folder), tmp_path / "work", WINDOW, run="folder", replay_days=2).digest
    )


def test_of_back_filled_day_newest_complete_version_is_fetched(lake, folder, tmp_path, raw_table):
    for version in (1, 2):
        newer = tmp_path / f"newer-{version}.parquet"
        start = parse_time("start", day(5)) / 1e6
        pq.write_table(raw_table(300, seed=20 + version, start=start, seconds=86_000), newer)
        backfill([newer], SHOP, lake=str(folder), day=parse_day("day", day(5)))
    (folder / f"day={day(5)}" / "version=3").mkdir()
    (folder / f"day={day(5)}" / "version=3" / "part-00000.parquet").write_bytes(
        b"half, and no marker"
    )
    put(folder)
    lake.seen.clear()
    expected = extract_lake(str(folder), tmp_path / "work", WINDOW, run="folder", replay_days=1)
    found = extract_lake(URI, tmp_path / "work", WINDOW, run="bucket", replay_days=1)
    assert same_but_place(found) == same_but_place(expected)
    assert {entry["day"]: entry["version"] for entry in found.days} == {day(5): 2, day(6): 0}
    assert not {part(5), part(5, 1), f"day={day(5)}/version=1/part-00000.parquet"} & set(
        fetched(lake.seen)
    )


def test_days_without_rows_do_not_count_as_days_to_replay(lake, folder, tmp_path):
    for number in (3, 4):
        for k in (0, 1):
            pq.write_table(RAW_SCHEMA.empty_table(), folder / part(number, k))
    put(folder)
    window = TimeSpan(parse_time("start", day(5)), None)
    found = extract_lake(URI, tmp_path / "work", window, replay_share=0.4, replay_days=2)
    assert [entry["day"] for entry in found.replay_days] == [day(1), day(2)]


def test_object_replaced_between_listing_and_fetch_is_temporary_error(lake, folder, tmp_path):

    def replace_before_its_download(request):
        if is_fetch_of(part(5))(request):
            lake.before = lambda request: None
            open_storage(URI).write(part(5), folder / part(5))

    lake.before = replace_before_its_download
    with raises(TemporaryError, part(5), "generation"):
        extract_lake(URI, tmp_path / "work", WINDOW)
    found, expected = (extract_lake(uri, tmp_path / "work", WINDOW) for uri in (URI, str(folder)))
    assert found.digest == expected.digest


@pytest.mark.parametrize(
    ("uri", "kind", "message"),
    [
        ("gs://models/nowhere", ContractError, "lake gs://models/nowhere holds no rows"),
        ("gs://models", ContractError, "lake gs://models holds no rows"),
        ("gs://elsewhere/lake", PermanentError, "expected bucket elsewhere to exist"),
        (
            "s3://models/lake",
            ContractError,
            "lake is .s3://models/lake., expected gs://bucket/prefix, file:",
        ),
    ],
)
def test_lake_that_is_not_there_is_refused(cloud_storage, tmp_path, uri, kind, message):
    with pytest.raises(kind, match=message):
        extract_lake(uri, tmp_path / "work", TimeSpan())


def test_errors_and_malformed_rows_name_object_they_came_from(lake, folder, tmp_path):
    table = pq.read_table(folder / part(5), partitioning=None)
    labels = [7 if i == 60 else label for i, label in enumerate(table[raw_rows.LABEL].to_pylist())]
    pq.write_table(
        table.set_column(0, raw_rows.LABEL, pa.array(labels, pa.int32())), folder / part(5)
    )
    put(folder)
    extract_lake(URI, tmp_path / "work", WINDOW, max_malformed_fraction=0.02)
    (line,) = (
        (tmp_path / "work" / "run" / "extraction" / "malformed.jsonl").read_text().splitlines()
    )
    assert (json.loads(line)["file"], json.loads(line)["line"]) == (f"{URI}/{part(5)}", 61)
    (folder / part(6)).write_bytes(b"corrupt")
    put(folder)
    with raises(ContractError, "1 of 4 files", f"{URI}/{part(6)}", "readable"):
        extract_lake(URI, tmp_path / "work", WINDOW)


def test_newest_row_takes_newest_day_with_rows_alone(lake, folder, tmp_path):
    for number, k in ((6, 0), (6, 1), (7, 0), (7, 1)):
        pq.write_table(RAW_SCHEMA.empty_table(), folder / part(number, k))
    put(folder)
    lake.seen.clear()
    with opened_lake(URI, work=tmp_path / "work", open_storage=open_storage) as files:
        found = Lake(files=files).newest()
    assert found == parse_time("newest", "2026-03-05T23:52:48Z")
    assert {name.partition("/")[0] for name in fetched(lake.seen)} == {
        f"day={day(n)}" for n in (5, 6, 7)
    }


BIG = part(1)
"""Name of the largest file, which is fetched first."""


@pytest.fixture
def big_lake(tmp_path, raw_table, write_lake, cloud_storage):
    """Three days in a bucket, with most rows in the first day's file.

    The fixture returns the folder.
    """
    folder = write_lake(
        tmp_path / "lake", raw_table(300, start=START.timestamp(), seconds=3 * 86_400)
    )
    pq.write_table(
        raw_table(16_000, seed=1, start=START.timestamp(), seconds=80_000),
        folder / BIG,
        row_group_size=2000,
    )
    put(folder)
    cloud_storage.seen.clear()
    return folder


def cached_file(work: Path, name: str) -> Path:
    (path,) = (work / ".lake-cache").glob(f"*/objects/*/{name}")
    return path


def test_killed_run_shows_nothing_and_next_one_asks_only_for_rest(
    big_lake, cloud_storage, tmp_path
):
    work = tmp_path / "work"
    before = extract_lake(str(big_lake), work, TimeSpan())
    stalled = cloud_storage.fail(is_fetch_of(BIG), "stall")
    accept_into(tmp_path / "store")
    flags = ["--run", "run", "--store", str(tmp_path / "store"), "--work", str(work), "--lake", URI]
    command = [
        sys.executable,
        "-m",
        "components.extraction",
        *flags,
        "--output",
        str(tmp_path / "raw.json"),
    ]
    step = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)

    def is_at_the_half():
        found = list((work / ".lake-cache").glob("*/objects/*/day=*/part*"))
        parts = [path for path in found if path.suffix == ".part"]
        return stalled.met and len(found) == 3 and len(parts) == 1 and parts[0].stat().st_size

    try:
        wait_for(is_at_the_half)
    finally:
        step.send_signal(signal.SIGKILL)
        step.wait(30)
    # The process lost the bytes that were only in its memory. The bytes on disk are the start of
    # the object, so they need not be downloaded again.
    arrived = cached_file(work, f"{BIG}.part").read_bytes()
    assert arrived
    assert (big_lake / BIG).read_bytes().startswith(arrived)
    assert not (tmp_path / "raw.json").exists()
    cloud_storage.released.set()
    cloud_storage.seen.clear()
    assert extract_lake(URI, work, TimeSpan()).digest == before.digest
    (request,) = [request for request in cloud_storage.seen if request.is_download]
    assert (request.name.removeprefix("a lake/"), request.range) == (BIG, f"bytes={len(arrived)}-")
    assert not list((work / ".lake-cache").rglob("*.part"))


def test_disk_without_room_is_reported_before_anything_is_fetched(
    big_lake, cloud_storage, tmp_path
):
    extract_lake(
        URI, tmp_path / "work", TimeSpan(None, int(START.timestamp() * 1e6) + 86_400_000_000)
    )
    here = cached(tmp_path / "work")
    cloud_storage.seen.clear()
    needed = sum(p.stat().st_size for p in big_lake.glob("day=2026-03-0[23]/*"))
    with raises(PermanentError, "2 files", URI, f"{needed} more bytes", needed - 1, "free"):
        extract_lake(URI, tmp_path / "work", TimeSpan(), opened={"free": lambda folder: needed - 1})
    assert fetched(cloud_storage.seen) == {}
    assert cached(tmp_path / "work") == here
    extract_lake(URI, tmp_path / "work", TimeSpan(), opened={"free": lambda folder: needed})
    assert fetched(cloud_storage.seen) == dict.fromkeys([part(2), part(3)], 1)


def test_what_no_run_needs_gives_way_before_disk_is_called_full(big_lake, tmp_path):
    start = int(START.timestamp() * 1e6)
    extract_lake(URI, tmp_path / "work", TimeSpan(None, start + 86_400_000_000))
    assert list(cached(tmp_path / "work")) == [BIG]

    def free(cache):
        return 0 if BIG in cached(tmp_path / "work") else 10**9

    window = TimeSpan(start + 86_400_000_000, None)
    extract_lake(URI, tmp_path / "work", window, replay_days=0, opened={"free": free})
    assert sorted(cached(tmp_path / "work")) == [part(2), part(3)]


def test_run_waits_for_another_that_reads_through_same_cache(big_lake, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="components.extraction.lake_files")
    waiting = threading.Thread(target=extract_lake, args=(URI, tmp_path / "work", TimeSpan()))
    with opened_lake(URI, work=tmp_path / "work", open_storage=open_storage):
        waiting.start()
        wait_for(lambda: "waiting for another run" in caplog.text)
        assert not (tmp_path / "work" / "run").exists()
    waiting.join(60)
    assert (tmp_path / "work" / "run" / "extraction").is_dir()


def test_what_newest_run_did_not_use_is_removed(tmp_path):
    cache = DownloadCache(folder=tmp_path)
    objects = [ObjectInfo(f"day=2026-03-0{n}/part", 100, n, "n4mOQw==") for n in range(1, 5)]
    for each in objects:
        cache.path(each).parent.mkdir(parents=True)
        cache.path(each).write_bytes(b"x" * 100)
    parts = [path.with_name(f"{path.name}.part") for path in map(cache.path, objects)]
    parts[0].write_bytes(b"x")
    parts[3].write_bytes(b"x")
    cache._used.update(cache.path(each) for each in objects[2:])
    cache.prune()
    found = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {cache.path(objects[2]), cache.path(objects[3]), parts[3]}
    assert all(any(folder.iterdir()) for folder in tmp_path.rglob("*") if folder.is_dir())


@pytest.mark.parametrize("spoil", ["cut", "flip"])
def test_file_of_cache_that_disk_spoilt_is_fetched_again(big_lake, cloud_storage, tmp_path, spoil):
    expected = extract_lake(URI, tmp_path / "work", TimeSpan())
    path = cached_file(tmp_path / "work", BIG)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if spoil == "flip" else content[:100])
    cloud_storage.seen.clear()
    assert extract_lake(URI, tmp_path / "work", TimeSpan()) == expected
    assert fetched(cloud_storage.seen) == {BIG: 1}
    assert path.read_bytes() == (big_lake / BIG).read_bytes()
