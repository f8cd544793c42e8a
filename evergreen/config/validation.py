"""The section `validation`: thresholds, and the rules with their default actions.

Actions:
- `block`: the run ends here, because training on the rows would be wrong.
- `quarantine`: the invalid rows are stored separately with the reason, and the run continues with
  all other rows. Only the rule `domain` supports this action.
- `warn`: the finding is reported, and the run continues.
- `notify`: the finding is reported as with `warn`, and again in the message at the end of the run.
- `info`: the finding is reported, and the decision stays `pass`.
- `off`: the rule is not applied.

`components.validation` applies the rules. Importing this module loads nothing heavy.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from evergreen.config.drift import DriftThresholds
from evergreen.runtime.errors import ContractError

_AT_LEAST_ONE = ("click_rate_factor", "range_factor")
_SHARED = frozenset(each.name for each in fields(DriftThresholds))


@dataclass(frozen=True, kw_only=True)
class ValidationSettings(DriftThresholds):
    """Thresholds of the rules, and the actions that differ from the defaults.

    Raises:
        ContractError: a threshold is out of range, or a rule or an action is unknown.
    """

    actions: dict[str, str] = field(default_factory=dict)
    """Actions that differ from the rule's default in `RULES`, such as `{"column_empty":
    "warn"}`."""

    mean_drift: float = 0.1
    """Minimum shift of a numeric column's mean that counts as drift, in standard deviations. Each
    value is represented by the number of its histogram bucket."""
    new_value_share: float = 0.05
    """Maximum share of rows whose category is unknown to the champion. Validation reports a larger
    share as a finding."""
    click_rate_factor: float = 2.0
    """Maximum factor by which the share of clicks may rise or fall. A larger change is reported as
    a finding."""
    skew_share: float = 0.001
    """Maximum share of rows whose value in training differs from the value that was served."""
    range_factor: float = 1000.0
    """Maximum factor by which a value may lie beyond the smallest or largest value of the first
    run. The factor is applied when the schema is inferred. In counts with a heavy tail, one request
    often sets the largest value. For example, the largest values of two windows differed by a
    factor of more than 10 in 86 of 400 pairs."""
    max_quarantined_fraction: float = 0.05
    """Maximum share of the rows that may be quarantined."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for rule, action in self.actions.items():
            _check_action(rule, action)
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if name == "actions" or name in _SHARED:
                continue
            is_number = (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and math.isfinite(value)
            )
            if name in _AT_LEAST_ONE and not (is_number and value >= 1):
                raise ContractError(f"{name} is {value!r}, expected a finite number of at least 1")
            may_be_zero = name == "max_quarantined_fraction"
            if name not in _AT_LEAST_ONE and not (
                is_number and 0 <= value <= 1 and (value or may_be_zero)
            ):
                raise ContractError(f"{name} is {value!r}, expected a number in (0, 1]")

    def action_of(self, rule: str) -> str:
        """Return the action of a rule."""
        return self.actions.get(rule, RULES[rule].action)


BLOCK, QUARANTINE, WARN, NOTIFY, INFO, OFF = "block", "quarantine", "warn", "notify", "info", "off"
ACTIONS = (BLOCK, QUARANTINE, WARN, NOTIFY, INFO, OFF)

DATASET = "dataset"
"""Value of `RuleCheck.column` for a check of the data set."""
DOMAIN = "domain"
"""Rule about single rows. Only the rule `domain` can quarantine rows."""


@dataclass(frozen=True)
class Rule:
    """Rule of validation with its default action."""

    action: str
    about: str
    settings: tuple[str, ...] = ()
    """Names of the fields of `ValidationSettings` that the rule reads."""


RULES: dict[str, Rule] = {
    "no_rows": Rule(BLOCK, "there are no rows"),
    "column_retyped": Rule(
        BLOCK, "a file of the lake holds a column in another type, which extraction cast"
    ),
    "column_new": Rule(
        WARN, "a file of the lake has a column that is not in the schema, and that is not read"
    ),
    "files_quarantined": Rule(
        NOTIFY, "files of the lake, or of served rows, were left out because they cannot be read"
    ),
    "label_invalid": Rule(BLOCK, "a label other than 0 and 1, or missing in some rows or in all"),
    "label_one_class": Rule(BLOCK, "the label is the same in all rows"),
    "value_type": Rule(BLOCK, "values of another type than the schema's"),
    "column_empty": Rule(
        BLOCK,
        "no row has a value, although the champion's rows predict at least 10; optional columns "
        "are exempt",
    ),
    "column_empty_by_chance": Rule(
        WARN,
        "no row has a value, but fewer than 10 were expected or it is a first run, so it may be "
        "chance",
    ),
    "presence": Rule(
        WARN, "fewer rows have a value than the schema requires, by more than sampling error"
    ),
    "range": Rule(
        WARN, "values outside the schema's domain, including NaN and infinity", ("range_factor",)
    ),
    "anomaly": Rule(WARN, "any other anomaly that TFDV finds against the schema"),
    "click_rate": Rule(
        WARN,
        "the share of clicks changed by more than chance: often labels that have not arrived",
        ("click_rate_factor",),
    ),
    "drift": Rule(
        WARN,
        "a feature drifted from the champion's rows; retraining adapts to it, so it does not block",
        (
            *(
                "categorical_drift",
                "categorical_drift_relative",
                "numeric_drift",
                "mean_drift",
                "missing_drift",
            ),
            "false_discovery_rate",
        ),
    ),
    "new_categories": Rule(
        WARN, "many rows have a category that is certainly new", ("new_value_share",)
    ),
    "skew": Rule(WARN, "a feature differs between training rows and served rows", ("skew_share",)),
    "quarantined_share": Rule(
        BLOCK,
        "more than the maximum share of the rows is quarantined",
        ("max_quarantined_fraction",),
    ),
    DOMAIN: Rule(OFF, "a row with a value outside the schema's domain, including NaN and infinity"),
}


UNLEARNABLE = frozenset({"no_rows", "label_invalid", "label_one_class"})
"""Rules whose findings make training impossible. A milder action for these rules would not help,
because training would still be impossible."""


def _check_action(rule: str, value: Any) -> None:
    if rule not in RULES:
        raise ContractError(
            f"actions: rule {rule!r} is unknown, expected one of {', '.join(RULES)}"
        )
    if value not in ACTIONS:
        raise ContractError(
            f"actions: rule {rule} has action {value!r}, expected one of {', '.join(ACTIONS)}"
        )
    if value == QUARANTINE and rule != DOMAIN:
        raise ContractError(
            f"actions: rule {rule} has action {QUARANTINE}, which only rule {DOMAIN} supports"
        )
