"""Tests of the monitor's decision log: an interrupted turn neither loses nor repeats a line."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from monitoring.journal import DECISIONS_FILE, Journal
from monitoring.policies.policies import POLICIES
from tests.support.crashes import Kill, Killed
from tests.support.monitors import START, Bench, clicks, prediction, publish

SETTINGS = {
    "policies": ",".join(POLICIES),
    "auc_threshold": 0.74,
    "decide_seconds": 4.0,
    "attribution_window_seconds": 7.0,
    "window_rows": 300,
    "min_clicks": 20,
    "archive_roll_rows": 150,
}


def traffic(seed: int = 5):
    """Return the predictions and clicks of one minute.

    In the first half, version 1 serves and version 2 is a canary. In the second half, version 2
    serves.
    """
    random = np.random.default_rng(seed)
    records = []
    for i in range(120):
        time = START + 0.5 * i + float(random.random()) / 2
        batch = prediction(f"r{i}", 8, time=time, version=2 if i > 60 or i % 7 == 3 else 1, seed=i)
        batch = dataclasses.replace(batch, canary=i <= 60 and i % 7 == 3)
        records.append((time, batch))
        clicked = [
            (batch.request_id, row, time + 1.0)
            for row in np.flatnonzero(random.random(8) < 0.4).tolist()
        ]
        if clicked:
            records.append((time + 1.0, clicks(f"o{i}", clicked)))
    return records


def decisions(state: Path) -> list[str]:
    return (state / DECISIONS_FILE).read_text().splitlines()


def play(b: Bench, tick_seconds: float, crash: str = "") -> list[str]:
    """Publish the shuffled traffic turn by turn, and return the decision lines."""
    random, records = np.random.default_rng(0), traffic()
    began = START - 1.0
    b.start()
    for turn, now in enumerate(
        np.arange(START + tick_seconds, START + 90.0, tick_seconds).tolist()
    ):
        b.clock.now = now
        due = [record for time, record in records if began < time <= now]
        publish(b.log, *(due[i] for i in random.permutation(len(due))))
        began = now
        b.checkpoint = Kill(crash).reach if crash and turn % 12 == 9 else lambda name: None
        try:
            b.monitor.tick()
        except Killed:
            b.checkpoint = lambda name: None
            b.start().tick()
    return decisions(b.settings.state)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    b = Bench(tmp_path_factory.mktemp("plain"), **SETTINGS)
    lines = play(b, 1.0)
    b.close()
    assert len(lines) > 12
    assert {json.loads(line)["version"] for line in lines} == {1, 2}
    return lines


@pytest.mark.parametrize(
    "name", ["intake.stored", "join.matured", "evaluator.decided", "evaluator.stored"]
)
def test_crash_between_any_two_steps_of_evaluation_changes_no_byte(bench, expected, name):
    assert play(bench(**SETTINGS), 2.0, name) == expected


@pytest.mark.parametrize("name", ["", "join.matured", "evaluator.stored"])
def test_request_published_after_final_label_enters_no_decision(tmp_path, name):
    """The late request is published when its label is already final.

    The late request is archived and counted, but used in no decision.
    """
    lines = {}
    for killed in dict.fromkeys(("", name)):
        (tmp_path / (killed or "unkilled")).mkdir(exist_ok=True)
        b = Bench(tmp_path / (killed or "unkilled"), **{**SETTINGS, "policies": "threshold"})
        b.start()
        b.tick(
            prediction("a", 8, time=START), prediction("b", 8, time=START + 5.0), at=START + 14.0
        )
        publish(
            b.log, prediction("late", 8, time=START + 1.0), prediction("c", 8, time=START + 9.0)
        )
        b.clock.now = START + 17.0
        b.checkpoint = Kill(killed).reach
        try:
            b.monitor.tick()
            assert not killed
        except Killed:
            b.checkpoint = lambda name: None
            b.start()
        b.tick(at=START + 30.0)
        assert b.store.counters["passed_over"] == 1
        assert b.store.counters["matured"] == 32
        lines[killed] = decisions(b.settings.state)
        b.close()
        assert [json.loads(line)["decisions"][0]["numbers"]["rows"] for line in lines[killed]][
            -1
        ] == 24
    assert lines[""] == lines[name]


def test_written_line_is_not_written_again_even_after_full_disk(tmp_path):
    lines = {float(i): json.dumps({"time": float(i)}) for i in range(6)}
    first = Journal(tmp_path, lambda: 0.0, max_file_bytes=50)
    first.append_decisions({time: lines[time] for time in (0.0, 1.0, 2.0)})
    again = Journal(tmp_path, lambda: 0.0, max_file_bytes=50)
    again.append_decisions(lines)
    full = (tmp_path / f"{DECISIONS_FILE}.1").read_text().splitlines()
    assert full + decisions(tmp_path) == list(lines.values())
