import numpy as np
import pytest
from scipy import stats

from evergreen.statistics.two_sample import MIN_EXPECTED, adjusted, homogeneity, proportion


def scipys(now, before):
    """Return the smallest p-value of SciPy's tests, with Bonferroni's correction.

    The tests are Pearson's test of all cells, and the corrected likelihood ratio test of each cell.
    """
    pearson = stats.chi2_contingency([now, before], correction=False).pvalue
    tables = [[[a, sum(now) - a], [b, sum(before) - b]] for a, b in zip(now, before)]
    ratio = {"correction": True, "lambda_": "log-likelihood"}
    one = min(
        stats.chi2_contingency(table, **ratio).pvalue
        for table in tables
        if np.sum(table, axis=0).all()
    )
    return min(1.0, 2 * min(pearson, one * len(now)))


def test_homogeneity_test_equals_scipys_where_no_cell_is_rare():
    random = np.random.default_rng(0)
    for _ in range(20):
        now, before = random.integers(20, 200, 12), random.integers(20, 900, 12)
        assert homogeneity(now, before, 1.0) == pytest.approx(scipys(now, before), rel=1e-9)


def test_change_of_one_cell_is_found_where_chi_square_alone_fails():
    before = np.full(400, 2000)
    noise = np.random.default_rng(3).poisson(20, 400)
    now = noise.copy()
    now[7] = 60
    assert stats.chi2_contingency([now, before], correction=False).pvalue > 1e-3
    assert homogeneity(now, before, 1.0) < 1e-8
    assert homogeneity(noise, before, 1.0) > 0.05


def test_proportion_test_equals_scipy_and_accepts_empty_shares():
    for a, n, b, m in ((3, 100, 20, 900), (50, 60, 10, 400), (0, 100, 5, 300)):
        table = [[a, n - a], [b, m - b]]
        expected = stats.chi2_contingency(table, correction=True, lambda_="log-likelihood").pvalue
        assert proportion(a, n, b=b, m=m, design=1.0) == pytest.approx(expected, rel=1e-9)
    assert proportion(0, 10, b=0, m=20, design=1.0) == 1.0
    assert proportion(10, 10, b=20, m=20, design=1.0) == 1.0
    assert proportion(0, 0, b=1, m=20, design=1.0) is None


@pytest.mark.parametrize("ratio", [1, 4])
def test_p_value_of_few_rows_is_not_smaller_than_exact_one(ratio):
    """The p-value may be a third smaller than the p-value of Fisher's exact test.

    `rare` is the number of rows with the rare value in the new sample.
    """
    rows = 10_000
    for rare, before in ((10, 0), (16, 2), (25, 5), (40, 12)):
        sides = [[rare, rows - rare], [before * ratio, ratio * rows - before * ratio]]
        exact = stats.fisher_exact(sides).pvalue
        assert exact < 0.01
        found = proportion(rare, rows, b=before * ratio, m=ratio * rows, design=1.0)
        assert 0.65 * exact <= found <= 4 * exact
        # Rows of the same request count as one row, because they are equal.
        assert proportion(
            8 * rare, 8 * rows, b=8 * before * ratio, m=8 * ratio * rows, design=8.0
        ) == pytest.approx(found)


def test_rare_cells_are_taken_together_until_each_expects_enough():
    now = np.array([1, 22, 0, 100, 3, 40, 0, 1])
    before = np.array([2, 31, 1, 300, 4, 60, 1, 0])
    n, m = now.sum(), before.sum()
    groups, held, start = [], 0.0, 0
    for cell in range(8):
        if held >= MIN_EXPECTED:
            groups.append(slice(start, cell))
            start, held = cell, 0.0
        held += (now[cell] + before[cell]) * min(n, m) / (n + m)
    groups.append(slice(start, 8))
    if held < MIN_EXPECTED:
        groups[-2:] = [slice(groups[-2].start, 8)]
    table = [[side[group].sum() for group in groups] for side in (now, before)]
    assert homogeneity(now, before, 1.0) == pytest.approx(scipys(*table))


def test_sample_that_is_empty_or_has_one_value_is_not_tested():
    assert homogeneity(np.array([0, 0]), np.array([5, 5]), 1.0) is None
    assert homogeneity(np.array([50, 0]), np.array([70, 0]), 1.0) == 1.0


def test_adjusted_p_values_equal_scipy():
    random = np.random.default_rng(1)
    for size in (1, 2, 39, 92):
        for power in (1, 4):
            p_values = random.random(size) ** power
            expected = stats.false_discovery_control(p_values, method="bh")
            assert adjusted(p_values.tolist()) == pytest.approx(expected, rel=1e-12)
    assert adjusted([]) == []
