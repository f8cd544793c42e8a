"""The cache benchmark's arithmetic: what it concludes from latencies that were made to mean something."""

import pytest

from benchmarks.cache import Pair, break_even, difference, of_rate


def planted(rate, *, plain=1.0e-3, miss_cost=0.1e-3, hit=0.3e-3, count=100):
    """One round in which every hit and every miss takes exactly as long as said."""
    hits = round(count * rate)
    return [Pair(True, plain, hit)] * hits + [Pair(False, plain, plain + miss_cost)] * (count - hits)


def test_planted_costs_are_found_and_meet_at_the_break_even():
    rounds = [planted(rate) for rate in (0.0, 0.25, 1.0)]
    assert difference(rounds, of_hits=False).median == pytest.approx(0.1)
    assert difference(rounds, of_hits=True).median == pytest.approx(-0.7)
    rate = break_even(0.1, 0.7)
    assert rate == pytest.approx(0.125)
    assert of_rate([planted(rate, count=800)])["saved"].median == pytest.approx(0.0, abs=1e-12)
    assert of_rate([planted(0.0)])["saved"].median == pytest.approx(-0.1)
    assert of_rate([planted(1.0)])["saved"].median == pytest.approx(0.7)


def test_a_slow_moment_of_the_machine_does_not_decide():
    disturbed = [*planted(0.5), Pair(False, 0.5, 1.1e-3), Pair(True, 1e-3, 0.7)]
    figures = of_rate([disturbed])
    assert figures["plain_ms"].median == pytest.approx(1.0)
    assert figures["cached_ms"].median == pytest.approx(0.7)
    assert difference([disturbed], of_hits=True).median == pytest.approx(-0.7)
