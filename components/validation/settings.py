"""The thresholds by which validation judges; each belongs to a rule (`rules.RULES`), and `--rules` changes it there.

What a threshold is compared with is described where it is used: in `judge`, `column_tests`, `skew` and `row_rules`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from components.runtime.errors import ContractError

_LEAST_ONE = ("click_rate_factor", "range_factor")
_LISTS = ("request_ids", "days")


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Thresholds of judgement.

    Raises:
        ContractError: a threshold is out of range.
    """

    categorical_drift: float = 0.02
    """Change of one category's share that counts as drift, if it is not explained by chance."""
    categorical_drift_relative: float = 0.5
    """The same relative to the share that the category had; the smaller of the two applies, down to 0.002."""
    numeric_drift: float = 0.003
    """Jensen-Shannon divergence in bits, beyond what chance adds, that counts as drift."""
    mean_drift: float = 0.1
    """Shift of an integer column's mean, in standard deviations of its bucket number, that counts as drift."""
    missing_drift: float = 0.02
    """Change of a column's share of missing values that counts as drift."""
    new_value_share: float = 0.05
    """Largest share of rows with a category unknown to the champion that passes without a finding."""
    missing_share_jump: float = 0.5
    """Largest change of a column's share of missing values that passes without a finding."""
    click_rate_factor: float = 2.0
    """How many times larger or smaller the share of clicks may become without a finding."""
    false_alarm_rate: float = 0.05
    """Share of the features reported as drifted that may be reported by chance (false discovery rate)."""
    skew_share: float = 0.001
    """Largest share of rows, joined between training and serving, whose value may differ."""
    range_factor: float = 1000.0
    """How many times the extremes of the first run a later value may be (used when the schema is inferred). Of counts
    with a heavy tail a window's largest value is one request's: 86 of 400 pairs of windows exceeded 10 times it."""
    max_quarantined_fraction: float = 0.05
    """Largest share of the rows that may be quarantined."""
    request_ids: tuple[str, ...] = ()
    """Requests whose rows offend `named_rows`."""
    days: tuple[str, ...] = ()
    """UTC days (YYYY-MM-DD) whose rows offend `named_rows`."""

    def __post_init__(self) -> None:
        """Refuses thresholds that no measurement can meet."""
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if name in _LISTS:
                if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
                    raise ContractError(f"{name} is {value!r}, expected a list of texts")
                continue
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if name in _LEAST_ONE and not (is_number and value >= 1):
                raise ContractError(f"{name} is {value!r}, expected a finite number of at least 1")
            may_be_zero = name == "max_quarantined_fraction"
            if name not in _LEAST_ONE and not (is_number and 0 <= value <= 1 and (value or may_be_zero)):
                raise ContractError(f"{name} is {value!r}, expected a number in (0, 1]")
