"""Decide whether the candidate may be released (the gate).

The gate uses the labels and the scores of held-out rows. Two checks compare a 95 % interval with a
limit. The floor check compares the candidate's AUC with a floor. The champion check compares the
AUC difference between candidate and champion with the allowed degradation (non-inferiority). The
intervals are computed by DeLong's method. Rows of one user count as dependent. If the user is
unknown, rows of one request count as dependent. An interval check passes if the whole interval is
on the good side of the limit. The check fails if the whole interval is on the bad side. If the
limit is within the interval, the check is inconclusive. If the result is inconclusive, a canary can
collect more evidence.

The slice check and the calibration check cannot be inconclusive, and fail only on significant
evidence. The slice check tests whether the log loss of a slice increases by more than the allowed
degradation. The tests are one-sided, with Holm's correction over all slices. The calibration check
tests whether expected clicks are off by more than a factor. docs/design/gate.md shows the power of
each check. The slice check and the calibration check use sample weights, because both depend on the
click rate. An AUC does not depend on the click rate, so the AUC checks use no weights. Other
modules of this package compute the scores.

A candidate can be weak in a slice although it is good overall. One slice contains all rows. Other
slices are defined by the age of categories and items, the hour of the day, the position in a ranked
list, or a frequent value of a column. A row of a list column belongs to the slice of each frequent
element that it contains. Columns that identify a user are not sliced by value.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.evaluation.scoring import NEW_ITEM, UNKNOWN_ITEM, ScoredHoldout
from evergreen.config.features import MISSING_CATEGORY
from evergreen.config.gate import GateSettings
from evergreen.contracts import checks as contract
from evergreen.contracts.category_texts import ShownValues
from evergreen.contracts.checks import AT_MOST, FAIL, INCONCLUSIVE, PASS, WITHIN_FACTOR, Check
from evergreen.contracts.manifests import AucLead, ModelQuality, RowsQuality
from evergreen.registry.model_cards import SliceQuality
from evergreen.runtime.errors import run_again
from evergreen.statistics.metrics import (
    MIN_DEGREES,
    AucDifference,
    AucEstimate,
    UserQuality,
    auc_difference,
    auc_estimate,
    calibration,
    click_rate,
    group_numbers,
    grouped_deviation,
    log_loss,
    normalized_entropy,
    roc_auc,
    row_log_losses,
    row_weighted,
    student_p_value,
    user_quality,
)

MIN_CLASS_REQUESTS = 10
"""Minimum number of requests (or users) that have a click. The same minimum applies to requests
that have a row without a click. With fewer requests, an interval is not reliable.

If only 4 to 9 requests have clicks, some 95 % intervals cover the true value in only 92 % of
simulated windows (docs/design/gate.md).
"""
_CHANCE = 0.5
"""AUC of random scores."""
SLICE_ALPHA = 0.05
"""Maximum probability of a false refusal by the slice check, over all slices together. A refusal is
false if the degradation of every slice is within the allowed degradation."""
_TOP_VALUES = 5
_MAX_POSITION = 10
MAX_SHOWN = 40
"""Number of slices whose metrics are on the card. The card shows the slices with the smallest
p-values."""
_HOUR_SECONDS = 3_600
_UNCOUNTED = MISSING_CATEGORY - 1
"""Placeholder in a slot that is not counted. A slot is not counted if an earlier slot of the row
has the same value. An empty slot is not counted if another slot has a value."""
_MORE_ROWS = "bring more rows, or hold out a larger share of them (extraction.holdout_fraction)"


class Estimates(NamedTuple):
    """AUCs with their intervals. An undefined AUC is None."""

    candidate: AucEstimate | None
    champion: AucEstimate | None
    difference: AucDifference | None
    """Candidate's AUC minus champion's AUC."""


def _estimate(
    labels: ArrayLike,
    candidate: ArrayLike,
    champion: ArrayLike | None = None,
    *,
    groups: ArrayLike,
) -> Estimates:
    """Return the estimates of one set of rows. `decide` explains the arguments."""
    alone = auc_estimate(labels, candidate, groups=groups)
    if champion is None:
        return Estimates(alone, None, None)
    difference = auc_difference(labels, candidate, champion, groups=groups)
    return Estimates(alone, auc_estimate(labels, champion, groups=groups), difference)


class GateDecision(NamedTuple):
    """The gate's checks, and the estimates behind them."""

    checks: Sequence[Check]
    estimates: Estimates
    slice_p_values: Mapping[str, float]
    """One-sided p-value of each tested slice. The hypothesis is that the slice degrades by at most
    the allowed degradation."""

    @property
    def decision(self) -> str:
        """The worst result of the checks: `pass`, `fail` or `inconclusive`."""
        return contract.decide(self.checks)


class _Evidence(NamedTuple):
    """Data that the checks measure. Each array has one entry per row."""

    click: NDArray[np.int8]
    candidate: ArrayLike
    champion: ArrayLike | None
    group: NDArray[np.int64]
    weights: ArrayLike | None
    estimates: Estimates
    slice_p_values: Mapping[str, float] | None
    """None if no slices were given, or there is no champion."""


def decide(
    labels: ArrayLike,
    candidate: ArrayLike,
    champion: ArrayLike | None = None,
    *,
    groups: ArrayLike,
    weights: ArrayLike | None = None,
    slices: Mapping[str, NDArray[np.bool_]] | None = None,
    settings: GateSettings,
) -> GateDecision:
    """Check one candidate on the held-out rows.

    Args:
        labels: 0 or 1 of each row, [n].
        candidate: The candidate's scores, [n].
        champion: The champion's scores, [n]. None skips the champion check and the slice check.
        groups: User or request of each row, [n]. The rows of one group are not independent.
        weights: Sample weight of each row, [n]. None means equal weights.
        slices: Mask [n] of the rows in each slice, by name of the slice. Slices may overlap.
        settings: The limits.

    Raises:
        ContractError: Lengths differ, a label is neither 0 nor 1, or a score is not finite.
    """
    click = np.asarray(labels)
    estimates = _estimate(click, candidate, champion, groups=groups)
    group = group_numbers(groups, len(click))
    has_weight = np.full(len(click), True) if weights is None else np.asarray(weights) > 0
    if too_few := _check_requests(click[has_weight], group[has_weight]):
        return GateDecision([too_few], estimates, {})
    p_values: Mapping[str, float] | None = None
    if champion is not None and slices:
        allowed = (1 + settings.max_slice_loss) * row_log_losses(click, champion)
        excess = row_weighted(row_log_losses(click, candidate) - allowed, weights)
        weighted = {name: rows & has_weight for name, rows in slices.items()}
        p_values = _slice_p_values(click, excess, group, slices=weighted)
    evidence = _Evidence(click, candidate, champion, group, weights, estimates, p_values)
    checks = [check for each in _CHECKS if (check := each(evidence, settings)) is not None]
    return GateDecision(checks, estimates, p_values or {})


def _check_requests(click: NDArray[np.int8], group: NDArray[np.int64]) -> Check | None:
    """Return an inconclusive check if one class has too few requests, else None."""
    rarer, requests = _fewest_requests(click, group)
    if requests >= MIN_CLASS_REQUESTS:
        return None
    if requests:
        needed = math.ceil(len(click) * MIN_CLASS_REQUESTS / requests)
        advice = (
            f"about {needed:,} held-out rows are needed, there are {len(click):,}: {_MORE_ROWS}"
        )
    else:
        advice = f"the held-out rows contain no {rarer}: bring newer rows that contain both labels"
    return Check(
        name=f"requests with {rarer}",
        value=requests,
        limit=MIN_CLASS_REQUESTS,
        result=INCONCLUSIVE,
        advice=advice,
    )


def _fewest_requests(click: NDArray[np.int8], group: NDArray[np.int64]) -> tuple[str, int]:
    """Return the rarer class of rows, and the number of requests with such rows.

    The classes are clicks and rows without a click. The rarer class occurs in fewer requests.
    """
    found = {
        "clicks": len(np.unique(group[click == 1])),
        "rows without a click": len(np.unique(group[click == 0])),
    }
    return min(found.items(), key=lambda item: item[1])


def _check_floor(evidence: _Evidence, settings: GateSettings) -> Check:
    """Check the candidate's AUC against the AUC threshold of the gate, `gate.min_auc`."""
    found, floor = evidence.estimates.candidate, settings.min_auc
    ways = ["bring features or rows that predict the clicks better"]
    if found is not None and (lower := math.floor(found.low * 100) / 100) > _CHANCE:
        again = run_again(f"--set gate.min_auc={lower:g}")
        ways.append(f"or, if such a model is good enough, {again}")
    check = Check(name="AUC", limit=floor, result=INCONCLUSIVE)
    return _check_interval(check, found, evidence, if_failed=", ".join(ways))


def _check_lead(evidence: _Evidence, settings: GateSettings) -> Check | None:
    if evidence.champion is None:
        return None
    check = Check(
        name="AUC against the champion",
        limit=-settings.max_auc_loss,
        is_difference=True,
        result=INCONCLUSIVE,
    )
    advice = "the live model stays; bring newer rows, or allow the loss by gate.max_auc_loss"
    return _check_interval(check, evidence.estimates.difference, evidence, if_failed=advice)


def _check_interval(
    check: Check,
    found: AucEstimate | AucDifference | None,
    evidence: _Evidence,
    *,
    if_failed: str,
) -> Check:
    """Return the check with its measured value.

    The check passes or fails only if the whole interval is on one side of the limit.
    """
    limit = check.limit
    assert limit is not None
    if found is None:
        detail = (
            "the interval is undefined, because no rows are in the wrong order, or at most "
            f"{MIN_DEGREES} requests determine the result"
        )
        return replace(check, detail=detail, advice=_MORE_ROWS)
    result = PASS if found.low >= limit else FAIL if found.high < limit else INCONCLUSIVE
    more = _more_rows(found, limit, num_rows=len(evidence.click))
    advice = {FAIL: if_failed, INCONCLUSIVE: more}.get(result, "")
    return replace(
        check, value=found.auc, low=found.low, high=found.high, result=result, advice=advice
    )


def _more_rows(found: AucEstimate | AucDifference, limit: float, *, num_rows: int) -> str:
    """Return a phrase with the number of held-out rows that would decide the check.

    The calculation assumes that more rows do not change the measured value.
    """
    distance, width = abs(found.auc - limit), (found.high - found.low) / 2
    # An interval's width shrinks with the root of the number of rows.
    is_far = distance > width / 100
    needed = math.ceil(num_rows * (width / distance) ** 2) if is_far else None
    about = "more than 10,000 times as many" if needed is None else f"about {needed:,}"
    return f"{about} held-out rows are needed for a decision, there are {num_rows:,}: {_MORE_ROWS}"


def _check_slices(evidence: _Evidence, settings: GateSettings) -> Check | None:
    p_values = evidence.slice_p_values
    if p_values is None:
        return None
    harmed = holm(p_values, SLICE_ALPHA)
    loss = f"increase the log loss by more than {settings.max_slice_loss:.1%}"
    detail = f"{len(harmed)} of {len(p_values)} tested slices {loss}"
    advice = "the live model stays; bring rows of these slices, or allow it by gate.max_slice_loss"
    return Check(
        name="slices with more log loss",
        value=len(harmed),
        limit=0,
        bound=AT_MOST,
        result=FAIL if harmed else PASS,
        detail=f"{detail}: {', '.join(harmed[:5])}" if harmed else detail,
        advice=advice if harmed else "",
    )


def _check_calibration(evidence: _Evidence, settings: GateSettings) -> Check:
    """Fail if expected clicks are off by significantly more than the factor.

    The check passes if the candidate's expected clicks are less wrong than the champion's.
    """
    click, weights, factor = evidence.click, evidence.weights, settings.max_calibration_factor
    scores = np.asarray(evidence.candidate, np.float64)
    ratio = calibration(click, scores, weights=weights)
    assert ratio is not None  # `_check_requests` has found clicks
    errors = (scores - factor * click, click / factor - scores)
    p_values = [_mean_p_value(row_weighted(each, weights), evidence.group) for each in errors]
    is_off = any(p_value is not None and p_value < SLICE_ALPHA / 2 for p_value in p_values)
    check = Check(name="calibration", value=ratio, limit=factor, bound=WITHIN_FACTOR, result=PASS)
    live = None
    if evidence.champion is not None:
        live = calibration(click, evidence.champion, weights=weights)
    if is_off and (live is None or abs(np.log(ratio)) > abs(np.log(live))):
        advice = (
            "check that the newest rows have all their clicks (extraction.attribution_hours), or "
            "allow it by gate.max_calibration_factor"
        )
        return replace(check, result=FAIL, advice=advice)
    if is_off:
        return replace(check, detail="the champion's ratio is further off")
    if not 1 / factor <= ratio <= factor:
        return replace(check, detail="too few rows to show that the ratio is off")
    return check


_CHECKS: tuple[Callable[[_Evidence, GateSettings], Check | None], ...] = (
    _check_floor,
    _check_lead,
    _check_slices,
    _check_calibration,
)
"""The table of checks. A check returns None if it does not apply to the rows."""


def _slice_p_values(
    click: NDArray[np.int8],
    excess: NDArray[np.float64],
    group: NDArray[np.int64],
    *,
    slices: Mapping[str, NDArray[np.bool_]],
) -> dict[str, float]:
    """Return the p-value of each slice.

    The hypothesis is that the mean `excess` of the slice is at most 0.

    `excess` has one value per row, [n]. A slice with too few clicks to test is left out.
    """
    tested = {
        name: rows
        for name, rows in slices.items()
        if _fewest_requests(click[rows], group[rows])[1] >= MIN_CLASS_REQUESTS
    }
    found = {name: _mean_p_value(excess[rows], group[rows]) for name, rows in tested.items()}
    return {name: p_value for name, p_value in found.items() if p_value is not None}


def _mean_p_value(values: NDArray[np.float64], group: NDArray[np.int64]) -> float | None:
    """Return the one-sided p-value for the hypothesis that the mean is at most 0.

    The test is Student's t. Values of one group are not independent. Returns None if
    `grouped_deviation` finds no standard error.
    """
    deviation = grouped_deviation((values, group))
    if deviation is None or not deviation.standard_error:
        return None
    t = float(values.mean()) / deviation.standard_error
    outside = student_p_value(t, deviation.degrees)
    return outside / 2 if t > 0 else 1 - outside / 2


def holm(p_values: Mapping[str, float], alpha: float) -> list[str]:
    """Return the hypotheses that Holm's method (1979) rejects, smallest p-value first.

    The probability that the result contains a true hypothesis is at most `alpha`.

    >>> holm({"a": 0.2, "b": 0.01, "c": 0.03}, 0.05)
    ['b']
    """
    rejected: list[str] = []
    for name, p_value in sorted(p_values.items(), key=lambda item: item[1]):
        if p_value > alpha / (len(p_values) - len(rejected)):
            break
        rejected.append(name)
    return rejected


def slice_masks(
    scored: ScoredHoldout, *, is_first_run: bool | None, shown: ShownValues
) -> dict[str, NDArray[np.bool_]]:
    """Return a mask [n] of the rows in each slice, by name of the slice.

    Args:
        scored: The rows.
        is_first_run: Whether the model has no parent. In a model without a parent, every category
            is new, so there is no slice of new categories. None means that the new categories are
            unknown.
        shown: Names of the categories. Columns whose values are hidden are not sliced.
    """
    slices = {"all rows": np.ones(len(scored.labels), dtype=bool)}
    if is_first_run is not None:
        slices |= dict(_by_newness(scored, is_first_run))
    hours = (scored.event_seconds // _HOUR_SECONDS % 24).astype(np.int64)
    slices |= {f"hour: {hour:02}": hours == hour for hour in np.unique(hours)}
    for position in range(1, min(scored.positions.max(initial=0), _MAX_POSITION) + 1):
        slices[f"position: {position}"] = scored.positions == position
    for column in dict.fromkeys(scored.columns):
        if column not in shown.hidden:
            values = scored.categories[:, [name == column for name in scored.columns]]
            slices |= dict(_by_value(column, values, shown))
    return slices


def measure_slices(
    scored: ScoredHoldout, slices: Mapping[str, NDArray[np.bool_]], p_values: Mapping[str, float]
) -> list[SliceQuality]:
    """Return the metrics of the slices that have the smallest p-values, ordered by p-value."""
    shown = sorted(slices, key=lambda name: p_values.get(name, 1.0))[:MAX_SHOWN]
    parts = {name: scored.of_rows(slices[name]) for name in shown}
    return [
        SliceQuality(
            name=name,
            click_rate=click_rate(part.labels, weights=part.weights),
            p_value=p_values.get(name),
            **vars(measure_rows(part)),
        )
        for name, part in parts.items()
    ]


def measure_rows(scored: ScoredHoldout, estimates: Estimates | None = None) -> RowsQuality:
    """Return the metrics of held-out rows. Pass `estimates` if they are known already."""
    known = estimates or _estimate(
        scored.labels, scored.candidate, scored.champion, groups=scored.groups
    )

    def quality(scores: NDArray[np.float32], estimated: AucEstimate | None) -> ModelQuality:
        of_users = UserQuality()
        if scored.users is not None:
            named = scored.users != MISSING_CATEGORY
            of_users = user_quality(scored.labels[named], scores[named], users=scored.users[named])
        return ModelQuality(
            auc=estimated.auc if estimated else roc_auc(scored.labels, scores),
            auc_low=estimated.low if estimated else None,
            auc_high=estimated.high if estimated else None,
            log_loss=log_loss(scored.labels, scores, weights=scored.weights),
            normalized_entropy=normalized_entropy(scored.labels, scores, weights=scored.weights),
            calibration=calibration(scored.labels, scores, weights=scored.weights),
            gauc=of_users.gauc,
            user_ndcg=of_users.ndcg,
        )

    lead = AucLead()
    if (difference := known.difference) is not None:
        lead = AucLead(
            auc=difference.auc, low=difference.low, high=difference.high, p_value=difference.p_value
        )
    return RowsQuality(
        candidate=quality(scored.candidate, known.candidate),
        champion=None if scored.champion is None else quality(scored.champion, known.champion),
        difference=None if scored.champion is None else lead,
        num_rows=len(scored.labels),
        num_clicks=int(scored.labels.sum()),
    )


def _by_newness(
    scored: ScoredHoldout, is_first_run: bool
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    new, unknown = scored.has_new_category, scored.has_unknown_category
    if not is_first_run:
        yield "categories: one or more got an id in this run", new
    yield "categories: one or more have no id of their own", unknown
    if is_first_run:
        yield "categories: all known", ~unknown
    else:
        yield "categories: all known before", ~(new | unknown)
    if scored.item_newness is not None:
        if not is_first_run:
            yield "item: got its id in this run", scored.item_newness == NEW_ITEM
        yield "item: has no id of its own", scored.item_newness == UNKNOWN_ITEM


def _by_value(
    column: str, values: NDArray[np.int64], shown: ShownValues
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield the name and the mask [n] of each slice of a column. `values` has the shape [n, slots].

    A row belongs to the slice of each of its values, or to `missing` if it has no value.
    """
    entries = np.sort(values, axis=1)
    entries[:, 1:][entries[:, 1:] == entries[:, :-1]] = _UNCOUNTED
    entries[:, 0][
        (entries[:, 0] == MISSING_CATEGORY) & (values != MISSING_CATEGORY).any(axis=1)
    ] = _UNCOUNTED
    distinct, counts = np.unique(entries[entries != _UNCOUNTED], return_counts=True)
    if len(distinct) < 2:
        return
    top = distinct[np.argsort(-counts, kind="stable")][:_TOP_VALUES]
    for value in top:
        text = "missing" if value == MISSING_CATEGORY else shown.text(column, int(value))
        yield f"{column}: {text}", np.logical_or.reduce(entries == value, axis=1)
    if len(distinct) > _TOP_VALUES:
        is_other = np.isin(entries, [*top, _UNCOUNTED], invert=True)
        yield (
            f"{column}: other {len(distinct) - _TOP_VALUES} values",
            np.logical_or.reduce(is_other, axis=1),
        )
