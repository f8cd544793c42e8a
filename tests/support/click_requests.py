"""Held-out rows that come in requests, and their true AUC: half of the logit's variance belongs to the request.

A row's logit is a sum of two normal parts, one of its request and one of its own; two models score it with normal
errors, of which half is the request's too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

VARIANCE = 2.0
"""Of the logit over rows."""
ERROR = 1.0
"""Variance of a model's error over rows."""


class Requests(NamedTuple):
    """Rows of requests, each [n]."""

    labels: NDArray[np.int8]
    candidate: NDArray[np.float64]
    champion: NDArray[np.float64]
    groups: NDArray[np.int64]


def draw_requests(random: np.random.Generator, *, rows: int, size: int, rate: float) -> Requests:
    """`rows` rows in requests of `size`, a share `rate` of them clicked; both models are equally good."""
    groups = np.arange(rows) // size

    def normal(variance: float) -> NDArray[np.float64]:
        shared, own = random.standard_normal(int(groups[-1]) + 1), random.standard_normal(rows)
        return np.sqrt(variance / 2.0) * (shared[groups] + own)

    logits = normal(VARIANCE)
    clicked = random.random(rows) < 1.0 / (1.0 + np.exp(-(logits + bias_of(rate))))
    return Requests(clicked.astype(np.int8), logits + normal(ERROR), logits + normal(ERROR), groups)


_LOGITS = np.linspace(-12.0, 12.0, 2401)
_DENSITY = np.exp(-(_LOGITS**2) / (2.0 * VARIANCE))
_DENSITY /= _DENSITY.sum()


def bias_of(rate: float) -> float:
    """What is added to the logits so that a share `rate` of rows is clicked."""
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2.0
        share = float((_DENSITY / (1.0 + np.exp(-(_LOGITS + middle)))).sum())
        low, high = (middle, high) if share < rate else (low, middle)
    return low


def true_auc(rate: float) -> float:
    """The AUC of either model over infinitely many requests, by integration over logits and errors."""
    clicks = _DENSITY / (1.0 + np.exp(-(_LOGITS + bias_of(rate))))
    error = np.exp(-(_LOGITS**2) / (2.0 * ERROR))
    of_clicks, of_others = (
        np.convolve(part, error) / (part.sum() * error.sum()) for part in (clicks, _DENSITY - clicks)
    )
    return float((of_clicks * (np.cumsum(of_others) - of_others / 2.0)).sum())
