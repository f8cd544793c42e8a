"""When a column counts as drifted; described where it is used, in `monitoring.drift.comparison`."""

from dataclasses import dataclass

from components.runtime.errors import expect


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
        expect(self, "at least 0", lambda value: value >= 0, "drift_bucket_seconds")
        expect(self, "at least 1", lambda value: value >= 1, "drift_min_rows")
        expect(self, "inside (0, 1)", lambda value: 0 < value < 1, "drift_false_discovery_rate")
        least = ("drift_min_divergence", "drift_min_share_change", "drift_min_outlier_rise")
        expect(self, "a number in [0, 1]", lambda value: 0 <= value <= 1, *least)
