"""CBPE against labels that it never saw: right under covariate shift, blind to concept drift."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from components.contracts.metrics import auc_estimate
from components.runtime.errors import ContractError
from monitoring.measures.estimated_auc import MIN_CLICKS, Calibration, estimate_auc, expected_auc, fit_calibration


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def draw(random, n, *, center=-3.2, spread=1.2, is_concept_changed=False):
    """Rows of one feature, on which the click's log odds depend; scores of a model that overstates them."""
    logits = random.normal(center, spread, n)
    truth = sigmoid(center + (0.15 * (logits - center) if is_concept_changed else logits - center))
    scores = sigmoid(0.8 + 1.3 * logits).astype(np.float32)
    return (random.random(n) < truth).astype(np.uint8), scores


def test_covariate_shift_is_found_and_the_band_holds_the_auc_to_come():
    random = np.random.default_rng(0)
    inside, errors, rounds = 0, [], 60
    for _ in range(rounds):
        calibration = fit_calibration(*draw(random, 8000))
        # Users all alike: the model tells them apart less well, though nobody's taste has changed.
        labels, scores = draw(random, 8000, spread=0.6)
        found, truth = estimate_auc(scores, calibration), roc_auc_score(labels, scores)
        inside += found.low <= truth <= found.high
        errors.append(found.auc - truth)
    assert abs(np.mean(errors)) < 0.01
    assert inside / rounds >= 0.85
    before = estimate_auc(draw(random, 8000)[1], calibration)
    assert before.low > found.high


def test_concept_drift_is_not_seen():
    random = np.random.default_rng(2)
    calibration = fit_calibration(*draw(random, 20_000))
    before, after = draw(random, 20_000), draw(random, 20_000, is_concept_changed=True)
    assert roc_auc_score(*before) - roc_auc_score(*after) > 0.15
    estimates = [estimate_auc(scores, calibration) for _, scores in (before, after)]
    assert estimates[1].auc == pytest.approx(estimates[0].auc, abs=0.01)
    assert estimates[1].low > roc_auc_score(*after)


def test_calibration_is_that_of_scikit_learn():
    labels, scores = draw(np.random.default_rng(3), 5000)
    found = fit_calibration(labels, scores)
    odds = np.log(np.float64(scores)) - np.log1p(-np.float64(scores))
    expected = LogisticRegression(C=1e12, tol=1e-12, max_iter=1000).fit(odds[:, None], labels)
    assert found.intercept == pytest.approx(expected.intercept_[0], abs=1e-4)
    assert found.slope == pytest.approx(expected.coef_[0, 0], abs=1e-4)
    np.testing.assert_allclose(found(scores), expected.predict_proba(odds[:, None])[:, 1], atol=1e-5)


@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 4, 1000]))
@settings(max_examples=60, deadline=None)
def test_expected_auc_is_the_ratio_over_all_pairs_and_that_of_known_labels(seed, levels):
    random = np.random.default_rng(seed)
    scores, p = random.integers(0, levels, 30) / levels, random.random(30)
    wins = (scores[:, None] > scores) + 0.5 * (scores[:, None] == scores)
    pairs = p[:, None] * (1 - p)
    np.fill_diagonal(pairs, 0)
    assert expected_auc(p, scores).auc == pytest.approx((wins * pairs).sum() / pairs.sum(), abs=1e-12)
    labels = np.r_[0, 0, 1, 1, random.integers(0, 2, 26)]
    known, delong = expected_auc(labels.astype(float), scores), auc_estimate(labels, scores)
    assert known.auc == pytest.approx(delong.auc, abs=1e-12)
    assert known.standard_error <= delong.standard_error + 1e-12  # which divides by n - 1


@pytest.mark.parametrize("p", [[], [0.5], [0.0, 0.0], [1.0, 1.0, 1.0]])
def test_without_a_possible_pair_there_is_no_expected_auc(p):
    assert expected_auc(np.array(p), np.arange(len(p)) / 10) is None


def test_too_few_clicks_or_separated_classes_fit_no_calibration():
    scores = np.linspace(0.01, 0.99, 1000)
    few = np.zeros(1000, np.uint8)
    few[: MIN_CLICKS - 1] = 1
    assert fit_calibration(few, scores) is None
    assert fit_calibration((scores > 0.5).astype(np.uint8), scores) is None
    assert fit_calibration(np.zeros(0, np.uint8), np.zeros(0)) is None
    assert estimate_auc(np.zeros(0), Calibration(0.0, 1.0, 0.01)) is None


def test_one_score_for_all_rows_is_calibrated_to_the_click_rate_and_tells_nothing_apart():
    labels = np.repeat([1, 0], [100, 900]).astype(np.uint8)
    calibration = fit_calibration(labels, np.full(1000, 0.4))
    assert calibration(np.array([0.4]))[0] == pytest.approx(0.1)
    assert estimate_auc(np.full(500, 0.4), calibration).auc == pytest.approx(0.5)


@pytest.mark.parametrize("scores", [[0.1, 1.2], [0.1, math.nan], [-0.1, 0.5]])
def test_scores_that_are_no_probabilities_are_refused(scores):
    with pytest.raises(ContractError):
        estimate_auc(np.array(scores), Calibration(0.0, 1.0, 0.01))
    with pytest.raises(ContractError):
        fit_calibration(np.array([0, 1], np.uint8), np.array(scores))
