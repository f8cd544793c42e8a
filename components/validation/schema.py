"""The schema of the training rows: inferred by TFDV once, checked by TFDV in every run, and a proposal to people.

The first run infers it, with what is known about Criteo. Categories are strings (see `tfdv_statistics`) without a list
of allowed values, because new ones appear daily; the label is in every training row, is 0 or 1, and is not served. A
feature must have a value in as large a share of the rows as in the first run, less sampling error, and one that the
first run had in no row is optional. Dense columns stay below `range_factor` times the first run's extremes, or below a
larger multiple if the tail is heavy and the rows are few, hold neither NaN nor infinity, and if the first run had no
negative value, none (except I2, whose rare negative values a small window may lack). Drift thresholds are settings of
the step, not facts about the data. Later runs are judged by a file that is not changed by itself: `schema_versions`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from statistics import NormalDist
from typing import Any

import tensorflow_data_validation as tfdv
from tensorflow_metadata.proto.v0 import schema_pb2, statistics_pb2

from components.contracts import criteo
from components.drift_statistics.effects import wilson_interval
from components.runtime.errors import ContractError
from components.validation.rows import ALIKE_ROWS, ColumnFault
from components.validation.schema_versions import SERVING, TRAINING
from components.validation.tfdv_statistics import by_feature, num_missing, num_rows, num_values, value_counts

NEGATIVE = ("I2",)
"""Columns known to hold negative values."""
STANDARD_ERRORS = 4.0
SMALLEST_ROWS = 10_000
"""Rows of a small window, which a schema has to judge fairly too, however large its own first window was."""
CHANCE = 0.001
"""Probability with which the next window of as many rows, of the same kind, exceeds the bound of a column."""
LARGEST_FACTOR = 1000.0
"""Beyond it a value is reported whatever the tail; a wrong unit is usually off by as much."""

_TYPES = {"string": "BYTES", "large_string": "BYTES", "binary": "BYTES", "float": "FLOAT", "double": "FLOAT"}
"""TFDV's types by Arrow's; others are integers."""


def infer_schema(statistics: Any, *, range_factor: float, excluded: Container[str] = ()) -> Any:
    """The curated schema of the rows that `statistics` describe; `excluded` features may be there or not."""
    schema = tfdv.infer_schema(statistics, infer_feature_shape=False)
    del schema.string_domain[:]
    schema.default_environment.extend([TRAINING, SERVING])
    observed = by_feature(statistics)
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
                _set_bounds(feature, observed[feature.name].num_stats, range_factor)
    return schema


def _set_presence(feature: Any, observed: Any, *, optional: bool) -> None:
    feature.presence.ClearField("min_fraction")
    present, rows = num_values(observed), num_values(observed) + num_missing(observed)
    if optional:
        feature.presence.min_count = 0
    elif present:
        # As if the first rows had been few: the windows to come may be, and may fall as low by chance.
        feature.presence.min_fraction = possible_shares(present / rows, min(rows, SMALLEST_ROWS))[0]


def _set_bounds(feature: Any, numbers: Any, factor: float) -> None:
    domain = feature.float_domain
    if numbers.common_stats.num_non_missing and math.isfinite(numbers.min) and math.isfinite(numbers.max):
        # An extreme of zero has no multiple and counts as one.
        domain.min = numbers.min - (factor - 1) * max(abs(numbers.min), 1.0)
        domain.max = numbers.max + (max(factor, _chance_factor(numbers)) - 1) * max(abs(numbers.max), 1.0)
        if numbers.min >= 0 and feature.name not in NEGATIVE:
            domain.min = 0.0


def _chance_factor(numbers: Any) -> float:
    """How many times the largest value the next rows' may be by chance; 1 if the deciles are not known."""
    for histogram in numbers.histograms:
        if histogram.type == statistics_pb2.Histogram.QUANTILES and len(histogram.buckets) == 10:
            median, ninth = (float(histogram.buckets[i].high_value) for i in (4, 8))
            if math.isfinite(median) and math.isfinite(ninth):
                return extreme_factor(numbers.min, median, ninth, numbers.common_stats.num_non_missing)
    return 1.0


def possible_shares(share: float, rows: int) -> tuple[float, float]:
    """The lowest and the highest true share that `share` of `rows` agrees with: Wilson's interval at 4 standard errors.

    `rows / ALIKE_ROWS` count as independent: rows of one request have the same user
    and context, so a column of the context is missing in all of them or in none.

    Args:
        share: In [0, 1].
        rows: At least 1.

    >>> low, high = possible_shares(0.5, 64_000)
    >>> round(low, 3), round(high, 3)
    (0.437, 0.563)
    """
    return wilson_interval(share, rows / ALIKE_ROWS, z=STANDARD_ERRORS)


def extreme_factor(least: float, median: float, ninth_decile: float, rows: int) -> float:
    """How many times the largest value of `rows` the next ones' may be by chance: exceeded with probability `CHANCE`.

    Of counts with a heavy tail a window's largest value says little: it is one request's. Bounds of the same multiple
    for every column alarm by chance (measured with 10: on 86 of 400 pairs of windows of 31 requests).

    In a tail that falls as a power of the value, with index g, the ratio of the maxima of two samples exceeds c with
    probability 1 / (1 + c^(1/g)): their ratio is that of two exponential variables to the power g. The index is the one
    that a lognormal distribution has at the largest of n values: its logarithm's standard deviation over the normal
    deviate of 1/n; the logarithm is of one more than the distance from the least value. `rows / ALIKE_ROWS` count as
    independent.

    Args:
        least: Least value.
        median: Half of the values are at most it.
        ninth_decile: Nine tenths are.
        rows: Rows with a value, at least 1.

    >>> round(extreme_factor(0.0, 8.0, 22.0, 64_000), 1)
    5.1
    """
    normal = NormalDist()
    deviation = math.log((1 + ninth_decile - least) / (1 + median - least)) / normal.inv_cdf(0.9)
    independent = max(rows / ALIKE_ROWS, 4.0)
    exponent = math.log(1 / CHANCE - 1) * deviation / normal.inv_cdf(1 - 1 / independent)
    return math.exp(min(exponent, math.log(LARGEST_FACTOR)))


def check_statistics(statistics: Any, schema: Any, environment: str = TRAINING) -> Any:
    """TFDV's `Anomalies` of `statistics` against `schema`: in `TRAINING` the label must be there, in `SERVING` not.

    Raises:
        ContractError: the schema does not know `environment`; TFDV would then ask for no column at all.
    """
    if environment not in schema.default_environment:
        known = ", ".join(schema.default_environment)
        raise ContractError(f"schema does not know the environment {environment!r}, expected one of {known}")
    return tfdv.validate_statistics(statistics, schema, environment=environment)


def propose_schema(
    schema: Any,
    statistics: Any,
    new_columns: Sequence[ColumnFault],
    *,
    range_factor: float,
    excluded: Container[str] = (),
) -> Any | None:
    """A copy of `schema` that the rows of `statistics` agree with; None if they agree with `schema` itself.

    Only facts about features are proposed: wider bounds, more values of a domain, fewer values present, a new column.
    The label, types and whatever else people wrote stay: rows that break those are wrong.

    Args:
        schema: In force.
        statistics: Of the rows.
        new_columns: Columns of the files that the schema may not know.
        range_factor: As for `infer_schema`: bounds that must grow, grow so far beyond the rows' extremes.
        excluded: Features that the run left out.
    """
    if not num_rows(statistics):
        return None
    proposed = schema_pb2.Schema()
    proposed.CopyFrom(schema)
    inferred = {f.name: f for f in infer_schema(statistics, range_factor=range_factor, excluded=excluded).feature}
    observed = by_feature(statistics)
    for feature in proposed.feature:
        if feature.name in criteo.FEATURES and feature.name in observed and feature.name not in excluded:
            _widen_feature(proposed, feature, inferred[feature.name], observed[feature.name])
    known = {feature.name for feature in schema.feature}
    for name, seen in inferred.items():
        if name not in known:
            proposed.feature.add().CopyFrom(seen)
    for column in new_columns:
        if column.column not in known:
            kind = schema_pb2.FeatureType.Value(_TYPES.get(column.arrow_type, "INT"))
            proposed.feature.add(name=column.column, type=kind)
    return proposed if proposed != schema else None


def _widen_feature(schema: Any, feature: Any, inferred: Any, observed: Any) -> None:
    present, rows = num_values(observed), num_values(observed) + num_missing(observed)
    if rows and present < feature.presence.min_fraction * rows:
        feature.presence.min_fraction = inferred.presence.min_fraction
    if present < feature.presence.min_count:
        feature.presence.min_count = 0
    if not present:
        return
    domain = feature.WhichOneof("domain_info")
    if domain == "float_domain" and observed.WhichOneof("stats") == "num_stats":
        limits, wider = feature.float_domain, inferred.float_domain
        if limits.HasField("min") and observed.num_stats.min < limits.min and wider.HasField("min"):
            limits.min = min(limits.min, wider.min)
        if limits.HasField("max") and observed.num_stats.max > limits.max and wider.HasField("max"):
            limits.max = max(limits.max, wider.max)
    elif domain in ("string_domain", "domain"):
        named = {each.name: each for each in schema.string_domain}
        values = feature.string_domain if domain == "string_domain" else named[feature.domain]
        # Only the most frequent values: the statistics do not count more.
        values.value.extend(value for value in value_counts(observed) if value not in set(values.value))
