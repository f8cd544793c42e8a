"""Tests of cooldown and rate limit as a table of cases."""

from dataclasses import replace

import pytest

from evergreen.config.monitor import RateLimitSettings
from monitoring.policies.policy import Action, Decision
from monitoring.policies.rate_limit import DAY_SECONDS, PastRuns, apply_limits, ended, requested

SETTINGS = RateLimitSettings()
DRIFT = Decision(
    policy="threshold", action=Action.RETRAIN, reason="auc fell", numbers={"version": 1}
)


def evaluator(past, *, now):
    return apply_limits(DRIFT, past, SETTINGS, now=now)


@pytest.mark.parametrize("action", [action for action in Action if action is not Action.RETRAIN])
def test_only_confirmed_drift_can_be_held(action):
    past = ended(PastRuns(), "failed", SETTINGS, now=0.0)
    decision = replace(DRIFT, action=action)
    assert apply_limits(decision, past, SETTINGS, now=1.0) == decision


def test_release_starts_cooldown():
    past = ended(requested(PastRuns(), now=0.0), "released", SETTINGS, now=100.0)
    decision = evaluator(past, now=100.0)
    assert decision.action is Action.HELD
    assert decision.reason == "auc fell; held 3600 s more: cooldown after a release"
    assert evaluator(past, now=3700.0) == DRIFT


def test_runs_without_release_back_off_longer_each_time_up_to_day():
    settings, past, rests = replace(SETTINGS, cooldown_seconds=0.0), PastRuns(), []
    for outcome in ["failed", "refused", "failed"] + ["failed"] * 40:
        past = ended(past, outcome, settings, now=0.0)
        rests.append(past.blocked_until)
    assert rests[:3] == [900.0, 1800.0, 3600.0]
    assert rests[-1] == DAY_SECONDS
    assert ended(past, "released", settings, now=0.0).failures == 0


def test_failed_runs_in_row_are_counted_apart_from_refused_ones():
    past, seen = PastRuns(), []
    for outcome in ("failed", "failed", "refused", "failed", "released", "failed", "notified"):
        past = ended(past, outcome, SETTINGS, now=0.0)
        seen.append((past.failures, past.failed))
    assert seen == [(1, 1), (2, 2), (3, 0), (4, 1), (0, 0), (1, 1), (0, 0)]


def test_daily_budget_holds_over_any_24_hours():
    past = PastRuns()
    for hour in range(4):
        past = requested(past, now=hour * 3600.0)
    decision = evaluator(past, now=DAY_SECONDS - 1)
    assert decision.action is Action.HELD
    assert "daily budget is 4" in decision.reason
    assert evaluator(past, now=DAY_SECONDS).action is Action.RETRAIN
    assert len(requested(past, now=2 * DAY_SECONDS).requested_at) == 1


def test_clock_set_back_does_not_delay_longer_than_longest_cooldown():
    """The clock was a year fast when a run was requested and ended."""
    year = 365 * DAY_SECONDS
    past = requested(PastRuns(), now=year)
    for _ in range(SETTINGS.daily_budget):
        past = requested(past, now=year)
    past = ended(past, "released", SETTINGS, now=year)
    assert evaluator(past, now=year).action is Action.HELD
    assert evaluator(past, now=100.0).action is Action.RETRAIN


def test_canary_counts_as_release_and_is_reported_as_canary():
    past = PastRuns(failures=2, failed=1, refusals=1, releases_since_full=3)
    begun, released = (
        ended(past, outcome, SETTINGS, now=100.0) for outcome in ("canary", "released")
    )
    assert begun == replace(released, blocked_by="cooldown after a canary's start")
    assert released.blocked_by == "cooldown after a release"
