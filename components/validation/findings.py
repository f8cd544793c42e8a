"""Findings: what a rule observed in the rows, its numbers, and the action that follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evergreen.config.validation import BLOCK, OFF, SEVERITIES, WARN, ValidationSettings
from evergreen.contracts.checks import AT_MOST, PASS


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One observation by one rule. An undefined number is None."""

    feature: str
    """Column, or `DATASET`."""
    kind: str
    """`anomaly`, `drift`, `skew` or `rule`."""
    rule: str
    action: str
    severity: str
    """`block`, `warn` or `info`."""
    description: str
    """One sentence."""
    value: float | None = None
    """Measured value that is compared with the limit."""
    low: float | None = None
    """Lower end of the value's 95 % interval."""
    high: float | None = None
    limit: float | None = None
    """Value at which the rule begins to apply."""
    bound: str = AT_MOST
    """How the value is compared with the limit, such as `at most`."""
    num_quarantined: int = 0
    """Rows that the rule quarantined."""


def find(
    rules: ValidationSettings,
    rule: str,
    feature: str,
    *,
    text: str,
    kind: str = "rule",
    at_most: str | None = None,
    numbers: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Return a list with the finding of a rule, or an empty list if the rule is off.

    Args:
        rules: The actions of the rules.
        rule: Name of the rule.
        feature: A column, or `DATASET`.
        text: One sentence.
        kind: See `Finding`.
        at_most: Action that replaces that of the rule. `info` if nobody has to act.
        numbers: `value`, `low`, `high`, `limit` and `bound`, as far as they exist.
    """
    action = rules.action_of(rule)
    if action == OFF:
        return []
    action = at_most or action
    severity = SEVERITIES[action]
    found = Finding(
        feature=feature, kind=kind, rule=rule, action=action, severity=severity, description=text
    )
    return [replace(found, **(numbers or {}))]


def decide(findings: Sequence[Finding]) -> str:
    """Return the worst severity: `block`, `warn` or `pass`.

    >>> decide(find(ValidationSettings(), "click_rate", "label", text="the share of clicks is 9 %, was 3 %"))
    'warn'
    >>> decide([])
    'pass'
    """  # noqa: E501
    severities = {finding.severity for finding in findings}
    return next((severity for severity in (BLOCK, WARN) if severity in severities), PASS)
