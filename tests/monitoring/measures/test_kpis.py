"""KPIs of windows of records and of time, of ranked lists and conversions, against scikit-learn on the same rows."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from components.contracts import metrics
from components.runtime.errors import ContractError
from monitoring.measures import window
from monitoring.measures.kpis import measure, measure_version
from monitoring.measures.window import MAX_VERSIONS, VersionWindows, WindowSettings


def rows(random, n, rate=0.2):
    labels = (random.random(n) < rate).astype(np.uint8)
    return labels, np.round(random.beta(2, 8, n) + 0.1 * labels, 2).astype(np.float32)


def test_normalized_entropy_is_log_loss_over_that_of_the_click_rate():
    labels, scores = rows(np.random.default_rng(0), 500)
    kpis = measure(1, labels, scores)
    background = log_loss(labels, np.full(500, labels.mean()))
    assert kpis.normalized_entropy == pytest.approx(log_loss(labels, np.float64(scores)) / background)


@given(st.integers(0, 2**32 - 1), st.integers(15, 200), st.sampled_from([1, 4, 1000]))
@settings(max_examples=60, deadline=None)
def test_calibration_error_is_that_of_bins_of_equal_mass_written_out(seed, n, levels):
    random = np.random.default_rng(seed)
    scores, labels = random.integers(0, levels, n) / levels, random.integers(0, 2, n)
    # Rows of one score share their click rate, so that it does not matter which of them fall into which bin.
    shared = np.array([labels[scores == score].mean() for score in scores])
    order, total = np.argsort(scores, kind="stable"), 0.0
    for b in range(15):
        part = order[b * n // 15 : (b + 1) * n // 15]
        total += len(part) / n * abs(scores[part].mean() - shared[part].mean())
    found = metrics.expected_calibration_error(labels, scores)
    assert found == pytest.approx(total, abs=1e-12)
    shuffled = random.permutation(n)
    assert metrics.expected_calibration_error(labels[shuffled], scores[shuffled]) == pytest.approx(found, abs=1e-12)


def test_score_distribution_is_that_of_numpy():
    scores = np.r_[np.random.default_rng(2).beta(1, 20, 997), 0.0, 1.0, 0.5].astype(np.float32)
    found = metrics.score_distribution(scores)
    expected = np.quantile(np.float64(scores), metrics.SCORE_QUANTILES, method="inverted_cdf")
    np.testing.assert_array_equal(found.quantiles, expected)
    np.testing.assert_array_equal(found.counts, np.histogram(np.float64(scores), metrics.SCORE_EDGES)[0])
    assert sum(found.counts) == 1000
    assert metrics.score_distribution([]) is None
    for bad in ([0.5, math.nan], [-0.1], [1.5]):
        with pytest.raises(ContractError, match="expected probabilities"):
            metrics.score_distribution(bad)


@given(st.integers(1, 25), st.integers(1, 12), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_ndcg_of_a_ranked_list_equals_scikit_learn(n, k, seed):
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


def test_hit_rate_is_over_all_lists_and_ndcg_over_those_with_a_click():
    windows, scores = VersionWindows(100, k=3), np.full(5, 0.1, np.float32)
    positions = np.array([5, 4, 3, 2, 1], np.int32)
    for at, labels in enumerate([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 0, 0]]):
        windows.update(1, np.array(labels, np.uint8), scores, predicted_at=float(at), positions=positions)
    windows.update(1, np.ones(5, np.uint8), scores, predicted_at=9.0)  # no list
    kpis = measure_version(1, windows)
    assert (kpis.ranked_lists, kpis.hit_rate) == (4, 0.5)
    assert kpis.ndcg == pytest.approx((1.0 + 0.0 + 1 / math.log2(4)) / 3)
    assert kpis.rows == 25


def test_without_lists_conversions_or_a_window_of_time_there_are_no_such_numbers():
    windows = VersionWindows(10)
    windows.update(1, np.zeros(3, np.uint8), np.zeros(3, np.float32), predicted_at=0.0)
    kpis = measure_version(1, windows)
    for name in ("ranked_lists", "hit_rate", "ndcg", "conversion_rate", "timed_auc", "timed_rows", "timed_seconds"):
        assert getattr(kpis, name) is None
    windows.update(
        1, np.zeros(2, np.uint8), np.zeros(2, np.float32), predicted_at=1.0, positions=np.array([1, 2], np.int32)
    )
    kpis = measure_version(1, windows)
    assert (kpis.ranked_lists, kpis.hit_rate, kpis.ndcg) == (1, 0.0, None)
    with pytest.raises(KeyError):
        measure_version(2, windows)


def test_conversion_rate_is_of_the_newest_rows_whose_conversion_window_has_closed(monkeypatch):
    monkeypatch.setattr(window, "MAX_SETTLED", 3)
    windows, settled = VersionWindows(10), [(4, 4), (10, 1), (5, 0), (5, 2)]
    windows.note_conversions(1, 7, 7)  # of a version that has no rows: forgotten, or never seen
    windows.update(1, np.zeros(1, np.uint8), np.zeros(1, np.float32), predicted_at=0.0)
    for rows_of_request, converted in settled:
        windows.note_conversions(1, rows_of_request, converted)
    assert measure_version(1, windows).conversion_rate == pytest.approx(3 / 20)


@pytest.mark.parametrize("capacity", [20, 300])
def test_auc_of_the_window_of_time_equals_scikit_learn_while_that_of_records_stays_what_it_was(capacity, monkeypatch):
    monkeypatch.setattr(window, "MAX_TIMED_ROWS", 500)
    random = np.random.default_rng(capacity)
    windows, every, now = VersionWindows(capacity, seconds=60.0), [], 1.7e9
    for _ in range(150):
        now += random.exponential(2.0)
        # Requests mature in the order of time, nearly.
        made, (labels, scores) = now - random.uniform(0, 1), rows(random, int(random.integers(1, 30)))
        windows.update(1, labels, scores, predicted_at=made)
        every += [(made, label, score) for label, score in zip(labels, scores)]
        kpis = measure_version(1, windows)
        newest = max(made for made, _, _ in every[-500:])
        kept = [(label, score) for made, label, score in every[-500:] if made > newest - 60.0]
        assert kpis.timed_rows == len(kept)
        labels, scores = zip(*kept)
        if 0 < sum(labels) < len(labels):
            assert kpis.timed_auc == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
            assert 0 <= kpis.timed_seconds < 61
        _, labels, scores = zip(*every[-capacity:])
        if 0 < sum(labels) < len(labels):
            assert kpis.auc == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_lists_and_conversions_of_a_forgotten_version_are_forgotten_too():
    windows, one = VersionWindows(10, seconds=5.0), (np.ones(1, np.uint8), np.ones(1, np.float32))
    for version in range(MAX_VERSIONS + 1):
        windows.update(version, *one, predicted_at=float(version), positions=np.ones(1, np.int32))
        windows.note_conversions(version, 1, 1)
    assert (windows.lists(0), windows.conversion_rate(0)) == ((), None)
    assert len(windows.lists(1)) == windows.conversion_rate(1) == 1


def test_kpis_can_be_written_to_the_timeline():
    windows = VersionWindows(10, seconds=5.0)
    windows.update(
        1, np.array([0, 1], np.uint8), np.array([0.1, 0.2], np.float32), predicted_at=1.0, positions=np.array([1, 2])
    )
    windows.note_conversions(1, 2, 1)
    kpis = measure_version(1, windows)
    assert json.loads(json.dumps(dataclasses.asdict(kpis), allow_nan=False))["timed_auc"] == 1.0


@pytest.mark.parametrize("settings", [{"window_seconds": -1.0}, {"window_seconds": math.nan}, {"ranking_k": 0}])
def test_windows_that_hold_nothing_are_refused(settings):
    with pytest.raises(ContractError):
        WindowSettings(**settings)
