"""The gate: decides from labels and scores alone whether the candidate may be released, and gives the reason.

Two checks decide by a 95 % interval (DeLong, rows of one user counted as alike, or of one request where the recommender
names no user): the candidate's AUC against an absolute floor, and its paired difference to the champion's AUC against
the loss that is allowed (non-inferiority). They pass where the whole interval lies on the good side, fail where it lies
on the bad side, and are inconclusive between, or without an interval. An inconclusive model is not lost: a canary goes
on judging it (`deployment.canary`).

Two checks only ever refuse, where the rows are sure of it: a slice of them loses more of its log loss than is allowed
(one-sided tests, Holm's correction over all slices), or clicks are predicted wrongly by more than a factor. What the
power of each is, docs/evaluation.md says. Sample weights count in these two: what they judge depends on the click rate.
An AUC does not, and counts rows alike. Scores are computed, and slices cut, elsewhere.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.contracts.manifests import FAIL, INCONCLUSIVE, PASS
from components.contracts.metrics import (
    MIN_DEGREES,
    AucDifference,
    AucEstimate,
    auc_difference,
    auc_estimate,
    calibration,
    group_numbers,
    grouped_deviation,
    row_log_losses,
    row_weighted,
    student_p_value,
)
from components.evaluation.settings import GateSettings

MIN_CLASS_REQUESTS = 10
"""Requests (or users) with a click, and with a row without one, below which an interval is not trusted: simulated with
clicks in 4 to 9 requests, some 95 % intervals hold in 92 % of the windows (docs/evaluation.md)."""
SLICE_ALPHA = 0.05
"""Highest probability of refusing a model that loses no more than is allowed in any slice, over all slices."""


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
    reason: str
    estimates: Estimates
    slice_p_values: Mapping[str, float]
    """One-sided, of each slice that could be tested: that it loses no more than is allowed."""


class _Check(NamedTuple):
    decision: str
    reason: str


def judge(
    labels: ArrayLike,
    candidate: ArrayLike,
    champion: ArrayLike | None = None,
    *,
    groups: ArrayLike,
    weights: ArrayLike | None = None,
    slices: Mapping[str, NDArray[np.bool_]] | None = None,
    settings: GateSettings,
) -> GateJudgement:
    """The gate's answer for one candidate on the held-out rows.

    Each row, [n], has its label, 0 or 1; both models' scores (no champion = floor and calibration alone judge); in
    `groups` its user or request, as rows of one are not independent; its weight (None = all count alike). `slices` are
    parts of the rows by name, each [n] whether a row is of it; they may overlap.

    Raises:
        ContractError: lengths differ, a label is neither 0 nor 1, or a score is not finite.
    """
    click = np.asarray(labels)
    estimates = estimate(click, candidate, champion, groups=groups)
    p_values: Mapping[str, float] = {}
    group = group_numbers(groups, len(click))
    has_weight = np.full(len(click), True) if weights is None else np.asarray(weights) > 0
    if words := _too_few(click[has_weight], group[has_weight]):
        checks = [_Check(INCONCLUSIVE, words)]
    else:
        checks = [_above_floor(estimates.candidate, settings.min_auc)]
        if champion is not None:
            checks.append(_not_worse(estimates.difference, settings.max_auc_loss))
        if champion is not None and slices:
            excess = row_log_losses(click, candidate) - (1 + settings.max_slice_loss) * row_log_losses(click, champion)
            slices = {name: rows & has_weight for name, rows in slices.items()}
            p_values = _slice_p_values(click, row_weighted(excess, weights), group, slices=slices)
            checks.append(_no_slice_harmed(p_values, settings.max_slice_loss))
        factor = settings.max_calibration_factor
        checks.append(_calibrated(click, candidate, champion, group=group, weights=weights, factor=factor))
    decision = next((d for d in (FAIL, INCONCLUSIVE) if d in [check.decision for check in checks]), PASS)
    reasons = [check.reason for check in checks]
    if champion is None:
        reasons.append("there is no champion to compare with")
    counts = f"{len(click)} held-out rows with {np.count_nonzero(click)} clicks"
    return GateJudgement(decision, f"{decision} over {counts}: {'; '.join(reasons)}", estimates, p_values)


def _too_few(click: NDArray[np.int8], group: NDArray[np.int64]) -> str:
    """Why no interval of these rows is to be trusted; empty where it is."""
    found = {"clicks": len(np.unique(group[click == 1])), "rows without a click": len(np.unique(group[click == 0]))}
    words, fewest = min(found.items(), key=lambda item: item[1])
    return "" if fewest >= MIN_CLASS_REQUESTS else f"{words} come from {fewest} requests, expected {MIN_CLASS_REQUESTS}"


def _above_floor(estimate: AucEstimate | None, min_auc: float) -> _Check:
    if estimate is None:
        return _without_interval("auc")
    words = f"auc {estimate.auc:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"
    reasons = {
        PASS: f"{words} is at least the floor {min_auc:g}",
        FAIL: f"{words} is below the floor {min_auc:g}",
        INCONCLUSIVE: f"{words} may lie on either side of the floor {min_auc:g}",
    }
    return _check_interval(estimate, min_auc, reasons=reasons)


def _not_worse(difference: AucDifference | None, max_auc_loss: float) -> _Check:
    if difference is None:
        return _without_interval("difference to the champion's auc")
    words = f"auc differs from the champion's by {difference.auc:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
    reasons = {
        PASS: f"{words}, a loss of at most {max_auc_loss:g}",
        FAIL: f"{words}, a loss of more than {max_auc_loss:g}",
        INCONCLUSIVE: f"{words}, which may be a loss of more than {max_auc_loss:g}",
    }
    return _check_interval(difference, -max_auc_loss, reasons=reasons)


def _without_interval(name: str) -> _Check:
    reason = f"{name} has no interval: no rows are in the wrong order, or all but {MIN_DEGREES} requests hardly count"
    return _Check(INCONCLUSIVE, reason)


def _check_interval(found: AucEstimate | AucDifference, threshold: float, *, reasons: dict[str, str]) -> _Check:
    decision = PASS if found.low >= threshold else FAIL if found.high < threshold else INCONCLUSIVE
    return _Check(decision, reasons[decision])


def _slice_p_values(
    click: NDArray[np.int8],
    excess: NDArray[np.float64],
    group: NDArray[np.int64],
    *,
    slices: Mapping[str, NDArray[np.bool_]],
) -> dict[str, float]:
    """By slice, that its mean `excess` [n] is at most 0; without those that have too few clicks to tell."""
    tested = {name: rows for name, rows in slices.items() if not _too_few(click[rows], group[rows])}
    found = {name: mean_p_value(excess[rows], group[rows]) for name, rows in tested.items()}
    return {name: p_value for name, p_value in found.items() if p_value is not None}


def _no_slice_harmed(p_values: Mapping[str, float], max_loss: float) -> _Check:
    harmed, part = holm(p_values, SLICE_ALPHA), f"{max_loss:.3g} of the champion's log loss"
    if harmed:
        return _Check(FAIL, f"{len(harmed)} of {len(p_values)} slices lose more than {part}: {', '.join(harmed[:5])}")
    return _Check(PASS, f"none of {len(p_values)} slices is shown to lose more than {part}")


def mean_p_value(values: NDArray[np.float64], group: NDArray[np.int64]) -> float | None:
    """One-sided p-value of the values' mean being at most 0, by Student's t; values of one group are not independent.

    None without a standard error (`grouped_deviation`).
    """
    deviation = grouped_deviation((values, group))
    if deviation is None or not deviation.standard_error:
        return None
    t = float(values.mean()) / deviation.standard_error
    outside = student_p_value(t, deviation.degrees)
    return outside / 2 if t > 0 else 1 - outside / 2


def holm(p_values: Mapping[str, float], alpha: float) -> list[str]:
    """Names of the hypotheses that Holm (1979) rejects, smallest first; one that holds is with probability `alpha`.

    >>> holm({"a": 0.2, "b": 0.01, "c": 0.03}, 0.05)
    ['b']
    """
    rejected: list[str] = []
    for name, p_value in sorted(p_values.items(), key=lambda item: item[1]):
        if p_value > alpha / (len(p_values) - len(rejected)):
            break
        rejected.append(name)
    return rejected


def _calibrated(
    click: NDArray[np.int8],
    candidate: ArrayLike,
    champion: ArrayLike | None,
    *,
    group: NDArray[np.int64],
    weights: ArrayLike | None,
    factor: float,
) -> _Check:
    """Fails where expected clicks are surely off by more than the factor, and further off than the champion's."""
    scores = np.asarray(candidate, np.float64)
    ratio = calibration(click, scores, weights=weights)
    assert ratio is not None  # there are clicks
    words = f"{ratio:.3g} clicks are expected for each one"
    errors = (row_weighted(values, weights) for values in (scores - factor * click, click / factor - scores))
    p_values = [mean_p_value(values, group) for values in errors]
    is_off = any(p_value is not None and p_value < SLICE_ALPHA / 2 for p_value in p_values)
    live = None if champion is None else calibration(click, champion, weights=weights)
    if is_off and (live is None or abs(np.log(ratio)) > abs(np.log(live))):
        return _Check(FAIL, f"{words}, which is off by more than a factor of {factor:g}")
    return _Check(PASS, words)
