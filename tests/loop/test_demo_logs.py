"""Tests of the demo with a log server: the same results as with a file, and no process left."""

import json

import pytest

from demo.log_server import find_emulator
from evergreen.runtime.errors import ContractError


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["pubsub", "kafka"])
def test_loop_turns_and_loses_no_record_over_log_server(kind, tmp_path, run_to_end):
    if kind == "pubsub":
        try:
            find_emulator()
        except ContractError as error:
            pytest.skip(str(error))
    folder = tmp_path / "a demo"
    ended = run_to_end(
        ["demo", "--rows", "60000", "--folder", str(folder), "--log", kind],
        output=tmp_path / "screen.log",
        seconds=850,
    )
    assert ended.code == 0, ended.output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["requests"]["failed"] == 0
    assert summary["records"]["archived"] == summary["records"]["published"] > 0
    assert summary["records"]["dead_letters"] == 0
    assert summary["trigger"]["runs"] == 1
    found = summary["decisions"]
    assert found["equal"] or found["late_requests"] or found["late_rows"]
    assert not (folder / "click_log.sqlite").exists()
    assert ended.left == {}


def test_demo_refuses_unknown_log_before_it_touches_folder(tmp_path, run_to_end):
    ended = run_to_end(
        ["demo", "--folder", str(tmp_path / "demo"), "--log", "rabbit"],
        output=tmp_path / "screen.log",
    )
    assert ended.code == 2
    assert "log is 'rabbit', expected one of sqlite, pubsub, kafka" in ended.output
    assert not (tmp_path / "demo").exists()
