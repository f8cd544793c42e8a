"""Compare a bucket of predictions with the training rows of its model.

`evergreen.statistics.comparison` compares the profiles. Outliers are tested separately, and means
are not compared. The score is compared like a column. The histogram of the scores in production is
compared with the histogram of the holdout scores.

Rows are not grouped by user. Rows of one user in several requests are therefore treated as
independent. If few users make most requests, the rate of false alarms is above the setting.
"""

from dataclasses import dataclass, replace

from evergreen.config.monitor import DriftSettings
from evergreen.statistics.column_profile import histogram_profile
from evergreen.statistics.comparison import ColumnDrift, Outliers, compare_tables
from monitoring.drift.sketch import SCORE, Sketch
from monitoring.policies.policy import FeatureDrift


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """Comparison of one closed bucket of one version."""

    bucket_start: float
    """Event time in seconds since the epoch. The value for merged buckets is the start of the first
    bucket."""
    bucket_end: float
    version: int
    rows: int
    requests: int
    reference_rows: int
    columns: tuple[ColumnDrift, ...]
    """All compared columns in column order. The column of scores is missing if the model registry
    has no histogram of scores."""

    @property
    def drifted(self) -> tuple[ColumnDrift, ...]:
        """Columns that drifted, worst first."""
        moved = [column for column in self.columns if column.drifted]
        return tuple(sorted(moved, key=lambda column: -column.excess))

    @property
    def outlying(self) -> tuple[ColumnDrift, ...]:
        """Columns with too many outliers, in column order."""
        return tuple(column for column in self.columns if column.outlying)

    def evidence(self) -> FeatureDrift:
        """Return the report as evidence for the policies."""
        return FeatureDrift(
            bucket_end=self.bucket_end,
            version=self.version,
            rows=self.rows,
            drifted=tuple(column.feature for column in self.drifted),
            distances={c.feature: c.effect for c in self.columns if c.effect is not None},
        )

    def text(self) -> str:
        """Describe the report in one sentence."""
        where = f"over {self.rows} rows of model version {self.version}"
        parts = []
        if self.drifted:
            more = f" and {len(self.drifted) - 3} more" if len(self.drifted) > 3 else ""
            parts.append(
                "drift: " + ", ".join(_describe_drift(column) for column in self.drifted[:3]) + more
            )
        if self.outlying:
            rates = ", ".join(
                f"{c.feature} {c.outliers_before:.2%} -> {c.outliers_now:.2%}"
                for c in self.outlying
            )
            parts.append(f"outliers: {rates}")
        return f"{'; '.join(parts) or 'no drift'} {where}"


def _describe_drift(column: ColumnDrift) -> str:
    change = (column.missing_now or 0.0) - (column.missing_before or 0.0)
    effect = "" if column.effect is None else f" {column.effect:.3f}"
    missing = f", missing {change:+.1%}" if abs(change) >= 0.01 else ""
    return f"{column.feature}{effect}{missing}"


def compare(sketch: Sketch, settings: DriftSettings) -> tuple[ColumnDrift, ...]:
    """Compare every column of the bucket, in column order."""
    reference, before = sketch.layout.reference, sketch.layout.reference.profile
    if reference.scores:
        scores = histogram_profile(reference.scores.counts)
        before = replace(before, columns={**before.columns, SCORE: scores})
    outliers = Outliers(reference.bounds, settings.outlier_drift)
    found = compare_tables(sketch.profile(), before, settings, outliers=outliers)
    return tuple(column.entry(name) for name, column in found.items())
