"""Incremental or full, as a table of cases, and through a monitor whose runs are refused."""

from __future__ import annotations

import pytest

from monitoring.deciding.request import RecipeMemory, RecipeSettings, choose_parent
from tests.support.monitors import DRIFT, traffic


@pytest.mark.parametrize(
    ("rules", "memory", "numbers", "parent", "reason"),
    [
        ({}, {"releases_since_full": 99, "refusals": 99}, {}, "current", "incremental run"),
        ({"full_every_releases": 3}, {"releases_since_full": 1}, {}, "current", "incremental run"),
        ({"full_every_releases": 3}, {"releases_since_full": 2}, {}, "none", "2 releases since the last full run"),
        ({"full_every_seconds": 50.0}, {"full_at": 51.0}, {}, "current", "incremental run"),
        ({"full_every_seconds": 50.0}, {"full_at": 50.0}, {}, "none", "the last full run is 50 s old"),
        ({"full_every_seconds": 50.0}, {}, {}, "current", "incremental run"),
        ({"full_after_refusals": 2}, {"refusals": 2}, {}, "none", "2 incremental runs in a row were refused"),
        ({"full_drift_share": 0.5}, {}, {"drifted_columns": 19, "judged_columns": 39}, "current", "incremental"),
        ({"full_drift_share": 0.5}, {}, {"drifted_columns": 20, "judged_columns": 39}, "none", "20 of 39 columns"),
        ({"full_drift_share": 0.5}, {}, {"drifted_columns": None, "judged_columns": 39}, "current", "incremental"),
        ({"full_drift_share": 0.5}, {}, {"drifted_columns": 0, "judged_columns": 0}, "current", "incremental"),
    ],
)
def test_rule_names_the_parent_and_why(rules, memory, numbers, parent, reason):
    found, why = choose_parent(RecipeMemory(**memory), RecipeSettings(**rules), numbers, now=100.0)
    assert (found, reason in why) == (parent, True), why


def test_memory_counts_what_the_rules_ask_for():
    memory = RecipeMemory().dated(now=5.0)
    assert memory.dated(now=9.0).full_at == 5.0
    for outcome in ("released", "refused", "failed", "refused"):
        memory = memory.ended(outcome, "current", now=10.0)
    assert memory == RecipeMemory(releases_since_full=1, full_at=5.0, refusals=2)
    assert memory.ended("failed", "none", now=20.0) == memory
    assert memory.ended("released", "current", now=20.0).refusals == 0
    assert memory.ended("released", "none", now=20.0) == RecipeMemory(full_at=20.0)


def test_two_refused_incremental_runs_are_followed_by_a_full_one_and_that_by_an_incremental_one(bench):
    b = bench(**{**DRIFT, "cooldown_seconds": 0.0}, full_after_refusals=2, daily_budget=100)
    monitor, hour = b.start(), 3600.0
    for number in range(4):
        traffic(b, f"bad{number}", auc="bad")
        monitor.tick()
        b.trigger.end("refused")
        monitor.tick()
        b.clock.now += 24 * hour
        monitor = b.start()  # the memory survives
    assert [request.parent for request in b.trigger.requests] == ["current", "current", "none", "current"]
    full = b.trigger.requests[2]
    assert full.request_id.endswith("-v1-full")
    assert "(full run: 2 incremental runs in a row were refused)" in full.reason
    assert full.pipeline_arguments()["parent"] == "none"
