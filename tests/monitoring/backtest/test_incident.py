"""An incident replays to the decisions that were recorded, anywhere, and says where it does not."""

from __future__ import annotations

import json
import shutil

import pytest

from monitoring.backtest.incident import MANIFEST, read_incident, replay
from monitoring.backtest.incident_command import main
from tests.monitoring.backtest.conftest import CHANGED_AT, RELEASED_AT
from tests.monitoring.conftest import START

SPAN = (CHANGED_AT - 31.0, RELEASED_AT + 12.5)


def record(ran, out, start=SPAN[0], end=SPAN[1]) -> int:
    store = ran.bench.settings.store
    store.mkdir(exist_ok=True)
    flags = {"state": ran.state, "archive": ran.archive, "store": store, "start": start, "end": end, "out": out}
    return main(["record", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))])


@pytest.fixture
def incident(ran, tmp_path):
    assert record(ran, tmp_path / "incident") == 0
    return tmp_path / "incident"


def test_an_incident_from_the_middle_replays_to_the_monitors_own_lines(ran, incident):
    times = [json.loads(line)["time"] for line in ran.lines]
    expected = [line for time, line in zip(times, ran.lines) if SPAN[0] < time <= SPAN[1]]
    replayed = replay(read_incident(incident))
    assert len(expected) > 20
    assert list(replayed.lines) == expected
    assert replayed.first_difference is None


def test_an_incident_from_the_very_beginning_needs_no_memory(ran, tmp_path):
    assert record(ran, tmp_path / "all", START - 1000.0, SPAN[1]) == 0
    assert replay(read_incident(tmp_path / "all")).first_difference is None


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


def test_a_newer_format_is_refused(incident):
    (incident / MANIFEST).write_text(json.dumps({"format_version": 99}))
    assert main(["replay", str(incident)]) == 2


def test_an_incident_is_never_written_over_and_never_empty(ran, incident, tmp_path, capsys):
    assert record(ran, incident) == 2
    assert "exists, expected the name of a folder to make" in capsys.readouterr().err
    assert record(ran, tmp_path / "none", START - 900.0, START - 800.0) == 2
    assert "holds no decision between" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
