"""The sequential test on planted streams: false alarms at most alpha, and a fall is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.policies import CASES, EDGE_ALPHA, GOOD, USERS, broken_bounds, study, study_users
from benchmarks.policy_study.contestants import first_run, sequential
from benchmarks.policy_study.streams import draw, joined
from monitoring.deciding.decision import Action
from monitoring.deciding.evidence import Baseline
from monitoring.deciding.sequential import SequentialPolicy, SequentialSettings
from tests.monitoring.deciding.conftest import evidence_of, rows_of

EASY = SequentialSettings(sequential_alpha=0.05, sequential_tolerance=0.0, min_rows_since_breach=50)
BAD = rows_of([1, 0, 0, 0] * 25, [0.0, 0.1, 0.2, 0.3] * 25)
GATE = Baseline(auc=0.85, low=0.8, high=0.9)


@pytest.mark.parametrize("rate", CASES)
def test_few_streams_at_the_edge_alarm_and_every_fall_is_found(rate):
    """A seeded sample of the study, on short streams; the bound itself is the slow test's."""
    case = replace(CASES[rate], stationary=CASES[rate].stationary // 4)
    found = study(case, streams=20, falls=3, seed=3, names=("sequential",))
    for figures in found.values():
        assert figures["false_alarms"] <= 3  # P(more than 3 of 20 at 5 %) = 0.016, and the seed is fixed
        assert figures["missed"] == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rate", CASES)
def test_of_1000_stationary_streams_at_most_alpha_alarm(rate):
    found = study(CASES[rate], streams=1_000, falls=50, seed=1, names=("sequential",))
    assert broken_bounds({"rates": {rate: found}, "users": {}}) == []
    assert all(figures["missed"] == 0 for figures in found.values())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rate", USERS)
def test_of_1000_streams_of_rows_that_share_their_user_at_most_alpha_alarm(rate):
    found = study_users(USERS[rate], streams=1_000, seed=1)
    assert found["by request"]["low"] <= EDGE_ALPHA
    assert found["by row"]["low"] > EDGE_ALPHA, "or the study shows nothing"


def test_long_service_before_the_fall_costs_little():
    """A bet from the start alone would have lost its capital: it never finds the fall."""
    traffic = replace(CASES["25 %"].traffic, rows_per_decision=1_000)
    delays = []
    for before in (5_000, 150_000):
        random = np.random.default_rng(11)
        stream = joined(draw(random, traffic, before, GOOD), draw(random, traffic, 30_000, 0.70))
        found = first_run(sequential(0.01, 0.02), stream, step=1_000, windows=None, gate_auc=GOOD)
        delays.append(found - before)
    assert 0 < delays[0] <= delays[1] <= 3 * delays[0] + 1_000


def test_an_alarm_lasts_until_another_version_serves_and_waits_for_rows_to_learn_from():
    policy, memory, actions = SequentialPolicy(EASY), {}, []
    for i in range(8):
        decision, memory = policy.decide(evidence_of(rows=BAD, matured_total=20 * i, baseline=GATE), memory)
        actions.append(decision.action)
    first = actions.index(Action.BREACH)
    assert actions[first:] == [Action.BREACH] * 3 + [Action.RETRAIN] * (5 - first)
    assert "false with a probability of at most 0.05" in decision.reason
    assert decision.numbers["evidence"] >= decision.numbers["evidence_needed"] == 20.0
    other, memory = policy.decide(evidence_of(replace(evidence_of().kpis, version=2), rows=BAD), memory)
    assert other.action in (Action.OK, Action.UNDECIDABLE)
    back, _ = policy.decide(evidence_of(rows=BAD, matured_total=999, baseline=GATE), memory)
    assert back.action is Action.RETRAIN, "versions that take turns keep their evidence"


def test_the_claim_is_the_gates_lower_end_less_the_tolerance_or_the_threshold():
    policy = SequentialPolicy(SequentialSettings(sequential_tolerance=0.03, auc_threshold=0.71))
    assert policy.decide(evidence_of(baseline=GATE), {})[0].numbers["threshold"] == pytest.approx(0.77)
    assert policy.decide(evidence_of(), {})[0].numbers["threshold"] == 0.71
