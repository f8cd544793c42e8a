"""The mirror's disk: what a kill, a full disk, another run and the cache's bound leave there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from components.extraction.download_cache import DownloadCache, DownloadProgress
from components.extraction.lake_folder import new_view, opened_lake
from components.extraction.times import TimeSpan
from components.runtime.durable import sha256_tree
from components.runtime.errors import PermanentError
from components.storage.objects import ObjectInfo
from tests.support.bucket_lakes import (
    URI,
    cached,
    extract_lake,
    fetched,
    is_fetch_of,
    open_storage,
    put,
    until,
    views,
)
from tests.support.full_disk import files_of_at_most

START = datetime(2026, 3, 1, tzinfo=timezone.utc)
REPOSITORY = Path(__file__).resolve().parents[3]
BIG = "day=2026-03-01/part-0.parquet"
"""The largest file, so the first one begun."""


@pytest.fixture
def folder(tmp_path, raw_table, write_lake):
    """Three days; the first one's file holds most of the rows."""
    lake = write_lake(tmp_path / "lake", raw_table(300, start=START.timestamp(), seconds=3 * 86_400))
    pq.write_table(raw_table(16_000, seed=1, start=START.timestamp(), seconds=80_000), lake / BIG, row_group_size=2000)
    return lake


@pytest.fixture
def lake(folder, cloud_storage):
    put(folder)
    cloud_storage.seen.clear()
    return cloud_storage


def test_a_killed_run_shows_nothing_and_the_next_one_asks_only_for_the_rest(lake, folder, tmp_path):
    before = extract_lake(str(folder), tmp_path / "work", TimeSpan())
    kept = sha256_tree(tmp_path / "work" / "run")
    stalled = lake.fail(is_fetch_of(BIG), "stall")
    flags = ["--run", "run", "--store", str(tmp_path / "store"), "--work", str(tmp_path / "work"), "--lake", URI]
    command = [sys.executable, "-m", "components.extraction", *flags, "--output", str(tmp_path / "raw.json")]
    step = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    size, half = (folder / BIG).stat().st_size, (folder / BIG).stat().st_size // 2

    def is_at_the_half():
        here = [p for p in (tmp_path / "work" / ".lake-cache").glob("*/objects/day=*/*/*") if p.is_file()]
        parts = [path for path in here if path.suffix == ".part"]
        others_are_whole = len(here) == 3 and [path.parents[1].name for path in parts] == ["day=2026-03-01"]
        return stalled.met and others_are_whole and parts[0].stat().st_size

    try:
        until(is_at_the_half)
    finally:
        step.send_signal(signal.SIGKILL)
        step.wait(30)
    # What the process held in memory of the half is gone with it; bytes on the disk are the object's first.
    (part,) = (tmp_path / "work" / ".lake-cache").glob(f"*/objects/{BIG}/*.part")
    here = part.stat().st_size
    assert part.read_bytes() == (folder / BIG).read_bytes()[:here]
    assert 0 < here <= half < size
    assert sha256_tree(tmp_path / "work" / "run") == kept
    assert not (tmp_path / "raw.json").exists()
    lake.released.set()
    lake.seen.clear()
    found = extract_lake(URI, tmp_path / "work", TimeSpan())
    assert found.digest == before.digest
    (request,) = [request for request in lake.seen if request.is_download]
    assert request.name.endswith(BIG)
    assert request.range == f"bytes={here}-"
    assert not list((tmp_path / "work" / ".lake-cache").glob("*/objects/day=*/*/*.part"))
    assert views(tmp_path / "work") == []


def test_a_disk_without_room_is_told_before_anything_is_fetched(lake, folder, tmp_path):
    extract_lake(URI, tmp_path / "work", TimeSpan(None, int(START.timestamp() * 1e6) + 86_400_000_000))
    here = cached(tmp_path / "work")
    kept = sha256_tree(tmp_path / "work" / "run")
    lake.seen.clear()
    needed = sum(p.stat().st_size for p in folder.glob("day=2026-03-0[23]/*"))
    told = rf"2 files of {URI} need {needed} bytes more, {needed - 1} are free"
    with pytest.raises(PermanentError, match=told):
        extract_lake(URI, tmp_path / "work", TimeSpan(), opened={"free": lambda folder: needed - 1})
    assert fetched(lake.seen) == {}
    assert cached(tmp_path / "work") == here
    assert sha256_tree(tmp_path / "work" / "run") == kept
    extract_lake(URI, tmp_path / "work", TimeSpan(), opened={"free": lambda folder: needed})
    assert fetched(lake.seen) == dict.fromkeys(["day=2026-03-02/part-0.parquet", "day=2026-03-03/part-0.parquet"], 1)


def test_what_no_run_needs_gives_way_before_the_disk_is_called_full(lake, folder, tmp_path):
    start = int(START.timestamp() * 1e6)
    extract_lake(URI, tmp_path / "work", TimeSpan(None, start + 86_400_000_000))
    assert list(cached(tmp_path / "work")) == [BIG]
    big, asked = (folder / BIG).stat().st_size, []

    def free(cache):
        asked.append(cache)
        return 0 if len(cached(tmp_path / "work").get(BIG, [])) else big

    window = TimeSpan(start + 86_400_000_000, None)
    extract_lake(URI, tmp_path / "work", window, replay_days=0, opened={"free": free})
    assert len(asked) == 2
    assert list(cached(tmp_path / "work")) == ["day=2026-03-02/part-0.parquet", "day=2026-03-03/part-0.parquet"]


def test_a_disk_that_becomes_full_is_told_and_what_was_there_stays(lake, folder, tmp_path):
    extract_lake(URI, tmp_path / "work", TimeSpan(int(START.timestamp() * 1e6) + 86_400_000_000, None), replay_days=0)
    here, kept = cached(tmp_path / "work"), sha256_tree(tmp_path / "work" / "run")
    size = (folder / BIG).stat().st_size
    told = rf"the disk became full; .*1 files of {URI} need {size} bytes more, \d+ are free"
    with files_of_at_most(size // 2), pytest.raises(PermanentError, match=told):
        extract_lake(URI, tmp_path / "work", TimeSpan())
    assert cached(tmp_path / "work") == here
    assert sha256_tree(tmp_path / "work" / "run") == kept
    assert views(tmp_path / "work") == []
    assert (
        extract_lake(URI, tmp_path / "work", TimeSpan()).digest
        == extract_lake(str(folder), tmp_path, TimeSpan()).digest
    )


def test_a_run_keeps_what_it_reads_though_another_run_prunes_it(lake, folder, tmp_path):
    start = int(START.timestamp() * 1e6)
    expected = (folder / BIG).read_bytes()
    with opened_lake(URI, work=tmp_path / "work", open_storage=open_storage) as first:
        first.fetch(TimeSpan(None, start + 86_400_000_000), replay_days=0)
        window = TimeSpan(start + 86_400_000_000, None)
        extract_lake(URI, tmp_path / "work", window, replay_days=0, opened={"spare_bytes": 0})
        assert BIG not in cached(tmp_path / "work")
        assert (first.path / BIG).read_bytes() == expected
    assert not first.path.exists()


def test_views_of_dead_processes_are_swept_and_those_of_living_ones_stay(tmp_path):
    killed = (
        "from components.extraction.lake_folder import new_view; import os, pathlib, sys; "
        "made = new_view(pathlib.Path(sys.argv[1])); made.__enter__().show({}, empty=['a']); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", killed, str(tmp_path)], cwd=REPOSITORY, check=False)
    assert len(list(tmp_path.iterdir())) == 2
    with new_view(tmp_path) as living:
        living.show({}, empty=["mine"])
        with new_view(tmp_path):
            assert [path.name for path in living.folder.iterdir()] == ["mine"]
            assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("spare", "num_kept"), [(0, 0), (99, 0), (100, 1), (250, 2), (10_000, 5)])
def test_of_what_is_not_needed_the_latest_used_stays_within_the_bound(tmp_path, spare, num_kept):
    cache = DownloadCache(folder=tmp_path, spare_bytes=spare)
    objects = [ObjectInfo(f"day=2026-03-0{n}/part", 100, n) for n in range(1, 8)]
    order = random.Random(spare).sample(objects, len(objects))
    for age, each in enumerate(order):
        cache.path(each).parent.mkdir(parents=True)
        cache.path(each).write_bytes(b"x" * 100)
        os.utime(cache.path(each), (1e9 - age, 1e9 - age))
    cache.path(order[1]).with_name("99.part").write_bytes(b"x")
    cache.prune(order[5:])
    assert [cache.holds(each) for each in order] == [age < num_kept or age >= 5 for age in range(7)]
    found = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert found == sorted(
        cache.path(each).relative_to(tmp_path).as_posix() for each in [*order[5:], *order[:num_kept]]
    )
    assert all(any(folder.iterdir()) for folder in tmp_path.rglob("*") if folder.is_dir())


def test_a_file_of_the_cache_that_lost_its_end_is_fetched_again(lake, folder, tmp_path):
    expected = extract_lake(URI, tmp_path / "work", TimeSpan())
    (whole,) = (tmp_path / "work" / ".lake-cache").glob(f"*/objects/{BIG}/*")
    os.truncate(whole, 100)
    lake.seen.clear()
    assert extract_lake(URI, tmp_path / "work", TimeSpan()).digest == expected.digest
    assert fetched(lake.seen) == {BIG: 1}


def test_a_file_of_the_cache_whose_bytes_are_others_is_fetched_again(lake, folder, tmp_path, caplog):
    expected = extract_lake(URI, tmp_path / "work", TimeSpan())
    (whole,) = (tmp_path / "work" / ".lake-cache").glob(f"*/objects/{BIG}/*")
    spoilt = bytearray(whole.read_bytes())
    spoilt[len(spoilt) // 2] ^= 1
    whole.write_bytes(spoilt)
    lake.seen.clear()
    assert extract_lake(URI, tmp_path / "work", TimeSpan()) == expected
    assert fetched(lake.seen) == {BIG: 1}
    assert whole.read_bytes() == (folder / BIG).read_bytes()
    assert "it is fetched again" in caplog.text


def test_a_line_of_progress_states_speed_and_what_is_left():
    seconds = iter([100.0, 105.0, 105.0, 110.0, 110.0, 120.0])
    progress = DownloadProgress("gs://models/lake", num_files=3, num_bytes=40_000_000, clock=lambda: next(seconds))
    progress.arrived(5_000_000)
    progress.finish_file()
    assert progress.line() == "gs://models/lake: 1 of 3 files, 5.0 of 40.0 MB in 5.0 s, 1.0 MB/s, 35 s left"
    progress.arrived(-1_000_000)
    assert progress.num_arrived == 4_000_000
