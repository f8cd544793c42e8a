"""How large a difference of two samples is: distances, and estimates with a 95 % interval.

Whether it is there at all is `chance`'s question; how large it must be to matter, the caller's. The distances are those
of TFDV's comparators (`tensorflow_data_validation/anomalies/metrics.cc`): both take the counts that are listed as the
whole, missing values are in neither, and the divergence's logarithm has base 2.
"""

import math
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.drift_statistics.chance import Counts, mean_design, taken_together

POWER = 0.8
"""Probability with which a detectable effect is found."""
_BITS = 8 * math.log(2)
"""Jensen-Shannon divergence in bits of a small difference: chi-square x (1/n + 1/m) / this."""
_Z = NormalDist().inv_cdf(0.975)


class Effect(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


def jensen_shannon(a: NDArray[Any], b: NDArray[Any]) -> float | None:
    """Jensen-Shannon divergence in bits (0 to 1) of counts [k] over the same buckets; None where a side is empty.

    >>> jensen_shannon(np.array([1, 0]), np.array([0, 3]))
    1.0
    """
    if not a.sum() or not b.sum():
        return None
    p, q = a / a.sum(), b / b.sum()
    middle = (p + q) / 2
    return float((_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2)


def l_infinity(a: NDArray[Any], b: NDArray[Any]) -> float | None:
    """Largest change of a value's share (0 to 1), of counts [k] of the same values; None where a side is empty.

    >>> l_infinity(np.array([1, 1]), np.array([3, 1]))
    0.25
    """
    if not a.sum() or not b.sum():
        return None
    return float(np.abs(a / a.sum() - b / b.sum()).max())


def _relative_entropy(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    held = p > 0
    return float((p[held] * np.log2(p[held] / q[held])).sum())


def divergence(now: Counts, before: Counts, design: float | NDArray[np.float64]) -> Effect | None:
    """Jensen-Shannon divergence in bits of two samples [k], less what chance alone adds; None where a side is empty.

    Two samples of one distribution have a divergence too: by its chi-square asymptotics (K - 1) s with
    s = design (1/n + 1/m) / (8 ln 2), K the cells taken together as the test takes them. Beyond it, the divergence over
    s is a noncentral chi-square, whose variance gives the interval.
    """
    n, m = int(now.sum()), int(before.sum())
    if not n or not m:
        return None
    a, b, designs = taken_together(now, before, design)
    if len(a) < 2:
        return Effect(0.0, 0.0, 0.0)
    one = mean_design(a + b, designs)[0] * (1 / n + 1 / m) / _BITS
    measured = jensen_shannon(a, b) or 0.0
    value = max(0.0, measured - (len(a) - 1) * one)
    error = one * math.sqrt(2 * (len(a) - 1) + 4 * value / one)
    return Effect(min(value, 1.0), max(0.0, value - _Z * error), min(1.0, value + _Z * error))


def share_change(a: int, n: int, *, b: int, m: int, design: float) -> Effect | None:
    """Change of a share from `b` of `m` rows to `a` of `n`; None where a sample is empty.

    The interval is Agresti and Caffo's (2000): of one more row of either kind to each sample, in independent rows.
    """
    if not n or not m:
        return None
    size_now, size_before = max(n / design, 1.0), max(m / design, 1.0)
    now = (a / n * size_now + 1) / (size_now + 2)
    before = (b / m * size_before + 1) / (size_before + 2)
    error = math.sqrt(now * (1 - now) / (size_now + 2) + before * (1 - before) / (size_before + 2))
    value, middle = a / n - b / m, now - before
    return Effect(value, max(-1.0, min(value, middle - _Z * error)), min(1.0, max(value, middle + _Z * error)))


def wilson_interval(share: float, rows: float, *, z: float = _Z) -> tuple[float, float]:
    """The lowest and the highest true share that `share` of `rows` independent rows agrees with (Wilson, 1927).

    >>> low, high = wilson_interval(0.5, 1000)
    >>> round(low, 3), round(high, 3)
    (0.469, 0.531)
    """
    scale = 1 + z**2 / rows
    middle = (share + z**2 / (2 * rows)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / rows + z**2 / (4 * rows**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def detectable_share(share: float, *, n: int, m: int, design: float, level: float) -> float:
    """Smallest change of a share of about `share` that a test at `level` finds with probability `POWER`; at most 1."""
    error = math.sqrt(max(share * (1 - share), 1 / (n + m)) * design * (1 / n + 1 / m))
    return min(1.0, _reach(level) * error)


def detectable_mean(n: int, m: int, *, design: float, level: float) -> float:
    """The same for the shift of a mean, in standard deviations."""
    return _reach(level) * math.sqrt(design * (1 / n + 1 / m))


def divergence_of_shift(shift: float) -> float:
    """Jensen-Shannon divergence in bits of two normal distributions `shift` (small) standard deviations apart.

    >>> round(divergence_of_shift(0.2), 4)
    0.0072
    """
    return min(1.0, shift**2 / _BITS)


def _reach(level: float) -> float:
    return NormalDist().inv_cdf(1 - level / 2) + NormalDist().inv_cdf(POWER)
