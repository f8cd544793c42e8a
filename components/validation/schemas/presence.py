"""How sure a share of rows is that was counted in few rows, many of which are alike."""

from __future__ import annotations

import math

ALIKE_ROWS = 64
"""Rows that count as one: those of one request have the same user and context (the simulated world's requests carry
64), so a column of the context is missing in all of them or in none."""
STANDARD_ERRORS = 4.0
SMALLEST_ROWS = 10_000
"""Rows of a small window, which a schema has to judge fairly too, however large the one was that it was inferred
from."""


def possible_shares(share: float, rows: int) -> tuple[float, float]:
    """The lowest and the highest true share that `share` of `rows` agrees with: Wilson's interval.

    (Wilson, Probable inference, 1927.) Of `rows / ALIKE_ROWS` independent rows, at 4 standard errors.

    Args:
        share: In [0, 1].
        rows: At least 1.

    >>> low, high = possible_shares(0.5, 64_000)
    >>> round(low, 3), round(high, 3)
    (0.437, 0.563)
    """
    independent = rows / ALIKE_ROWS
    squared = STANDARD_ERRORS**2
    middle = share + squared / (2 * independent)
    half = STANDARD_ERRORS * math.sqrt(share * (1 - share) / independent + squared / (4 * independent**2))
    scale = 1 + squared / independent
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def least_share(share: float, rows: int) -> float:
    """The `min_fraction` of a column that had a value in `share` of the first `rows`.

    As if they had been at most `SMALLEST_ROWS`: the windows that come are as small, and may fall as low by chance.
    """
    return possible_shares(share, min(rows, SMALLEST_ROWS))[0] if rows else 0.0
