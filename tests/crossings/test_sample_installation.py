"""Tests of the promise in docs/upgrade.md: this version reads an installation of an earlier one."""

import json
from pathlib import Path

import pytest

from cli.__main__ import main
from controller import verify
from evergreen.contracts.manifests import CURRENT
from evergreen.registry.models import stored_model
from evergreen.registry.promotion_journal import current
from evergreen.registry.recommenders import accepted
from evergreen.runtime.errors import PermanentError
from monitoring.state.database import VERSION
from tests.crossings.conftest import Chain
from tests.crossings.sample_installation import MEMORY, OWN, unpack, write_day
from tests.support.monitors import Bench

SAMPLES = sorted((Path(__file__).parent / "golden").glob("installation-*.zip"))


@pytest.fixture(params=SAMPLES, ids=lambda path: path.stem)
def installation(request, tmp_path):
    unpack(request.param, tmp_path / "a monitor")
    return tmp_path / "a monitor"


def test_people_are_told_what_was_live_and_what_is_known_of_it(installation, capsys):
    store = ["--store", str(installation / "store")]
    told = []
    for line in (["models", "--json"], ["live-at", "now", "--json"], ["runs", "--json"], ["model", "card", "1"]):
        assert main([*line, *store]) == 0
        told.append(json.loads(capsys.readouterr().out))
    lines, live, runs, card = told
    assert [(each["action"], each["version"]) for each in lines] == [("intent", 1), ("release", 1)]
    assert (live["version"], live["until"]) == (1, None)
    assert [(run["run"], run["model_id"]) for run in runs] == [("round-1", live["model_id"])]
    assert card["model"]["model_id"] == live["model_id"]


def test_its_version_is_what_was_released_and_answered_what_was_logged(installation, capsys):
    line = ["1", "--store", str(installation / "store"), "--lake", str(installation / "archive"), "--json"]
    assert verify.main(line) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_rows"], found["max_abs_diff"]) == (8, 0.0)


def test_its_monitor_goes_on_from_its_memory_or_names_format(installation):
    recommender = accepted(installation / "store", CURRENT)
    bench = Bench(installation.parent, archive_roll_seconds=1.0)
    bench.clock.advance(1000.0)
    memory = (installation / f"{MEMORY}.sql").read_text()
    if f"user_version = {VERSION};" not in memory:
        with pytest.raises(PermanentError, match=f"has version [5678], expected {VERSION}"):
            bench.start(recommender)
        return
    bench.start(recommender)
    assert {row["request_id"] for row in bench.archived} == {"archived"}
    bench.turn(3, 1.0)
    assert {row["request_id"] for row in bench.archived} == {"archived", "open"}
    bench.close()


def test_round_continues_its_live_model(installation, warm):
    live = current(installation / "store")
    write_day(installation, "2026-01-03")
    recommender = accepted(installation / "store", CURRENT)
    made = Chain(installation, recommender=recommender, settings=OWN, warm=warm).turn_to_training("round-2").training
    assert made.parent_model_id == live.model_id
    assert made.optimizer_step > stored_model(installation / "store", live.model_id).optimizer_step
