"""How far each of the 39 features has moved from the champion's training rows, measured by TFDV's comparators.

Categories: L-infinity, the largest change of one value's share of the rows that have a value, over the 1000 most
frequent values of each side. Dense columns: Jensen-Shannon divergence in bits over `log_histogram.EDGES`.

The threshold of a feature is the setting, raised where the rows are too few for it (two samples of one distribution
differ too), and lowered for a column whose most frequent value is rare: a change of 0.1 cannot be seen where no value
has a share of 0.1. Noise of a share p: 4 standard errors, `4 sqrt(p (1 - p) (1/n + 1/m))`. Noise of the divergence
over K occupied buckets: three times its expectation, `3 (K - 1) (1/n + 1/m) / (8 ln 2)` (its chi-square asymptotics).

Missing values are in neither distance; `rules` compares their shares.
"""

from __future__ import annotations

import math
from typing import Any

from components.contracts import criteo
from components.validation.settings import ValidationSettings
from components.validation.summarize import (
    CERTAIN_ROWS,
    NUM_RANKED_VALUES,
    by_feature,
    log_histogram,
    num_values,
    value_counts,
)
from components.validation.tfdv import schema_pb2, statistics_pb2, tfdv

L_INFINITY = "L_INFTY"
JENSEN_SHANNON = "JENSEN_SHANNON_DIVERGENCE"


def measure_drift(now: Any, before: Any, settings: ValidationSettings) -> list[dict[str, Any]]:
    """One entry per feature, in column order, as `manifests.ValidationReport.drift` describes them.

    `num_rows_*` count the rows that have a value; `distance` and `threshold` are None where either side has none.
    `new_value_share` (see `new_value_share`) and `moved_value` come on top: the category whose share changed most, with
    its shares before and now; None for dense columns.
    """
    features_now, features_before = by_feature(now), by_feature(before)
    thresholds = {
        name: _threshold(name, features_now.get(name), features_before.get(name), settings) for name in criteo.FEATURES
    }
    distances = _compare(now, before, thresholds)
    return [
        _entry(name, features_now.get(name), features_before.get(name), distances.get(name), thresholds[name])
        for name in criteo.FEATURES
    ]


def _entry(name: str, now: Any, before: Any, distance: float | None, threshold: float | None) -> dict[str, Any]:
    drifted = distance is not None and threshold is not None and distance > threshold
    return {
        "feature": name,
        "measure": L_INFINITY if name in criteo.CATEGORICAL else JENSEN_SHANNON,
        "distance": distance,
        "threshold": threshold,
        "severity": "warn" if drifted else "info",
        "num_rows_now": num_values(now),
        "num_rows_before": num_values(before),
        "new_value_share": new_value_share(now, before) if name in criteo.CATEGORICAL else None,
        "moved_value": _most_moved(now, before) if name in criteo.CATEGORICAL else None,
    }


def new_value_share(now: Any, before: Any) -> float | None:
    """Share of the rows with a value whose category is new with certainty: a lower bound; None where undefined.

    A category is new if it is absent from the values listed before though its share now, less 4 standard errors,
    promised 10 rows there; where that list is full, twice the count of its rarest value more.
    """
    rows_now, rows_before = num_values(now), num_values(before)
    known = value_counts(before)
    if not rows_now or not rows_before or not known:
        return None
    floor = 2 * min(known.values()) if len(known) >= NUM_RANKED_VALUES else 0
    needed = (CERTAIN_ROWS + floor) * rows_now / rows_before
    counts = [count for value, count in value_counts(now).items() if value not in known]
    return float(sum(count for count in counts if count - 4 * math.sqrt(count) >= needed) / rows_now)


def _most_moved(now: Any, before: Any) -> dict[str, Any] | None:
    rows_now, rows_before = num_values(now), num_values(before)
    if not rows_now or not rows_before:
        return None
    counts_now, counts_before = value_counts(now), value_counts(before)
    shares = {
        value: (counts_before.get(value, 0.0) / rows_before, counts_now.get(value, 0.0) / rows_now)
        for value in [*counts_before, *counts_now]
    }
    value, (share_before, share_now) = max(shares.items(), key=lambda item: abs(item[1][1] - item[1][0]))
    return {"value": value, "share_before": share_before, "share_now": share_now}


def _threshold(name: str, now: Any, before: Any, settings: ValidationSettings) -> float | None:
    rows_now, rows_before = num_values(now), num_values(before)
    if not rows_now or not rows_before:
        return None
    per_row = 1 / rows_now + 1 / rows_before
    if name in criteo.CATEGORICAL:
        top = max(value_counts(before).values(), default=0.0) / rows_before
        wanted = min(settings.categorical_drift, settings.categorical_drift_relative * top)
        return max(wanted, 4 * math.sqrt(max(top * (1 - top), 1 / rows_before) * per_row))
    histograms = [h for h in (log_histogram(now), log_histogram(before)) if h is not None]
    if len(histograms) < 2:
        return None
    occupied = {b.low_value for h in histograms for b in h.buckets if b.sample_count}
    return max(settings.numeric_drift, 3 * (len(occupied) - 1) * per_row / (8 * math.log(2)))


def _compare(now: Any, before: Any, thresholds: dict[str, float | None]) -> dict[str, float]:
    """TFDV's distances by feature; TFDV measures only what has a threshold and is on both sides."""
    schema = schema_pb2.Schema()
    for name, threshold in thresholds.items():
        if threshold is None:
            continue
        if name in criteo.CATEGORICAL:
            feature = schema.feature.add(name=name, type=schema_pb2.BYTES)
            feature.drift_comparator.infinity_norm.threshold = threshold
        else:
            comparator = schema.feature.add(name=name, type=schema_pb2.FLOAT).drift_comparator.jensen_shannon_divergence
            comparator.threshold = threshold
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
