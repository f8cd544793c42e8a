"""Compares one bucket with the training rows: distances, chance and the verdict on every column.

Three tests of two samples to a column: the distribution of its values (a dense column's without outliers), its share of
missing values, a dense column's share of outliers. All p-values of a bucket are adjusted together; a change counts if
its adjusted p-value is at most `drift_false_discovery_rate` and its size at least the setting's, for in a huge bucket
any difference is significant.

Rows of one request are alike where they share their user. Each test is made as if there were fewer rows, by the design
effect measured in this very bucket, and the same is assumed of the training rows. That rows of one user in several
requests are alike too is not corrected: nothing in a record names the user. Where few users make most requests, the
rate of false alarms is above the setting's.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.config.features import LENGTH
from components.config.monitor import DriftSettings
from components.contracts.reference_statistics import CategoryColumn, DenseColumn
from components.drift_statistics import (
    adjusted,
    design_effect,
    homogeneity,
    jensen_shannon,
    l_infinity,
    proportion,
)
from monitoring.deciding.policy import FeatureDrift
from monitoring.drift.sketch import SCORE, Sketch

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


Counts = NDArray[np.int64]


class _Sample(NamedTuple):
    """A column in the bucket and before, and how many rows say as much as one independent row."""

    now: Counts
    before: Counts
    fair: Counts
    """Of `before`, the rows that tests may use (`contracts.reference_statistics`)."""
    missing: tuple[int, int]
    design: float
    missing_design: float


def compare(sketch: Sketch, settings: DriftSettings) -> tuple[ColumnDrift, ...]:
    """Every judged column of the bucket, in column order."""
    reference = sketch.layout.reference
    excluded = {each for name in reference.excluded for each in (name, LENGTH.format(name=name))}
    columns = [_dense(sketch, name, reference.dense[name]) for name in reference.dense if name not in excluded]
    judged = [name for name in reference.categorical if name not in excluded]
    columns += [_category(sketch, name, reference.categorical[name]) for name in judged]
    if reference.scores:
        columns.append(_score(sketch, reference.scores.counts))
    return _judged(columns, settings)


def _dense(sketch: Sketch, name: str, before: DenseColumn) -> ColumnDrift:
    cells = sketch.cells[sketch.layout.slice_of(name)]
    sample = _sample(
        sketch, name, cells[:-1], before=(before.counts, before.fair_counts), missing=(int(cells[-1]), before.missing)
    )
    inner = slice(*before.inner)
    (outliers, values), (outliers_before, values_before) = (
        (int(side.sum() - side[inner].sum()), int(side.sum())) for side in (sample.now, sample.fair)
    )
    return replace(
        _compared(name, JENSEN_SHANNON, sample),
        distance=jensen_shannon(sample.now[inner], sample.before[inner]),
        p_value=homogeneity(sample.now[inner], sample.fair[inner], sample.design),
        outlier_rate=outliers / values if values else None,
        outlier_rate_before=outliers_before / values_before if values_before else None,
        outlier_p_value=proportion(outliers, values, b=outliers_before, m=values_before, design=sample.design),
    )


def _category(sketch: Sketch, name: str, before: CategoryColumn) -> ColumnDrift:
    cells = sketch.cells[sketch.layout.slice_of(name)]
    listed = (np.append(before.counts, before.others), np.append(before.fair_counts, before.fair_others))
    sample = _sample(sketch, name, cells[:-1], before=listed, missing=(int(cells[-1]), before.missing))
    compared = _compared(name, L_INFINITY, sample)
    return replace(
        compared,
        distance=l_infinity(sample.now, sample.before),
        p_value=homogeneity(sample.now, sample.fair, sample.design),
        # No element of a list is missing.
        missing_p_value=None if name in sketch.layout.reference.lists else compared.missing_p_value,
    )


def _score(sketch: Sketch, before: Counts) -> ColumnDrift:
    sample = _sample(
        sketch, SCORE, sketch.cells[sketch.layout.slice_of(SCORE)], before=(before, before), missing=(0, 0)
    )
    return replace(
        _compared(SCORE, JENSEN_SHANNON, sample),
        distance=jensen_shannon(sample.now, sample.before),
        p_value=homogeneity(sample.now, sample.before, sample.design),
        missing_p_value=None,
    )


def _sample(
    sketch: Sketch, name: str, now: Counts, *, before: tuple[Counts, Counts], missing: tuple[int, int]
) -> _Sample:
    number = sketch.layout.columns.index(name)
    mean_rows = sketch.mean_request_rows(number)
    present = np.array([missing[0], now.sum()])
    return _Sample(
        now,
        *before,
        missing,
        design_effect(*sketch.same_cell(number), shares=_shares(now), mean_rows=mean_rows),
        design_effect(*sketch.same_missing(number), shares=_shares(present), mean_rows=mean_rows),
    )


def _shares(counts: Counts) -> NDArray[np.float64]:
    """Shares of counts [k]; zeros where all are."""
    return counts / max(int(counts.sum()), 1)


def _compared(name: str, measure: str, sample: _Sample) -> ColumnDrift:
    """What all columns have in common."""
    missing, missing_before = sample.missing
    rows, rows_before = missing + int(sample.now.sum()), missing_before + int(sample.before.sum())
    return ColumnDrift(
        column=name,
        measure=measure,
        missing_share=missing / max(rows, 1),
        missing_share_before=missing_before / max(rows_before, 1),
        missing_p_value=proportion(missing, rows, b=missing_before, m=rows_before, design=sample.missing_design),
        design_effect=sample.design,
    )


_TESTS = ("p_value", "missing_p_value", "outlier_p_value")


def _judged(columns: list[ColumnDrift], settings: DriftSettings) -> tuple[ColumnDrift, ...]:
    made = [(i, test) for i, column in enumerate(columns) for test in _TESTS if getattr(column, test) is not None]
    p_values = adjusted([getattr(columns[i], test) for i, test in made])
    significant = {key for key, p in zip(made, p_values) if p <= settings.drift_false_discovery_rate}
    return tuple(
        _verdict(column, {test for test in _TESTS if (i, test) in significant}, settings)
        for i, column in enumerate(columns)
    )


def _verdict(column: ColumnDrift, significant: set[str], settings: DriftSettings) -> ColumnDrift:
    is_share = column.measure == L_INFINITY
    least = settings.drift_min_share_change if is_share else settings.drift_min_divergence
    change = abs(column.missing_share - column.missing_share_before)
    excesses = []
    if "p_value" in significant and column.distance is not None and column.distance >= least:
        excesses.append(column.distance / max(least, 1e-12))
    if "missing_p_value" in significant and change >= settings.drift_min_share_change:
        excesses.append(change / max(settings.drift_min_share_change, 1e-12))
    rise = (column.outlier_rate or 0.0) - (column.outlier_rate_before or 0.0)
    outlying = "outlier_p_value" in significant and rise >= settings.drift_min_outlier_rise and rise > 0
    return replace(column, drifted=bool(excesses), outlying=outlying, excess=max(excesses, default=0.0))
