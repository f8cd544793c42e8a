"""Tests of the AUC's bounds with open labels: all labelings are tried, and delays are simulated."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from evergreen.runtime.errors import ContractError
from monitoring.metrics.open_labels import (
    MIN_DELAYS,
    ClickDelays,
    OpenEstimate,
    estimate_open,
    expected_auc,
)

WINDOW = 600.0
DELAYS = {
    "exponential": lambda random, n: random.exponential(90.0, n),
    "uniform over the window": lambda random, n: random.uniform(0, WINDOW, n),
    "heavy tail": lambda random, n: random.lognormal(3.5, 1.5, n),
    "two humps": lambda random, n: np.where(
        random.random(n) < 0.5, random.normal(10, 2, n), random.normal(400, 30, n)
    ),
    "at once": lambda random, n: np.zeros(n),
    "before the prediction, by its clock": lambda random, n: random.normal(0.0, 1.0, n),
}


def matured_auc(labels, scores):
    return roc_auc_score(labels, scores) if 0 < labels.sum() < len(labels) else None


@st.composite
def open_rows(draw):
    n = draw(st.integers(1, 6))
    scores = draw(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.9, 1.0]), min_size=n, max_size=n))
    states = draw(st.lists(st.sampled_from(["open", "clicked", "closed"]), min_size=n, max_size=n))
    return np.array(scores, np.float32), np.array(states)


@given(open_rows())
@settings(max_examples=80, deadline=None)
def test_bounds_are_extremes_over_every_labeling(rows):
    scores, states = rows
    still_open, clicked = states == "open", states == "clicked"
    values = []
    for extra in itertools.product([0, 1], repeat=int(still_open.sum())):
        labels = clicked.astype(np.uint8)
        labels[still_open] = extra
        values.append(matured_auc(labels, scores))
    ages = np.where(states == "closed", WINDOW, 1.0)
    found = estimate_open(
        scores, ages, clicked, version=1, delays=ClickDelays(), window_seconds=WINDOW, now=0.0
    )
    existing = [value for value in values if value is not None]
    if not existing:
        assert found.auc_low is found.auc_high is None
        return
    assert found.auc_low == pytest.approx(min(existing), abs=1e-12)
    assert found.auc_high == pytest.approx(max(existing), abs=1e-12)


class SimulatedClicks:
    """Simulated rows over `span` seconds. The scores are good or bad, and the clicks arrive late.

    Clicks after the attribution window are ignored.
    """

    def __init__(self, draw_delays, seed, *, n=3000, span=900.0, is_changed=False):
        random = np.random.default_rng(seed)
        self.times = np.sort(random.uniform(0, span, n))
        self.scores = random.beta(1.5, 12, n).astype(np.float32)
        probabilities = random.permutation(self.scores) if is_changed else self.scores
        self.delays = np.where(random.random(n) < probabilities, draw_delays(random, n), np.nan)
        self.delays[self.delays > WINDOW] = np.nan
        self.labels = ~np.isnan(self.delays)
        self.matured = ClickDelays()
        past = draw_delays(random, 4000)
        self.matured.update(past[past <= WINDOW])

    def at(self, now, rows) -> OpenEstimate:
        ages = now - self.times[rows]
        clicked = self.labels[rows] & (self.delays[rows] <= ages)
        return estimate_open(
            self.scores[rows],
            ages,
            clicked,
            version=1,
            delays=self.matured,
            window_seconds=WINDOW,
            now=float(now),
        )


@pytest.mark.parametrize("is_changed", [False, True], ids=["calibrated", "changed scores"])
@pytest.mark.parametrize("name", DELAYS)
def test_at_every_moment_bounds_contain_matured_value(name, is_changed):
    clicks = SimulatedClicks(DELAYS[name], seed=3, is_changed=is_changed)
    for now in np.linspace(1, 900 + WINDOW, 40):
        rows = (clicks.times <= now) & (clicks.times > now - WINDOW)
        if not rows.any():
            continue
        found = clicks.at(now, rows)
        assert found.final_at is not None
        assert now <= found.final_at <= now + WINDOW
        matured = matured_auc(clicks.labels[rows], clicks.scores[rows])
        if matured is not None:
            assert found.auc_low - 1e-9 <= matured <= found.auc_high + 1e-9
        assert found.auc is None or found.auc_low - 1e-9 <= found.auc <= found.auc_high + 1e-9


@pytest.mark.parametrize("is_changed", [False, True], ids=["calibrated", "changed scores"])
@pytest.mark.parametrize(
    "name", ["exponential", "uniform over the window", "heavy tail", "two humps"]
)
def test_bounds_and_error_of_estimate_shrink_until_labels_are_final(name, is_changed):
    moments = [300.0, 400.0, 600.0, 899.0]
    errors, widths = np.zeros(len(moments)), np.zeros(len(moments))
    for seed in range(8):
        clicks = SimulatedClicks(DELAYS[name], seed, span=300.0, is_changed=is_changed)
        rows, matured = np.ones(len(clicks.times), bool), matured_auc(clicks.labels, clicks.scores)
        for i, now in enumerate(moments):
            found = clicks.at(now, rows)
            widths[i] += found.auc_high - found.auc_low
            errors[i] += abs(found.auc - matured) / 8
        end = clicks.at(300.0 + WINDOW, rows)
        assert (end.auc_low, end.auc, end.auc_high) == pytest.approx([matured] * 3, abs=1e-6)
        assert end.final_at == 300.0 + WINDOW
    assert (np.diff(widths) <= 0).all()
    assert widths[-1] < widths[0] / 10
    assert errors[-1] < errors[0] / 2
    # At the first point in time, a third of the rows has open labels. The estimate is already much
    # more precise than the bounds.
    assert errors[0] < 0.08


def test_change_of_simulator_shows_before_labels_are_final():
    clicks = SimulatedClicks(DELAYS["exponential"], seed=5, span=300.0, is_changed=True)
    found = clicks.at(350.0, np.ones(len(clicks.times), bool))
    assert roc_auc_score(clicks.labels, clicks.scores) == pytest.approx(0.5, abs=0.05)
    assert found.auc == pytest.approx(0.5, abs=0.08)


def test_no_estimate_from_too_few_delays_but_bounds():
    delays = ClickDelays()
    delays.update(np.full(MIN_DELAYS - 1, 1.0))
    rows = np.array([0.2, 0.7]), np.array([1.0, 2.0]), np.array([False, True])
    found = estimate_open(*rows, version=1, delays=delays, window_seconds=WINDOW, now=100.0)
    assert (found.auc, found.auc_low, found.auc_high) == (None, 1.0, 1.0)
    assert found.final_at == 100.0 + WINDOW - 1.0


def test_without_rows_nothing_is_estimated():
    nothing = np.zeros(0), np.zeros(0), np.zeros(0, bool)
    found = estimate_open(*nothing, version=2, delays=ClickDelays(), window_seconds=WINDOW, now=1.0)
    assert found == OpenEstimate(version=2, open_rows=0, open_clicks=0, final_at=None)


def test_order_of_rows_does_not_matter_even_with_ties():
    clicks = SimulatedClicks(DELAYS["exponential"], seed=1)
    clicks.scores = np.round(clicks.scores, 2)
    shuffled = np.random.default_rng(0).permutation(len(clicks.times))
    first, second = (clicks.at(700.0, rows) for rows in (np.arange(len(clicks.times)), shuffled))
    assert first.auc == pytest.approx(second.auc, abs=1e-9)


@pytest.mark.parametrize(
    ("scores", "ages", "message"),
    [
        ([0.1, 0.2], [1.0], "shapes"),
        ([0.1, 1.2], [1.0, 1.0], "outside"),
        ([0.1, np.nan], [1.0, 1.0], "outside"),
    ],
)
def test_invalid_rows_are_refused(scores, ages, message):
    with pytest.raises(ContractError, match=message):
        estimate_open(
            np.array(scores),
            np.array(ages),
            np.zeros(2, bool),
            version=1,
            delays=ClickDelays(),
            window_seconds=1,
            now=0,
        )


@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 4, 1000]))
@settings(max_examples=60, deadline=None)
def test_expected_auc_is_ratio_over_all_pairs_and_that_of_known_labels(seed, levels):
    random = np.random.default_rng(seed)
    scores, p = random.integers(0, levels, 30) / levels, random.random(30)
    wins = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    pairs = p[:, None] * (1 - p)
    np.fill_diagonal(pairs, 0)
    assert expected_auc(p, scores) == pytest.approx((wins * pairs).sum() / pairs.sum(), abs=1e-12)
    labels = np.r_[0, 0, 1, 1, random.integers(0, 2, 26)]
    assert expected_auc(labels.astype(float), scores) == pytest.approx(
        roc_auc_score(labels, scores), abs=1e-12
    )


@pytest.mark.parametrize("p", [[], [0.5], [0.0, 0.0], [1.0, 1.0, 1.0]])
def test_without_possible_pair_there_is_no_expected_auc(p):
    assert expected_auc(np.array(p), np.arange(len(p)) / 10) is None
