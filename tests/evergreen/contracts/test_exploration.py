"""Tests that propensities are the probabilities of a row's positions."""

from collections import Counter

import numpy as np
import pytest

from evergreen.contracts.exploration import explored
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises

DRAWS = 12_000
CHANCES = (np.arange(DRAWS) + 0.5) / DRAWS
"""Evenly spaced numbers in place of random numbers. A frequency over these numbers is a
probability."""


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.49])
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_frequency_of_each_row_at_each_position_equals_its_propensity(k, share):
    order = 10 + np.arange(k)
    seen, expected = Counter(), {}
    for chance in CHANCES:
        shown, propensities = explored(order, share, chance)
        for position, (row, propensity) in enumerate(zip(shown.tolist(), propensities.tolist())):
            seen[row, position] += 1
            assert expected.setdefault((row, position), propensity) == propensity
    for at, count in seen.items():
        assert count / DRAWS == pytest.approx(expected[at], abs=2 / DRAWS), at


def test_one_pair_of_neighbours_is_swapped_and_each_equally_often():
    order = np.arange(5)
    shown = Counter(tuple(explored(order, 0.25, chance)[0].tolist()) for chance in CHANCES)
    assert shown.pop((0, 1, 2, 3, 4)) == 0.75 * DRAWS
    swapped = [(1, 0, 2, 3, 4), (0, 2, 1, 3, 4), (0, 1, 3, 2, 4), (0, 1, 2, 4, 3)]
    assert shown == {order: DRAWS / 16 for order in swapped}
    assert order.tolist() == [0, 1, 2, 3, 4], "the input array must not change"


@pytest.mark.parametrize("share", [-0.1, 0.5, 1.0, float("nan")])
def test_share_that_would_hide_swapped_pair_is_refused(share):
    with raises(ContractError, "[0, 0.5)"):
        explored(np.arange(3), share, 0.1)
