"""Tests of the sequential test on planted streams: false alarms and power."""

from dataclasses import replace

import numpy as np
import pytest

from evergreen.config.monitor import PolicySettings
from evergreen.statistics.metrics import auc_estimate
from monitoring.policies.policies import SequentialPolicy
from monitoring.policies.policy import Action, Baseline
from testing.click_streams import (
    ClickTraffic,
    draw,
    draw_returning,
    first_run,
    joined,
    of_partition,
)
from tests.support.evidence import evidence_of, rows_of

GOOD, FALLEN, ALPHA = 0.80, 0.70, 0.05
EDGE = PolicySettings(sequential_alpha=ALPHA, sequential_tolerance=0.0)
"""Limiting case of the bound: the tolerance is 0, and the gate's AUC equals the stream's AUC."""
BAD = rows_of([1, 0, 0, 0] * 25, [0.0, 0.1, 0.2, 0.3] * 25)
GATE = Baseline(auc=0.85, low=0.8, high=0.9)
TRAFFIC = ClickTraffic(0.25, 250)


def test_of_stationary_streams_at_most_alpha_alarm():
    """`make benchmark-policies` simulates 1,000 streams, also with rows that share a user."""
    alarms = 0
    for number in range(20):
        stream = draw(np.random.default_rng((3, number)), TRAFFIC, rows=10_000, auc=GOOD)
        found = first_run(SequentialPolicy(EDGE), stream, step=250, windows=None, gate_auc=GOOD)
        alarms += found is not None
    assert alarms <= 3, "P(more than 3 of 20 at 5 %) = 0.016; the seeds are fixed"


def test_few_returning_users_raise_no_more_alarms_if_gate_grouped_by_user():
    """At the bound, the gate evaluates 100 requests of 50 users.

    The monitor evaluates 5,000 requests of 50 other users.
    """
    alarms = {"users": 0, "requests": 0}
    for number in range(60):
        random = np.random.default_rng((5, number))
        held_out, users = draw_returning(random, users=50, requests=100)
        stream, _ = draw_returning(random, users=50, requests=5_000)
        for name, groups in (("users", users), ("requests", held_out.groups)):
            low = auc_estimate(held_out.labels, held_out.scores, groups=groups).low
            alarms[name] += (
                first_run(SequentialPolicy(EDGE), stream, step=800, windows=None, gate_auc=low)
                is not None
            )
    assert alarms["users"] <= 7, "P(more than 7 of 60 at 5 %) = 0.01; the seeds are fixed"
    assert alarms["requests"] > alarms["users"]


def test_requests_of_one_partition_in_four_alarm_as_rarely_and_show_drop():
    """The test simulates 20 streams, and `make benchmark-policies` simulates 1,000 streams."""
    alarms, falls = 0, 0
    for number in range(20):
        random, name = np.random.default_rng((6, number)), f"stream {number}"
        stationary = of_partition(draw(random, TRAFFIC, rows=40_000, auc=GOOD), name, partitions=4)
        alarms += (
            first_run(SequentialPolicy(EDGE), stationary, step=250, windows=None, gate_auc=GOOD)
            is not None
        )
        fallen = of_partition(draw(random, TRAFFIC, rows=40_000, auc=FALLEN), name, partitions=4)
        falls += (
            first_run(SequentialPolicy(EDGE), fallen, step=250, windows=None, gate_auc=GOOD)
            is not None
        )
    assert alarms <= 3, "P(more than 3 of 20 at 5 %) = 0.016; the seeds are fixed"
    assert falls == 20


def test_every_drop_is_detected():
    for number in range(3):
        random = np.random.default_rng((4, number))
        before = draw(random, TRAFFIC, rows=10_000, auc=GOOD)
        stream = joined(before, draw(random, TRAFFIC, rows=30_000, auc=FALLEN))
        assert (
            first_run(SequentialPolicy(EDGE), stream, step=250, windows=None, gate_auc=GOOD)
            is not None
        )


def test_long_service_before_drop_costs_little():
    """If a version served for a long time before the drop, the alarm must not be delayed.

    If all bets started at the beginning, the e-value would be tiny when the drop comes.
    """
    traffic, settings = ClickTraffic(0.25, 1_000), PolicySettings()
    delays = []
    for before in (5_000, 150_000):
        random = np.random.default_rng(11)
        stream = joined(
            draw(random, traffic, rows=before, auc=GOOD),
            draw(random, traffic, rows=30_000, auc=FALLEN),
        )
        found = first_run(
            SequentialPolicy(settings), stream, step=1_000, windows=None, gate_auc=GOOD
        )
        delays.append(found - before)
    assert 0 < delays[0] <= delays[1] <= 3 * delays[0] + 1_000


def test_alarm_lasts_until_other_version_serves_and_waits_for_rows():
    policy, state, actions = SequentialPolicy(replace(EDGE, min_rows_since_breach=50)), {}, []
    for i in range(8):
        decision, state = policy.decide(
            evidence_of(rows=BAD, matured_total=20 * i, baseline=GATE), state
        )
        actions.append(decision.action)
    first = actions.index(Action.BREACH)
    assert actions[first:] == [Action.BREACH] * 3 + [Action.RETRAIN] * (5 - first)
    assert "a false alarm with a probability of at most 0.05" in decision.reason
    assert decision.numbers["evidence"] >= decision.numbers["evidence_needed"] == 20.0
    other, state = policy.decide(
        evidence_of(replace(evidence_of().kpis, version=2), rows=BAD), state
    )
    assert other.action in (Action.OK, Action.UNDECIDABLE)
    back, _ = policy.decide(evidence_of(rows=BAD, matured_total=999, baseline=GATE), state)
    assert back.action is Action.RETRAIN, "the evidence must remain if versions alternate"


def test_good_stream_is_ok_once_rounds_were_evaluated_and_undecidable_before():
    policy, state, seen = SequentialPolicy(EDGE), {}, []
    good = rows_of([1, 0, 0, 0] * 25, [0.9, 0.1, 0.2, 0.3] * 25)
    for _ in range(2):
        decision, state = policy.decide(evidence_of(rows=good, baseline=GATE), state)
        seen.append(
            (
                decision.action,
                decision.numbers["evaluated_clicks"] > 0,
                decision.numbers["rows_since_breach"],
            )
        )
    assert seen == [(Action.UNDECIDABLE, False, 0), (Action.OK, True, 0)]
    assert "clicks, model version 1" in decision.reason


def test_claim_equals_lower_end_of_gate_less_tolerance():
    policy = SequentialPolicy(PolicySettings(sequential_tolerance=0.03))
    assert policy.decide(evidence_of(baseline=GATE), {})[0].numbers["threshold"] == pytest.approx(
        0.77
    )


def test_version_without_verdict_is_undecidable_and_keeps_other_evidence():
    policy = SequentialPolicy(EDGE)
    _, state = policy.decide(evidence_of(rows=BAD, baseline=GATE), {})
    decision, next_state = policy.decide(
        evidence_of(replace(evidence_of().kpis, version=2), rows=BAD), state
    )
    assert decision.action is Action.UNDECIDABLE
    assert decision.reason == "the gate's auc of model version 2 is unknown"
    assert decision.numbers["threshold"] is None
    assert next_state == state
