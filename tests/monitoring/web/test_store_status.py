"""Tests of runs, releases and files in the monitor's metrics."""

import json
import os
import shutil
from datetime import datetime, timezone

import pytest

from components.run_outcome.__main__ import record
from evergreen.registry import promotion_journal
from evergreen.registry.runs import STEPS, step_note
from monitoring.uploader import Uploader
from monitoring.web import store_status
from monitoring.web.store_status import LOOK_SECONDS
from tests.support.monitors import DRIFT, START, WINDOW, clicks, prediction, publish, traffic
from tests.support.snapshots import samples


def run_pipeline(
    store,
    run: str,
    *states: str,
    decision: str = "fail",
    trigger_id: str = "",
    rollout: str = "full",
) -> None:
    """Write the files that a run's steps and its exit handler write.

    `states` contains the state of each step that ran, in the order of the steps.
    """
    for step, state in zip(STEPS, states):
        try:
            with step_note(store, run, step) as note:
                if step == "deployment":
                    note.facts = {"version": 2, "rollout": rollout}
                if step == "evaluation":
                    note.facts = {"decision": "pass" if state == "done" else decision}
                note.state = state if state == "refused" else note.state
                if state == "failed":
                    raise OSError("as the test says")
        except OSError:
            pass
    kfp = "FAILED" if "failed" in states else "SUCCEEDED"
    record(run=run, store=store.as_uri(), trigger_id=trigger_id, trigger_reason="", kfp_state=kfp)


RELEASED = ("done",) * 6
GATE = (*("done",) * 4, "refused")
BLOCKED = ("done", "refused")
DIED = ("done", "done", "failed")


class Shown:
    """The metrics of a monitor, read after its turn."""

    def __init__(self, bench) -> None:
        self.bench = bench
        self.monitor = bench.start()

    def after(self, seconds: float = LOOK_SECONDS) -> dict[tuple, float]:
        self.bench.clock.now += seconds
        self.monitor.tick()
        return samples(self.monitor._exposition.snapshot)


def verdicts(found) -> dict[str, float]:
    return {
        labels[0][1]: value
        for (name, *labels), value in found.items()
        if name == "ctr_monitor_runs_total" and value
    }


def test_runs_are_counted_by_verdict_once_and_over_restart(bench):
    b = bench()
    for name, states, decision in (
        ("released", RELEASED, ""),
        ("worse", GATE, "fail"),
        ("too few", GATE, "inconclusive"),
        ("too few still", GATE, "inconclusive"),
        ("bad data", BLOCKED, ""),
        ("not served", (*("done",) * 5, "refused"), ""),
        ("died", DIED, ""),
    ):
        run_pipeline(b.settings.store, name, *states, decision=decision)
    run_pipeline(b.settings.store, "on trial", *RELEASED, rollout="canary")
    run_pipeline(b.settings.store, "kept", *("done",) * 5, "refused", rollout="none")
    with step_note(b.settings.store, "at work", "extraction"):
        expected = {**dict.fromkeys(store_status.VERDICTS, 1), "gate_inconclusive": 2}
        shown = Shown(b)
        assert verdicts(shown.after()) == expected
        assert verdicts(shown.after()) == expected
        shown = Shown(b)
        assert verdicts(shown.after()) == expected
    shutil.rmtree(b.settings.store / "runs" / "worse")
    run_pipeline(b.settings.store, "at work", *RELEASED)
    assert verdicts(shown.after()) == {**expected, "released": 2}, "deleted runs must still count"


def test_repeated_run_under_its_name_counts_again(bench):
    b = bench()
    run_pipeline(b.settings.store, "r", *DIED)
    shown = Shown(b)
    b.clock.now = datetime.now(timezone.utc).timestamp()
    assert verdicts(shown.after()) == {"failed": 1}
    run_pipeline(b.settings.store, "r", *RELEASED)
    assert verdicts(shown.after()) == {"failed": 1, "released": 1}


def test_gate_refusals_in_row_end_with_release_not_with_run_before_gate(bench):
    b, row = bench(), "ctr_monitor_gate_refusals_in_a_row"
    shown = Shown(b)
    assert (row,) not in shown.after(), "the row must be absent before a run reaches the gate"
    shown_rows = []
    for number, states in enumerate((GATE, DIED, GATE, BLOCKED, RELEASED, GATE)):
        run_pipeline(
            b.settings.store, f"r{number}", *states, decision="inconclusive" if number else "fail"
        )
        shown_rows.append(shown.after().get((row,)))
        if number == 3:
            shown = Shown(b)
    assert shown_rows == [1, 1, 2, 2, 0, 1]


def promotion(store, action: str, version: int, time: str):
    values = {
        "previous_version": None,
        "model_id": "m",
        "model_uri": "",
        "release_uri": "",
        "trigger_id": None,
    }
    line = promotion_journal.Promotion(
        time=time, action=action, version=version, reason="r", **values
    )
    promotion_journal.append_promotion(store, line)


def test_journal_reports_what_is_live_by_what_since_when_and_how_often(bench):
    b = bench()
    b.settings.store.mkdir(parents=True)
    shown = Shown(b)
    found = shown.after()
    assert ("ctr_monitor_live_version",) not in found
    assert found["ctr_monitor_promotions_total", ("action", "release")] == 0
    for action, version, time in (
        ("intent", 1, "2026-01-01T00:00:00+00:00"),
        ("release", 1, "2026-01-01T00:00:01+00:00"),
        ("intent", 2, "2026-01-02T00:00:00+00:00"),
        ("release", 2, "2026-01-02T00:00:01+00:00"),
        ("rollback", 1, "2026-01-02T06:00:00+00:00"),
        ("intent", 3, "2026-01-03T00:00:00+00:00"),
    ):
        promotion(b.settings.store, action, version, time)
    found = shown.after()
    assert found["ctr_monitor_promotions_total", ("action", "release")] == 2
    assert found["ctr_monitor_promotions_total", ("action", "rollback")] == 1
    assert ("ctr_monitor_promotions_total", ("action", "intent")) not in found
    assert found["ctr_monitor_live_version",] == 1
    since = datetime(2026, 1, 2, 6, tzinfo=timezone.utc).timestamp()
    assert found["ctr_monitor_live_since_timestamp_seconds", ("action", "rollback")] == since
    assert ("ctr_monitor_live_since_timestamp_seconds", ("action", "release")) not in found
    status = json.loads(shown.monitor._exposition.status())
    assert status["store_status"]["promotions"]["counts"] == {"release": 2, "rollback": 1}


@pytest.mark.parametrize("broken", ["journal", "outcome"])
def test_store_that_cannot_be_read_is_reported_and_stops_nothing(bench, broken):
    b = bench()
    run_pipeline(b.settings.store, "r", *RELEASED)
    promotion(b.settings.store, "release", 1, "2026-01-01T00:00:00+00:00")
    shown = Shown(b)
    assert shown.after()["ctr_monitor_model_registry_readable",] == 1
    journal = b.settings.store / "journal.jsonl"
    path = journal if broken == "journal" else b.settings.store / "runs" / "new" / "outcome.json"
    path.parent.mkdir(exist_ok=True)
    content = path.read_bytes() if path.exists() else None
    path.write_text("nonsense\n")
    found = shown.after()
    assert found["ctr_monitor_model_registry_readable",] == 0
    assert ("ctr_monitor_live_version",) not in found
    assert found["ctr_monitor_last_turn_timestamp_seconds",] == b.clock.now
    path.unlink() if content is None else path.write_bytes(content)
    found = shown.after()
    assert found["ctr_monitor_model_registry_readable",] == 1
    assert found["ctr_monitor_live_version",] == 1


def test_files_that_wait_for_uploader_are_reported_with_age_of_oldest(bench, tmp_path):
    b = bench(archive_roll_seconds=0.0, upload_wait_seconds=600.0)
    shown = Shown(b)
    assert shown.after()["ctr_monitor_unuploaded_files",] == 0
    for name in ("a", "b"):
        publish(
            b.log, prediction(name, time=b.clock.now), clicks(f"o-{name}", [(name, 0, b.clock.now)])
        )
        found = shown.after(WINDOW + LOOK_SECONDS)
    assert found["ctr_monitor_unuploaded_files",] == 2
    first, second = sorted(b.settings.archive.glob("day=*/*.parquet"))
    os.utime(first, (START, START))
    os.utime(second, (START + 50.0, START + 50.0))
    assert shown.after()["ctr_monitor_oldest_unuploaded_timestamp_seconds",] == START
    Uploader(b.settings.archive, tmp_path / "lake").run_once()
    found = shown.after()
    assert found["ctr_monitor_unuploaded_files",] == 0
    assert ("ctr_monitor_oldest_unuploaded_timestamp_seconds",) not in found


def test_disks_of_existing_folders_are_checked_each_minute(bench, monkeypatch):
    b, free = bench(), [700]
    real, usage = shutil.disk_usage, shutil._ntuple_diskusage
    monkeypatch.setattr(
        store_status.shutil, "disk_usage", lambda path: (real(path), usage(1000, 300, free[0]))[1]
    )
    b.settings.store.mkdir(exist_ok=True)
    (b.settings.store.parent / "lake").mkdir()
    shown, key = Shown(b), "ctr_monitor_disk_free_bytes"
    found = shown.after()
    folders = {labels[1] for name, *pairs in found for labels in pairs if name == key}
    assert folders == {"state", "archive", "store", "lake"}, (
        "folders that do not exist have no disk usage"
    )
    assert (
        found[key, ("folder", "lake")],
        found["ctr_monitor_disk_size_bytes", ("folder", "lake")],
    ) == (700, 1000)
    free[0] = 600
    assert shown.after(LOOK_SECONDS - 1)[key, ("folder", "lake")] == 700
    assert shown.after(1)[key, ("folder", "lake")] == 600


def test_budget_failures_in_row_and_active_run_survive_restart(bench):
    b = bench(
        **{**DRIFT, "failure_backoff_seconds": 1.0, "cooldown_seconds": 0.0, "daily_budget": 3}
    )
    shown = Shown(b)
    found = shown.after(1.0)
    assert found["ctr_monitor_retrain_budget",] == found["ctr_monitor_retrain_budget_left",] == 3
    for number, outcome in enumerate(("refused", "failed", "failed")):
        while not any(run.state == "running" for run in b.trigger.runs.values()):
            traffic(b, f"bad {number} {b.clock.now}", auc="bad")
            found = shown.after(1.0)
        assert found["ctr_monitor_run_under_way",] == 1
        assert found["ctr_monitor_auc_threshold",] == 0.74
        assert found["ctr_monitor_run_started_timestamp_seconds",] == b.clock.now
        assert found["ctr_monitor_retrain_budget_left",] == 2 - number
        b.trigger.end(outcome)
        found = shown.after(0.5)
        assert found["ctr_monitor_run_under_way",] == 0
    shown = Shown(b)
    found = shown.after(0.0)
    assert found["ctr_monitor_retrain_budget_left",] == 0
    assert found["ctr_monitor_runs_without_release_in_a_row",] == 3
    assert found["ctr_monitor_failed_runs_in_a_row",] == 2
