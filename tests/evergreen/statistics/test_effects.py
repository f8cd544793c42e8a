"""Tests of effects and their intervals, compared with SciPy's definitions and with simulations."""

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.distance import jensenshannon

from evergreen.statistics import two_sample
from evergreen.statistics.column_profile import RowTotal, TableProfile
from evergreen.statistics.comparison import compare_totals
from evergreen.statistics.two_sample import proportion


def test_divergence_equals_scipy_if_sampling_error_is_negligible():
    random = np.random.default_rng(0)
    for _ in range(10):
        a, b = random.integers(1, 50, (2, 12)) * 1_000_000
        found = two_sample.divergence(a, b, 1.0)
        assert found.value == pytest.approx(jensenshannon(a, b, base=2) ** 2, abs=1e-6)
        assert found.low <= found.value <= found.high


def test_chance_is_subtracted_and_interval_contains_true_value():
    random = np.random.default_rng(1)
    p = stats.norm.pdf(np.arange(-2, 2, 0.25))
    q = stats.norm.pdf(np.arange(-2, 2, 0.25) - 0.3)
    p, q = p / p.sum(), q / q.sum()
    for first, second in ((p, p), (p, q)):
        true_value = jensenshannon(first, second, base=2) ** 2
        found = [
            two_sample.divergence(
                random.multinomial(3000, first), random.multinomial(5000, second), 1.0
            )
            for _ in range(400)
        ]
        held = np.mean([each.low <= true_value <= each.high for each in found])
        assert held >= 0.92
        assert np.mean([each.value for each in found]) == pytest.approx(true_value, abs=0.0005)


def test_interval_of_change_of_share_contains_true_change():
    random = np.random.default_rng(2)
    for p, q in ((0.3, 0.3), (0.02, 0.05), (0.0, 0.004)):
        found = [
            two_sample.share_change(
                random.binomial(800, p), 800, b=random.binomial(1500, q), m=1500, design=1.0
            )
            for _ in range(1000)
        ]
        assert np.mean([each.low <= p - q <= each.high for each in found]) >= 0.93
        assert all(each.low <= each.value <= each.high for each in found)


def test_change_of_share_is_undefined_without_rows():
    assert two_sample.share_change(0, 0, b=3, m=5, design=1.0) is None
    assert two_sample.divergence(np.zeros(3, np.int64), np.ones(3, np.int64), 1.0) is None


@pytest.mark.parametrize("size", [1, 8])
def test_totals_are_compared_as_scipy_compares_independent_requests(size):
    """Each request consists of `size` identical rows."""

    def table(requests, clicked):
        squares = clicked * size**2
        clicks = RowTotal(rows=clicked * size, squares=squares, products=squares)
        sizes = requests * size**2
        return TableProfile(
            rows=requests * size, requests=requests, sizes=sizes, clicks=clicks, columns={}
        )

    tables = table(1000, 100), table(2000, 260)
    found = compare_totals(tables[0].clicks, tables[1].clicks, tables)
    counts = [[100, 900], [260, 1740]]
    expected = stats.chi2_contingency(counts, correction=True, lambda_="log-likelihood").pvalue
    assert found.design == pytest.approx(size, rel=1e-3)
    assert found.p_value == pytest.approx(expected, rel=0.01)
    assert found.effect.value == pytest.approx(0.1 - 0.13)
    assert found.effect.low < found.effect.value < found.effect.high
    empty = table(0, 0)
    assert compare_totals(empty.clicks, tables[1].clicks, (empty, tables[1]))[:2] == (None, None)


@pytest.mark.parametrize("design", [1.0, 8.0])
def test_detectable_change_is_found_as_often_as_promised(design):
    """Each request consists of `design` identical rows.

    At a level of 1 %, the test finds the change in 80 % of the windows.
    """
    random = np.random.default_rng(3)
    n, m, share, level = 4000, 8000, 0.2, 0.01
    change = two_sample.detectable_share(share, n=n, m=m, design=design, level=level)
    found = 0
    for _ in range(1000):
        a = int(random.binomial(int(n / design), share + change / 2) * design)
        b = int(random.binomial(int(m / design), share - change / 2) * design)
        found += proportion(a, n, b=b, m=m, design=design) <= level
    assert found / 1000 == pytest.approx(two_sample.POWER, abs=0.05)


def test_detectable_shift_of_mean_is_found_as_often_as_promised():
    random = np.random.default_rng(4)
    n, m, level = 500, 900, 0.02
    shift = two_sample.detectable_mean(n, m, design=1.0, level=level)
    found = sum(
        stats.ttest_ind(random.normal(shift, 1, n), random.normal(0, 1, m)).pvalue <= level
        for _ in range(1000)
    )
    assert found / 1000 == pytest.approx(two_sample.POWER, abs=0.05)
