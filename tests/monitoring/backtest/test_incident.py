"""An incident replays to the decisions that were recorded, anywhere, and says where it does not."""

import json
import shutil
from dataclasses import replace

import pytest

from monitoring.backtest.incident import MANIFEST, main, replay
from tests.monitoring.backtest.conftest import CHANGED_AT, RELEASED_AT
from tests.support.monitors import START

SPAN = (CHANGED_AT - 31.0, RELEASED_AT + 12.5)


def record(ran, out, start=SPAN[0], end=SPAN[1]) -> int:
    store = ran.bench.settings.store
    store.mkdir(exist_ok=True)
    flags = {"state": ran.state, "archive": ran.archive, "store": store, "out": out}
    flags |= {name: value for name, value in (("start", start), ("end", end)) if value is not None}
    return main(["record", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))])


@pytest.fixture
def incident(ran, tmp_path):
    assert record(ran, tmp_path / "incident") == 0
    return tmp_path / "incident"


def test_an_incident_from_the_middle_replays_to_the_monitors_own_lines(ran, incident):
    times = [json.loads(line)["time"] for line in ran.lines]
    expected = [line for time, line in zip(times, ran.lines) if SPAN[0] < time <= SPAN[1]]
    replayed = replay(incident)
    assert len(expected) > 20
    assert list(replayed.lines) == expected
    assert replayed.first_difference is None


def test_an_incident_without_start_and_end_holds_every_decision_that_was_written(ran, tmp_path):
    assert record(ran, tmp_path / "all", None, None) == 0
    replayed = replay(tmp_path / "all")
    assert list(replayed.lines) == ran.lines
    assert replayed.first_difference is None


def test_where_the_first_decisions_have_rolled_away_an_incident_begins_with_what_is_left(ran, tmp_path):
    """Two full files are kept: the first line left gives its memory, the lines after it are replayed."""
    shutil.copytree(ran.state, tmp_path / "state")
    left = ran.lines[len(ran.lines) // 3 :]
    for name, lines in (("decisions.jsonl.1", left[:10]), ("decisions.jsonl", left[10:])):
        (tmp_path / "state" / name).write_text("".join(f"{line}\n" for line in lines))
    ran = replace(ran, folder=tmp_path / "state")
    assert record(ran, tmp_path / "all", 0.0, SPAN[1]) == 0
    replayed = replay(tmp_path / "all")
    assert replayed.first_difference is None
    assert list(replayed.lines) == [line for line in left[1:] if json.loads(line)["time"] <= SPAN[1]]


def test_two_replays_in_two_places_give_one_digest(incident, tmp_path, capsys):
    shutil.copytree(incident, tmp_path / "elsewhere" / "copy")
    digests = []
    for folder in (incident, tmp_path / "elsewhere" / "copy"):
        assert main(["replay", str(folder), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["digest"] == told["recorded_digest"]
        digests.append(told["digest"])
    assert digests[0] == digests[1]


def test_other_settings_decide_otherwise_and_the_first_difference_is_shown(incident, capsys):
    known = json.loads((incident / MANIFEST).read_text())
    known["settings"]["auc_threshold"] = 0.6
    (incident / MANIFEST).write_text(json.dumps(known))
    assert main(["replay", str(incident)]) == 1
    assert "differs from the recorded one" in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_a_file_that_is_not_the_recorded_one_is_named(incident, capsys, harm):
    (records,) = incident.glob("records/day=*/part.parquet")
    if harm == "gone":
        records.unlink()
    else:
        records.write_bytes(records.read_bytes()[:-1] + b"x")
    assert main(["replay", str(incident)]) == 2
    assert f"{records} is missing or is not the file that was recorded" in capsys.readouterr().err


def test_an_incident_is_never_written_over_and_never_empty(ran, incident, tmp_path, capsys):
    assert record(ran, incident) == 2
    assert "exists, expected the name of a folder to make" in capsys.readouterr().err
    assert record(ran, tmp_path / "none", START - 900.0, START - 800.0) == 2
    assert "holds no decision between" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
