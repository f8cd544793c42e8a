"""The numbers of a verdict: how good two models' scores of the same rows are, and how far apart.

Defined in `contracts.metrics`; named here as `Verdict` and the Kubeflow UI name them. A number that does not exist is
`None`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.contracts.metrics import (
    AucDifference,
    AucEstimate,
    auc_difference,
    auc_estimate,
    calibration,
    log_loss,
    normalized_entropy,
)

Numbers = dict[str, "float | None"]


class Compared(NamedTuple):
    """See `Verdict.candidate` and `Verdict.difference` for the names in each."""

    candidate: Numbers
    champion: Numbers | None
    difference: Numbers | None
    """Candidate minus champion; None without a champion."""


class Estimates(NamedTuple):
    """AUCs with their intervals; None where there is no such number."""

    candidate: AucEstimate | None
    champion: AucEstimate | None
    difference: AucDifference | None
    """Candidate minus champion."""


def estimate(labels: ArrayLike, candidate: ArrayLike, champion: ArrayLike | None) -> Estimates:
    """The estimates of one set of rows; see `compare` for the arguments."""
    if champion is None:
        return Estimates(auc_estimate(labels, candidate), None, None)
    return Estimates(
        auc_estimate(labels, candidate), auc_estimate(labels, champion), auc_difference(labels, candidate, champion)
    )


def compare(
    labels: NDArray[np.int8],
    candidate: NDArray[np.float32],
    champion: NDArray[np.float32] | None,
    estimates: Estimates,
) -> Compared:
    """The numbers of one set of rows.

    Args:
        labels: 0 or 1, [n].
        candidate: The candidate's scores, [n].
        champion: The champion's scores; None = there is none.
        estimates: Those of the same rows, so that nobody computes them twice.
    """
    first = _numbers(labels, candidate, estimates.candidate)
    if champion is None:
        return Compared(first, None, None)
    difference = estimates.difference
    return Compared(
        first,
        _numbers(labels, champion, estimates.champion),
        {
            "auc": difference.auc if difference else None,
            "low": difference.low if difference else None,
            "high": difference.high if difference else None,
            "p_value": difference.p_value if difference else None,
        },
    )


def _numbers(labels: NDArray[np.int8], scores: NDArray[np.float32], estimate: AucEstimate | None) -> Numbers:
    return {
        "auc": estimate.auc if estimate else None,
        "auc_low": estimate.low if estimate else None,
        "auc_high": estimate.high if estimate else None,
        "log_loss": log_loss(labels, scores),
        "normalized_entropy": normalized_entropy(labels, scores),
        "calibration": calibration(labels, scores),
    }
