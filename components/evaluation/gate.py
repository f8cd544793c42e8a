"""The gate: decides from labels and scores alone whether the candidate may be released, and gives the reason.

Two checks, each by a 95 % interval (DeLong, rows of one request counted as alike): the candidate's AUC against an
absolute floor, and its paired difference to the champion's AUC against the loss that is allowed (non-inferiority). A
check passes where the whole interval lies on the good side, fails where it lies on the bad side, and is inconclusive
between, or without an interval. Scores are computed elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from components.contracts.metrics import (
    MIN_DEGREES,
    Z_95,
    AucDifference,
    AucEstimate,
    auc_difference,
    auc_estimate,
)
from components.runtime.errors import ContractError

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"

Z_POWER = 0.8416212335729143
"""80 % quantile of the normal distribution: the power that `rows_needed` aims at."""
MIN_CLASS_REQUESTS = 10
"""Requests with a click, and with a row without one, below which an interval is not trusted: simulated with clicks in
4 to 9 requests, some 95 % intervals hold in 92 % of the windows (docs/evaluation.md)."""


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """What a candidate must show."""

    min_auc: float = 0.6
    """AUC that a model needs to be released at all."""
    max_auc_loss: float = 0.002
    """AUC by which the candidate may trail the champion."""
    accept_inconclusive: bool = False
    """Whether a candidate is released that the held-out rows can neither clear nor condemn."""

    def __post_init__(self) -> None:
        """Refuses thresholds that no AUC can meet or miss."""
        for name in ("min_auc", "max_auc_loss"):
            if not 0.0 <= (value := getattr(self, name)) <= 1.0:
                raise ContractError(f"{name} is {value}, expected a number in [0, 1]")


class Estimates(NamedTuple):
    """AUCs with their intervals; None where there is no such number."""

    candidate: AucEstimate | None
    champion: AucEstimate | None
    difference: AucDifference | None
    """Candidate minus champion."""


def estimate(
    labels: ArrayLike, candidate: ArrayLike, champion: ArrayLike | None = None, *, groups: ArrayLike
) -> Estimates:
    """The estimates of one set of rows; see `judge` for the arguments."""
    alone = auc_estimate(labels, candidate, groups=groups)
    if champion is None:
        return Estimates(alone, None, None)
    difference = auc_difference(labels, candidate, champion, groups=groups)
    return Estimates(alone, auc_estimate(labels, champion, groups=groups), difference)


class GateJudgement(NamedTuple):
    """The gate's answer, and the estimates that it rests on."""

    decision: str
    """`pass`, `fail` or `inconclusive`."""
    accepted: bool
    reason: str
    estimates: Estimates
    rows_needed: int | None
    """Rows at which an inconclusive gate would decide with 80 % probability if the observed numbers were the true
    ones; `None` where it decided, or where more rows of this kind would only show that the candidate is too weak."""


class _Check(NamedTuple):
    decision: str
    reason: str
    rows_needed: int | None = None


def judge(
    labels: ArrayLike,
    candidate: ArrayLike,
    champion: ArrayLike | None = None,
    *,
    groups: ArrayLike,
    settings: GateSettings,
) -> GateJudgement:
    """The gate's answer for one candidate on the held-out rows.

    Args:
        labels: 0 or 1, [n].
        candidate: The candidate's scores, [n].
        champion: The live model's scores of the same rows; None judges by the floor alone.
        groups: The request of each row, strings or integers, [n]: rows of one request are not independent.
        settings: The thresholds.

    Raises:
        ContractError: lengths differ, a label is neither 0 nor 1, or a score is not finite.
    """
    label_array = np.asarray(labels)
    estimates = estimate(label_array, candidate, champion, groups=groups)
    if (check := _too_few(label_array, np.asarray(groups))) is not None:
        checks = [check]
    else:
        checks = [_above_floor(estimates.candidate, settings.min_auc, len(label_array))]
        if champion is not None:
            checks.append(_not_worse(estimates.difference, settings.max_auc_loss, len(label_array)))

    decisions = [check.decision for check in checks]
    decision = next((d for d in (FAIL, INCONCLUSIVE) if d in decisions), PASS)
    rows_needed = _rows_that_decide(checks) if decision == INCONCLUSIVE else None
    num_clicks = int(np.count_nonzero(label_array))
    reason = f"{decision} over {len(label_array)} held-out rows with {num_clicks} clicks: " + "; ".join(
        check.reason for check in checks
    )
    if champion is None:
        reason += "; there is no champion to compare with"
    if rows_needed is not None:
        reason += f"; about {rows_needed} rows would decide"
    accepted = decision == PASS or (decision == INCONCLUSIVE and settings.accept_inconclusive)
    if accepted and decision == INCONCLUSIVE:
        reason += "; accepted nevertheless, because accept_inconclusive is set"
    return GateJudgement(decision, accepted, reason, estimates, rows_needed)


def rows_to_decide(num_rows: int, standard_error: float, distance: float) -> int:
    """Rows at which an observed `distance` (> 0) from a threshold is decided with 80 % probability.

    The standard error falls with the root of the rows, and the interval clears the threshold with probability 0.8
    once the distance is (z_0.975 + z_0.8) standard errors: rows = n * ((1.96 + 0.84) * error / distance)^2, the sample
    size of a non-inferiority trial (Julious 2004, Statistics in Medicine 23:1921, equation for one-sided 2.5 %).

    >>> rows_to_decide(1000, 0.01, 0.01)
    7849
    """
    return math.ceil(num_rows * ((Z_95 + Z_POWER) * standard_error / distance) ** 2)


def _too_few(labels: np.ndarray, groups: np.ndarray) -> _Check | None:  # type: ignore[type-arg]
    found = {
        "clicks": len(np.unique(groups[labels == 1])),
        "rows without a click": len(np.unique(groups[labels == 0])),
    }
    words, fewest = min(found.items(), key=lambda item: item[1])
    if fewest >= MIN_CLASS_REQUESTS:
        return None
    rows_needed = math.ceil(len(labels) * MIN_CLASS_REQUESTS / fewest) if fewest else None
    reason = f"{words} come from {fewest} requests, expected at least {MIN_CLASS_REQUESTS}"
    return _Check(INCONCLUSIVE, reason, rows_needed)


def _above_floor(estimate: AucEstimate | None, min_auc: float, num_rows: int) -> _Check:
    if estimate is None:
        return _without_interval("auc")
    words = f"auc {estimate.auc:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"
    reasons = {
        PASS: f"{words} is at least the floor {min_auc:g}",
        FAIL: f"{words} is below the floor {min_auc:g}",
        INCONCLUSIVE: f"{words} may lie on either side of the floor {min_auc:g}",
    }
    return _check_interval(estimate, min_auc, num_rows, reasons=reasons)


def _not_worse(difference: AucDifference | None, max_auc_loss: float, num_rows: int) -> _Check:
    if difference is None:
        return _without_interval("difference to the champion's auc")
    words = f"auc differs from the champion's by {difference.auc:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
    reasons = {
        PASS: f"{words}, a loss of at most {max_auc_loss:g}",
        FAIL: f"{words}, a loss of more than {max_auc_loss:g}",
        INCONCLUSIVE: f"{words}, which may be a loss of more than {max_auc_loss:g}",
    }
    return _check_interval(difference, -max_auc_loss, num_rows, reasons=reasons)


def _without_interval(name: str) -> _Check:
    reason = f"{name} has no interval: no rows are in the wrong order, or all but {MIN_DEGREES} requests hardly count"
    return _Check(INCONCLUSIVE, reason)


def _check_interval(
    found: AucEstimate | AucDifference, threshold: float, num_rows: int, *, reasons: dict[str, str]
) -> _Check:
    decision = PASS if found.low >= threshold else FAIL if found.high < threshold else INCONCLUSIVE
    distance, rows = found.auc - threshold, None
    if decision == INCONCLUSIVE and distance > 0:
        rows = rows_to_decide(num_rows, found.standard_error, distance)
    return _Check(decision, reasons[decision], rows)


def _rows_that_decide(checks: list[_Check]) -> int | None:
    """The most rows that an inconclusive check needs; None where one of them would turn into a fail."""
    needs = [check.rows_needed for check in checks if check.decision == INCONCLUSIVE]
    known = [need for need in needs if need is not None]
    return max(known) if known and len(known) == len(needs) else None
