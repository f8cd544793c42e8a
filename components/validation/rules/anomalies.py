"""TFDV's anomalies against the schema, each under the rule that acts on it."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from components.contracts import criteo
from components.validation.rules.catalogue import INFO, Finding
from components.validation.rules.judging import Judging
from components.validation.schemas.presence import possible_shares
from components.validation.summarize import by_feature, num_missing, num_values
from components.validation.tfdv import anomalies_pb2

_EXPLAINED_BY_RULES = ("FEATURE_TYPE_NOT_PRESENT", "SCHEMA_MISSING_COLUMN")
_RULE_OF = {
    **dict.fromkeys(
        ("UNEXPECTED_DATA_TYPE", "FLOAT_TYPE_NOT_FLOAT", "FLOAT_TYPE_STRING_NOT_FLOAT", "INT_TYPE_INT_EXPECTED"),
        "value_type",
    ),
    **dict.fromkeys(
        (
            *("FLOAT_TYPE_BIG_FLOAT", "FLOAT_TYPE_SMALL_FLOAT", "FLOAT_TYPE_HAS_NAN", "FLOAT_TYPE_HAS_INF"),
            *("INT_TYPE_BIG_INT", "INT_TYPE_SMALL_INT", "ENUM_TYPE_UNEXPECTED_STRING_VALUES"),
        ),
        "range",
    ),
    **dict.fromkeys(("FEATURE_TYPE_LOW_FRACTION_PRESENT", "FEATURE_TYPE_LOW_NUMBER_PRESENT"), "presence"),
    "SCHEMA_NEW_COLUMN": "column_new",
}


def judge_anomalies(
    anomalies: Any, statistics: Any, schema: Any, judging: Judging, *, excluded: Container[str] = ()
) -> list[Finding]:
    """Findings on what TFDV says of `statistics` against `schema`.

    What a rule of ours explains better is left out, and so are `excluded` columns. Too few values in a column are
    `info` where the rows are so few that the column may have as many as the schema wants.
    """
    found: list[Finding] = []
    features, wanted = by_feature(statistics), {feature.name: feature for feature in schema.feature}
    for name, anomaly in sorted(anomalies.anomaly_info.items()):
        for reason in anomaly.reason:
            kind = anomalies_pb2.AnomalyInfo.Type.Name(reason.type)
            if kind in _EXPLAINED_BY_RULES or name in excluded:
                continue
            rule = "label_invalid" if name == criteo.LABEL else _RULE_OF.get(kind, "anomaly")
            text = f"{name}: {reason.short_description}. {reason.description}".strip()
            chance = kind == "FEATURE_TYPE_LOW_FRACTION_PRESENT" and name != criteo.LABEL
            if chance and (chance := _may_be_chance(features.get(name), wanted[name].presence.min_fraction)):
                text += " In so few rows that may be chance."
            found += judging.find(name, "anomaly", rule, text, at_most=INFO if chance else None)
    return found


def _may_be_chance(feature: Any, min_fraction: float) -> bool:
    present, rows = num_values(feature), num_values(feature) + num_missing(feature)
    return rows > 0 and possible_shares(present / rows, rows)[1] >= min_fraction
