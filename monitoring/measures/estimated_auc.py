"""The AUC that a model probably has while labels are missing altogether: confidence-based performance estimation.

CBPE (NannyML's documentation, "Estimating performance of binary classification", 2022; the idea: Guillory et al. 2021):
scores are calibrated on rows whose labels are known; of new rows each is then a click with its calibrated probability,
and the expected AUC follows (`expected_auc`). NannyML goes through the expected confusion matrix of every
threshold, which gives the same number. The calibration here is logistic in the score's log odds (Platt 1999): two
numbers, which some hundred clicks determine, in place of isotonic regression, which needs thousands in its tail.

It sees a covariate shift: rows of another mixture, more or fewer of them hard to tell apart. It is **blind to concept
drift**: that rows of a score are clicked as often as before is what it assumes, so when what users want changes and the
scores do not, the estimate stays where it was while the true AUC falls. Its band says nothing of that either. What does
see it are labels: `kpis`, or the first clicks in `open_labels`, which takes the expected AUC of its probabilities from
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts.metrics import Z_95, auc_estimate
from components.runtime.errors import ContractError

MIN_CLICKS = 50
"""Fewer clicks, or fewer rows without one, fit no calibration."""
_STEPS = 30


class ExpectedAuc(NamedTuple):
    """An AUC of uncertain labels and its standard error."""

    auc: float
    standard_error: float
    """Of the AUC that as many rows will have: DeLong's, each row weighted by its probability."""


def expected_auc(probabilities: NDArray[np.float64], scores: NDArray[np.floating]) -> ExpectedAuc | None:
    """Expected number of (click, other) pairs that the click wins, over the expected number of pairs.

    Labels are taken as independent: the pair of i and j is (click, other) with probability p_i (1 - p_j). Probabilities
    of 0 and 1 give the AUC of these labels.

    Args:
        probabilities: In [0, 1], shape [n].
        scores: Finite, shape [n]; only their order counts.

    Returns:
        None where no pair is possible: fewer than two rows, or all probabilities 0, or all 1.
    """
    order = np.argsort(scores)
    ordered, p = np.asarray(scores)[order], probabilities[order]
    firsts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]][: len(p)])
    if not len(firsts):
        return None
    sizes = np.diff(firsts, append=len(p))
    others_below, clicks_above = _below(1 - p, firsts, sizes), p.sum() - _below(p, firsts, sizes)
    # A row is no pair with itself; with its own score it would be one, counted half.
    others_below, clicks_above = others_below - (1 - p) / 2, clicks_above - p / 2
    clicks, others = float(p.sum()), float((1 - p).sum())
    pairs = clicks * others - float((p * (1 - p)).sum())
    if pairs <= 1e-12:
        return None
    auc = min(1.0, max(0.0, float((p * others_below).sum()) / pairs))
    won, lost = others_below / others, clicks_above / clicks
    variance = float((p * (won - auc) ** 2).sum()) / clicks**2 + float(((1 - p) * (lost - auc) ** 2).sum()) / others**2
    return ExpectedAuc(auc, float(np.sqrt(variance)))


def _below(weights: NDArray[np.float64], firsts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """For each row of an order in runs of equal scores: the weight of the runs below and half that of its own."""
    in_run = np.add.reduceat(weights, firsts)
    below: NDArray[np.float64] = np.repeat(np.cumsum(in_run) - in_run / 2, sizes)
    return below


def row_losses(scores: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Log loss in nats of each row [n] if it is a click, and if it is none; clipped as in `metrics.row_log_losses`."""
    clipped = np.clip(np.asarray(scores, np.float64), 1e-7, 1 - 1e-7)
    return -np.log(clipped), -np.log1p(-clipped)


@dataclass(frozen=True)
class Calibration:
    """Turns scores into probabilities: sigmoid(intercept + slope log(score / (1 - score)))."""

    intercept: float
    slope: float
    """1 and an intercept of 0 for a calibrated model; negative for one that orders the wrong way round."""
    auc_error: float
    """Standard error of the AUC of the rows that it was fitted on: how well they tell the slope."""

    def __call__(self, scores: NDArray[np.floating]) -> NDArray[np.float64]:
        """Probabilities [n] of `scores` [n]."""
        return _sigmoid(self.intercept + self.slope * _log_odds(scores))


@dataclass(frozen=True)
class EstimatedAuc:
    """An estimated AUC and its 95 % band, clipped to [0, 1]."""

    auc: float
    low: float
    high: float


def fit_calibration(labels: NDArray[np.uint8], scores: NDArray[np.floating]) -> Calibration | None:
    """The calibration most likely after matured rows, by Newton's method.

    Args:
        labels: 0 or 1, shape [n].
        scores: Probabilities, shape [n].

    Returns:
        None with fewer than `MIN_CLICKS` clicks or rows without one, or where no finite calibration is most likely
        (scores that separate the classes).

    Raises:
        ContractError: shapes differ, a label is neither 0 nor 1, or a score is no probability.
    """
    found = auc_estimate(labels, scores)
    _expect_probabilities(scores)
    click = labels == 1
    if found is None or min(int(click.sum()), int((~click).sum())) < MIN_CLICKS:
        return None
    odds = _log_odds(scores)
    inputs = np.stack([np.ones(len(odds)), odds])
    # One number for all rows: the slope is then no matter, but Newton's matrix is singular.
    weights = np.array([0.0, 1.0]) if np.ptp(odds) > 0 else np.array([_log_odds(click.mean(keepdims=True))[0], 0.0])
    for _ in range(_STEPS if np.ptp(odds) > 0 else 0):
        p = _sigmoid(weights @ inputs)
        gradient = inputs @ (click - p)
        hessian = (inputs * (p * (1 - p))) @ inputs.T
        if not np.isfinite(hessian).all() or abs(np.linalg.det(hessian)) < 1e-12:
            return None
        # Far from the maximum a whole step may overshoot it.
        step = np.linalg.solve(hessian, gradient)
        weights = weights + step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-9:
            return Calibration(float(weights[0]), float(weights[1]), found.standard_error)
    return None if np.ptp(odds) > 0 else Calibration(float(weights[0]), float(weights[1]), found.standard_error)


def estimate_auc(scores: NDArray[np.floating], calibration: Calibration) -> EstimatedAuc | None:
    """The AUC that rows of these scores have if rows of a score are clicked as often as those calibrated on.

    The band joins two errors as independent: that of as many labels, once they exist (DeLong's, in expectation), and
    that of the rows calibrated on. It holds the AUC to come in 95 % of cases only without concept drift.

    Args:
        scores: Probabilities of rows without labels, shape [n].
        calibration: Fitted on rows of the same model version.

    Returns:
        None with fewer than two rows.

    Raises:
        ContractError: a score is no probability.
    """
    _expect_probabilities(scores)
    found = expected_auc(calibration(scores), scores) if len(scores) else None
    if found is None:
        return None
    reach = Z_95 * float(np.hypot(found.standard_error, calibration.auc_error))
    return EstimatedAuc(found.auc, max(0.0, found.auc - reach), min(1.0, found.auc + reach))


def _expect_probabilities(scores: NDArray[np.floating]) -> None:
    if not ((scores >= 0) & (scores <= 1)).all():
        raise ContractError("scores hold a value outside [0, 1], expected probabilities")


def _log_odds(scores: NDArray[np.floating]) -> NDArray[np.float64]:
    clipped = np.clip(np.asarray(scores, np.float64), 1e-7, 1 - 1e-7)
    odds: NDArray[np.float64] = np.log(clipped) - np.log1p(-clipped)
    return odds


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    positive: NDArray[np.float64] = 1.0 / (1.0 + np.exp(-np.abs(logits)))
    return np.where(logits >= 0, positive, 1.0 - positive)
