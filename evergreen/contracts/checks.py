"""Checks of a decision, and their text form.

A check has a measured value, a limit and a result. Validation, the gate, the canary and the baking
produce checks. Pages and messages display the checks. A decision is a list of checks, and the worst
check decides. All text about a decision is built in this module.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

PASS, WARN, INCONCLUSIVE, FAIL = RESULTS = ("pass", "warn", "inconclusive", "fail")
"""Possible results of a check, and of a list of checks, from the best to the worst."""
_NUM_NAMED = 4
"""Maximum number of checks that a headline names for each result."""
AT_LEAST, AT_MOST, BELOW, WITHIN_FACTOR = "at least", "at most", "below", "within a factor of"
"""Comparison of a value with its limit."""


_T = TypeVar("_T", bound="Check")


@dataclass(frozen=True, kw_only=True)
class Check:
    """Measured value with its limit and the result."""

    name: str
    """Displayed name of the check, such as `AUC against the champion`. The name is unique within a
    decision."""
    value: float | None = None
    """Measured value. None if the value is undefined."""
    low: float | None = None
    """Lower end of the value's 95 % interval. None if the value has no interval."""
    high: float | None = None
    limit: float | None = None
    """Value at which the result of the check changes. None if the check has no limit."""
    bound: str = AT_LEAST
    """Comparison of the value with the limit, such as `at least`."""
    is_difference: bool = False
    """Whether the value is the difference between two models. A difference is printed with its
    sign."""
    result: str
    """One of `RESULTS`."""
    detail: str = ""
    """Explanation printed beside the numbers: one sentence without a full stop."""
    advice: str = ""
    """Advice on how to make the check pass, as one sentence without a full stop."""

    @property
    def passed(self) -> bool:
        """Whether the result is `pass`."""
        return self.result == PASS

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval, or None if the check has no interval."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    @property
    def limit_text(self) -> str | None:
        """Limit as text, or None if the check has no limit.

        >>> Check(name="AUC", limit=0.6, result="pass").limit_text
        'at least 0.6'
        """
        return None if self.limit is None else f"{self.bound} {self.limit:g}"


@dataclass(frozen=True, kw_only=True)
class RuleCheck(Check):
    """Result of a validation rule for one column, or for the data set.

    The result follows from the rule's action. For `block`, the check fails. For `warn`, `notify`
    and `quarantine`, it is a warning. For `info`, the check passes. A rule without a finding has
    one check, which passes.
    """

    rule: str
    """Name in `evergreen.config.validation.RULES`."""
    column: str = ""
    """Column, or `dataset`. Empty if the rule found nothing."""
    action: str = ""
    """Action of the rule. Empty if the rule found nothing."""
    num_quarantined: int = 0
    """Number of rows that the rule quarantined."""


def decide(checks: Iterable[Check]) -> str:
    """Return the worst result: `fail`, else `inconclusive`, else `warn`, else `pass`.

    >>> decide([Check(name="a", result="pass"), Check(name="b", result="inconclusive")])
    'inconclusive'
    """
    return max((check.result for check in checks), key=RESULTS.index, default=PASS)


def worst_first(checks: Iterable[_T]) -> list[_T]:
    """Return the checks in the order of their results, the worst first."""
    return sorted(checks, key=lambda check: -RESULTS.index(check.result))


def headline(checks: Sequence[Check]) -> str:
    """Return a summary of the checks in one line.

    The summary has the values with intervals, the number of passed checks, and the names of the
    first checks that did not pass. The intervals of single columns are omitted.

    >>> auc = Check(name="AUC", value=0.77, low=0.757, high=0.782, limit=0.6, result="pass")
    >>> lead = Check(name="AUC against the champion", value=0.142, is_difference=True,
    ...     low=0.12, high=0.16, limit=-0.002, result="pass")
    >>> headline([auc, lead])
    'AUC 0.7700 [0.7570, 0.7820], +0.1420 against the champion; passed 2 of 2 checks'
    >>> headline([Check(name="requests with clicks", value=3, limit=10, result="inconclusive")])
    'passed 0 of 1 checks; inconclusive: requests with clicks 3 (expected at least 10)'
    """
    estimated = [
        check
        for check in checks
        if check.value is not None and check.interval and not isinstance(check, RuleCheck)
    ]
    first = estimated[0].name if estimated else ""
    parts = [", ".join(_estimate(check, first) for check in estimated)] if estimated else []
    parts.append(f"passed {sum(check.result == PASS for check in checks)} of {len(checks)} checks")
    for result, words in ((FAIL, "failed"), (INCONCLUSIVE, INCONCLUSIVE), (WARN, "warnings")):
        if open_ := [check for check in checks if check.result == result]:
            named = [_named(check, estimated) for check in open_[:_NUM_NAMED]]
            more = len(open_) - len(named)
            parts.append(f"{words}: {', '.join(named)}" + (f" and {more} more" if more else ""))
    return "; ".join(parts)


def sentence(check: Check) -> str:
    """Return one check in words.

    >>> sentence(Check(name="AUC", value=0.5, low=0.4, high=0.6, limit=0.7, result="fail"))
    'AUC 0.5000 [0.4000, 0.6000], at least 0.7: fail'
    >>> sentence(Check(name="evidence that the AUC is below 0.7", value=537.2, limit=500,
    ...     bound="below", result="fail"))
    'evidence that the AUC is below 0.7: 537.2, below 500: fail'
    """
    text = check.name if check.value is None else _valued(check)
    if check.interval:
        low, high = (_number_text(check, end) for end in check.interval)
        text += f" [{low}, {high}]"
    text += f", {check.limit_text}" if check.limit_text else ""
    return f"{text}: {check.result}" + (f". {check.detail}" if check.detail else "")


def advice(checks: Iterable[Check]) -> list[str]:
    """Return the advice of the checks that did not pass and have advice."""
    return [check.advice for check in checks if check.result != PASS and check.advice]


def metrics(checks: Iterable[Check]) -> dict[str, float]:
    """Return the finite values and interval ends of checks, by metric name.

    An interval has two entries: `<name>_low` and `<name>_high`. The metrics count the checks of
    validation rules by action and rule, because the checked columns differ between runs.

    >>> metrics([Check(name="AUC", value=0.5, low=0.4, high=0.6, result="pass")])
    {'auc': 0.5, 'auc_low': 0.4, 'auc_high': 0.6}
    >>> drift = RuleCheck(name="I1: drift", rule="drift", column="I1", action="warn", result="warn")
    >>> metrics([drift, drift])
    {'warn_drift': 2}
    """
    found: dict[str, float | None] = {}
    for check in checks:
        if isinstance(check, RuleCheck):
            if name := f"{check.action}_{check.rule}" if check.action else "":
                found[name] = (found.get(name) or 0) + 1
            continue
        name = re.sub(r"\W+", "_", check.name.lower()).strip("_")
        found |= {name: check.value, f"{name}_low": check.low, f"{name}_high": check.high}
    return {name: each for name, each in found.items() if each is not None and math.isfinite(each)}


def _number_text(check: Check, value: float | None = None) -> str:
    """Return `value`, or else the value of the check, as text in the format of the check."""
    shown = check.value if value is None else value
    if shown is None:
        return "unknown"
    if check.interval or check.is_difference:
        return f"{shown:{'+' if check.is_difference else ''}.4f}"
    return f"{shown:.4g}" if abs(shown) < 1e4 else f"{shown:.0f}"


def _estimate(check: Check, first: str) -> str:
    """Return the name, the value and the interval of a check as text.

    For a difference whose name starts with `first`, the returned text omits `first` and the
    interval.
    """
    if check.is_difference and check.name != first and check.name.startswith(f"{first} "):
        return f"{_number_text(check)} {check.name.removeprefix(first).strip()}"
    assert check.interval
    low, high = (_number_text(check, end) for end in check.interval)
    return f"{_valued(check)} [{low}, {high}]"


def _named(check: Check, shown: Sequence[Check]) -> str:
    """Return the name, the value and the limit of a check as text.

    The value is omitted if the check is in `shown`. If a check has no value, its detail explains
    why.
    """
    if check.value is None and check.detail:
        return f"{check.name} ({check.detail})"
    text = check.name if check.value is None or check in shown else _valued(check)
    return text + (f" (expected {check.limit_text})" if check.limit_text else "")


def _valued(check: Check) -> str:
    """Return the name and the value of a check as text.

    If the name ends with a digit, a colon follows the name.
    """
    return f"{check.name}{':' if check.name[-1:].isdigit() else ''} {_number_text(check)}"
