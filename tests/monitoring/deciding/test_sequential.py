"""The sequential test on planted streams: false alarms at most alpha, and a fall is detected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from monitoring.deciding.policies import PolicySettings, SequentialPolicy
from monitoring.deciding.policy import Action, Baseline
from tests.support.click_streams import ClickTraffic, draw, first_run, joined, pooled_auc
from tests.support.evidence import evidence_of, rows_of

GOOD, FALLEN, ALPHA = 0.80, 0.70, 0.05
EDGE = PolicySettings(sequential_alpha=ALPHA, sequential_tolerance=0.0)
"""At the edge of its claim: the gate measured exactly the AUC that the stream has, so the bound is used up."""
BAD = rows_of([1, 0, 0, 0] * 25, [0.0, 0.1, 0.2, 0.3] * 25)
GATE = Baseline(auc=0.85, low=0.8, high=0.9)
RATES = {
    "0.1 %": (ClickTraffic(0.001, 5_000), 300_000, 600_000),
    "3 %": (ClickTraffic(0.03, 500), 60_000, 40_000),
    "25 %": (ClickTraffic(0.25, 250), 40_000, 30_000),
}
"""Click rate: traffic, rows of a stationary stream, rows after a fall within which it must be detected."""


def alarms(traffic, rows, streams, *, gate_auc=GOOD, by_row=False) -> int:
    """Of so many stationary streams, those on which the test ever asks for a run."""
    count = 0
    for number in range(streams):
        stream = draw(np.random.default_rng((3, number)), traffic, rows=rows, auc=GOOD)
        if by_row:
            stream = replace(stream, groups=np.arange(len(stream.groups)))
        policy = SequentialPolicy(EDGE)
        found = first_run(policy, stream, step=traffic.rows_per_decision, windows=None, gate_auc=gate_auc)
        count += found is not None
    return count


LONG = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("rate", "streams", "most"),
    # P(more than 3 of 20 at 5 %) = 0.016, more than 70 of 1,000: 0.003; the seeds are fixed.
    [("25 %", 20, 3), *(pytest.param(rate, 1_000, 70, marks=LONG) for rate in RATES)],
)
def test_of_stationary_streams_at_most_alpha_alarm(rate, streams, most):
    traffic, rows, _ = RATES[rate]
    assert alarms(traffic, rows // 4 if streams == 20 else rows, streams) <= most


@pytest.mark.parametrize("rate", [pytest.param("0.1 %", marks=LONG), pytest.param("3 %", marks=LONG), "25 %"])
def test_every_fall_is_detected(rate):
    traffic, before, after = RATES[rate]
    for number in range(3):
        random = np.random.default_rng((4, number))
        stream = joined(
            draw(random, traffic, rows=before // 4, auc=GOOD), draw(random, traffic, rows=after, auc=FALLEN)
        )
        policy = SequentialPolicy(EDGE)
        assert first_run(policy, stream, step=traffic.rows_per_decision, windows=None, gate_auc=GOOD) is not None


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rate", [0.03, 0.25])
def test_of_1000_streams_of_rows_that_share_their_user_at_most_alpha_alarm(rate):
    traffic = ClickTraffic(rate, 1_000, rows_per_request=10, user_spread=1.0)
    gate_auc = pooled_auc(traffic, GOOD)
    assert alarms(traffic, 40_000, 1_000, gate_auc=gate_auc) <= 70
    assert alarms(traffic, 40_000, 1_000, gate_auc=gate_auc, by_row=True) > 200, "or the streams show nothing"


def test_long_service_before_the_fall_costs_little():
    """A bet from the start alone would have lost its capital: it never detects the fall."""
    traffic, settings = ClickTraffic(0.25, 1_000), PolicySettings()
    delays = []
    for before in (5_000, 150_000):
        random = np.random.default_rng(11)
        stream = joined(draw(random, traffic, rows=before, auc=GOOD), draw(random, traffic, rows=30_000, auc=FALLEN))
        found = first_run(SequentialPolicy(settings), stream, step=1_000, windows=None, gate_auc=GOOD)
        delays.append(found - before)
    assert 0 < delays[0] <= delays[1] <= 3 * delays[0] + 1_000


def test_an_alarm_lasts_until_another_version_serves_and_waits_for_rows_to_learn_from():
    policy, memory, actions = SequentialPolicy(replace(EDGE, min_rows_since_breach=50)), {}, []
    for i in range(8):
        decision, memory = policy.decide(evidence_of(rows=BAD, matured_total=20 * i, baseline=GATE), memory)
        actions.append(decision.action)
    first = actions.index(Action.BREACH)
    assert actions[first:] == [Action.BREACH] * 3 + [Action.RETRAIN] * (5 - first)
    assert "a false alarm with a probability of at most 0.05" in decision.reason
    assert decision.numbers["evidence"] >= decision.numbers["evidence_needed"] == 20.0
    other, memory = policy.decide(evidence_of(replace(evidence_of().kpis, version=2), rows=BAD), memory)
    assert other.action in (Action.OK, Action.UNDECIDABLE)
    back, _ = policy.decide(evidence_of(rows=BAD, matured_total=999, baseline=GATE), memory)
    assert back.action is Action.RETRAIN, "versions that alternate keep their evidence"


def test_the_claim_is_the_gates_lower_end_less_the_tolerance_or_the_threshold():
    policy = SequentialPolicy(PolicySettings(sequential_tolerance=0.03, auc_threshold=0.71))
    assert policy.decide(evidence_of(baseline=GATE), {})[0].numbers["threshold"] == pytest.approx(0.77)
    assert policy.decide(evidence_of(), {})[0].numbers["threshold"] == 0.71
