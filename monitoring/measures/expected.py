"""AUC and log loss where a row's label is known only as a probability; with known labels they are `contracts.metrics`'.

In: scores, and of each row the probability that it is, or becomes, a click. Where these come from is left to
`open_labels` (labels that are still open) and `estimated_auc` (labels that are missing).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
