"""Tests of rollbacks on planted traffic: of every bad version, and of few equal versions."""

import json
from dataclasses import replace

import numpy as np
import pytest

from evergreen.config.release import BakingSettings
from evergreen.contracts.baking import BAD, BAKES, WELL
from evergreen.statistics.metrics import auc_estimate, roc_auc
from monitoring.policies.baking import BakingPolicy, mixture_evidence, state_of
from monitoring.policies.policy import Action, Baseline, MaturedRows, Predecessor
from testing.click_streams import draw_returning
from tests.support.evidence import KPIS, evidence_of

RATE, AUC, STEP = 0.07, 0.75, 640
GATE = Baseline(auc=AUC + 0.01, low=AUC, high=AUC + 0.02, previous_version=1)
BEFORE = Predecessor(auc_low=AUC, click_rate=RATE)


def traffic(seed, *, rows, calibration=1.0, noise=0.0, user_spread=0.0, per_request=8):
    """Return rows whose clicks are `calibration` times as frequent as predicted.

    `noise` in the scores' logits lowers the AUC. Rows of a request share their user's click
    tendency. `user_spread` is the share of the variance between users.
    """
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(rows // per_request), per_request)
    logits = np.minimum(random.normal(np.log(RATE) - 0.5, 1.0, len(groups)), -1.1)
    readiness = (1 + user_spread * random.choice([-1.0, 1.0], groups[-1] + 1))[groups]
    truth = 1 / (1 + np.exp(-logits))
    clicks = random.random(len(groups)) < calibration * truth * readiness
    scores = 1 / (1 + np.exp(-(logits + random.normal(0.0, noise, len(groups)) - noise**2 / 2)))
    return MaturedRows(
        labels=clicks.astype(np.uint8), scores=scores.astype(np.float32), groups=groups
    )


LIMITS = BakingSettings()


def rolled_back(rows, *, settings=LIMITS, gate=GATE, before=BEFORE):
    """Return the number of rows until the rollback (or None), and the last decision.

    Traffic has 64 rows a second.
    """
    policy, state, decision = BakingPolicy(settings), {}, None
    for begin in range(0, len(rows.labels), STEP):
        part = slice(begin, begin + STEP)
        seen = MaturedRows(
            labels=rows.labels[part],
            scores=rows.scores[part],
            groups=rows.groups[part] - rows.groups[begin],
        )
        evidence = evidence_of(
            rows=seen, baseline=gate, predecessor=before, time=(begin + STEP) / 64
        )
        decision, state = policy.decide(evidence, json.loads(json.dumps(state, allow_nan=False)))
        if decision.action is Action.ROLLBACK:
            return begin + STEP, decision
    return None, decision


@pytest.mark.parametrize(
    ("planted", "within", "reason"),
    [
        (
            {"calibration": 2.0},
            6_000,
            "failed: evidence of more than 1.5 times the clicks that are predicted",
        ),
        (
            {"calibration": 0.5},
            10_000,
            "failed: evidence of less than 1/1.5 of the clicks that are predicted",
        ),
        ({"noise": 1.2}, 40_000, "failed: evidence that the AUC is below 0."),
    ],
    ids=["twice the clicks", "half of them", "0.05 less AUC"],
)
def test_version_bad_on_live_traffic_is_rolled_back_within_stated_rows(planted, within, reason):
    good = traffic(0, rows=80_000)
    auc = roc_auc(good.labels, good.scores)
    gate = Baseline(auc=auc, low=auc - 0.01, high=auc + 0.01, previous_version=1)
    for seed in range(3):
        rows, decision = rolled_back(
            traffic(seed, rows=within, **planted),
            settings=BakingSettings(bake_rows=10**6, max_auc_loss=0.01),
            gate=gate,
            before=replace(BEFORE, auc_low=auc - 0.01),
        )
        assert rows is not None, f"seed {seed}: {decision.reason}"
        assert reason in decision.reason
        assert decision.reason.endswith(f", AUC {KPIS.auc:.4f} on the last {KPIS.rows} rows")
        assert state_of(decision) == BAD


def _share_rolled_back(planted, runs, *, rows=20_000):
    settings = BakingSettings(bake_alpha=0.25, bake_rows=10**7)
    streams = (traffic(seed, rows=rows, **planted) for seed in range(runs))
    return (
        sum(rolled_back(each, settings=settings, gate=None)[0] is not None for each in streams)
        / runs
    )


@pytest.mark.parametrize(
    "planted",
    [
        {"calibration": 1.5},
        {"calibration": 1 / 1.5},
        {"calibration": 1.5, "user_spread": 0.8},
        {"calibration": 1 / 1.5, "user_spread": 0.8},
    ],
    ids=str,
)
def test_version_at_exact_limit_is_rolled_back_with_at_most_alpha(planted):
    """One metric of the version is exactly at its limit.

    At an alpha of 0.25, each of the five tests may roll back 5 % of the runs.
    """
    assert _share_rolled_back(planted, 500) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_of_thousand_equal_versions_at_most_alpha_are_rolled_back():
    """The test uses the default settings and all rows.

    The gate's metrics come from 20,000 rows, and the predecessor's metrics come from 20,000 other
    rows.
    """
    num_rolled_back = 0
    for seed in range(1_000):
        rows = traffic((19, seed), rows=140_000)
        gate, before, live = (
            MaturedRows(
                labels=rows.labels[part], scores=rows.scores[part], groups=rows.groups[part]
            )
            for part in (slice(20_000), slice(20_000, 40_000), slice(40_000, None))
        )
        auc, live_auc = (
            auc_estimate(each.labels, each.scores, groups=each.groups) for each in (gate, before)
        )
        promised = Baseline(auc=auc.auc, low=auc.low, high=auc.high, previous_version=1)
        reached = Predecessor(auc_low=live_auc.low, click_rate=float(before.labels.mean()))
        num_rolled_back += rolled_back(live, gate=promised, before=reached)[0] is not None
    assert num_rolled_back <= LIMITS.bake_alpha * 1_000


def test_version_as_good_as_promised_is_baked_after_its_rows_and_its_time():
    settings = BakingSettings(bake_seconds=200.0, bake_rows=6_400)
    low = replace(GATE, low=0.5)
    for rows, state in ((6_400, BAKES), (12_160, BAKES), (12_800, WELL)):
        back, decision = rolled_back(traffic(3, rows=rows), settings=settings, gate=low)
        assert (back, state_of(decision)) == (None, state), decision.reason


@pytest.mark.parametrize("seed", [7, 10])
def test_suspected_version_goes_on_baking_until_evidence_is_enough(seed):
    early = BakingSettings(bake_seconds=0.0, bake_rows=1_280)
    states = [
        state_of(rolled_back(traffic(seed, rows=n, calibration=2.0), settings=early)[1])
        for n in (1_920, 6_400)
    ]
    assert states == [BAKES, BAD]


def test_after_change_version_is_compared_with_what_predecessor_reaches():
    """A drift can lower the AUC of both versions below the AUC that the gate measured.

    A rollback to the previous version would then not help.
    """
    rows = traffic(5, rows=40_000, noise=1.2)
    assert (
        rolled_back(
            rows, settings=BakingSettings(bake_rows=10**6), before=replace(BEFORE, auc_low=0.5)
        )[0]
        is None
    )


def test_version_whose_predecessor_left_no_rows_is_held_to_gate_alone():
    rows, decision = rolled_back(traffic(1, rows=6_400, calibration=3.0), before=None)
    assert (rows is not None, decision.action) == (True, Action.ROLLBACK)


def test_version_is_evaluated_on_its_own_rows_once_first_has_matured():
    bad = traffic(1, rows=6_400, calibration=5.0)
    policy = BakingPolicy(LIMITS)
    waiting, state = policy.decide(
        evidence_of(
            version=2, rows_of={1: bad}, lineage=(1, 2), baselines={2: GATE}, predecessor=None
        ),
        {},
    )
    assert (waiting.action, state_of(waiting)) == (Action.UNDECIDABLE, BAKES)
    assert waiting.reason == "no row of model version 2 has matured yet"
    assert (waiting.numbers["rows_baked"], waiting.numbers["auc"], state) == (0, None, {})
    found, _ = policy.decide(
        evidence_of(version=2, rows_of={1: traffic(2, rows=640), 2: bad}, baselines={2: GATE}),
        state,
    )
    assert found.numbers["rows_baked"] == 6_400
    assert found.action is Action.ROLLBACK


def test_version_with_one_score_for_every_row_is_rolled_back_untested():
    rows = traffic(1, rows=1_280)
    stuck = MaturedRows(
        labels=rows.labels, scores=np.full(1_280, 0.07, np.float32), groups=rows.groups
    )
    back, decision = rolled_back(stuck, gate=None)
    assert back == 1_280
    assert "failed: rows of one score 1280 (expected below 1000)" in decision.reason


@pytest.mark.parametrize(
    ("settings", "before"),
    [(BakingSettings(), None), (BakingSettings(bake_rows=0), BEFORE)],
    ids=["first", "off"],
)
def test_version_without_rollback_target_is_not_evaluated(settings, before):
    first = replace(GATE, previous_version=None)
    back, decision = rolled_back(
        traffic(1, rows=6_400, calibration=5.0), settings=settings, before=before, gate=first
    )
    assert (back, decision.action) == (None, Action.OK)


def test_evidence_has_mean_of_one_under_terms_without_mean():
    """The expected evidence is computed by numeric integration.

    The e-value of an empty sample is 1. A larger sum gives a larger e-value.
    """
    from scipy import integrate, stats

    bets = np.linspace(0.0, 3.0, 200_001)
    weights = stats.halfnorm(scale=1 / np.sqrt(50.0)).pdf(bets)
    for total, squares in ((3.0, 10.0), (-5.0, 40.0), (20.0, 80.0), (-400.0, 50.0)):
        by_hand = integrate.simpson(np.exp(bets * total - bets**2 * squares / 2) * weights, x=bets)
        assert mixture_evidence(total, squares) == pytest.approx(by_hand, rel=1e-3)


def test_few_returning_users_roll_no_good_version_back():
    """50 users with 100 requests each.

    The gate evaluated 200 requests of 50 other users. docs/guides/canary.md reports 200 streams.
    """
    alarms = 0
    for number in range(30):
        random = np.random.default_rng((9, number))
        held_out, users = draw_returning(random, users=50, requests=200)
        stream, _ = draw_returning(random, users=50, requests=5_000)
        found = auc_estimate(held_out.labels, held_out.scores, groups=users)
        gate = Baseline(auc=found.auc, low=found.low, high=found.high, previous_version=1)
        before = Predecessor(auc_low=found.low, click_rate=float(held_out.labels.mean()))
        alarms += rolled_back(stream, gate=gate, before=before)[0] is not None
    assert alarms <= 2, "P(more than 2 of 30 at 1 %) = 0.003; the seeds are fixed"
