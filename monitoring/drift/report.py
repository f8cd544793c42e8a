"""The drift report of one closed bucket: per column how far it moved, how likely that is by chance, and the verdict."""

from dataclasses import dataclass

from monitoring.deciding.policy import FeatureDrift

JENSEN_SHANNON = "JS"
L_INFINITY = "L-inf"


@dataclass(frozen=True, kw_only=True)
class ColumnDrift:
    """One column of one bucket; a number that does not exist is None."""

    column: str
    """I1..I13, C1..C26 or `score`."""
    measure: str
    """`JS`: Jensen-Shannon divergence in bits, without outliers. `L-inf`: largest change of a value's share."""
    distance: float | None = None
    """Among the values that are there; None where the bucket or the training rows have none. Categories that the
    training rows' list lacks count as one value."""
    p_value: float | None = None
    """Of that difference or a larger one without drift, before the control of many tests."""
    missing_share: float
    missing_share_before: float
    missing_p_value: float | None
    """None for the score, which is never missing."""
    outlier_rate: float | None = None
    """Share of the values outside the training rows' bounds; None for categories, the score, and without values."""
    outlier_rate_before: float | None = None
    outlier_p_value: float | None = None
    design_effect: float
    """Rows of this bucket that say as much of the column as one independent row; 1 where requests' rows are."""
    drifted: bool = False
    """The distribution or the missing share moved: significantly, and by the least that counts."""
    outlying: bool = False
    """Outliers rose: a unit, a sensor or a join is broken, rather than the world changed."""
    excess: float = 0.0
    """By how many times the change is the least one that counts; orders the columns."""


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """One closed bucket of one version."""

    bucket_start: float
    """Event time, seconds since the epoch; earlier than one bucket before the end where small ones were joined."""
    bucket_end: float
    version: int
    rows: int
    requests: int
    reference_rows: int
    columns: tuple[ColumnDrift, ...]
    """All judged columns in column order; the score is absent where the model store keeps no histogram of it."""

    @property
    def drifted(self) -> tuple[ColumnDrift, ...]:
        """Columns that drifted, the worst first."""
        moved = [column for column in self.columns if column.drifted]
        return tuple(sorted(moved, key=lambda column: -column.excess))

    @property
    def outlying(self) -> tuple[ColumnDrift, ...]:
        """Columns with too many outliers, in column order."""
        return tuple(column for column in self.columns if column.outlying)

    def evidence(self) -> FeatureDrift:
        """What the policies get of it."""
        return FeatureDrift(
            bucket_end=self.bucket_end,
            version=self.version,
            rows=self.rows,
            drifted=tuple(column.column for column in self.drifted),
            distances={c.column: c.distance for c in self.columns if c.distance is not None},
        )

    def text(self) -> str:
        """One sentence for people."""
        where = f"over {self.rows} rows of model version {self.version}"
        parts = []
        if self.drifted:
            more = f" and {len(self.drifted) - 3} more" if len(self.drifted) > 3 else ""
            parts.append("drift: " + ", ".join(_describe_drift(column) for column in self.drifted[:3]) + more)
        if self.outlying:
            rates = ", ".join(f"{c.column} {c.outlier_rate_before:.2%} -> {c.outlier_rate:.2%}" for c in self.outlying)
            parts.append(f"outliers: {rates}")
        return f"{'; '.join(parts) or 'no drift'} {where}"


def _describe_drift(column: ColumnDrift) -> str:
    change = column.missing_share - column.missing_share_before
    distance = "" if column.distance is None else f" {column.measure} {column.distance:.3f}"
    missing = f", missing {change:+.1%}" if abs(change) >= 0.01 else ""
    return f"{column.column}{distance}{missing}"
