"""Tests that compare metrics with scikit-learn, and with DeLong's formulas pair by pair."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from evergreen.runtime.errors import ContractError
from evergreen.statistics import metrics
from tests.support.errors import raises


def delong(labels, *models):
    """Return AUCs and their covariance from all pairs of clicks and non-clicks, O(n m)."""
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


def auc_by_row(labels, scores):
    """Return the AUC estimate for requests of one row each."""
    return metrics.auc_estimate(labels, scores, groups=np.arange(len(np.asarray(labels))))


@st.composite
def scored(draw, *, models=1, levels=None):
    """Draw labels with at least two rows of each class, and scores with many ties."""
    n = draw(st.integers(4, 60))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    labels = random.permutation(np.r_[1, 1, 0, 0, random.integers(0, 2, n - 4)])
    grid = levels or draw(st.sampled_from([2, 5, 1000]))
    return labels, *(random.integers(0, grid, n) / grid for _ in range(models))


@given(scored())
@settings(max_examples=100, deadline=None)
def test_roc_auc_equals_scikit_learn_with_ties(sample):
    labels, scores = sample
    assert metrics.roc_auc(labels, scores) == pytest.approx(
        roc_auc_score(labels, scores), abs=1e-12
    )


@pytest.mark.parametrize(
    "labels", [[], [1], [0, 0, 0], [1, 1]], ids=["empty", "one row", "no click", "all clicks"]
)
def test_auc_is_none_until_both_classes_seen(labels):
    assert metrics.roc_auc(labels, [0.5] * len(labels)) is None
    assert metrics.normalized_entropy(labels, [0.5] * len(labels)) is None


def test_auc_of_one_click_exists_but_its_uncertainty_does_not():
    labels, scores = [1, 0, 0], [0.9, 0.1, 0.95]
    assert metrics.roc_auc(labels, scores) == 0.5
    assert auc_by_row(labels, scores) is None
    assert metrics.auc_difference(labels, scores, scores, groups=range(3)) is None
    assert auc_by_row([1, 1, 0], scores) is None


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([0, 1], [0.1], r"\(2,\) and \(1,\)"),
        ([[0, 1]], [[0.1, 0.2]], "expected one length"),
        ([0, 2], [0.1, 0.2], "other than 0 and 1"),
        ([0, float("nan")], [0.1, 0.2], "other than 0 and 1"),
        ([0, 1, 1], [0.1, float("nan"), float("inf")], "2 scores are NaN or infinite"),
    ],
    ids=["lengths", "two dimensions", "label 2", "label NaN", "scores not finite"],
)
@pytest.mark.parametrize(
    "metric", [metrics.roc_auc, auc_by_row, metrics.log_loss, metrics.calibration]
)
def test_bad_input_is_refused(metric, labels, scores, message):
    with pytest.raises(ContractError, match=message):
        metric(labels, scores)


@given(scored())
@settings(max_examples=60, deadline=None)
def test_standard_error_equals_direct_formula_of_delong(sample):
    labels, scores = sample
    (auc,), covariance = delong(labels, scores)
    estimate = auc_by_row(labels, scores)
    assert auc == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    if estimate is None:
        assert min(labels.sum(), (1 - labels).sum()) < 10 or auc in (0.0, 1.0)
        return
    assert estimate.auc == pytest.approx(auc, abs=1e-12)
    assert estimate.standard_error == pytest.approx(math.sqrt(covariance[0, 0]), abs=1e-12)
    assert 0.0 < estimate.low <= estimate.auc <= estimate.high < 1.0
    # If all scores are equal, the AUC is 0.5 for any labels, and the interval has no width.
    assert (estimate.low < estimate.auc < estimate.high) == (len(set(scores)) > 1)


@given(scored(models=2))
@settings(max_examples=60, deadline=None)
def test_paired_difference_equals_direct_formula_of_delong(sample):
    labels, scores, reference = sample
    aucs, covariance = delong(labels, scores, reference)
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    difference = metrics.auc_difference(labels, scores, reference, groups=np.arange(len(labels)))
    if difference is None:
        assert min(labels.sum(), (1 - labels).sum()) < 10 or variance < 1e-12
        return
    assert difference.auc == pytest.approx(aucs[0] - aucs[1], abs=1e-12)
    # The definition subtracts nearly equal numbers, so rounding errors of the variance remain. An
    # error of 1e-14 in the variance is an error of 1e-7 in its square root.
    assert difference.standard_error == pytest.approx(math.sqrt(max(variance, 0.0)), abs=1e-7)
    if difference.standard_error:
        half = stats.t.ppf(0.975, difference.degrees) * difference.standard_error
        assert difference.high - difference.auc == pytest.approx(half)


def test_rows_reported_twice_are_no_further_evidence():
    labels, scores = np.tile([1, 0, 0, 1, 0], 8), np.random.default_rng(0).random(40)
    once = metrics.auc_estimate(labels, scores, groups=np.arange(40))
    twice = metrics.auc_estimate(
        np.tile(labels, 2), np.tile(scores, 2), groups=np.tile(np.arange(40), 2)
    )
    assert twice == pytest.approx(once)


def test_groups_may_have_any_names_in_any_order():
    random = np.random.default_rng(3)
    labels, scores, groups = (
        random.integers(0, 2, 200),
        random.random(200),
        random.integers(0, 30, 200),
    )
    named = metrics.auc_estimate(
        labels, scores, groups=[f"request {29 - group}" for group in groups]
    )
    assert named == pytest.approx(metrics.auc_estimate(labels, scores, groups=groups))
    with raises(ContractError, "groups", (3,), "200 rows"):
        metrics.auc_estimate(labels, scores, groups=[1, 2, 3])


def test_clicks_of_three_requests_are_too_few_for_interval():
    labels, scores = np.r_[np.ones(300), np.zeros(300)], np.random.default_rng(0).random(600)
    groups = np.r_[np.arange(300) % 3, np.arange(300)]
    assert metrics.auc_estimate(labels, scores, groups=groups) is None
    assert metrics.auc_difference(labels, scores, scores[::-1], groups=groups) is None
    assert metrics.auc_estimate(labels, scores, groups=np.arange(600)) is not None


def test_perfect_order_has_no_interval_and_equal_order_no_difference():
    labels = np.repeat([1, 0], 20)
    assert auc_by_row(labels, labels) is None
    equal = metrics.auc_difference(labels, labels + 1.0, labels, groups=range(40))
    assert (equal.auc, equal.low, equal.high, equal.p_value) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("degrees", "exact"), [(3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227), (1e6, 1.95997)]
)
def test_intervals_and_p_values_are_those_of_students_t(degrees, exact):
    """The reference is a printed table of the distribution's 97.5 % quantiles."""
    assert metrics.Deviation(2.0, degrees).half_width == pytest.approx(2 * exact, rel=1e-5)
    assert metrics.student_p_value(exact, degrees) == pytest.approx(0.05, rel=1e-4)
    assert metrics.student_p_value(-exact, degrees) == metrics.student_p_value(exact, degrees)


def test_log_loss_equals_scikit_learn_and_is_finite_for_certain_scores():
    random = np.random.default_rng(1)
    labels, scores = random.integers(0, 2, 500), random.random(500)
    assert metrics.log_loss(labels, scores) == pytest.approx(
        sklearn_log_loss(labels, scores), rel=1e-12
    )
    assert metrics.log_loss([1], [0.0]) == pytest.approx(-math.log(1e-7))
    assert metrics.log_loss([], []) is None


def test_normalized_entropy_is_one_for_base_rate_and_less_for_knowledge():
    labels = np.array([1, 0, 0, 0] * 50)
    assert metrics.normalized_entropy(labels, np.full(200, 0.25)) == pytest.approx(1.0)
    assert metrics.normalized_entropy(labels, np.where(labels == 1, 0.6, 0.1)) < 0.6
    assert metrics.normalized_entropy(labels, np.full(200, 0.9)) > 1.0


def test_calibration_is_expected_over_observed_clicks():
    assert metrics.calibration([1, 0, 0, 1], [0.5, 0.25, 0.25, 0.5]) == pytest.approx(0.75)
    assert metrics.calibration([0, 0], [0.5, 0.5]) is None
    assert metrics.calibration([], []) is None


def test_rows_with_weights_count_as_so_many_copies_of_same_group():
    random = np.random.default_rng(2)
    weights, labels, scores = (
        random.integers(0, 4, 900),
        random.integers(0, 2, 900),
        random.random(900),
    )
    copies = np.repeat(np.arange(900), weights)
    for metric in (metrics.log_loss, metrics.normalized_entropy, metrics.calibration):
        assert metric(labels, scores, weights=weights / 2) == pytest.approx(
            metric(labels[copies], scores[copies])
        )
        assert metric(labels, scores, weights=np.zeros(900)) is None
    assert metrics.click_rate(labels, weights=weights) == pytest.approx(labels[copies].mean())
    weighted = metrics.row_weighted(scores, weights)
    mine = metrics.grouped_deviation((weighted, np.arange(900)))
    its = metrics.grouped_deviation((scores[copies], copies))
    assert weighted.mean() == pytest.approx(scores[copies].mean())
    assert mine.standard_error == pytest.approx(its.standard_error, rel=1e-3)


def test_user_quality_is_mean_over_users_who_have_both_labels():
    random = np.random.default_rng(5)
    users, labels = random.integers(0, 40, 300), random.integers(0, 2, 300)
    scores = random.integers(0, 6, 300) / 8  # scores with many ties
    aucs, weights, gains = [], [], []
    for user in range(40):
        mine = users == user
        click, score = labels[mine], scores[mine]
        if not 0 < click.sum() < len(click):
            continue
        aucs.append(
            np.mean([(a > b) + (a == b) / 2 for a in score[click == 1] for b in score[click == 0]])
        )
        weights.append(len(click))
        # Compute the mean over random orders of the rows with equal scores.
        orders = [np.lexsort((random.random(len(click)), -score)) for _ in range(1000)]
        ideal = sum(1 / np.log2(position + 2) for position in range(click.sum()))
        gains.append(
            np.mean([(click[order] / np.log2(np.arange(len(click)) + 2)).sum() for order in orders])
            / ideal
        )
    found = metrics.user_quality(labels, scores, users=users)
    assert found.gauc == pytest.approx(np.average(aucs, weights=weights))
    assert found.ndcg == pytest.approx(np.mean(gains), abs=0.002)
    assert metrics.user_quality([1, 0], [0.1, 0.2], users=[1, 2]) == metrics.UserQuality(None, None)
