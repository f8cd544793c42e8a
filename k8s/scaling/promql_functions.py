"""Prometheus' functions of one series' samples in a range, and of single values; which of them exist is `promql`'s.

Semantics are those of Prometheus 2.42, against which the exam runs: ranges are closed at both ends. Prometheus 3 leaves
the left end open, which matters only where a sample falls on it to the millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Samples = Sequence[tuple[int, float]]
"""Milliseconds and values, ascending."""
OverRange = Callable[[Samples, int, int], "float | None"]
"""(samples, first and last millisecond of the range) -> value; None: the series has no result."""


def _extrapolated(samples: Samples, first: int, last: int, *, is_counter: bool, per_second: bool) -> float | None:
    """The change over the range, extrapolated to its ends as far as the samples' spacing allows."""
    if len(samples) < 2:
        return None
    values = [value for _, value in samples]
    change = values[-1] - values[0]
    if is_counter:
        # A counter that fell was reset: it counted up to its last value, then again from 0.
        change += sum(before for before, after in zip(values, values[1:]) if after < before)
    to_start, to_end = (samples[0][0] - first) / 1000, (last - samples[-1][0]) / 1000
    sampled = (samples[-1][0] - samples[0][0]) / 1000
    spacing = sampled / (len(samples) - 1)
    if is_counter and change > 0 and values[0] >= 0:
        # A counter is never below 0, so it cannot be extrapolated to before it was 0.
        to_start = min(to_start, sampled * values[0] / change)
    covered = sampled
    for gap in (to_start, to_end):
        covered += gap if gap < spacing * 1.1 else spacing / 2
    factor = covered / sampled
    if per_second:
        factor /= (last - first) / 1000
    return change * factor


def rate(samples: Samples, first: int, last: int) -> float | None:
    """A counter's growth per second."""
    return _extrapolated(samples, first, last, is_counter=True, per_second=True)


def increase(samples: Samples, first: int, last: int) -> float | None:
    """A counter's growth."""
    return _extrapolated(samples, first, last, is_counter=True, per_second=False)


def delta(samples: Samples, first: int, last: int) -> float | None:
    """A gauge's change."""
    return _extrapolated(samples, first, last, is_counter=False, per_second=False)


def irate(samples: Samples, first: int, last: int) -> float | None:
    """A counter's growth per second between the last two samples."""
    if len(samples) < 2:
        return None
    (time_a, a), (time_b, b) = samples[-2:]
    return (b if b < a else b - a) / ((time_b - time_a) / 1000)


def _over_time(function: Callable[[list[float]], float]) -> OverRange:
    def over(samples: Samples, first: int, last: int) -> float | None:
        return function([value for _, value in samples]) if samples else None

    return over


def mean(values: Sequence[float]) -> float:
    """Their mean; infinities and NaN as in floating point."""
    return sum(values) / len(values)


def largest(values: Sequence[float]) -> float:
    """The largest number; NaN only where all are NaN."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def smallest(values: Sequence[float]) -> float:
    """The smallest number; NaN only where all are NaN."""
    return min((value for value in values if not math.isnan(value)), default=math.nan)


OVER_RANGE: dict[str, OverRange] = {
    "rate": rate,
    "increase": increase,
    "delta": delta,
    "irate": irate,
    "avg_over_time": _over_time(mean),
    "sum_over_time": _over_time(sum),
    "min_over_time": _over_time(smallest),
    "max_over_time": _over_time(largest),
    "count_over_time": _over_time(lambda values: float(len(values))),
    "last_over_time": _over_time(lambda values: values[-1]),
}
AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "avg": mean,
    "min": smallest,
    "max": largest,
    "count": lambda values: float(len(values)),
}


def _at_least(value: float, low: float) -> float:
    return math.nan if math.isnan(value) or math.isnan(low) else max(value, low)


def _at_most(value: float, high: float) -> float:
    return math.nan if math.isnan(value) or math.isnan(high) else min(value, high)


def _rounded(function: Callable[[float], int]) -> Callable[[float], float]:
    return lambda value: float(function(value)) if math.isfinite(value) else value


OF_VALUES: dict[str, Callable[..., float]] = {
    "clamp_min": _at_least,
    "clamp_max": _at_most,
    "abs": abs,
    "ceil": _rounded(math.ceil),
    "floor": _rounded(math.floor),
}
"""Functions of each value of a vector, and of scalars after it."""
