"""Tests that compare the KPIs of windows and ranked lists with scikit-learn on the same rows."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from evergreen.statistics import metrics
from monitoring.metrics.window import (
    MAX_VERSIONS,
    RANKING_K,
    RowWindow,
    VersionWindows,
    measure,
    measure_version,
)
from testing.click_streams import draw_returning
from tests.support.monitors import START, WINDOW, clicks, matured, prediction


def rows(random, n, rate=0.2):
    labels = (random.random(n) < rate).astype(np.uint8)
    return labels, np.round(random.beta(2, 8, n) + 0.1 * labels, 2).astype(np.float32)


@given(st.integers(0, 2**32 - 1), st.integers(15, 200), st.sampled_from([1, 4, 1000]))
@settings(max_examples=60, deadline=None)
def test_calibration_error_equals_direct_formula_over_bins_of_equal_mass(seed, n, levels):
    random = np.random.default_rng(seed)
    scores, labels = random.integers(0, levels, n) / levels, random.integers(0, 2, n)
    # Rows with equal scores share their click rate, so their order among the bins does not matter.
    shared = np.array([labels[scores == score].mean() for score in scores])
    order, total = np.argsort(scores, kind="stable"), 0.0
    for b in range(15):
        part = order[b * n // 15 : (b + 1) * n // 15]
        total += len(part) / n * abs(scores[part].mean() - shared[part].mean())
    found = metrics.expected_calibration_error(labels, scores)
    assert found == pytest.approx(total, abs=1e-12)
    shuffled = random.permutation(n)
    assert metrics.expected_calibration_error(labels[shuffled], scores[shuffled]) == pytest.approx(
        found, abs=1e-12
    )


@given(st.integers(1, 25), st.integers(1, 12), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_ndcg_of_ranked_list_equals_scikit_learn(n, k, seed):
    random = np.random.default_rng(seed)
    positions, labels = random.permutation(n) + 1, (random.random(n) < 0.3).astype(int)
    found = metrics.ndcg_at_k(positions[labels == 1], k=k)
    if not labels.any():
        assert found is None
    elif n > 1:
        assert found == pytest.approx(ndcg_score([labels], [-positions], k=k), abs=1e-12)
    else:
        assert found == 1.0
    top = labels[np.argsort(positions)][:k]
    assert metrics.hit_at_k(positions[labels == 1], k=k) == bool(top.any())


def test_hit_rate_is_over_all_lists_and_ndcg_over_those_with_click():
    windows, n = VersionWindows(100), RANKING_K + 2
    for click_position in (1, None, n, 3):
        labels = (np.arange(1, n + 1) == click_position).astype(np.uint8)
        windows.update(
            matured("list", 0.0, 1, labels, np.full(n, 0.1), positions=np.arange(1, n + 1))
        )
    windows.update(matured("none", 0.0, 1, np.ones(5), np.full(5, 0.1)))  # rows without positions
    kpis = measure_version(1, windows)
    assert (kpis.ranked_lists, kpis.hit_rate, kpis.rows) == (4, 0.5, 4 * n + 5)
    assert kpis.ndcg == pytest.approx((1.0 + 0.0 + 1 / math.log2(4)) / 3)


def test_without_lists_ranking_kpis_are_absent():
    windows = VersionWindows(10)
    windows.update(matured("none", 0.0, 1, np.zeros(3), np.zeros(3)))
    kpis = measure_version(1, windows)
    assert kpis.ranked_lists is kpis.hit_rate is kpis.ndcg is kpis.conversion_rate is None
    windows.update(matured("list", 0.0, 1, np.zeros(2), np.zeros(2), positions=[1, 2]))
    kpis = measure_version(1, windows)
    assert (kpis.ranked_lists, kpis.hit_rate, kpis.ndcg) == (1, 0.0, None)
    with pytest.raises(KeyError):
        measure_version(2, windows)


def test_lists_of_forgotten_version_are_forgotten_too():
    windows = VersionWindows(10)
    for version in range(MAX_VERSIONS + 1):
        windows.update(matured("list", 0.0, version, [1], [1.0], positions=[1]))
    assert windows.versions == tuple(range(1, MAX_VERSIONS + 1))
    assert (len(windows.lists(0)), len(windows.lists(1))) == (0, 1)


@pytest.mark.parametrize("batch_rows", [1, 7, 64, 150])
def test_auc_equals_scikit_learn_on_tail_after_every_update(batch_rows):
    random = np.random.default_rng(batch_rows)
    windows, labels, scores = VersionWindows(100), [], []
    for _ in range(40):
        new_labels = (random.random(batch_rows) < 0.3).astype(np.uint8)
        # Rounded scores have many ties.
        new_scores = np.round(random.random(batch_rows), 2).astype(np.float32)
        labels += new_labels.tolist()
        scores += new_scores.tolist()
        windows.update(matured("r", 0.0, 1, new_labels, new_scores))
        kpis = measure(1, windows[1])
        tail_labels, tail_scores = labels[-100:], scores[-100:]
        assert (kpis.rows, kpis.clicks) == (len(tail_labels), sum(tail_labels))
        if 0 < sum(tail_labels) < len(tail_labels):
            assert kpis.auc == pytest.approx(roc_auc_score(tail_labels, tail_scores), abs=1e-12)
            clipped = np.clip(np.float64(tail_scores), 1e-7, 1 - 1e-7)
            assert kpis.log_loss == pytest.approx(log_loss(tail_labels, clipped), abs=1e-9)
        else:
            assert kpis.auc is None


def test_interval_covers_returning_users_and_is_too_narrow_by_requests():
    """Each of 100 populations has 50 users with 20 requests each.

    The true value is the AUC over users with one request each.
    """
    random, held = np.random.default_rng(6), {"users": 0, "requests": 0}
    everybody, _ = draw_returning(random, users=250_000, requests=250_000)
    true_auc = roc_auc_score(everybody.labels, everybody.scores)
    for _ in range(100):
        rows, users = draw_returning(random, users=50, requests=1_000)
        for name in held:
            window = RowWindow(4_000)
            for at in range(0, 4_000, 4):
                of_users = users[at : at + 4] if name == "users" else None
                window.update(
                    matured(
                        "r",
                        0.0,
                        1,
                        rows.labels[at : at + 4],
                        rows.scores[at : at + 4],
                        users=of_users,
                    )
                )
            kpis = measure(1, window)
            held[name] += kpis.auc_low <= true_auc <= kpis.auc_high
    assert held["users"] >= 90
    assert held["requests"] <= 75


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_window_has_no_auc(label):
    window = RowWindow(50)
    window.update(matured("r", 0.0, 1, np.full(50, label), np.linspace(0, 1, 50)))
    kpis = measure(3, window)
    assert kpis.auc is kpis.auc_low is kpis.auc_high is None
    assert kpis.ctr == label


def test_empty_window_has_no_kpi():
    kpis = measure(1, RowWindow(10))
    assert (kpis.rows, kpis.auc, kpis.log_loss, kpis.calibration, kpis.ctr) == (
        0,
        None,
        None,
        None,
        None,
    )


@pytest.mark.parametrize("size", [1, 7, 64])
def test_interval_treats_rows_of_request_as_cluster_even_in_split_window(size):
    random, window = np.random.default_rng(size), RowWindow(1000)
    labels, scores = rows(random, size * (2500 // size), rate=0.3)
    for begin in range(0, len(labels), size):
        window.update(
            matured("r", 0.0, 1, labels[begin : begin + size], scores[begin : begin + size])
        )
    groups = (np.arange(len(labels)) // size)[-1000:]
    expected = metrics.auc_estimate(labels[-1000:], scores[-1000:], groups=groups)
    kpis = measure(1, window)
    assert (kpis.auc, kpis.auc_low, kpis.auc_high) == (expected.auc, expected.low, expected.high)


def test_ranked_requests_reach_kpis(started):
    b = started()
    positions = np.array([3, 1, 2, 4, 6, 5, 12, 7], np.int32)
    lists = [
        dataclasses.replace(prediction(name, 8, time=START + i), positions=positions)
        for i, name in enumerate(["a", "b", "c"])
    ]
    outcomes = [("a", 0, START + 5), ("a", 3, START + 6), ("b", 6, START + 7)]
    b.tick(
        *lists, prediction("d", 8, time=START + 3), clicks("o", outcomes), at=START + WINDOW + 10
    )
    (kpis,) = b.monitor._measurements.shown
    labels = np.zeros((4, 8), int)
    for name, row, _ in outcomes:
        labels["abcd".index(name), row] = 1
    assert (kpis.ranked_lists, kpis.hit_rate) == (3, pytest.approx(1 / 3))
    assert kpis.ndcg == pytest.approx(ndcg_score(labels[:1], [-positions], k=10) / 2)
