"""Tests of `evergreen status` for folders with and without a model, and for a running monitor."""

import json
import sqlite3
from contextlib import closing
from dataclasses import asdict, replace

import pytest

from cli.status import main, read_status
from evergreen.config.monitor import DecisionSettings
from evergreen.registry.models import verdict_paths
from evergreen.registry.promotion_journal import ROLLBACK, append_promotion, current
from evergreen.registry.runs import SEARCH_RUN, RunOutcome, new_run_name, write_outcome
from monitoring.metrics.window import Kpis
from monitoring.policies.policy import Action, Decision
from monitoring.retraining.actions import ActionStatus
from monitoring.state.rules_file import write_rules
from monitoring.state.store import STORE_FILE, StateStore
from monitoring.web.exposition import Exposition, Snapshot
from monitoring.web.server import HttpSettings, MonitorServer
from testing.releases import make_live, passing_verdict, release, store_model

NOW = 1_772_362_800.0  # 2026-03-01T11:00:00Z
KPIS = Kpis(
    version=1,
    rows=8000,
    clicks=2000,
    auc=0.77,
    auc_low=0.75,
    auc_high=0.79,
    log_loss=0.5,
    calibration=1.0,
    ctr=0.25,
)
NUMBERS = {"auc": 0.77, "threshold": 0.73, "version": 1, "window_version": 1}
DECISION = Decision(
    policy="sequential", action=Action.BREACH, reason="evidence 12 of 100", numbers=NUMBERS
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "store").mkdir()
    return tmp_path


@pytest.fixture
def live(folder):
    """Folder of an installation whose version 1 is live."""
    store = folder / "store"
    store_model(store, "m1")
    make_live(store, release(store, 1, "m1"))
    return folder


def status_of(folder, *, state=None, address=None):
    return read_status(folder / "store", state, address=address, now=NOW)


def leave_monitor(state):
    """Write the files of a monitor that stopped after it suspected a drift."""
    state.mkdir()
    write_rules(state, DecisionSettings())
    point = {"time": NOW - 60, "backlog": 0, **asdict(KPIS)}
    (state / "timeline.jsonl").write_text(json.dumps(point) + "\n")
    line = {
        "time": NOW - 90,
        "version": 1,
        "action": "breach",
        "policy": "sequential",
        "reason": DECISION.reason,
        "decisions": [DECISION.document()],
    }
    (state / "decisions.jsonl").write_text(json.dumps(line) + "\n")
    columns = [{"feature": "price", "drifted": True}, {"feature": "age", "drifted": False}]
    incident = {"since": NOW - 300, "last_at": NOW - 90, "sent_at": 0, "text": "x"}
    with closing(StateStore(state / STORE_FILE)) as store:
        store.write_documents(
            {
                "rate_limits": {"blocked_until": NOW + 600, "blocked_by": "cooldown after a test"},
                "incidents": {"drift": incident},
                "drift": {"shown": [{"version": 1, "columns": columns}]},
            },
            {"dead_letter": 3},
        )


def test_empty_folder_names_next_command(folder, capsys):
    assert main([str(folder)]) == 0
    output = capsys.readouterr().out
    assert "live      no version" in output
    assert "no version is live: " in output
    assert main([str(folder), "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert [known[name] for name in ("live", "auc", "drift", "last_run", "next_run")] == [None] * 5


def test_folder_without_store_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no folder store" in capsys.readouterr().err


def test_without_monitor_auc_is_that_of_gate(live):
    store = live / "store"
    verdict = passing_verdict("m1", store / "scores", num_rows=900)
    verdict.write(verdict_paths(store, "m1")[0])
    found = status_of(live).auc
    assert (found.auc, found.rows, found.is_of_production) == (verdict.candidate.auc, 900, False)
    assert found.limit is None


def write_failed(live, run, reason):
    """Write the outcome of a run that failed at training."""
    outcome = RunOutcome(
        run=run,
        trigger_id="",
        state="failed",
        step="training",
        reason=reason,
        version=None,
        ended_at="2026-03-01T00:00:00Z",
    )
    write_outcome(live / "store", outcome)


def test_failed_run_needs_person(live):
    write_failed(live, "r1", "disk is full")
    found = status_of(live)
    assert (found.last_run.run, found.last_run.state) == ("r1", "failed")
    assert "run r1 failed at training: disk is full" in found.needs_person


def test_failed_trial_of_search_needs_no_person(live):
    write_failed(live, new_run_name(SEARCH_RUN), "network of this run has [64, 32]")
    found = status_of(live)
    assert found.last_run.state == "failed"
    assert found.needs_person == []


def roll_back(store, *, blocked):
    """Write the journal's line that makes version 1 live again in place of version 2."""
    made = replace(
        current(store),
        time="2026-01-02T00:00:00Z",
        action=ROLLBACK,
        previous_version=2,
        who="controller",
        reason="the monitor: failed",
        blocked_model_id=blocked,
    )
    append_promotion(store, made)


def test_automatic_rollback_needs_person_until_next_release(live, capsys):
    roll_back(live / "store", blocked="m2")
    assert main([str(live)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "(rollback from version 2 by controller)" in output
    assert "version 2 was rolled back automatically at " in output
    assert "(the monitor: failed)" in output
    make_live(live / "store", release(live / "store", 3, "m1"))
    assert status_of(live).needs_person == []


def test_rollback_by_person_needs_no_controller(live):
    roll_back(live / "store", blocked=None)
    found = status_of(live)
    assert (found.live.action, found.live.previous_version) == ("rollback", 2)
    assert found.needs_person == []


def test_stopped_monitor_is_read_from_its_files(live):
    leave_monitor(live / "monitor")
    found = status_of(live, state=live / "monitor")
    assert found.monitor == "stopped"
    assert (found.auc.auc, found.auc.low, found.auc.high) == (0.77, 0.75, 0.79)
    assert (found.auc.limit, found.auc.rows) == (0.73, 8000)
    assert (found.drift.action, found.drift.reason) == ("breach", "evidence 12 of 100")
    assert (found.drift.drifted_columns, found.drift.num_columns) == (["price"], 2)
    assert found.drift.since == "2026-03-01T10:55:00+00:00"
    assert found.next_run.not_before == "2026-03-01T11:10:00+00:00"
    assert found.next_run.cause == "cooldown after a test"
    assert any(each.startswith("no monitor runs on ") for each in found.needs_person)
    assert any(each.startswith("3 dead letters") for each in found.needs_person)


def test_reading_takes_no_lock_and_changes_no_file(live):
    leave_monitor(state := live / "monitor")
    before = {path.name: path.read_bytes() for path in state.iterdir()}
    with closing(StateStore(state / STORE_FILE)):
        assert status_of(live, state=state).drift.action == "breach"
    status_of(live, state=state)
    assert {name: (state / name).read_bytes() for name in before} == before


def test_state_of_other_program_is_refused(live, capsys):
    (state := live / "monitor").mkdir()
    with closing(sqlite3.connect(state / STORE_FILE)) as database:
        database.execute("CREATE TABLE other (name TEXT)")
    assert main([str(live)]) == 2
    assert "expected a monitor's state" in capsys.readouterr().err


def test_running_monitor_is_queried(live):
    exposition = Exposition()
    exposition.show(
        Snapshot(
            time=NOW,
            serving_version=1,
            windows=(KPIS,),
            decisions=(DECISION,),
            decision="breach: evidence 12 of 100",
            decided_at=NOW - 90,
            log_problem="the broker is gone",
            actions=ActionStatus(
                phase="running", request_id="drift-1", daily_budget=2, budget_left=1
            ),
        )
    )
    (state := live / "monitor").mkdir()
    with closing(MonitorServer(exposition, HttpSettings(http_port=0))) as server:
        server.write_address(state)
        found = status_of(live, state=state)
        assert found == status_of(live, state=state, address=f"http://127.0.0.1:{server.port}")
    assert found.monitor == "running"
    assert (found.auc.auc, found.auc.limit) == (0.77, 0.73)
    assert (found.drift.action, found.drift.drifted_columns) == ("breach", None)
    assert found.next_run.in_progress == "drift-1"
    assert found.needs_person == ["the log cannot deliver: the broker is gone"]
    assert status_of(live, state=state).monitor == "stopped", (
        "no process listens at the monitor's address"
    )


def test_address_without_monitor_is_error(live, capsys):
    assert main([str(live), "--monitor", "http://127.0.0.1:9"]) == 3
    assert "no monitor responds at http://127.0.0.1:9/status" in capsys.readouterr().err
