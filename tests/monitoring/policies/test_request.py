"""Tests of the choice between incremental and full runs, also after refused runs."""

import pytest

from evergreen.config.monitor import RateLimitSettings, RecipeSettings
from monitoring.policies.rate_limit import PastRuns, choose_parent, ended
from tests.support.monitors import DRIFT


@pytest.mark.parametrize(
    ("rules", "past", "parent", "reason"),
    [
        ({}, {"releases_since_full": 99, "refusals": 99}, "current", "incremental run"),
        ({"full_every_releases": 3}, {"releases_since_full": 1}, "current", "incremental run"),
        (
            {"full_every_releases": 3},
            {"releases_since_full": 2},
            "none",
            "2 releases since the last full run",
        ),
        (
            {"full_after_refusals": 2},
            {"refusals": 2},
            "none",
            "2 incremental runs in a row were refused",
        ),
    ],
)
def test_rule_names_parent_and_why(rules, past, parent, reason):
    found, why = choose_parent(PastRuns(**past), RecipeSettings(**rules))
    assert (found, reason in why) == (parent, True), why


def test_state_contains_counts_that_rules_need():
    def counts(past, *runs):
        for outcome, parent in runs:
            past = ended(past, outcome, RateLimitSettings(), now=10.0, parent=parent)
        return past, (past.releases_since_full, past.refusals)

    runs = [
        ("released", "current"),
        ("refused", "current"),
        ("failed", "current"),
        ("refused", "current"),
    ]
    past, counted = counts(PastRuns(), *runs)
    assert counted == (1, 2)
    assert counts(past, ("failed", "none"))[1] == (1, 2)
    assert counts(past, ("refused", "none"))[1] == (1, 0)
    assert counts(past, ("released", "current"))[1] == (2, 0)
    assert counts(past, ("released", "none"))[1] == (0, 0)


def test_two_refused_incremental_runs_lead_to_full_one_and_back(bench):
    b = bench(**{**DRIFT, "cooldown_seconds": 0.0}, full_after_refusals=2, daily_budget=100)
    monitor, hour = b.start(), 3600.0
    for number in range(4):
        b.evaluate(f"bad{number}", auc="bad")
        b.trigger.end("refused")
        monitor.tick()
        b.clock.now += 24 * hour
        monitor = b.start()  # the monitor continues from the stored state
    assert [request.parent for request in b.trigger.requests] == [
        "current",
        "current",
        "none",
        "current",
    ]
    full = b.trigger.requests[2]
    assert full.request_id.endswith("-v1-full")
    assert "(full run: 2 incremental runs in a row were refused)" in full.reason
    assert full.pipeline_arguments()["parent"] == "none"
