"""Live and backtest decide alike: the lines are equal byte for byte, whatever the monitor's turns and restarts were."""

from __future__ import annotations

import json

import pytest

from components.storage.folder import FolderObjects
from components.storage.locations import open_objects
from monitoring.backtest.archived_requests import read_requests
from monitoring.backtest.judging import judge_requests
from tests.monitoring.backtest.conftest import CHANGED_AT, SETTINGS, run_monitor
from tests.support.monitors import WINDOW, Bench


def backtested(archive, settings) -> list[str]:
    return [each.line() for each in judge_requests(read_requests(archive), settings)]


def test_the_monitors_lines_are_the_backtests(ran):
    assert len(ran.lines) > 50
    assert backtested(FolderObjects(ran.archive), ran.settings) == ran.lines


@pytest.mark.parametrize(("every", "restart_every"), [(1, 0), (17, 0), (4, 50)], ids=["each second", "rare", "killed"])
def test_no_turn_and_no_restart_changes_a_line(ran, tmp_path, every, restart_every):
    bench = Bench(tmp_path, **SETTINGS)
    other = run_monitor(bench, every=every, restart_every=restart_every)
    bench.kill()
    bench.log.close()
    assert other.lines == ran.lines
    assert backtested(FolderObjects(other.archive), other.settings) == ran.lines


def test_a_canary_is_judged_by_neither_as_the_serving_version(ran):
    requests = list(read_requests(FolderObjects(ran.archive)))
    assert sum(request.is_canary for request in requests) == 60
    before_release = [
        json.loads(line)["version"] for line in ran.lines if json.loads(line)["time"] < CHANGED_AT + 40 - WINDOW
    ]
    assert set(before_release) == {1}


def test_an_archive_in_a_bucket_is_read_alike(ran, cloud_storage):
    bucket = open_objects("gs://models/archive")
    for path in ran.archive.glob("day=*/*.parquet"):
        bucket.write(path.relative_to(ran.archive).as_posix(), path)
    assert backtested(bucket, ran.settings) == ran.lines
