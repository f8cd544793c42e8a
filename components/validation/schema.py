"""The schema of the training rows: inferred by TFDV once, curated by what is known of Criteo, then by people.

The first run infers it; it is kept beside the model, and every later run is judged by its champion's file unchanged, or
by the one that people accepted since (`schemas.curated`).

Curated: categories are strings (see `summarize`) without a list of allowed values, for new ones come daily; the label
is in every training row, is 0 or 1, and is not served. A feature has a value in as large a share of the rows as in the
first run, less sampling error (`schemas.presence`), and in some row where the first run had it; one that the first run
had in no row is optional. Dense columns stay below `range_factor` times the first run's extremes, or below a larger
multiple where the tail is heavy and the rows are few (`schemas.extremes`), hold neither NaN nor infinity, and where the
first run had no negative value, none (but for I2, whose rare negative values a small window may lack). No drift
thresholds: those are settings of the step, not facts about the data.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

from components.contracts import criteo
from components.validation.schemas.extremes import extreme_factor
from components.validation.schemas.files import SERVING, TRAINING, format_schema, read_schema
from components.validation.schemas.presence import least_share
from components.validation.tfdv import schema_pb2, statistics_pb2, tfdv

__all__ = ["format_schema", "infer_schema", "make_type_schema", "read_schema"]

NEGATIVE = ("I2",)
"""Columns known to hold negative values."""


def make_type_schema() -> Any:
    """A schema with types only: what TFDV must know to take categories as categories."""
    schema = schema_pb2.Schema()
    schema.feature.add(name=criteo.LABEL, type=schema_pb2.INT)
    for name in criteo.DENSE:
        schema.feature.add(name=name, type=schema_pb2.FLOAT)
    for name in criteo.CATEGORICAL:
        schema.feature.add(name=name, type=schema_pb2.BYTES)
    return schema


def infer_schema(statistics: Any, *, range_factor: float, excluded: Container[str] = ()) -> Any:
    """The curated schema of the rows that `statistics` describe; `excluded` features may be there or not."""
    schema = tfdv.infer_schema(statistics, infer_feature_shape=False)
    del schema.string_domain[:]
    schema.default_environment.extend([TRAINING, SERVING])
    observed = {f.path.step[0]: f for f in statistics.datasets[0].features}
    for feature in schema.feature:
        if feature.name == criteo.LABEL:
            feature.presence.min_fraction, feature.presence.min_count = 1.0, 1
            feature.int_domain.min, feature.int_domain.max = 0, 1
            feature.not_in_environment.append(SERVING)
            continue
        _set_presence(feature, observed[feature.name], optional=feature.name in excluded)
        if feature.name in criteo.CATEGORICAL:
            # Inferred from what the strings look like: a list of values, or integers.
            if inferred := feature.WhichOneof("domain_info"):
                feature.ClearField(inferred)
        elif feature.name in criteo.DENSE:
            feature.float_domain.disallow_nan = feature.float_domain.disallow_inf = True
            if feature.name not in excluded:
                _bound(feature.name, feature.float_domain, observed[feature.name].num_stats, range_factor)
    return schema


def _set_presence(feature: Any, observed: Any, *, optional: bool) -> None:
    feature.presence.ClearField("min_fraction")
    common = getattr(observed, observed.WhichOneof("stats") or "num_stats").common_stats
    present, rows = common.num_non_missing, common.num_non_missing + common.num_missing
    if optional:
        feature.presence.min_count = 0
    elif present:
        feature.presence.min_fraction = least_share(present / rows, rows)


def _bound(name: str, domain: Any, numbers: Any, factor: float) -> None:
    if numbers.common_stats.num_non_missing and math.isfinite(numbers.min) and math.isfinite(numbers.max):
        # An extreme of zero has no multiple; it is taken for one.
        domain.min = numbers.min - (factor - 1) * max(abs(numbers.min), 1.0)
        domain.max = numbers.max + (max(factor, _chance_factor(numbers)) - 1) * max(abs(numbers.max), 1.0)
        if numbers.min >= 0 and name not in NEGATIVE:
            domain.min = 0.0


def _chance_factor(numbers: Any) -> float:
    """How many times the largest value the next rows' may be by chance; 1 where the deciles are not known."""
    for histogram in numbers.histograms:
        if histogram.type == statistics_pb2.Histogram.QUANTILES and len(histogram.buckets) == 10:
            median, ninth = (float(histogram.buckets[i].high_value) for i in (4, 8))
            if math.isfinite(median) and math.isfinite(ninth):
                return extreme_factor(numbers.min, median, ninth, numbers.common_stats.num_non_missing)
    return 1.0
