"""Rollback, shadow and notice in place of a run: real commands over a real model store's journal and verdicts."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys

import pytest

from components.contracts.manifests import Release, Verdict
from components.runtime.errors import ContractError
from components.store import models as model_store
from components.store import promotion_journal
from components.store.promotion_journal import Promotion, append_promotion
from monitoring.acting.kinds import KindSettings, against_rollback, parse_actions
from monitoring.acting.processes import Processes
from monitoring.acting.request import utc
from monitoring.acting.restraint import RestraintMemory
from monitoring.deciding.decision import Action, Decision
from tests.monitoring.acting.test_retraining import DRIFT, traffic
from tests.monitoring.conftest import START
from tests.monitoring.test_process import wait_until
from tests.support.crashes import Killed, crash_at
from tests.support.paths import REPOSITORY

ROLL_BACK = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from dataclasses import replace
from pathlib import Path
from components.store.promotion_journal import append_promotion, current, read_journal
from tests.support.crashes import Killed, crash_at
store, previous, reason = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with open(store / "rollbacks.txt", "a") as file:
    file.write(f"to {{previous}}: {{reason}}\\n")
live = current(store)
assert live.version != previous, "live already"
target = [line for line in read_journal(store) if line.version == previous][-1]
append_promotion(store, replace(target, action="rollback", previous_version=live.version, reason=reason))
"""
"""What `evergreen rollback` does to the journal, without servers; it refuses a version that is live already."""


def release(store, version, *, auc, at=START, previous=None, action="release"):
    """A release as deployment leaves it: manifest, verdict, journal line."""
    fill = {"str": "x", "int": 1, "float": 0.0, "dict[str, str]": {}, "str | None": None, "int | None": None}
    manifest = Release(
        **{
            **{
                f.name: fill[f.type]
                for f in dataclasses.fields(Release)
                if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            },
            **{"version": version, "previous_version": previous, "model_id": f"m{version}"},
        }
    )
    path = model_store.release_path(store, version)
    manifest.write(path)
    if auc is not None:
        of_verdict, _ = model_store.verdict_paths(store, f"m{version}")
        Verdict(
            candidate_model_id=f"m{version}", champion_model_id=None, decision="pass", accepted=True, reason="",
            num_rows=1, num_clicks=1, candidate={"auc": auc}, champion=None, difference=None, rows_needed=None,
            scores_uri="",
        ).write(of_verdict)  # fmt: skip
    append_promotion(
        store,
        Promotion(
            time=utc(at).isoformat(),
            action=action,
            version=version,
            previous_version=previous,
            model_id=f"m{version}",
            model_uri="",
            release_uri=path.as_uri(),
            trigger_id=None,
            reason="",
        ),  # fmt: skip
    )


@pytest.fixture
def roll(bench, tmp_path):
    """A monitor whose threshold policy rolls back; version 1, AUC .80 before the gate, was replaced by version 2."""

    made = []

    def make(*, previous_auc=0.80, live_at=START - 600.0, script=ROLL_BACK, **changes):
        store = tmp_path / "a monitor" / "store"
        words = [sys.executable, "-c", script, str(store), "{previous}", "{reason}"]
        settings = {**DRIFT, "cooldown_seconds": 0.0, "actions": "threshold=rollback", **changes}
        b = bench(**settings, rollback_command=shlex.join(words))
        release(store, 1, auc=previous_auc, at=START - 86_400.0)
        release(store, 2, auc=0.81, at=live_at, previous=1)
        b.model_store = store
        made.append(b.settings.state)
        return b

    yield make
    for state in made:  # a command outlives its monitor, and a test that failed
        processes = Processes(state / "correction.lock", state / "corrections")
        processes.stop(processes.running() or "")


def settle(b, monitor):
    """Turns of the loop until nothing is under way."""

    def idle():
        monitor.tick()
        return monitor.acting.correction.memory.phase == "idle"

    wait_until(idle, what="the end of the command")


def drift(b, monitor, name, version):
    traffic(b, name, auc="bad", version=version)
    monitor.tick()


def rollbacks(b):
    path = b.model_store / "rollbacks.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_a_young_version_is_rolled_back_once_with_the_reason_and_no_run_is_asked_for(roll):
    b = roll()
    monitor = b.start()
    drift(b, monitor, "bad", 2)
    settle(b, monitor)
    assert promotion_journal.current(b.model_store).version == 1
    (line,) = rollbacks(b)
    assert line.startswith("to 1: auc 0.497 (95 % 0.441..0.554) < 0.740 over 400 rows, 200 clicks, model version 2")
    assert b.trigger.requests == []
    assert b.store.counters["rollback_done"] == 1
    assert [kind for kind in b.kinds() if "rollback" in kind] == ["rollback_decided", "rollback_done"]


def test_a_rollback_never_ping_pongs(roll):
    """The previous version serves as badly as the one before: what follows is a run, not a way back."""
    b = roll()
    monitor = b.start()
    for number in range(6):
        live = promotion_journal.current(b.model_store).version
        drift(b, monitor, f"bad{number}", live)
        settle(b, monitor)
        b.clock.time += 3600.0
    assert [line.action for line in promotion_journal.read_journal(b.model_store)] == ["release"] * 2 + ["rollback"]
    assert len(rollbacks(b)) == 1
    (request,) = b.trigger.requests
    assert "no rollback: version 1 is live by a rollback already" in request.reason


def test_a_version_that_was_rolled_back_and_promoted_again_by_a_person_is_not_rolled_back_again(roll):
    b = roll()
    monitor = b.start()
    drift(b, monitor, "bad", 2)
    settle(b, monitor)
    release(b.model_store, 2, auc=0.81, at=b.clock.time, previous=1, action="promote")
    b.clock.time += 3600.0
    drift(b, monitor, "bad again", 2)
    settle(b, monitor)
    assert len(rollbacks(b)) == 1
    assert "no rollback: version 2 had one" in b.trigger.requests[0].reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"previous_auc": None}, "no verdict is kept on its predecessor, version 1"),
        ({"previous_auc": 0.45}, "its predecessor, version 1, had auc 0.450 before the gate"),
        ({"rollback_within_seconds": 600.0}, "version 2 has served for 660 s"),
    ],
)
def test_where_a_rollback_promises_nothing_a_run_is_asked_for_and_says_why(roll, changes, reason):
    b = roll(**changes)
    monitor = b.start()
    drift(b, monitor, "bad", 2)
    assert rollbacks(b) == []
    assert f"no rollback: {reason}" in b.trigger.requests[0].reason


def test_a_version_that_the_journal_does_not_call_live_is_not_rolled_back(roll):
    b = roll()
    monitor = b.start()
    drift(b, monitor, "bad", 7)
    assert rollbacks(b) == []
    assert "no rollback: version 7 has no predecessor" in b.trigger.requests[0].reason
    reason = against_rollback(b.model_store, 7, auc=None, settings=KindSettings(), now=START)
    assert reason == "version 7 is not the live one of the journal"


def test_a_damaged_journal_leads_to_a_run(roll):
    b = roll()
    (b.model_store / "journal.jsonl").write_text("{torn\n")
    monitor = b.start()
    drift(b, monitor, "bad", 2)
    assert "no rollback: " in b.trigger.requests[0].reason


def test_a_journal_that_is_damaged_after_the_decision_ends_the_rollback_and_not_the_monitor(roll):
    b = roll()
    b.checkpoint = crash_at("correction.decided")
    monitor = b.start()
    with pytest.raises(Killed):
        drift(b, monitor, "bad", 2)
    b.checkpoint = lambda name: None
    (b.model_store / "journal.jsonl").write_text("{torn\n")
    settle(b, b.start())
    (event,) = [event for event in b.events if event["kind"] == "rollback_failed"]
    assert "it could not be started: " in event["text"]
    assert "is not a promotion" in event["text"]


def test_a_rollback_that_fails_is_told_backs_off_and_is_followed_by_a_run(roll):
    b = roll(script="import sys; sys.exit(3)")
    monitor = b.start()
    drift(b, monitor, "bad", 2)
    settle(b, monitor)
    (event,) = [event for event in b.events if event["kind"] == "rollback_failed"]
    assert "version 2 is live; exit code 3, see " in event["text"]
    drift(b, monitor, "bad again", 2)
    assert "no rollback: version 2 had one" in b.trigger.requests[0].reason


def test_a_command_that_takes_too_long_is_killed_with_its_children(roll):
    script = "import subprocess; subprocess.run(['sleep', '300'])"
    b = roll(script=script, command_timeout_seconds=30.0)
    monitor = b.start()
    drift(b, monitor, "bad", 2)
    assert monitor.acting.correction.memory.phase == "running"
    wait_until((b.settings.state / "corrections" / "rollback-v2.json").exists, what="the command")
    b.clock.time += 30.0
    monitor.tick()
    assert monitor.acting.correction.memory.phase == "idle"
    assert "rollback from version 2 failed: not over in 30 s, killed" in b.events[-1]["text"]
    processes = monitor.acting.correction._processes
    wait_until(lambda: processes.running() is None, what="the lock of the killed command")


POINTS = ["correction.decided", "correction.started", "correction.running", "correction.ended"]


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_step_leads_to_exactly_one_rollback(roll, point):
    b = roll()
    b.checkpoint = crash_at(point)
    monitor = b.start()
    traffic(b, "bad", auc="bad", version=2)
    with pytest.raises(Killed):
        settle(b, monitor)
    b.checkpoint = lambda name: None
    monitor = b.start()
    settle(b, monitor)
    assert promotion_journal.current(b.model_store).version == 1
    assert len(rollbacks(b)) == 1
    assert b.store.counters["rollback_done"] == 1
    assert b.trigger.requests == []


def test_a_shadow_is_started_once_and_a_run_follows_if_the_drift_goes_on(bench, tmp_path):
    store, out = tmp_path / "a monitor" / "store", tmp_path / "shadow.txt"
    line = shlex.join([sys.executable, "-c", "import sys; open(sys.argv[1], 'a').write(sys.argv[2])", str(out)])
    settings = {**DRIFT, "cooldown_seconds": 0.0, "actions": "threshold=shadow"}
    b = bench(**settings, shadow_command=line + " 'of {previous} beside {version} '")
    release(store, 1, auc=0.8)
    release(store, 2, auc=0.8, previous=1)
    monitor = b.start()
    drift(b, monitor, "bad", 2)
    settle(b, monitor)
    drift(b, monitor, "bad again", 2)
    assert out.read_text() == "of 1 beside 2 "
    assert b.store.counters["shadow_done"] == 1
    assert "no shadow: version 2 had one" in b.trigger.requests[0].reason


def test_a_policy_that_only_notifies_asks_for_nothing_and_rests_like_any_action(bench):
    b = bench(**DRIFT, actions="threshold=notify")
    monitor = b.start()
    for number in range(4):
        drift(b, monitor, f"bad{number}", 1)
    assert b.trigger.requests == []
    assert b.kinds().count("decision") == 1
    assert "held" not in b.kinds()
    assert b.store.counters["request_notified"] == 1
    assert monitor.retraining.memory.requested_at == ()


def confirmed(policy, reason):
    numbers = {"version": 1, "drifted_columns": 30, "judged_columns": 39}
    return Decision(policy=policy, action=Action.RETRAIN, reason=reason, numbers=numbers)


def test_of_several_policies_each_has_its_own_action(bench):
    b = bench(**DRIFT, actions="data_drift=notify", full_drift_share=0.5)
    monitor = b.start()
    columns, auc = confirmed("data_drift", "30 columns drifted"), confirmed("threshold", "auc fell")
    fine = dataclasses.replace(auc, action=Action.OK, reason="auc is fine")
    now = b.clock.time
    answer = monitor.acting.consider(columns, [columns, fine], now=now, data_until=now - 60.0)
    assert answer == columns
    assert monitor.retraining.progress.phase == "idle"
    answer = monitor.acting.consider(columns, [columns, auc], now=now + 10.0, data_until=now - 50.0)
    assert answer.action is Action.RETRAIN
    request = monitor.retraining.progress.request
    assert request["reason"] == "auc fell (full run: 30 of 39 columns drifted)"
    assert request["parent"] == "none"
    assert b.store.counters["request_notified"] == 1


def test_rests_of_one_action_do_not_hold_another_and_name_it(roll):
    b = roll(cooldown_seconds=1000.0)
    monitor = b.start()
    drift(b, monitor, "bad", 2)
    settle(b, monitor)
    memory = monitor.acting._memory("rollback")
    assert memory.blocked_by == "cool-down after a rollback"
    assert len(memory.requested_at) == 1
    assert monitor.retraining.memory == RestraintMemory()
    drift(b, monitor, "bad too", 1)
    assert len(b.trigger.requests) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": "threshold"}, "actions has 'threshold', expected policy=kind with a kind of retrain, notify"),
        ({"actions": "a=retrain,a=notify"}, "actions names 'a' twice"),
        ({"actions": "a=rollback"}, "rollback_command is empty"),
        ({"actions": "a=shadow"}, "shadow_command is empty"),
        ({"command_timeout_seconds": 0.0}, "command_timeout_seconds is 0.0"),
        ({"rollback_within_seconds": float("nan")}, "rollback_within_seconds is nan"),
    ],
)
def test_actions_that_cannot_be_done_are_refused(changes, message):
    with pytest.raises(ContractError, match=message):
        KindSettings(**changes)


def test_no_action_is_named_by_default():
    assert parse_actions("") == {}


def test_a_reason_with_braces_and_quotes_reaches_the_command_as_one_argument(tmp_path):
    from monitoring.acting.correction import Correction
    from monitoring.journal import Journal
    from monitoring.memory.store import Store

    out = tmp_path / "out.json"
    code = "import json, sys; json.dump(sys.argv[2:], open(sys.argv[1], 'w'))"
    line = shlex.join([sys.executable, "-c", code, str(out), "{reason}", "v{version}"])
    store = Store(tmp_path / "monitor.db")
    correction = Correction(
        store,
        state=tmp_path / "state",
        store=tmp_path / "store",
        journal=Journal(tmp_path, clock=lambda: 1.0),
        settings=KindSettings(shadow_command=line),
    )
    reason = "auc {version} < '0.7' \"$HOME\"; rm {reason}"
    correction.begin("shadow", 3, 2, reason, now=0.0)
    wait_until(lambda: correction.step(1.0), what="the command")
    store.close()
    assert json.loads(out.read_text()) == [reason, "v3"]
