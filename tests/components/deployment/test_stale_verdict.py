"""A verdict holds for the champion that it compared with: two runs at once, one wins and the other says so."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from components.deployment.release import ReleaseSettings, StaleVerdict, release
from components.store import runs
from components.store.promotion_journal import read_entries, read_journal
from tests.support.real_servers import live_version

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def unserved(tmp_path):
    return ReleaseSettings(store=tmp_path / "store", repository=str(tmp_path / "repository"))


@pytest.fixture
def judged(make_candidate):
    """The candidate of `seed`, judged against `champion` as the run had asked for it by `reference`."""

    def make(store, seed, champion, reference="current"):
        model, verdict, raw = make_candidate(store, seed)
        return model, dataclasses.replace(verdict, champion_model_id=champion, champion_reference=reference), raw

    return make


def test_a_verdict_against_another_model_than_the_live_one_is_refused(judged, unserved):
    release(*judged(unserved.store, 1, None, "current"), settings=unserved)
    release(*judged(unserved.store, 2, "model-1"), settings=unserved)
    with pytest.raises(StaleVerdict, match="model-3 was judged against model-1, but model-2 is live: judge it again"):
        release(*judged(unserved.store, 3, "model-1"), settings=unserved)
    assert [entry.version for entry in read_journal(unserved.store)] == [1, 2]
    assert read_entries(unserved.store)[-1].action == "release", "nothing was even announced"


def test_a_first_release_that_another_run_came_before_is_refused(judged, unserved):
    release(*judged(unserved.store, 1, None), settings=unserved)
    with pytest.raises(StaleVerdict, match="judged against no champion, but model-1 is live"):
        release(*judged(unserved.store, 2, None), settings=unserved)


@pytest.mark.parametrize(("champion", "reference"), [(None, "none"), ("model-1", "model-1")])
def test_a_run_that_named_its_champion_is_not_held_to_the_live_one(judged, unserved, champion, reference):
    release(*judged(unserved.store, 1, None), settings=unserved)
    release(*judged(unserved.store, 2, "model-1"), settings=unserved)
    assert release(*judged(unserved.store, 3, champion, reference), settings=unserved).version == 3


@pytest.mark.e2e
def test_of_two_runs_at_once_one_wins_and_the_other_is_refused(judged, settings, deploy, client, raw_rows, tmp_path):
    deploy(1)

    def command(seed):
        flags = {
            "run": f"run-{seed}", "store": settings.store, "repository": settings.repository,
            "triton-urls": settings.triton_urls[0], "output": tmp_path / f"release-{seed}.json",
        }  # fmt: skip
        for kind, manifest in zip(
            ("model", "verdict", "raw-dataset"), judged(settings.store, seed, "model-1"), strict=True
        ):
            flags[kind] = tmp_path / f"{kind}-{seed}.json"
            manifest.write(flags[kind])
        line = [sys.executable, "-m", "components.deployment", *(f"--{name}={value}" for name, value in flags.items())]
        return lambda: subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    commands = [command(seed) for seed in (2, 3)]
    processes = [start() for start in commands]
    words = [process.communicate(timeout=120)[1] for process in processes]
    codes = [process.returncode for process in processes]
    winner = codes.index(0)
    loser = 1 - winner
    assert codes[loser] in (1, 3), words[loser]
    said = {1: f"but model-{winner + 2} is live", 3: "another deployment is at work"}[codes[loser]]
    assert said in words[loser]
    assert live_version(client, raw_rows(3)) == 2
    assert [entry.model_id for entry in read_journal(settings.store)] == ["model-1", f"model-{winner + 2}"]
    if codes[loser] == 3:
        again = commands[loser]()
        assert "judge it again" in again.communicate(timeout=120)[1]
        assert again.returncode == 1
    [note] = runs.read_notes(settings.store, f"run-{loser + 2}")
    assert (note.state, "judge it again" in note.reason) == ("refused", True)
