"""What the step makes of faults, anomalies and drift: findings with a severity, and one decision.

Blocks (training on such rows would be wrong):
- there are no rows;
- a file lacks the label or a feature, or holds it in another type;
- TFDV finds anything wrong with the label: a value other than 0 and 1, missing in some rows or in all;
- the label has one class only;
- TFDV finds values of another type than the schema's;
- a feature has no value in any row, though by its share in the champion's rows 10 or more were expected.

Warns (retraining is the answer to it, or people should know):
- a feature has no value in any row of a first run (nothing says that it ever had), or fewer than 10 were expected (few
  rows of a rare feature: absence may be chance);
- drift above the feature's threshold (`drift`); drift never blocks, or no retraining would mend it;
- certainly new categories in more than `new_value_share` of the rows;
- the share of missing values changed by more than `missing_share_jump`, up or down;
- the share of clicks is more than `click_rate_factor` times larger or smaller, and by more than chance (4 standard
  errors): often labels that have not all arrived;
- any other TFDV anomaly: values far out of the first run's range, NaN, infinity.

The decision is the worst severity; findings of severity `info` leave it at `pass`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from components.contracts import criteo
from components.validation.rows import ColumnFault
from components.validation.settings import ValidationSettings
from components.validation.summarize import CERTAIN_ROWS, by_feature, missing_share, num_missing, num_rows, num_values
from components.validation.tfdv import anomalies_pb2

BLOCK, WARN, INFO, PASS = "block", "warn", "info", "pass"
DATASET = "dataset"
"""Stands for a finding's feature where it concerns all of them."""

_EXPLAINED_BY_RULES = ("FEATURE_TYPE_NOT_PRESENT", "SCHEMA_MISSING_COLUMN")
_WRONG_TYPE = ("UNEXPECTED_DATA_TYPE", "FLOAT_TYPE_NOT_FLOAT", "FLOAT_TYPE_STRING_NOT_FLOAT", "INT_TYPE_INT_EXPECTED")

Finding = dict[str, Any]


def make_finding(feature: str, kind: str, severity: str, description: str) -> Finding:
    """A finding as `manifests.ValidationReport.findings` describes it."""
    return {"feature": feature, "kind": kind, "severity": severity, "description": description}


def judge_structure(faults: Sequence[ColumnFault], statistics: Any) -> list[Finding]:
    """What blocks whatever the values are: no rows, missing or retyped columns."""
    found = [make_finding(fault.column, "rule", BLOCK, fault.description) for fault in faults]
    if not num_rows(statistics):
        found.insert(0, make_finding(DATASET, "rule", BLOCK, "there are no training rows, expected at least 1"))
    return found


def judge_anomalies(anomalies: Any) -> list[Finding]:
    """TFDV's anomalies against the schema, with their severity; those that a rule explains better are left out."""
    found = []
    for name, anomaly in sorted(anomalies.anomaly_info.items()):
        for reason in anomaly.reason:
            kind = anomalies_pb2.AnomalyInfo.Type.Name(reason.type)
            if kind in _EXPLAINED_BY_RULES:
                continue
            severity = BLOCK if name == criteo.LABEL or kind in _WRONG_TYPE else WARN
            text = f"{name}: {reason.short_description}. {reason.description}".strip()
            found.append(make_finding(name, "anomaly", severity, text))
    return found


def judge_values(now: Any, before: Any | None, settings: ValidationSettings) -> list[Finding]:
    """The rules on one-class labels, columns without values and jumps of the missing share."""
    rows = num_rows(now)
    if not rows:
        return []
    features, features_before = by_feature(now), by_feature(before) if before is not None else {}
    found = _judge_label(features.get(criteo.LABEL), rows)
    if not found and before is not None:
        found += _judge_click_rate(features.get(criteo.LABEL), features_before.get(criteo.LABEL), settings)
    for name in criteo.FEATURES:
        if name in features:
            found += _judge_missing(name, features[name], features_before.get(name), before is None, rows, settings)
    return found


def _judge_label(label: Any, rows: int) -> list[Finding]:
    if label is None:
        return []
    if not num_values(label):
        return [make_finding(criteo.LABEL, "rule", BLOCK, f"label is missing in all {rows} rows")]
    numbers = label.num_stats
    if numbers.min == numbers.max:
        text = f"label is {numbers.min:g} in all {rows} rows, expected both classes: nothing can be learned from them"
        return [make_finding(criteo.LABEL, "rule", BLOCK, text)]
    return []


def _judge_click_rate(now: Any, before: Any, settings: ValidationSettings) -> list[Finding]:
    rows_now, rows_before = num_values(now), num_values(before)
    if not rows_now or not rows_before:
        return []
    rate, rate_before = now.num_stats.mean, before.num_stats.mean
    noise = 4 * math.sqrt(max(rate_before * (1 - rate_before), 0.0) * (1 / rows_now + 1 / rows_before))
    factor = settings.click_rate_factor
    if rate_before / factor <= rate <= rate_before * factor or abs(rate - rate_before) <= noise:
        return []
    text = f"the share of clicks is {rate:.2%}, was {rate_before:.2%}: look for labels that have not arrived"
    return [make_finding(criteo.LABEL, "rule", WARN, text)]


def _judge_missing(
    name: str, now: Any, before: Any, first_run: bool, rows: int, settings: ValidationSettings
) -> list[Finding]:
    if not num_values(now):
        if first_run:
            text = f"{name} has no value in any of {rows} rows"
            return [make_finding(name, "rule", WARN, text)]
        if known := num_values(before):
            rows_before = known + num_missing(before)
            expected = known * rows / rows_before
            text = f"{name} has no value in any of {rows} rows, had values in {known} of {rows_before} rows before"
            severity = BLOCK if expected >= CERTAIN_ROWS else WARN
            return [make_finding(name, "rule", severity, f"{text}: {expected:.0f} were expected")]
        return [make_finding(name, "rule", INFO, f"{name} has no value in any of {rows} rows, as before")]
    share_now, share_before = missing_share(now), missing_share(before)
    if share_now is None or share_before is None or abs(share_now - share_before) <= settings.missing_share_jump:
        return []
    text = f"{name} is missing in {share_now:.1%} of the rows, was in {share_before:.1%}"
    return [make_finding(name, "rule", WARN, text)]


def judge_drift(drift: Sequence[dict[str, Any]], settings: ValidationSettings) -> list[Finding]:
    """A warning per drifted feature, and per feature with many new categories; the most distant first."""
    found = []
    for entry in sorted(drift, key=lambda e: -(e["distance"] or 0)):
        name, moved = entry["feature"], entry["moved_value"]
        if entry["severity"] != INFO:
            text = f"{name} drifted: {entry['measure']} {entry['distance']:.4f} > {entry['threshold']:.4f}"
            if moved:
                text += f"; value {moved['value']} went from {moved['share_before']:.1%} to {moved['share_now']:.1%}"
            found.append(make_finding(name, "drift", entry["severity"], text))
        new = entry["new_value_share"]
        if new is not None and new > settings.new_value_share:
            text = f"{name} has categories that the champion never saw in at least {new:.1%} of the rows"
            found.append(make_finding(name, "drift", WARN, text))
    return found


def decide(findings: Sequence[Finding]) -> str:
    """`block`, `warn` or `pass`: the worst severity.

    >>> decide([make_finding("I1", "rule", "info", "")]), decide([make_finding("I1", "rule", "warn", "")])
    ('pass', 'warn')
    """
    severities = {finding["severity"] for finding in findings}
    return next((severity for severity in (BLOCK, WARN) if severity in severities), PASS)
