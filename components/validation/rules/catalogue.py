"""The rules by name: what each looks at, what it does by default, and what may be set with it.

Actions:
- `block`: the run ends here; training on such rows would be wrong;
- `quarantine`: the offending rows go aside with their reason, the rest goes on; for rules about single rows only;
- `warn`: told in the report, the run goes on; retraining is the answer to it, or people should know;
- `notify`: as `warn`, and the message about the run's end carries it;
- `info`: told in the report, the decision stays `pass`;
- `off`: the rule is not applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.runtime.errors import ContractError

BLOCK, QUARANTINE, WARN, NOTIFY, INFO, OFF = "block", "quarantine", "warn", "notify", "info", "off"
ACTIONS = (BLOCK, QUARANTINE, WARN, NOTIFY, INFO, OFF)
PASS = "pass"
SEVERITIES = {BLOCK: BLOCK, QUARANTINE: WARN, WARN: WARN, NOTIFY: WARN, INFO: INFO}
"""How bad a finding is, by the action of its rule."""

DATASET = "dataset"
"""Stands for a finding's feature where it concerns all of them."""

Finding = dict[str, Any]
"""As `manifests.ValidationReport.findings` describes it."""


def _number(low: float, high: float = math.inf) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high:
            raise ContractError(f"{name} is {value!r}, expected a finite number from {low:g} to {high:g}")
        return float(value)

    return check


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ContractError(f"{name} is {value!r}, expected a list of texts")
    return tuple(value)


@dataclass(frozen=True)
class Parameter:
    """What may be set with one rule."""

    default: Any
    check: Callable[[str, Any], Any]
    """Gives the value of what JSON held under a name, or raises `ContractError`."""


@dataclass(frozen=True)
class Rule:
    """One rule."""

    action: str
    """The default."""
    about: str
    settings: tuple[str, ...] = ()
    """Thresholds of `ValidationSettings` that are the rule's."""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    of_rows: bool = False
    """Whether it looks at single rows, so that it can set them aside."""


RULES: dict[str, Rule] = {
    "no_rows": Rule(BLOCK, "there are no rows"),
    "column_missing": Rule(BLOCK, "a file lacks the label or a feature"),
    "column_retyped": Rule(BLOCK, "a file holds a column in another type"),
    "column_new": Rule(WARN, "a file holds a column that nobody agreed on; it is not read"),
    "label_invalid": Rule(BLOCK, "a label other than 0 and 1, or missing in some rows or in all"),
    "label_one_class": Rule(BLOCK, "the label is the same in all rows"),
    "value_type": Rule(BLOCK, "values of another type than the schema's"),
    "column_empty": Rule(
        BLOCK, "no value in any row, though by the champion's rows 10 or more were expected; not where it is optional"
    ),
    "column_empty_by_chance": Rule(
        WARN, "no value in any row of a first run, or where fewer than 10 were expected: absence may be chance"
    ),
    "presence": Rule(WARN, "fewer rows have a value than the schema wants, by more than sampling error"),
    "range": Rule(WARN, "values out of the schema's domain, NaN or infinity among them", ("range_factor",)),
    "anomaly": Rule(WARN, "anything else that TFDV finds against the schema"),
    "missing_share": Rule(WARN, "the share of missing values jumped, up or down", ("missing_share_jump",)),
    "click_rate": Rule(
        WARN,
        "the share of clicks changed by more than chance: often labels that have not arrived",
        ("click_rate_factor",),
    ),
    "drift": Rule(
        WARN,
        "a feature moved away from the champion's rows; were it to block, no retraining could mend it",
        (
            *("categorical_drift", "categorical_drift_relative", "numeric_drift", "mean_drift", "missing_drift"),
            "false_alarm_rate",
        ),
    ),
    "new_categories": Rule(WARN, "certainly new categories in many rows", ("new_value_share",)),
    "skew": Rule(WARN, "a feature differs between training rows and served rows", ("skew_share",)),
    "quarantined_share": Rule(
        BLOCK,
        "rules set more than this share of the rows aside",
        parameters={"max_quarantined_fraction": Parameter(0.05, _number(0.0, 1.0))},
    ),
    "quarantine_replayed": Rule(INFO, "rows of an earlier quarantine came back, as people asked"),
    "label_kind": Rule(OFF, "a row whose label is missing, or neither 0 nor 1", of_rows=True),
    "domain": Rule(OFF, "a row with a value out of the schema's domain, NaN or infinity among them", of_rows=True),
    "outlier": Rule(
        OFF,
        "a row with an integer feature beyond `factor` times the schema's bound, or, where `quantile` is set, `factor` "
        "times that quantile of the champion's rows",
        parameters={"factor": Parameter(10.0, _number(1.0)), "quantile": Parameter(None, _number(0.5, 1.0))},
        of_rows=True,
    ),
    "named_rows": Rule(
        OFF,
        "rows of the named requests, or of the named UTC days (YYYY-MM-DD)",
        parameters={"request_ids": Parameter((), _texts), "days": Parameter((), _texts)},
        of_rows=True,
    ),
}


def decide(findings: Sequence[Finding]) -> str:
    """`block`, `warn` or `pass`: the worst severity.

    >>> decide([{"severity": "info"}]), decide([{"severity": "info"}, {"severity": "warn"}])
    ('pass', 'warn')
    """
    severities = {finding["severity"] for finding in findings}
    return next((severity for severity in (BLOCK, WARN) if severity in severities), PASS)
