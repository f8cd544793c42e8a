"""TFDV's own drift distances of the 39 features, for people who know them; nothing is decided by them.

Categories: L-infinity, the largest change of one value's share of the rows that have a value, over the 1000 most
frequent values of each side. Dense columns: Jensen-Shannon divergence in bits over `log_histogram.EDGES`. Missing
values are in neither. Both sides are whole TFDV statistics: these rows, and the champion's own window.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from components.contracts import criteo
from components.validation.summarize import by_feature, log_histogram, num_values
from components.validation.tfdv import schema_pb2, statistics_pb2, tfdv

_ANY = 1e-6
"""TFDV measures only where it has a threshold; what it says about it is not asked for."""


def tfdv_distances(now: Any, before: Any, excluded: Collection[str] = ()) -> dict[str, float]:
    """The distance of each feature; absent where TFDV has none, or a side has no values."""
    features_now, features_before = by_feature(now), by_feature(before)
    schema = schema_pb2.Schema()
    for name in criteo.FEATURES:
        sides = (features_now.get(name), features_before.get(name))
        if name in excluded or not all(num_values(side) for side in sides):
            continue
        if name in criteo.CATEGORICAL:
            feature = schema.feature.add(name=name, type=schema_pb2.BYTES)
            feature.drift_comparator.infinity_norm.threshold = _ANY
        elif all(log_histogram(side) is not None for side in sides):
            comparator = schema.feature.add(name=name, type=schema_pb2.FLOAT).drift_comparator.jensen_shannon_divergence
            comparator.threshold = _ANY
            comparator.source.type = schema_pb2.HistogramSelection.STANDARD
    anomalies = tfdv.validate_statistics(
        _with_log_histograms(now), schema, previous_statistics=_with_log_histograms(before)
    )
    return {
        info.path.step[0]: measurement.value
        for info in anomalies.drift_skew_info
        for measurement in info.drift_measurements
        if math.isfinite(measurement.value)
    }


def _with_log_histograms(statistics: Any) -> Any:
    """A copy in which the dense columns' only histogram is the one over fixed edges, where TFDV's comparator looks."""
    copy = statistics_pb2.DatasetFeatureStatisticsList()
    copy.CopyFrom(statistics)
    for name, feature in by_feature(copy).items():
        histogram = log_histogram(feature)
        if name in criteo.DENSE and histogram is not None:
            del feature.num_stats.histograms[:]
            feature.num_stats.histograms.add().CopyFrom(histogram)
    return copy
