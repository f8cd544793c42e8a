"""Bounds of a schema that few requests with a heavy tail keep by chance, and that a large window makes tight."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from components.validation.schema import infer_schema
from components.validation.schemas.extremes import CHANCE, LARGEST_FACTOR, extreme_factor
from tests.components.validation.counting import statistics_of


def drawn(random, rows, size, deviation):
    """Log-normal whole numbers that `size` rows in a row share."""
    values = np.floor(np.exp(3 + deviation * random.standard_normal(-(-rows // size))))
    return np.repeat(values, size)[:rows]


def factor_of(values):
    median, ninth = np.quantile(values, [0.5, 0.9], method="inverted_cdf")
    return extreme_factor(values.min(), median, ninth, len(values))


@pytest.mark.parametrize("deviation", [0.8, 1.6, 2.6])
def test_the_next_window_of_few_requests_keeps_the_bound(deviation):
    random = np.random.default_rng(0)
    runs, beyond, beyond_ten = 2000, 0, 0
    for _ in range(runs):
        first, following = drawn(random, 2000, 64, deviation), drawn(random, 2000, 64, deviation)
        beyond += following.max() > first.max() * max(10.0, factor_of(first))
        beyond_ten += following.max() > first.max() * 10
    # A spread estimated from 31 requests and the cap cost a part of the promised rate.
    assert beyond / runs <= 0.005
    if deviation == 2.6:
        assert beyond_ten / runs > 0.05


def test_the_chance_of_the_ratio_is_that_of_a_tail_that_falls_as_a_power():
    """Maxima of Pareto samples whose index is the one taken: exceeded with `CHANCE`, by simulation."""
    rows, median, ninth = 64 * 1000, 8.0, 22.0
    factor = extreme_factor(0.0, median, ninth, rows)
    index = np.log(factor) / np.log(1 / CHANCE - 1)
    random = np.random.default_rng(1)
    # The largest of n: tail probability 1 - U^(1/n).
    tails = -np.expm1(np.log(random.random((2, 400_000))) / 1000)
    first, following = tails**-index
    assert (following > factor * first).mean() == pytest.approx(CHANCE, rel=0.15)


def test_the_factor_grows_with_the_tail_and_falls_with_the_rows_up_to_its_cap():
    factors = [extreme_factor(0.0, 8.0, ninth, 64_000) for ninth in (9.0, 22.0, 90.0, 1e9)]
    assert factors == sorted(factors)
    assert factors[-1] == pytest.approx(LARGEST_FACTOR)
    sizes = [extreme_factor(0.0, 8.0, 40.0, rows) for rows in (1, 2000, 64_000, 10_000_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert extreme_factor(5.0, 5.0, 5.0, 100) == 1


def test_a_schema_bounds_a_light_tail_by_the_setting_and_a_heavy_one_of_few_rows_by_chance(judged):
    random = np.random.default_rng(2)
    light, heavy = np.floor(random.uniform(0, 100, 2000)), drawn(random, 2000, 64, 2.6)
    rows = judged(2000, I2=pa.array(light, pa.float32()), I5=pa.array(heavy, pa.float32()))
    schema = infer_schema(statistics_of(rows), range_factor=10.0)
    bounds = {feature.name: feature.float_domain.max for feature in schema.feature}
    assert bounds["I2"] == 10 * light.max()
    # TFDV's deciles come from a sketch.
    assert bounds["I5"] / np.float32(heavy.max()) == pytest.approx(factor_of(heavy), rel=0.05)
    assert bounds["I5"] > 50 * heavy.max()
