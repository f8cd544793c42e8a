"""When a column counts as drifted; described where it is used, in `monitoring.drift.comparison`."""

from __future__ import annotations

from dataclasses import dataclass

from components.runtime.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class DriftSettings:
    """Buckets and thresholds of the drift watch."""

    drift_bucket_seconds: float = 3600.0
    """Event time that predictions are compared over with the training rows; 0 = drift is not watched."""
    drift_min_rows: int = 2000
    """Fewest rows that are judged; a smaller bucket joins the next one of its version."""
    drift_false_discovery_rate: float = 0.01
    """Probability that anything is called drift, or outlying, in a bucket where nothing moved."""
    drift_min_divergence: float = 0.003
    """Least Jensen-Shannon divergence, in bits, of an integer column or the score that counts as drift."""
    drift_min_share_change: float = 0.02
    """Least change of a category's share (L-infinity) or of a column's missing share that counts as drift."""
    drift_min_outlier_rise: float = 0.005
    """Least rise of an integer column's share of outliers that is an alarm."""

    def __post_init__(self) -> None:
        """Refuses settings that judge nothing."""
        if not self.drift_bucket_seconds >= 0:
            raise ContractError(f"drift_bucket_seconds is {self.drift_bucket_seconds}, expected at least 0")
        if self.drift_min_rows < 1:
            raise ContractError(f"drift_min_rows is {self.drift_min_rows}, expected at least 1")
        if not 0 < self.drift_false_discovery_rate < 1:
            raise ContractError(
                f"drift_false_discovery_rate is {self.drift_false_discovery_rate}, expected inside (0, 1)"
            )
        for name in ("drift_min_divergence", "drift_min_share_change", "drift_min_outlier_rise"):
            if not 0 <= getattr(self, name) <= 1:
                raise ContractError(f"{name} is {getattr(self, name)}, expected a number in [0, 1]")
