"""Tests that the replay of an incident makes the recorded decisions, or reports differences."""

import json
import shutil
from dataclasses import replace
from datetime import datetime, timezone

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from evergreen.contracts.manifests import ModelQuality
from evergreen.registry.models import verdict_paths
from monitoring.backtest.incident import MANIFEST, _baselines, main, replay
from monitoring.policies.evaluation import serving_ahead
from testing.releases import keep_model, passing_verdict, release
from tests.monitoring.backtest.conftest import (
    CHANGED_AT,
    RELEASED_AT,
    SECONDS,
    SETTINGS,
    run_over,
    stream,
)
from tests.support.monitors import START, Bench

SPAN = (CHANGED_AT - 31.0, RELEASED_AT + 12.5)


def record(ran, out, start=SPAN[0], end=SPAN[1]) -> int:
    store = ran.bench.settings.store
    store.mkdir(exist_ok=True)
    flags = {"state": ran.state, "archive": ran.archive, "store": store, "out": out}
    flags |= {name: value for name, value in (("start", start), ("end", end)) if value is not None}
    return main(
        ["record", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]
    )


@pytest.fixture
def incident(ran, tmp_path):
    assert record(ran, tmp_path / "incident") == 0
    return tmp_path / "incident"


def test_incident_from_middle_replays_to_lines_of_monitor(ran, incident):
    times = [json.loads(line)["time"] for line in ran.lines]
    expected = [line for time, line in zip(times, ran.lines) if SPAN[0] < time <= SPAN[1]]
    replayed = replay(incident)
    assert len(expected) > 20
    assert list(replayed.lines) == expected
    assert replayed.first_difference is None


def test_incident_without_start_and_end_holds_every_decision_written(ran, tmp_path):
    assert record(ran, tmp_path / "all", None, None) == 0
    replayed = replay(tmp_path / "all")
    assert list(replayed.lines) == ran.lines
    assert replayed.first_difference is None


def test_incident_begins_with_remaining_lines_if_first_decisions_are_gone(ran, tmp_path):
    """Only the last two files of the decision log remain.

    The first remaining line provides the state, and later lines are replayed.
    """
    shutil.copytree(ran.state, tmp_path / "state")
    left = ran.lines[len(ran.lines) // 3 :]
    for name, lines in (("decisions.jsonl.1", left[:10]), ("decisions.jsonl", left[10:])):
        (tmp_path / "state" / name).write_text("".join(f"{line}\n" for line in lines))
    ran = replace(ran, folder=tmp_path / "state")
    assert record(ran, tmp_path / "all", 0.0, SPAN[1]) == 0
    replayed = replay(tmp_path / "all")
    assert replayed.first_difference is None
    assert list(replayed.lines) == [
        line for line in left[1:] if json.loads(line)["time"] <= SPAN[1]
    ]


def test_two_replays_in_two_folders_give_one_digest(incident, tmp_path, capsys):
    shutil.copytree(incident, tmp_path / "elsewhere" / "copy")
    digests = []
    for folder in (incident, tmp_path / "elsewhere" / "copy"):
        assert main(["replay", str(folder), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["digest"] == report["recorded_digest"]
        digests.append(report["digest"])
    assert digests[0] == digests[1]


def test_other_settings_decide_otherwise_and_first_difference_is_shown(incident, capsys):
    known = json.loads((incident / MANIFEST).read_text())
    known["settings"]["auc_threshold"] = 0.6
    (incident / MANIFEST).write_text(json.dumps(known))
    assert main(["replay", str(incident)]) == 1
    assert "differs from the recorded one" in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_another_file_than_recorded_file_is_named(incident, capsys, harm):
    (records,) = incident.glob("records/day=*/part.parquet")
    if harm == "gone":
        records.unlink()
    else:
        records.write_bytes(records.read_bytes()[:-1] + b"x")
    assert main(["replay", str(incident)]) == 2
    assert f"{records} is missing or is not the file that was recorded" in capsys.readouterr().err


def test_incident_is_never_written_over_and_never_empty(ran, incident, tmp_path, capsys):
    assert record(ran, incident) == 2
    assert "exists, expected the name of a folder to create" in capsys.readouterr().err
    assert record(ran, tmp_path / "none", START - 900.0, START - 800.0) == 2
    assert "has no decision between" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


# -- an incident that cannot be complete yet


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    """A monitor's state after version 2 was released, rolled back and restored within one window.

    Version 1 served before version 2. The registry has baselines of versions 1 and 2.
    """
    changes = {"policies": "sequential", "drift_grace_seconds": 5.0}
    bench = Bench(tmp_path_factory.mktemp("rolled_back"), **{**SETTINGS, **changes})
    trained = {1: START - 900.0, 2: START - 30.0}
    for version, until in trained.items():
        model_id = f"m{version}"
        trained_until = datetime.fromtimestamp(until, timezone.utc).isoformat()
        keep_model(bench.settings.store, model_id, watermark=trained_until)
        release(bench.settings.store, version, model_id, previous_version=version - 1 or None)
        path = verdict_paths(bench.settings.store, model_id)[0]
        quality = ModelQuality(auc=0.8, auc_low=0.79, auc_high=0.81)
        passing_verdict(model_id, path, num_rows=1_000, candidate=quality).write(path)
    back_and_forth = [
        (0.0, 1),
        (ROLLED_BACK_AT - 60.0, 2),
        (ROLLED_BACK_AT, 1),
        (ROLLED_BACK_AT + 10.0, 2),
    ]

    def version_at(second):
        return next(version for since, version in reversed(back_and_forth) if second >= since)

    def records():
        for second, made in stream():
            yield (
                second,
                [
                    replace(each, model_version=version_at(second), canary=False)
                    if hasattr(each, "canary")
                    else each
                    for each in made
                ],
            )

    made = run_over(bench, records(), SECONDS, every=3)
    bench.kill()
    yield made
    bench.log.close()


ROLLED_BACK_AT = 200.0


def test_rollback_and_return_in_one_window_replay_without_negative_age(rolled_back, tmp_path):
    assert record(rolled_back, tmp_path / "all", None, None) == 0
    assert list(replay(tmp_path / "all").lines) == rolled_back.lines
    assert replay(tmp_path / "all").first_difference is None
    decided = [each for line in rolled_back.lines for each in json.loads(line)["decisions"]]
    assert {each["numbers"]["version"] for each in decided} == {1, 2}
    assert not [each["reason"] for each in decided if " -" in each["reason"]]
    middle = json.loads(rolled_back.lines[len(rolled_back.lines) // 2])["time"]
    assert record(rolled_back, tmp_path / "half", middle, None) == 0
    assert replay(tmp_path / "half").first_difference is None


def archive_up_to(ran, folder, until):
    """Create the monitor's archive as it was before the rows after `until` had matured."""
    for file in ran.archive.glob("day=*/*.parquet"):
        table = pq.read_table(file)
        early_rows = table.filter(
            pc.less_equal(pc.cast(table["event_time"], "int64"), round(until * 1e6))
        )
        target = folder / file.relative_to(ran.archive)
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(early_rows, target)
    return folder


def test_incomplete_incident_names_open_decisions(rolled_back, tmp_path, capsys):
    """The incident ends after a rollback, and before a row after the rollback has matured."""
    end = START + ROLLED_BACK_AT - 20.0
    early = replace(rolled_back, archived=archive_up_to(rolled_back, tmp_path / "early", end))
    assert record(early, tmp_path / "incident", None, end) == 0
    output = capsys.readouterr().out
    ahead = serving_ahead(rolled_back.settings.evaluation)
    found = replay(tmp_path / "incident")
    assert found.complete_until == pytest.approx(end - ahead, abs=2.0)
    open_points = len(found.recorded) - found.num_complete
    assert 0 < open_points < len(found.recorded)
    assert f"the last {open_points} of them, after" in output
    assert "record it again once the archive has rows from after" in output
    assert found.first_difference is not None
    assert found.first_difference >= found.num_complete > 0
    assert main(["replay", str(tmp_path / "incident")]) == 0
    output = capsys.readouterr().out
    assert f"each of the first {found.first_difference} decisions is the recorded one" in output
    assert "the rows that show which version served then had not matured" in output
    assert main(["replay", str(tmp_path / "incident"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["first_difference"], report["open_points"]) == (None, open_points)


def test_difference_before_open_decisions_is_still_one(rolled_back, tmp_path, capsys):
    end = START + ROLLED_BACK_AT - 20.0
    early = replace(rolled_back, archived=archive_up_to(rolled_back, tmp_path / "early", end))
    assert record(early, tmp_path / "incident", None, end) == 0
    known = json.loads((tmp_path / "incident" / MANIFEST).read_text())
    known["settings"]["sequential_tolerance"] = 0.1
    (tmp_path / "incident" / MANIFEST).write_text(json.dumps(known))
    assert main(["replay", str(tmp_path / "incident")]) == 1
    assert "decision 1 differs from the recorded one" in capsys.readouterr().out


def test_incident_over_more_versions_than_lineage_keeps_each_baseline():
    lines = [
        json.dumps(
            {"state": {"baselines": {str(version): {"auc": version / 100} for version in versions}}}
        )
        for versions in (range(1, 9), range(2, 10), range(5, 13))
    ]
    assert _baselines(lines) == {str(version): {"auc": version / 100} for version in range(1, 13)}
