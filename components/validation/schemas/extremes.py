"""How many times the largest value of a few rows the next ones' may be, where nothing changed.

Of counts with a heavy tail a window's largest value says little: it is one request's. Bounds that are the same multiple
for every column and window alarm on them by chance (measured with 10: on 86 of 400 pairs of windows of 31 requests).
"""

from __future__ import annotations

import math
from statistics import NormalDist

from components.validation.schemas.presence import ALIKE_ROWS

CHANCE = 0.001
"""Probability with which the next window of as many rows, of the same kind, exceeds the bound of a column."""
LARGEST_FACTOR = 1000.0
"""Beyond it a value is named whatever the tail; a unit is usually wrong by as much."""


def extreme_factor(least: float, median: float, ninth_decile: float, rows: int) -> float:
    """The factor that the ratio of two windows' largest values exceeds with probability `CHANCE`; from 1 on.

    In a tail that falls as a power of the value, with index g, the ratio of the maxima of two samples exceeds c with
    probability 1 / (1 + c^(1/g)): one over the other is as one exponential variable over another, to the power g. The
    index is the one that a lognormal distribution has at the largest of n values, its logarithm's standard deviation
    over the normal deviate of 1/n; the logarithm is of one more than the distance from the least value. `rows` are
    taken for `rows / ALIKE_ROWS` independent ones, as for missing values.

    Args:
        least: Least value.
        median: Half of the values are at most it.
        ninth_decile: Nine tenths are.
        rows: Rows with a value, at least 1.

    >>> round(extreme_factor(0.0, 8.0, 22.0, 64_000), 1)
    8.5
    """
    normal = NormalDist()
    deviation = math.log((1 + ninth_decile - least) / (1 + median - least)) / normal.inv_cdf(0.9)
    independent = max(rows / ALIKE_ROWS, 4.0)
    exponent = math.log(1 / CHANCE - 1) * deviation / normal.inv_cdf(1 - 1 / independent)
    return math.exp(min(exponent, math.log(LARGEST_FACTOR)))
