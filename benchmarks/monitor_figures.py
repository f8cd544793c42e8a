"""From what contestants answered, and how fast, to the monitor benchmark's figures; arithmetic and print only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.spread import Spread, spread

OURS, RIVER, SCIKIT_LEARN = "ours", "river RollingROCAUC", "scikit-learn"
TARGETS = {SCIKIT_LEARN: 1000.0, RIVER: 1.0}
"""Times as fast that ours should be."""
TOLERANCE = 1e-12


class Unequal(Exception):
    """Two contestants answered the same question differently: their speed would be compared on different work."""


class Answers(NamedTuple):
    """One contestant's answers of one round."""

    aucs: NDArray[np.float64]
    """After each of its records, all from the stream's first on, shape [n]; NaN where undefined."""
    seconds: float
    window: int
    """Records that the AUC is over."""


def expect_equal(answers: Mapping[str, Answers]) -> None:
    """Compares every two contestants of one window on the records that both answered.

    Raises:
        Unequal: see there.
    """
    names = list(answers)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            a, b = answers[first], answers[second]
            both = min(len(a.aucs), len(b.aucs))
            one, other = a.aucs[:both], b.aucs[:both]
            if a.window == b.window and not np.allclose(one, other, rtol=0, atol=TOLERANCE, equal_nan=True):
                at = int(np.argmax(~np.isclose(one, other, rtol=0, atol=TOLERANCE, equal_nan=True)))
                raise Unequal(f"record {at}: {first} says {one[at]!r}, {second} {other[at]!r}")


def of_rate(rate: float, rounds: Sequence[Mapping[str, Answers]]) -> dict[str, Any]:
    """Records per second of each contestant, and how many times as fast ours is, of the same round's two rates.

    Args:
        rate: The stream's click rate.
        rounds: At least one; the same contestants in each, ours among them.
    """
    speeds = {name: [len(each[name].aucs) / each[name].seconds for each in rounds] for name in rounds[0]}
    return {
        "click_rate": rate,
        "records_per_second": {name: spread(of_name) for name, of_name in speeds.items()},
        "ours_over": {
            name: spread([mine / other for mine, other in zip(speeds[OURS], of_name)])
            for name, of_name in speeds.items()
            if name != OURS
        },
        "records_compared": {name: sum(len(each[name].aucs) for each in rounds) for name in speeds},
    }


def verdict(name: str, ratio: Spread) -> str:
    """Whether ours is as many times as fast as `name` as it should be; empty where that was no target."""
    if name not in TARGETS:
        return ""
    return f", target {TARGETS[name]:,.0f}x: {'met' if ratio.median >= TARGETS[name] else 'TARGET MISSED'}"


def print_rate(result: Mapping[str, Any]) -> None:
    """One click rate's table."""
    print(f"\nclick rate {result['click_rate']:.1%}")
    for name, speed in result["records_per_second"].items():
        line = f"  {name:<25} {speed.median:>11,.0f} records/s {f'({speed.least:,.0f} to {speed.most:,.0f})':>26}"
        if ratio := result["ours_over"].get(name):
            line += f"  ours {ratio.median:,.1f}x ({ratio.least:,.1f} to {ratio.most:,.1f}){verdict(name, ratio)}"
        print(line)
    compared = result["records_compared"][SCIKIT_LEARN], result["records_compared"][RIVER]
    print(f"  answers equal to {TOLERANCE:g}: {compared[0]:,} with scikit-learn, {compared[1]:,} with river")
    far = ", ".join(f"{name} {value:.1g}" for name, value in result["off_with_ties"].items())
    print(f"  where scores tie, furthest from scikit-learn: {far}", flush=True)
