"""Tests of the coverage of 95 % intervals. Rows are in requests, and the true AUC is known.

An interval that treats every row as independent covers the true AUC too rarely.
"""

import numpy as np
import pytest

from evergreen.statistics.metrics import auc_difference, auc_estimate
from testing.planted_models import NOISE, draw, population_auc


def coverage(
    *, windows: int, rows: int, size: int, rate: float, by_row: bool = False
) -> dict[str, float]:
    """Return the shares of intervals that contain the true value.

    `exists` is the share of windows that have an interval.
    """
    random, true_auc = np.random.default_rng(size), population_auc(rate, NOISE)
    found: dict[str, list[bool]] = {"auc": [], "difference": []}
    for _ in range(windows):
        drawn = draw(random, rows=rows, rate=rate, rows_per_request=size)
        groups = np.arange(len(drawn.labels)) if by_row else drawn.requests
        estimate = auc_estimate(drawn.labels, drawn.candidate, groups=groups)
        difference = auc_difference(drawn.labels, drawn.candidate, drawn.champion, groups=groups)
        for name, interval, true in (("auc", estimate, true_auc), ("difference", difference, 0.0)):
            if interval is not None:
                found[name].append(interval.low <= true <= interval.high)
    return {name: float(np.mean(held)) for name, held in found.items()} | {
        "exists": min(map(len, found.values())) / windows
    }


# In 99.8 % of all cases, Binomial(500, 0.95) is between 92 and 98 % of 500. The slow tests draw
# more windows, so their bounds are 93 and 97 %.
@pytest.mark.parametrize(
    ("windows", "rows", "size", "rate", "off", "exist"),
    [
        (500, 4000, 64, 0.25, 0.03, 1.0),
        *(
            pytest.param(2000, 20_000, size, rate, 0.02, 0.9805, marks=pytest.mark.slow)
            for size in (1, 10, 64)
            for rate in (0.001, 0.03, 0.25)
        ),
    ],
)
def test_95_of_100_intervals_contain_true_value(windows, rows, size, rate, off, exist):
    found = coverage(windows=windows, rows=rows, size=size, rate=rate)
    assert found["exists"] >= exist
    assert found["auc"] == pytest.approx(0.95, abs=off)
    assert found["difference"] == pytest.approx(0.95, abs=off)


def test_intervals_of_rows_counted_one_by_one_are_too_narrow():
    assert coverage(windows=200, rows=4000, size=64, rate=0.25, by_row=True)["auc"] < 0.88


def test_returning_users_must_count_as_clusters():
    """Each user has 16 requests of 4 rows.

    Intervals by request are too narrow, but intervals by user have the right coverage.
    """
    random, true_auc = np.random.default_rng(7), population_auc(0.25, NOISE)
    held: dict[int, list[bool]] = {1: [], 16: []}
    for _ in range(400):
        drawn = draw(random, rows=4000, rate=0.25, rows_per_request=64)
        for requests in held:
            groups = np.arange(len(drawn.labels)) // (64 // 16 * requests)
            estimate = auc_estimate(drawn.labels, drawn.candidate, groups=groups)
            assert estimate
            held[requests].append(estimate.low <= true_auc <= estimate.high)
    assert 0.92 <= np.mean(held[16]) <= 0.98
    assert np.mean(held[1]) < 0.88


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 64], ids="{} rows a request".format)
def test_windows_of_few_clicks_have_no_interval_or_one_of_ninety_percent(size):
    found = coverage(windows=2000, rows=2000, size=size, rate=0.001)
    assert found["exists"] < 0.2
    assert found["auc"] >= 0.9
    assert found["difference"] >= 0.9
