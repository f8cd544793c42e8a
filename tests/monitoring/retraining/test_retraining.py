"""Tests of retraining: runs never overlap, and a failed run does not cause run after run."""

import json
from datetime import datetime

import numpy as np
import pytest

from evergreen.runtime.errors import PermanentError
from monitoring.journal import Journal
from monitoring.uploader import Uploader
from tests.support.crashes import Kill, Killed
from tests.support.monitors import DRIFT, START, WINDOW, clicks, prediction, publish, traffic


@pytest.fixture
def drifted(bench):
    """A bench whose monitor has evaluated rows that require a run."""

    def make(**settings):
        b = bench(**{**DRIFT, **settings})
        b.start()
        b.evaluate("bad", auc="bad")
        return b

    return make


def test_drift_requests_one_run_and_new_version_is_evaluated_afresh(started):
    b = started(**DRIFT)
    b.evaluate("good", auc="good")
    assert b.trigger.requests == []
    for i in range(5):
        b.evaluate(f"bad{i}", auc="bad")
    (request,) = b.trigger.requests
    assert request.request_id.startswith("drift-2025")
    assert request.request_id.endswith("-v1")
    assert request.window_start == ""
    assert request.window_end < request.requested_at, (
        "the window ends at the decision point, up to which labels are final"
    )
    assert request.observed["auc"] < request.observed["threshold"] == 0.74
    assert "< 0.740 over" in request.reason
    b.trigger.end("released", version=2)
    b.evaluate("v1 goes on", auc="bad")
    b.evaluate("v2", auc="good", version=2)
    for i in range(3):
        b.evaluate(f"v2-{i}", auc="good", version=2)
    b.clock.now += 2000  # after the cooldown, the old window is still a breach
    b.evaluate("last", auc="good", version=2)
    assert len(b.trigger.requests) == 1
    kinds = b.kinds()
    for kind in ("decision", "requested", "run_started", "run_ended", "recovered"):
        assert kinds.count(kind) == 1, kind
    assert kinds.count("version_seen") == 2


@pytest.mark.parametrize("restart", [False, True], ids=["", "after a restart"])
def test_old_version_rows_that_mature_after_release_never_retrigger(drifted, restart):
    b = drifted(cooldown_seconds=0.0, drift_grace_seconds=WINDOW / 2)
    scores = np.linspace(0.0, 1.0, 400)
    publish(b.log, prediction("v1, label to come", 400, time=b.clock.now, scores=scores))
    publish(
        b.log, clicks("o", [("v1, label to come", row, b.clock.now) for row in range(0, 400, 2)])
    )
    b.clock.now += 1
    publish(b.log, prediction("v2, label to come", 4, time=b.clock.now, version=2))
    b.trigger.end("released", version=2)
    b.monitor.tick()
    if restart:
        b.start()
    b.tick(at=b.clock.now + WINDOW - 0.5)
    assert len(b.monitor.windows[1].labels) == 800
    assert b.monitor.serving_version == 2
    assert len(b.trigger.requests) == 1


def test_files_sealed_after_flush_do_not_delay_run(drifted):
    b = drifted(upload_wait_seconds=1000.0, archive_roll_rows=1)
    Uploader(b.settings.archive, b.folder / "lake").run_once()
    b.evaluate("next", auc="bad")
    assert len(b.archived) == 400  # the last 400 rows are sealed but not uploaded
    assert len(b.trigger.requests) == 1


def test_archive_is_flushed_and_uploaded_before_run_is_requested(drifted):
    b = drifted(upload_wait_seconds=100.0)
    assert b.monitor.actions.retraining.progress.phase == "uploading"
    assert len(b.archived) == 400
    b.monitor.tick()
    assert b.trigger.requests == []
    Uploader(b.settings.archive, b.folder / "lake").run_once()
    b.monitor.tick()
    assert len(b.trigger.requests) == 1


def test_absent_uploader_ends_request_and_backs_off(drifted):
    b = drifted(upload_wait_seconds=100.0)
    b.tick(at=b.clock.now + 100.0)
    assert b.trigger.requests == []
    (ended,) = [event for event in b.events if event["kind"] == "run_ended"]
    assert ended["outcome"] == "failed"
    assert "1 files not uploaded within 100 s" in ended["text"]
    b.evaluate("bad again", auc="bad")
    assert b.kinds()[-1] == "held"


@pytest.mark.parametrize("outcome", ["failed", "refused"])
def test_run_without_release_is_not_repeated_in_loop(started, outcome):
    """Drift lasts six hours and is evaluated every ten minutes.

    Every run ends at once and with the same outcome.
    """
    b = started(**{**DRIFT, "cooldown_seconds": 0.0}, daily_budget=100)
    begun = b.clock.now
    while b.clock.now < begun + 6 * 3600:
        traffic(b, f"bad at {b.clock.now}", auc="bad", rows=60)
        b.tick(at=b.clock.now + 540.0)
        if any(run.state == "running" for run in b.trigger.runs.values()):
            b.trigger.end(outcome)
            b.monitor.tick()
    # Runs start at minutes 10, 30, 60, 120 and 240. The cooldowns are 15, 30, 60, 120 and 240
    # minutes long. The monitor checks every ten minutes.
    assert len(b.trigger.requests) == 5


def test_busy_trigger_is_retried_later_and_reported_once(bench):
    b = bench(**DRIFT)
    b.trigger.runs["by hand"] = b.trigger.state("x")._replace(state="running")
    b.start()
    traffic(b, "bad", auc="bad")
    b.turn(5, 16.0)
    assert b.trigger.requests == []
    assert b.kinds().count("busy") == 1
    b.trigger.end("released")
    b.monitor.tick()
    assert len(b.trigger.requests) == 1


POINTS = [
    "retraining.decided",
    "archive.sealed",
    "retraining.submitted",
    "retraining.running",
    "retraining.ended",
]


@pytest.mark.parametrize("point", POINTS)
def test_crash_at_any_step_leads_to_exactly_one_run(bench, point):
    b = bench(**DRIFT)
    b.checkpoint = Kill(point).reach
    monitor = b.start()
    traffic(b, "bad", auc="bad")

    def run(monitor) -> None:
        for _ in range(3):
            monitor.tick()
            if (
                any(each.state == "running" for each in b.trigger.runs.values())
                and point == "retraining.ended"
            ):
                b.trigger.end("released", version=2)

    with pytest.raises(Killed):
        run(monitor)
    b.checkpoint = lambda name: None
    monitor = b.start()
    for i in range(3):
        b.evaluate(f"bad{i}", auc="bad")
    assert len(b.trigger.requests) == 1
    if point != "retraining.ended":
        assert monitor.actions.retraining.progress.phase == "running"
        b.trigger.end("released", version=2)
        monitor.tick()
    assert monitor.actions.retraining.progress.phase == "idle"
    assert monitor.actions.retraining.past_runs.blocked_until > b.clock.now
    assert b.kinds().count("run_ended") == 1


def test_run_unknown_to_its_trigger_counts_as_failed_after_while(drifted):
    b = drifted()
    b.trigger.runs.clear()
    b.monitor.tick()
    assert b.monitor.actions.retraining.progress.phase == "running"
    b.tick(at=b.clock.now + 61)
    assert b.events[-1]["outcome"] == "failed"


def test_trigger_without_state_of_run_ends_request_and_not_monitor(drifted):
    b = drifted()

    def state(request_id):
        raise PermanentError("looking for it: KFP answered 404 Not Found")

    b.trigger.state = state
    b.evaluate("next", auc="bad")
    (ended,) = [event for event in b.events if event["kind"] == "run_ended"]
    assert ended["outcome"] == "failed"
    assert "KFP answered 404" in ended["text"]
    assert b.store.counters["matured"] == 800
    assert len(b.trigger.requests) == 1


def test_remote_trigger_is_not_queried_at_every_turn(bench):
    b = bench(**DRIFT)
    b.trigger.poll_seconds = 15.0
    state, requested = b.trigger.state, []
    b.trigger.state = lambda request_id: requested.append(b.clock.now) or state(request_id)
    b.start()
    traffic(b, "bad", auc="bad")
    b.turn(31, 1.0)
    assert [time - requested[0] for time in requested] == [0.0, 15.0]


@pytest.mark.parametrize("offset", [0.0, 7.25], ids=["at a decision point", "between two"])
def test_every_row_that_was_evaluated_belongs_to_run(started, offset):
    """The archive's times are in microseconds, and the window's end is exclusive.

    The newest evaluated row is before the end of the run's window.
    """
    b = started(**DRIFT)
    b.clock.now = START + offset
    traffic(b, "bad", auc="bad")
    b.tick(at=b.clock.now + 10.0)
    window = b.trigger.requests[0].window_end
    assert len(b.archived) == 400
    assert max(row["event_time"] for row in b.archived) < datetime.fromisoformat(window)


def test_long_run_is_reported_once_and_followed_to_its_end(drifted):
    b = drifted()
    for _ in range(20):
        b.tick(at=b.clock.now + 3600.0)
    assert b.kinds().count("overdue") == 1
    assert b.monitor.actions.retraining.progress.phase == "running"
    b.trigger.end("released", version=2)
    b.monitor.tick()
    assert b.monitor.actions.retraining.progress.phase == "idle"


def test_full_timeline_is_cut_and_keeps_its_predecessor(tmp_path):
    journal = Journal(tmp_path, clock=lambda: 1.0, max_file_bytes=1000)
    for number in range(100):
        journal.append_point({"number": number})
    remaining = [
        (tmp_path / name).read_text().splitlines()
        for name in ("timeline.jsonl.1", "timeline.jsonl")
    ]
    numbers = [json.loads(line)["number"] for lines in remaining for line in lines]
    assert numbers == list(range(numbers[0], 100))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2100
    journal.emit("stopped", "in time")
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1
