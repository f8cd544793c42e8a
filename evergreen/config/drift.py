"""Thresholds of drift, which validation and the monitor share."""

from dataclasses import dataclass

from evergreen.runtime.errors import expect


@dataclass(frozen=True, kw_only=True)
class DriftThresholds:
    """Minimum effects that count as drift, and the false discovery rate.

    Raises:
        ContractError: a threshold is out of range.
    """

    categorical_drift: float = 0.02
    """Minimum change of a category's share that counts as drift of a column. If chance can explain
    a change, the change is no drift."""
    categorical_drift_relative: float = 0.5
    """Minimum change relative to the category's previous share. The effective limit is the smaller
    of this limit and `categorical_drift`, but never below 0.002."""
    numeric_drift: float = 0.003
    """Minimum bias-corrected Jensen-Shannon divergence, in bits, that counts as drift of a
    column."""
    missing_drift: float = 0.02
    """Minimum change of the share of missing values that counts as drift of a column."""
    false_discovery_rate: float = 0.05
    """False discovery rate: maximum expected share of false alarms among the columns reported as
    drifted."""

    def __post_init__(self) -> None:
        expect(self, "inside (0, 1)", lambda value: 0 < value < 1, "false_discovery_rate")
        expect(
            self,
            "a number in [0, 1]",
            lambda value: 0 <= value <= 1,
            "categorical_drift",
            "categorical_drift_relative",
            "numeric_drift",
            "missing_drift",
        )
