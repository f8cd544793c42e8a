"""Reports of an evaluation: the model's card, and the metrics and curve that Kubeflow's UI draws.

The UI shows the card's page in a frame without network access, and draws flat metrics and the ROC
curve from JSON. All numbers must be finite, because a NaN or infinity in KFP's metadata ends the
run. Other modules compute the numbers.
"""

import math
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.evaluation.evaluate import Evaluation
from components.evaluation.gate import MIN_CLASS_REQUESTS
from components.evaluation.scoring import ScoredHoldout
from evergreen.contracts.checks import metrics
from evergreen.contracts.manifests import Model, RawDataset, ValidationReport, Verdict
from evergreen.registry.model_cards import CalibrationBin, ModelCard
from evergreen.statistics.metrics import row_weighted


def make_card(
    evaluation: Evaluation,
    *,
    run: str,
    model: Model,
    raw: RawDataset,
    validation: ValidationReport | None,
) -> ModelCard:
    """Return the model's card after the gate, without the names of the lake's files.

    The lake can have many files.
    """
    scored = evaluation.scored
    bins = partial(calibration_bins, scored.labels, weights=scored.weights)
    return ModelCard(
        run=run,
        model=replace(model, files={}),
        raw=replace(raw, files={}),
        verdict=evaluation.verdict,
        gate={**asdict(evaluation.settings), "min_class_requests": MIN_CLASS_REQUESTS},
        slices=evaluation.slices,
        calibration=bins(scored.candidate),
        champion_calibration=[] if scored.champion is None else bins(scored.champion),
        validation=validation,
    )


def metrics_document(verdict: Verdict, *, train_rows: int) -> dict[str, float]:
    """Return the metrics by which people compare runs in Kubeflow. Unknown metrics are left out.

    The metrics contain the value of each check. If a check has an interval, the metrics also
    contain both ends of the interval. The model card contains all other numbers.

    Args:
        verdict: The gate's verdict on the candidate.
        train_rows: Number of rows on which the candidate was trained in this run.
    """
    values: dict[str, float | None] = {
        "accepted": int(verdict.accepted),
        "auc": verdict.candidate.auc,
        "log_loss": verdict.candidate.log_loss,
        "calibration": verdict.candidate.calibration,
        "champion_auc": verdict.champion.auc if verdict.champion else None,
        "rows_trained": train_rows,
        "rows_held_out": verdict.num_rows,
    }
    known = {
        name: value for name, value in values.items() if value is not None and math.isfinite(value)
    }
    return {**known, **metrics(verdict.checks)}


def roc_document(scored: ScoredHoldout) -> dict[str, list[float]]:
    """Return the arguments of KFP's `log_roc_curve`.

    The lists are empty unless both classes are present.
    """
    points = roc_curve(scored.labels, scored.candidate)
    return {
        "fpr": [point.false_positive_rate for point in points],
        "tpr": [point.true_positive_rate for point in points],
        "threshold": [point.threshold for point in points],
    }


# -- curves of a classifier


_MAX_ROC_POINTS = 200


class RocPoint(NamedTuple):
    """Rates if rows with a score of at least `threshold` are classified as positive."""

    false_positive_rate: float
    true_positive_rate: float
    threshold: float


def roc_curve(
    labels: NDArray[np.int8], scores: NDArray[np.float32], max_points: int = _MAX_ROC_POINTS
) -> list[RocPoint]:
    """Return points of the ROC curve from (0, 0) to (1, 1), evenly spaced along it.

    Every point is on the exact curve. The list is empty unless both classes are present. No row
    scores above the threshold of the first point. The first threshold is 1, the largest
    probability, because metadata stores reject infinity.
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
    chosen = np.unique(np.r_[0, np.minimum(wanted, len(along) - 1), len(along) - 1])
    # np.searchsorted maps 0 to the point (0, 0), so the curve keeps at most max_points + 1 points.
    return [
        RocPoint(*map(float, point))
        for point in zip(false_rate[chosen], true_rate[chosen], thresholds[chosen])
    ]


def calibration_bins(
    labels: NDArray[np.int8],
    scores: NDArray[np.float32],
    num_bins: int = 10,
    *,
    weights: NDArray[np.float32] | None = None,
) -> list[CalibrationBin]:
    """Return the mean score and the click rate of each bin, lowest scores first.

    All bins have about equally many rows.

    If rows have weights, the mean score and the click rate are weighted. There are never more bins
    than rows.
    """

    def mean(values: NDArray[Any], rows: NDArray[np.int64]) -> float:
        return float(
            row_weighted(
                values[rows].astype(np.float64), None if weights is None else weights[rows]
            ).mean()
        )

    order = np.argsort(scores, kind="stable")
    return [
        CalibrationBin(
            num_rows=len(rows), mean_score=mean(scores, rows), click_rate=mean(labels, rows)
        )
        for rows in np.array_split(order, num_bins)
        if len(rows) and (weights is None or weights[rows].any())
    ]
