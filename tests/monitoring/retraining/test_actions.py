"""Tests of the action after confirmed drift: a run or a notification."""

import dataclasses

import pytest

from monitoring.policies.policy import Action, Decision
from tests.support.monitors import DRIFT


@pytest.mark.parametrize("has_trigger", [True, False])
def test_policy_that_only_notifies_requests_no_run_and_pauses_as_usual(bench, has_trigger):
    b = bench(**DRIFT, notify_only="threshold" if has_trigger else "")
    b.trigger = b.trigger if has_trigger else None
    monitor = b.start()
    for number in range(4):
        b.evaluate(f"bad{number}", auc="bad")
    assert not has_trigger or b.trigger.requests == []
    assert b.kinds().count("decision") == 1
    assert "held" not in b.kinds()
    assert b.store.counters["request_notified"] == 1
    assert monitor.actions.retraining.past_runs.requested_at == ()


def test_start_without_trigger_leaves_running_request_for_later_start(started):
    b = started(**DRIFT)
    b.evaluate("bad", auc="bad")
    trigger, b.trigger = b.trigger, None
    b.start()
    b.evaluate("bad too", auc="bad")
    assert b.monitor.actions.retraining.progress.phase == "running"
    b.trigger = trigger
    trigger.end("released", version=2)
    b.start()
    b.monitor.tick()
    assert b.store.counters["request_released"] == 1


def confirmed(policy, reason):
    numbers = {"version": 1, "drifted_columns": 30, "compared_columns": 39}
    return Decision(policy=policy, action=Action.RETRAIN, reason=reason, numbers=numbers)


def test_of_several_policies_those_that_only_notify_request_no_run(started):
    b = started(**DRIFT, notify_only="data_drift")
    columns, auc = confirmed("data_drift", "30 columns drifted"), confirmed("threshold", "auc fell")
    fine = dataclasses.replace(auc, action=Action.OK, reason="auc is fine")
    now = b.clock.now
    answer = b.monitor.actions.consider(columns, [columns, fine], now=now, data_until=now - 60.0)
    assert answer == columns
    assert b.monitor.actions.retraining.progress.phase == "idle"
    answer = b.monitor.actions.consider(
        columns, [columns, auc], now=now + 10.0, data_until=now - 50.0
    )
    assert answer.action is Action.RETRAIN
    request = b.monitor.actions.retraining.progress.request
    assert (request["reason"], request["parent"]) == ("auc fell (incremental run)", "current")
    assert b.store.counters["request_notified"] == 1
