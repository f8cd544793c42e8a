"""What a schema would have to become for rows that show something new: a proposal to people, never used by itself.

Only facts about features are proposed: wider bounds, more values of a domain, fewer values present, a new column. What
is said of the label, types and what people wrote otherwise is left as it is: rows that break that are wrong.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from components.contracts import criteo
from components.validation.rows import ColumnFault
from components.validation.schema import infer_schema
from components.validation.summarize import by_feature, num_missing, num_rows, num_values, value_counts
from components.validation.tfdv import schema_pb2

_TYPES = {"string": "BYTES", "large_string": "BYTES", "binary": "BYTES", "float": "FLOAT", "double": "FLOAT"}
"""Of Arrow's types, in TFDV's words; others are integers."""


def propose_schema(
    schema: Any,
    statistics: Any,
    new_columns: Sequence[ColumnFault],
    *,
    range_factor: float,
    excluded: Container[str] = (),
) -> Any | None:
    """A copy of `schema` that the rows of `statistics` agree with; None where they agree with `schema` itself.

    Args:
        schema: In force.
        statistics: Of the rows.
        new_columns: Columns of the files that the schema may not know.
        range_factor: As for `infer_schema`: bounds that must grow grow so far beyond the rows' extremes.
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
            _widen(proposed, feature, inferred[feature.name], observed[feature.name])
    known = {feature.name for feature in schema.feature}
    for name, seen in inferred.items():
        if name not in known:
            proposed.feature.add().CopyFrom(seen)
    for column in new_columns:
        if column.column not in known:
            kind = schema_pb2.FeatureType.Value(_TYPES.get(column.arrow_type, "INT"))
            proposed.feature.add(name=column.column, type=kind)
    return proposed if proposed != schema else None


def _widen(schema: Any, feature: Any, inferred: Any, observed: Any) -> None:
    _lower_presence(feature, inferred, observed)
    if not num_values(observed):
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
        # Of the most frequent values: the statistics do not count more.
        values.value.extend(value for value in value_counts(observed) if value not in set(values.value))


def _lower_presence(feature: Any, inferred: Any, observed: Any) -> None:
    present, rows = num_values(observed), num_values(observed) + num_missing(observed)
    if rows and present < feature.presence.min_fraction * rows:
        feature.presence.min_fraction = inferred.presence.min_fraction
    if present < feature.presence.min_count:
        feature.presence.min_count = 0
