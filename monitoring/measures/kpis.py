"""The numbers of one window of matured rows. Definitions are `contracts.metrics`'; which rows, `window`'s."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from components.contracts import metrics


@dataclass(frozen=True, kw_only=True)
class Kpis:
    """What a window says of one model version; a number that does not exist is None."""

    version: int
    rows: int
    clicks: int
    auc: float | None
    """None unless both classes are present."""
    auc_low: float | None
    """Lower end of the 95 % interval (DeLong); None with fewer than two rows of either class."""
    auc_high: float | None
    log_loss: float | None
    calibration: float | None
    """Expected clicks per observed click; None without a click."""
    ctr: float | None


def measure(version: int, labels: NDArray[np.uint8], scores: NDArray[np.float32]) -> Kpis:
    """The KPIs of `labels` and `scores`, both of shape [n].

    >>> measure(1, np.zeros(3, np.uint8), np.full(3, 0.5, np.float32)).auc is None
    True
    """
    estimate = metrics.auc_estimate(labels, scores)
    return Kpis(
        version=version,
        rows=len(labels),
        clicks=int(labels.sum()),
        auc=estimate.auc if estimate else metrics.roc_auc(labels, scores),
        auc_low=estimate.low if estimate else None,
        auc_high=estimate.high if estimate else None,
        log_loss=metrics.log_loss(labels, scores),
        calibration=metrics.calibration(labels, scores),
        ctr=float(labels.mean()) if len(labels) else None,
    )
