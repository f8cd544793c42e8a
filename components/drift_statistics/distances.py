"""Distances of two counted distributions, as TensorFlow Data Validation computes them.

TFDV's comparators (`tensorflow_data_validation/anomalies/metrics.cc`): both take the counts that are listed as the
whole, missing values are in neither, and the divergence's logarithm has base 2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64] | NDArray[np.float64]


def jensen_shannon(a: Counts, b: Counts) -> float | None:
    """Jensen-Shannon divergence in bits (0 to 1) of counts [k] over the same buckets; None where a side is empty.

    >>> jensen_shannon(np.array([1, 0]), np.array([0, 3]))
    1.0
    """
    if not a.sum() or not b.sum():
        return None
    p, q = a / a.sum(), b / b.sum()
    middle = (p + q) / 2
    return float((_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2)


def l_infinity(a: Counts, b: Counts) -> float | None:
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
