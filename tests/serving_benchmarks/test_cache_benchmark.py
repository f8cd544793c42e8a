"""The cache benchmark's arithmetic: what it concludes from latencies that were made to mean something."""

import pytest

from benchmarks.cache import Pair, break_even, medians_of


def planted(*, plain=1.0e-3, miss_cost=0.1e-3, hit=0.3e-3, count=100):
    """One round in which every hit and every miss takes exactly as long as said."""
    return [Pair(True, plain, hit)] * count + [Pair(False, plain, plain + miss_cost)] * count


def test_planted_costs_are_found_and_meet_at_the_break_even():
    found = medians_of(planted())
    assert found == pytest.approx((1.0, 0.1, 0.7))
    rate = break_even(found.miss_cost, found.hit_saving)
    assert rate == pytest.approx(0.125)
    assert found.saved(rate) == pytest.approx(0.0, abs=1e-12)
    assert found.saved(0.0) == pytest.approx(-0.1)
    assert found.saved(1.0) == pytest.approx(0.7)


def test_a_slow_moment_of_the_machine_does_not_decide():
    disturbed = medians_of([*planted(), Pair(False, 0.5, 1.1e-3), Pair(True, 1e-3, 0.7)])
    assert disturbed == pytest.approx((1.0, 0.1, 0.7))
