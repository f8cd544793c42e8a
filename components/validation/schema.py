"""The schema of the training rows: inferred once, and checked by TFDV in every run.

The first run infers the schema. For a feature that is added later, the first run with the feature
infers its rules. Categories are strings (see `tfdv_statistics`) without a list of allowed values,
because new categories appear daily. Lists of categories may have any length. The label is required
in every training row, is 0 or 1, and is not served. The share of rows with a value must not be
smaller than in the first run, except for sampling error. A feature without any value in the first
run is optional. Numeric columns must stay below `range_factor` times the first run's extremes, and
must not contain NaN or infinity. If at least `_SIGNED_ROWS` rows of the first run had values and
none was negative, negative values are not allowed. Drift thresholds are settings of the step. Later
runs use a schema file that changes only when people accept a new version (`schema_versions`).
"""

from collections.abc import Container
from typing import Any, NamedTuple

import tensorflow_data_validation as tfdv
from scipy import special
from tensorflow_metadata.proto.v0 import schema_pb2

from components.validation.schema_versions import SERVING, TRAINING
from components.validation.tfdv_statistics import ColumnStatistics, TableStatistics
from evergreen.config.features import Features
from evergreen.contracts import raw_rows
from evergreen.contracts.manifests import RawDataset

_STANDARD_ERRORS = 4.0
_CORRELATED_ROWS = 64
"""Number of correlated rows that count as one independent row. The true correlation within a
request is unknown."""
_SMALLEST_ROWS = 10_000
"""A schema must not reject a window of this number of rows by chance, even if the schema's first
window was much larger."""

_SIGNED_ROWS = 10_000
"""Minimum number of rows with a value to decide whether a column can be negative. If 3 % of a
column's values are negative, the first run contains a negative value with a probability of 99 %.
The calculation assumes that only one of 64 rows is independent."""

_TYPES = {
    "string": "BYTES",
    "large_string": "BYTES",
    "binary": "BYTES",
    "float": "FLOAT",
    "double": "FLOAT",
}
"""TFDV's type of a column, by the name of its Arrow type. All other Arrow types count as
integers."""


class CheckedSchema(NamedTuple):
    """Schema of a run's rows, and the result of TFDV's check."""

    schema: Any
    """Schema in force, fitted to the recommender's features. If no schema is in force, this is the
    schema inferred from the rows."""
    proposal: Any | None
    """Proposed schema that these rows would satisfy. None if the rows satisfy the schema in force,
    or if no schema is in force."""
    anomalies: Any
    """Anomalies that TFDV found when it checked the statistics against the schema."""


def check_schema(
    in_force: Any | None, statistics: TableStatistics, raw: RawDataset, *, range_factor: float
) -> CheckedSchema:
    """Check the statistics of training rows by the schema in force, or infer their schema.

    Args:
        in_force: The schema in force. None means that there is no schema yet.
        statistics: TFDV's statistics of the rows.
        raw: Manifest of the rows.
        range_factor: Factor by which numeric values may exceed the extremes of the first run.
    """
    features, excluded, proposal = raw.recommender.features, raw.excluded_columns, None
    if in_force is None:
        schema = infer_schema(statistics, features, range_factor=range_factor, excluded=excluded)
    else:
        schema = fitted_to(
            in_force, statistics, features, range_factor=range_factor, excluded=excluded
        )
        proposal = propose_schema(schema, statistics, raw)
    return CheckedSchema(schema, proposal, check_statistics(statistics, schema))


def infer_schema(
    statistics: TableStatistics,
    features: Features,
    *,
    range_factor: float,
    excluded: Container[str] = (),
) -> Any:
    """Infer the curated schema of the rows that `statistics` describe.

    `excluded` features are optional.
    """
    schema = tfdv.infer_schema(statistics.message, infer_feature_shape=False)
    del schema.string_domain[:]
    schema.default_environment.extend([TRAINING, SERVING])
    observed = statistics.columns
    for feature in schema.feature:
        if feature.name == raw_rows.LABEL:
            feature.presence.min_fraction, feature.presence.min_count = 1.0, 1
            feature.int_domain.min, feature.int_domain.max = 0, 1
            feature.not_in_environment.append(SERVING)
            continue
        _set_presence(feature, observed[feature.name], optional=feature.name in excluded)
        if feature.name in features.lists:
            feature.ClearField("value_count")
        if feature.name in features.categorical + features.lists:
            # Remove the rules that TFDV infers from string values: an integer type, and a list of
            # allowed values.
            if inferred := feature.WhichOneof("domain_info"):
                feature.ClearField(inferred)
        elif feature.name in features.numeric:
            feature.float_domain.disallow_nan = feature.float_domain.disallow_inf = True
            if feature.name not in excluded:
                _set_bounds(feature, observed[feature.name], range_factor)
    return schema


def fitted_to(
    schema: Any,
    statistics: TableStatistics,
    features: Features,
    *,
    range_factor: float,
    excluded: list[str],
) -> Any:
    """Return `schema` fitted to the recommender's features, or `schema` itself if it fits already.

    New features get the rules that `infer_schema` infers from these rows. Removed features become
    optional.
    """
    known = {feature.name: feature for feature in schema.feature}
    gone = [
        n
        for n, each in known.items()
        if n not in (raw_rows.LABEL, *features.names) and _is_required(each)
    ]
    if not gone and known.keys() >= set(features.names):
        return schema
    fitted = schema_pb2.Schema()
    fitted.CopyFrom(schema)
    for feature in fitted.feature:
        if feature.name in gone:
            feature.presence.ClearField("min_fraction")
            feature.presence.min_count = 0
    for feature in infer_schema(
        statistics, features, range_factor=range_factor, excluded=excluded
    ).feature:
        if feature.name in features.names and feature.name not in known:
            fitted.feature.add().CopyFrom(feature)
    return fitted


def _is_required(feature: Any) -> bool:
    return bool(feature.presence.min_fraction or feature.presence.min_count)


def _set_presence(feature: Any, observed: ColumnStatistics, *, optional: bool) -> None:
    feature.presence.ClearField("min_fraction")
    present, rows = observed.num_values, observed.num_rows
    if optional:
        feature.presence.min_count = 0
    elif present:
        # Compute the limit as if there were at most `_SMALLEST_ROWS` rows. The limit then also
        # suits later windows with few rows, whose shares vary more by chance.
        lowest, _ = possible_shares(present / rows, min(rows, _SMALLEST_ROWS))
        feature.presence.min_fraction = lowest


def _set_bounds(feature: Any, observed: ColumnStatistics, factor: float) -> None:
    domain, least, most = feature.float_domain, observed.least, observed.most
    if least is None or most is None:
        return
    # An extreme of zero has no useful multiple, so 1 is used instead.
    domain.min = least - (factor - 1) * max(abs(least), 1.0)
    domain.max = most + (factor - 1) * max(abs(most), 1.0)
    if least >= 0 and observed.num_values >= _SIGNED_ROWS:
        domain.min = 0.0


def possible_shares(share: float, rows: int) -> tuple[float, float]:
    """Return the lowest and highest true share that are consistent with an observed share.

    The result is the exact interval of Clopper and Pearson. The confidence level is the probability
    that a normal variable is within `_STANDARD_ERRORS` standard errors. Only `rows /
    _CORRELATED_ROWS` rows count as independent, because a context column is missing in all rows of
    a request or in none.

    >>> low, high = possible_shares(0.5, 64_000)
    >>> round(low, 3), round(high, 3)
    (0.437, 0.563)
    """
    independent, tail = rows / _CORRELATED_ROWS, special.ndtr(-_STANDARD_ERRORS)
    hits, others = share * independent, (1 - share) * independent
    low = float(special.betaincinv(hits, others + 1, tail)) if hits > 0 else 0.0
    high = float(special.betainccinv(hits + 1, others, tail)) if others > 0 else 1.0
    return low, high


def check_statistics(statistics: TableStatistics, schema: Any) -> Any:
    """Check statistics of training rows against `schema`, and return TFDV's `Anomalies`."""
    return tfdv.validate_statistics(statistics.message, schema, environment=TRAINING)


def propose_schema(schema: Any, statistics: TableStatistics, raw: RawDataset) -> Any | None:
    """Return a copy of `schema` that TFDV has adapted to the rows.

    Returns None if the rows satisfy `schema`. Only changes of features are proposed: wider bounds,
    more values of a domain, fewer values present, or a new column. The label's rules and all other
    rules do not change, because rows that break these rules are wrong. New columns come from `raw`,
    which lists the columns of the lake that the schema lacks.
    """
    if not statistics.num_rows:
        return None
    proposed = tfdv.update_schema(schema, statistics.message)
    known, observed = {feature.name: feature for feature in schema.feature}, statistics.columns
    checked = set(raw.recommender.features.names) - set(raw.excluded_columns)
    for feature in proposed.feature:
        old, seen = known[feature.name], observed.get(feature.name)
        if (
            seen is None
            or not seen.num_values
            or feature.name in (raw_rows.LABEL, *raw.excluded_columns)
        ):
            # TFDV would mark a column without values as deprecated and would no longer check the
            # column.
            feature.CopyFrom(old)
        if seen is not None and feature.name in checked:
            share = seen.num_values / seen.num_rows
            if share < old.presence.min_fraction:
                _set_presence(feature, seen, optional=not share)
    for each in raw.schema_mismatches:
        if each["expected"] is None and each["column"] not in known:
            kind = schema_pb2.FeatureType.Value(_TYPES.get(each["arrow_type"], "INT"))
            proposed.feature.add(name=each["column"], type=kind)
    return proposed if proposed != schema else None
