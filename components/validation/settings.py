"""The thresholds by which validation judges; flags of the step, in the same names.

What each threshold is compared with is described where it is used: `components.validation.rules` and `.drift`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from components.runtime.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Thresholds of judgement; all of them lead to a warning, never to a block.

    Raises:
        ContractError: a threshold lies outside its range.
    """

    categorical_drift: float = 0.02
    """Change of one category's share (0..1) from which on it is drift, if it is no chance."""
    categorical_drift_relative: float = 0.5
    """The same as a part of the share that the category had; the smaller of the two holds, down to 0.002."""
    numeric_drift: float = 0.003
    """Jensen-Shannon divergence (bits, 0..1), beyond chance's part, from which on it is drift; a normal distribution
    has it shifted by an eighth of a standard deviation."""
    mean_drift: float = 0.1
    """Shift of an integer column's mean, in standard deviations of its bucket number, from which on it is drift."""
    missing_drift: float = 0.02
    """Change of a column's share of missing values (0..1) from which on it is drift."""
    new_value_share: float = 0.05
    """Largest share of rows whose category the champion's rows certainly did not hold."""
    missing_share_jump: float = 0.5
    """Largest change of a column's share of missing values."""
    click_rate_factor: float = 2.0
    """How many times larger or smaller the share of clicks may be than in the champion's rows."""
    false_alarm_rate: float = 0.05
    """False discovery rate: share of the features called drifted that may be called so by chance."""
    skew_share: float = 0.001
    """Largest share of rows, trained on and served under one name, whose value may differ."""
    range_factor: float = 10.0
    """How many times the first run's extremes a value may be before it is named; more where a heavy tail and few rows
    say less of the next rows' extremes (`schemas.extremes`)."""

    def __post_init__(self) -> None:
        """Refuses thresholds that no distance can meet."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("click_rate_factor", "range_factor"):
                if not 1 <= value < float("inf"):
                    raise ContractError(f"{field.name} is {value}, expected a finite number of at least 1")
            elif not 0 < value <= 1:
                raise ContractError(f"{field.name} is {value}, expected a number in (0, 1]")
