"""Metric definitions against scikit-learn and against DeLong's formulas written out pair by pair in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from components.contracts import metrics
from components.runtime.errors import ContractError


def delong(labels, *models):
    """AUCs and their covariance, from the definition: every click compared with every non-click, O(n m)."""
    labels = np.asarray(labels)
    clicks_won, others_lost = [], []
    for scores in models:
        scores = np.asarray(scores, dtype=np.float64)
        x, y = scores[labels == 1][:, None], scores[labels == 0][None, :]
        psi = (x > y) + 0.5 * (x == y)
        clicks_won.append(psi.mean(axis=1))
        others_lost.append(psi.mean(axis=0))
    m, n = len(clicks_won[0]), len(others_lost[0])
    aucs = np.array([v.mean() for v in clicks_won])
    v10, v01 = np.array(clicks_won) - aucs[:, None], np.array(others_lost) - aucs[:, None]
    return aucs, v10 @ v10.T / (m - 1) / m + v01 @ v01.T / (n - 1) / n


@st.composite
def scored(draw, *, models=1, levels=None):
    """Labels with both classes at least twice, and scores rich in ties."""
    n = draw(st.integers(4, 60))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    labels = random.permutation(np.r_[1, 1, 0, 0, random.integers(0, 2, n - 4)])
    grid = levels or draw(st.sampled_from([2, 5, 1000]))
    return labels, *(random.integers(0, grid, n) / grid for _ in range(models))


@given(scored())
@settings(max_examples=100, deadline=None)
def test_roc_auc_equals_scikit_learn_with_ties(sample):
    labels, scores = sample
    assert metrics.roc_auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


@pytest.mark.parametrize("labels", [[], [1], [0, 0, 0], [1, 1]], ids=["empty", "one row", "no click", "all clicks"])
def test_auc_is_none_until_both_classes_seen(labels):
    assert metrics.roc_auc(labels, [0.5] * len(labels)) is None
    assert metrics.normalized_entropy(labels, [0.5] * len(labels)) is None


def test_auc_of_one_click_exists_but_its_uncertainty_does_not():
    labels, scores = [1, 0, 0], [0.9, 0.1, 0.95]
    assert metrics.roc_auc(labels, scores) == 0.5
    assert metrics.auc_estimate(labels, scores) is None
    assert metrics.auc_difference(labels, scores, scores) is None
    assert metrics.auc_estimate([1, 1, 0], scores) is None


@pytest.mark.parametrize(
    ("labels", "scores", "said"),
    [
        ([0, 1], [0.1], r"\(2,\) and \(1,\)"),
        ([[0, 1]], [[0.1, 0.2]], "one same length"),
        ([0, 2], [0.1, 0.2], "other than 0 and 1"),
        ([0, float("nan")], [0.1, 0.2], "other than 0 and 1"),
        ([0, 1, 1], [0.1, float("nan"), float("inf")], "2 scores are NaN or infinite"),
    ],
    ids=["lengths", "two dimensions", "label 2", "label NaN", "scores not finite"],
)
@pytest.mark.parametrize("metric", [metrics.roc_auc, metrics.auc_estimate, metrics.log_loss, metrics.calibration])
def test_bad_input_is_refused(metric, labels, scores, said):
    with pytest.raises(ContractError, match=said):
        metric(labels, scores)


@given(scored())
@settings(max_examples=60, deadline=None)
def test_standard_error_equals_delong_written_out(sample):
    labels, scores = sample
    (auc,), covariance = delong(labels, scores)
    estimate = metrics.auc_estimate(labels, scores)
    assert estimate.auc == pytest.approx(auc, abs=1e-12)
    assert estimate.auc == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert estimate.standard_error == pytest.approx(math.sqrt(covariance[0, 0]), abs=1e-12)
    assert 0.0 <= estimate.low <= estimate.auc <= estimate.high <= 1.0


@given(scored(models=2))
@settings(max_examples=60, deadline=None)
def test_paired_difference_equals_delong_written_out(sample):
    labels, scores, reference = sample
    aucs, covariance = delong(labels, scores, reference)
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    difference = metrics.auc_difference(labels, scores, reference)
    assert difference.auc == pytest.approx(aucs[0] - aucs[1], abs=1e-12)
    # The definition subtracts nearly equal terms: its variance is exact to rounding only, its root to the root of it.
    assert difference.standard_error == pytest.approx(math.sqrt(max(variance, 0.0)), abs=1e-7)
    assert difference.high - difference.low == pytest.approx(2 * metrics.Z_95 * difference.standard_error)


def test_log_loss_equals_scikit_learn_and_survives_certainty():
    random = np.random.default_rng(1)
    labels, scores = random.integers(0, 2, 500), random.random(500)
    assert metrics.log_loss(labels, scores) == pytest.approx(sklearn_log_loss(labels, scores), rel=1e-12)
    assert metrics.log_loss([1], [0.0]) == pytest.approx(-math.log(1e-7))
    assert metrics.log_loss([], []) is None


def test_normalized_entropy_is_one_for_the_base_rate_and_less_for_knowledge():
    labels = np.array([1, 0, 0, 0] * 50)
    assert metrics.normalized_entropy(labels, np.full(200, 0.25)) == pytest.approx(1.0)
    assert metrics.normalized_entropy(labels, np.where(labels == 1, 0.6, 0.1)) < 0.6
    assert metrics.normalized_entropy(labels, np.full(200, 0.9)) > 1.0


def test_calibration_is_expected_over_observed_clicks():
    assert metrics.calibration([1, 0, 0, 1], [0.5, 0.25, 0.25, 0.5]) == pytest.approx(0.75)
    assert metrics.calibration([0, 0], [0.5, 0.5]) is None
    assert metrics.calibration([], []) is None
