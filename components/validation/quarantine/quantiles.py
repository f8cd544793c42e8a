"""Quantiles of the champion's integer features, from the histogram over fixed edges in its statistics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from components.contracts import criteo
from components.validation.summarize import by_feature, log_histogram


def dense_quantiles(statistics: Any, quantile: float) -> dict[str, tuple[float, float]]:
    """Per integer feature with values: a number at or below its (1 - q)-quantile, and one at or above its q-quantile.

    They are the outer edges of the histogram's buckets that hold the quantiles, or the extremes where those lie
    nearer; so at most a share `1 - quantile` of the champion's values lies beyond each.
    """
    ends = {}
    for name, feature in by_feature(statistics).items():
        histogram = log_histogram(feature)
        if name not in criteo.DENSE or histogram is None:
            continue
        counts = np.array([bucket.sample_count for bucket in histogram.buckets])
        if not counts.sum():
            continue
        shares = np.cumsum(counts) / counts.sum()
        # Sums of floats end a little off their value; a bucket too few would put a limit too low.
        low = int(np.searchsorted(shares, 1 - quantile - 1e-12, side="left"))
        high = min(int(np.searchsorted(shares, quantile - 1e-12, side="left")), len(counts) - 1)
        numbers = feature.num_stats
        ends[name] = (
            max(histogram.buckets[low].low_value, numbers.min),
            min(histogram.buckets[high].high_value, numbers.max),
        )
    return {name: pair for name, pair in ends.items() if all(map(math.isfinite, pair))}
