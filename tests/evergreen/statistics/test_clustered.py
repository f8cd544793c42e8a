"""Tests of clustered comparisons: the rows of one request are alike in both samples."""

import numpy as np
import pytest
from scipy import stats

from evergreen.statistics.two_sample import (
    Clustered,
    comparison_design,
    correlations,
    homogeneity,
    own_designs,
    with_few,
)


def sample(values, requests, cells):
    """Count the rows of each cell, with the sums that a clustered test needs.

    `values` contains each row's cell, from 0 to cells-1. `requests` contains each row's request.
    """
    table = np.zeros((requests.max() + 1, cells), np.int64)
    np.add.at(table, (requests, values), 1)
    table = table[table.sum(axis=1) > 0]
    sizes = table.sum(axis=1)
    return Clustered(
        counts=table.sum(axis=0),
        squares=(table.astype(float) ** 2).sum(axis=0),
        products=(table * sizes[:, None]).sum(axis=0).astype(float),
        rows=len(values),
        sizes=int((sizes**2).sum()),
        requests=len(sizes),
    )


def drawn(random, requests, size, share_alike, probabilities):
    """Draw rows of requests.

    With probability `share_alike`, a row has its request's value, otherwise its own.
    """
    own = random.choice(len(probabilities), requests * size, p=probabilities)
    common = np.repeat(random.choice(len(probabilities), requests, p=probabilities), size)
    alike = random.random(requests * size) < share_alike
    return np.where(alike, common, own), np.repeat(np.arange(requests), size)


FIVE = np.array([0.5, 0.25, 0.15, 0.07, 0.03])


@pytest.mark.parametrize("share_alike", [0.0, 0.5, 1.0])
def test_correlation_equals_that_of_drawn_rows(share_alike):
    values, requests = drawn(np.random.default_rng(0), 4000, 16, share_alike, FIVE)
    each, overall = correlations((sample(values, requests, 5),))
    # Two rows of a request both copy the request's value with the probability share_alike ** 2.
    # Otherwise the two values are independent.
    assert overall == pytest.approx(share_alike**2, abs=0.02)
    np.testing.assert_allclose(each, share_alike**2, atol=0.04)
    assert (each >= overall).all()


def test_design_effect_is_variance_over_that_of_independent_rows():
    random = np.random.default_rng(1)
    shares, effects = [], []
    for _ in range(400):
        values, requests = drawn(random, 150, 16, 0.7, FIVE)
        found = sample(values, requests, 5)
        shares.append(found.counts / found.rows)
        effects.append(comparison_design(correlations((found, found))[0], found, found))
    true = np.var(shares, axis=0, ddof=1) / (FIVE * (1 - FIVE) / (150 * 16))
    np.testing.assert_allclose(np.mean(effects, axis=0), true, rtol=0.2)


def test_samples_with_requests_of_two_sizes_have_own_design_effects():
    random = np.random.default_rng(2)
    now = sample(*drawn(random, 500, 64, 1.0, FIVE), 5)
    before = sample(*drawn(random, 16_000, 2, 1.0, FIVE), 5)
    correlation, _ = correlations((now, before))
    np.testing.assert_allclose(comparison_design(correlation, now, before), (64 + 2) / 2, rtol=1e-9)


def test_difference_between_samples_is_no_similarity_within_them():
    random = np.random.default_rng(3)
    now = sample(*drawn(random, 500, 32, 0.0, FIVE[::-1]), 5)
    before = sample(*drawn(random, 500, 32, 0.0, FIVE), 5)
    assert correlations((now, before))[1] == pytest.approx(0.0, abs=0.005)


def test_sample_with_more_similar_rows_counts_by_its_own_correlation():
    random = np.random.default_rng(5)
    now = sample(*drawn(random, 100, 32, 1.0, FIVE), 5)
    before = sample(*drawn(random, 10_000, 32, 0.0, FIVE), 5)
    correlation, overall = correlations((now, before))
    assert overall < 0.05
    own = own_designs(correlation, now, before)
    np.testing.assert_allclose(own[0], 32, rtol=0.01)
    np.testing.assert_allclose(own[1], 1 + overall * 31, rtol=0.5)


def test_sample_with_unknown_requests_uses_correlation_of_other_sample():
    random = np.random.default_rng(4)
    now = sample(*drawn(random, 300, 32, 1.0, FIVE), 5)
    before = Clustered(
        counts=now.counts,
        squares=np.zeros(5),
        products=np.zeros(5),
        rows=now.rows,
        sizes=0,
        requests=0,
    )
    correlation, _ = correlations((now, before))
    np.testing.assert_allclose(comparison_design(correlation, now, before), 32)


def test_single_rows_have_no_design_effect_and_unknown_cell_has_overall_one():
    values = np.array([0, 0, 1, 1, 2, 2] * 50)
    single = sample(values, np.arange(300), 3)
    np.testing.assert_allclose(
        comparison_design(correlations((single, single))[0], single, single), 1
    )
    paired = sample(values, np.arange(300) // 2, 3)
    hidden = Clustered(**{**vars(paired), "squares": np.array([np.nan, *paired.squares[1:]])})
    assert correlations((hidden,))[0][0] == correlations((hidden,))[1] == pytest.approx(1.0)


def test_cells_of_different_similarity_are_corrected_together():
    """Half of the cells contain whole requests, and half contain single rows.

    The second-order correction keeps the rate of false alarms at 5 %.
    """
    random = np.random.default_rng(6)
    runs, alarms = 300, 0
    for _ in range(runs):
        found = []
        for requests in (200, 200):
            whole = random.random(requests) < 0.5
            common = np.repeat(np.where(whole, random.integers(0, 6, requests), 0), 16)
            single = 6 + random.integers(0, 6, requests * 16)
            values = np.where(np.repeat(whole, 16), common, single)
            found.append(sample(values, np.repeat(np.arange(requests), 16), 12))
        design = comparison_design(correlations(tuple(found))[0], *found)
        alarms += homogeneity(found[0].counts, found[1].counts, design) <= 0.05
    assert alarms <= stats.binom.isf(1e-4, runs, 0.05)


def test_variance_from_few_requests_gives_student_s_p_values():
    for freedom in (5, 30, 200):
        for t in (0.5, 2.0, 3.5, 5.0):
            known = 2 * stats.norm.sf(t)
            assert with_few(known, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=0.06)
            assert with_few(known, freedom) >= known
    assert with_few(1e-40, 1e9) == pytest.approx(1e-40, rel=1e-4)
    assert (with_few(None, 3), with_few(1.0, 3)) == (None, 1.0)
