"""Curves that people judge a classifier by: ROC, confusion at one threshold, calibration by score.

Small enough to draw; the exact areas and ratios are `contracts.metrics`'.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_ROC_POINTS = 200


class RocPoint(NamedTuple):
    """Rates of the rows that score at or above `threshold`."""

    false_positive_rate: float
    true_positive_rate: float
    threshold: float


class CalibrationBin(NamedTuple):
    """One equal share of the rows, cut by score."""

    num_rows: int
    mean_score: float
    click_rate: float


def roc_curve(
    labels: NDArray[np.int8], scores: NDArray[np.float32], max_points: int = MAX_ROC_POINTS
) -> list[RocPoint]:
    """Points of the ROC curve from (0, 0) to (1, 1), evenly spread along it; empty unless both classes are present.

    Every point is one of the exact curve. The first has no row above its threshold; it is written as 1, being the
    largest probability, where others write infinity, which no metadata store takes.
    """
    num_clicks = int(np.count_nonzero(labels))
    num_others = len(labels) - num_clicks
    if not num_clicks or not num_others:
        return []
    order = np.argsort(-scores, kind="stable")
    descending = scores[order]
    last_of_tie = np.r_[np.flatnonzero(np.diff(descending)), len(descending) - 1]
    clicks = np.cumsum(labels[order], dtype=np.int64)[last_of_tie]
    true_rate = np.r_[0.0, clicks / num_clicks]
    false_rate = np.r_[0.0, (last_of_tie + 1 - clicks) / num_others]
    thresholds = np.r_[1.0, descending[last_of_tie].astype(np.float64)]
    along = true_rate + false_rate
    wanted = np.searchsorted(along, np.linspace(0.0, 2.0, max_points))
    kept = np.unique(np.r_[0, np.minimum(wanted, len(along) - 1), len(along) - 1])
    # searchsorted's first hit for 0 is the point (0, 0) itself, so no more than max_points + 1 are kept.
    return [RocPoint(*map(float, point)) for point in zip(false_rate[kept], true_rate[kept], thresholds[kept])]


def confusion_matrix(labels: NDArray[np.int8], scores: NDArray[np.float32], threshold: float = 0.5) -> list[list[int]]:
    """Rows by truth, columns by answer, no click before click; a score of exactly `threshold` answers a click."""
    click, answered = labels == 1, scores >= threshold
    return [[int(np.count_nonzero((click == truth) & (answered == said))) for said in (0, 1)] for truth in (0, 1)]


def calibration_bins(labels: NDArray[np.int8], scores: NDArray[np.float32], num_bins: int = 10) -> list[CalibrationBin]:
    """Mean score against click rate in shares of equal size, lowest scores first; no more of them than rows."""
    order = np.argsort(scores, kind="stable")
    return [
        CalibrationBin(len(rows), float(scores[rows].mean(dtype=np.float64)), float(labels[rows].mean()))
        for rows in np.array_split(order, num_bins)
        if len(rows)
    ]
