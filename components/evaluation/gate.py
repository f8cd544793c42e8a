"""The gate: decides from labels and scores alone whether the candidate may be released, and gives the reason.

Two checks decide by a 95 % interval (DeLong, rows of one user counted as alike, or of one request where the recommender
names no user): the candidate's AUC against an absolute floor, and its paired difference to the champion's AUC against
the loss that is allowed (non-inferiority). They pass where the whole interval lies on the good side, fail where it lies
on the bad side, and are inconclusive between, or without an interval. An inconclusive model is not lost: a canary goes
on judging it (`controller.canary`).

Two checks only ever refuse, where the rows are sure of it: a slice of them loses more of its log loss than is allowed
(one-sided tests, Holm's correction over all slices), or clicks are predicted wrongly by more than a factor. What the
power of each is, docs/evaluation.md says. Sample weights count in these two: what they judge depends on the click rate.
An AUC does not, and counts rows alike. Scores are computed elsewhere.

Slices, on which a candidate may be weak although it is good on the whole: all rows; how new their categories, and their
items, are; hours of the day; positions in ranked lists; frequent values of every column, and of a column of lists its
frequent elements: a row belongs to the slice of each that it holds. Columns that say who a user is are not cut by
value.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.evaluation.scoring import NEW_ITEM, UNKNOWN_ITEM, ScoredHoldout
from evergreen.config.features import MISSING_CATEGORY
from evergreen.config.gate import GateSettings
from evergreen.contracts.manifests import FAIL, INCONCLUSIVE, PASS, AucLead, ModelQuality, RowsQuality
from evergreen.contracts.words import ShownValues
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
"""Requests (or users) with a click, and with a row without one, below which an interval is not trusted: simulated with
clicks in 4 to 9 requests, some 95 % intervals hold in 92 % of the windows (docs/evaluation.md)."""
CHANCE = 0.5
"""AUC of scores that know nothing."""
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
    advice: list[str]
    """What would make a check pass, a sentence for each check that did not."""
    estimates: Estimates
    slice_p_values: Mapping[str, float]
    """One-sided, of each slice that could be tested: that it loses no more than is allowed."""


class _Check(NamedTuple):
    decision: str
    reason: str
    advice: str = ""


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
        checks = [_Check(INCONCLUSIVE, words, _more_requests(click[has_weight], group[has_weight]))]
    else:
        checks = [_above_floor(estimates.candidate, settings.min_auc, num_rows=len(click))]
        if champion is not None:
            checks.append(_not_worse(estimates.difference, settings.max_auc_loss, num_rows=len(click)))
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
    advice = [check.advice for check in checks if check.decision != PASS and check.advice]
    return GateJudgement(decision, f"{decision} over {counts}: {'; '.join(reasons)}", advice, estimates, p_values)


def _fewest_requests(click: NDArray[np.int8], group: NDArray[np.int64]) -> tuple[str, int]:
    """The class of rows that comes from the fewest requests, and how many these are."""
    found = {"clicks": len(np.unique(group[click == 1])), "rows without a click": len(np.unique(group[click == 0]))}
    return min(found.items(), key=lambda item: item[1])


def _too_few(click: NDArray[np.int8], group: NDArray[np.int64]) -> str:
    """Why no interval of these rows is to be trusted; empty where it is."""
    words, fewest = _fewest_requests(click, group)
    return "" if fewest >= MIN_CLASS_REQUESTS else f"{words} come from {fewest} requests, expected {MIN_CLASS_REQUESTS}"


def _more_requests(click: NDArray[np.int8], group: NDArray[np.int64]) -> str:
    words, fewest = _fewest_requests(click, group)
    if not fewest:
        return f"no held-out row is one of the {words}: bring rows in which both labels are among the newest"
    needed = math.ceil(len(click) * MIN_CLASS_REQUESTS / fewest)
    return f"about {needed:,} held-out rows are needed, there are {len(click):,}: {_MORE_ROWS}"


_MORE_ROWS = "bring more rows, or hold out a larger share of them (extraction.holdout_fraction)"


def _more_rows(found: AucEstimate | AucDifference, threshold: float, num_rows: int) -> str:
    """How many held-out rows would tell on which side of the threshold the value is, if it stays as it is."""
    distance, width = abs(found.auc - threshold), (found.high - found.low) / 2
    # An interval's width shrinks with the root of the number of rows.
    needed = math.ceil(num_rows * (width / distance) ** 2) if distance > width / 100 else None
    about = "more than 10,000 times as many" if needed is None else f"about {needed:,}"
    return f"{about} held-out rows would tell, there are {num_rows:,}: {_MORE_ROWS}"


def _above_floor(estimate: AucEstimate | None, min_auc: float, *, num_rows: int) -> _Check:
    if estimate is None:
        return _without_interval("auc")
    words = f"auc {estimate.auc:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"
    reasons = {
        PASS: f"{words} is at least the floor {min_auc:g}",
        FAIL: f"{words} is below the floor {min_auc:g}",
        INCONCLUSIVE: f"{words} may lie on either side of the floor {min_auc:g}",
    }
    lower = math.floor(estimate.low * 100) / 100
    ways = ["bring features or rows that tell more of the clicks"]
    if lower > CHANCE:
        ways.append("or, if such a model is good enough, " + run_again(f"--set gate.min_auc={lower:g}"))
    advice = {
        FAIL: ", ".join(ways),
        INCONCLUSIVE: _more_rows(estimate, min_auc, num_rows),
    }
    return _check_interval(estimate, min_auc, reasons=reasons, advice=advice)


def _not_worse(difference: AucDifference | None, max_auc_loss: float, *, num_rows: int) -> _Check:
    if difference is None:
        return _without_interval("difference to the champion's auc")
    words = f"auc differs from the champion's by {difference.auc:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
    reasons = {
        PASS: f"{words}, a loss of at most {max_auc_loss:g}",
        FAIL: f"{words}, a loss of more than {max_auc_loss:g}",
        INCONCLUSIVE: f"{words}, which may be a loss of more than {max_auc_loss:g}",
    }
    advice = {
        FAIL: "the live model stays; bring newer rows, or allow the loss by gate.max_auc_loss",
        INCONCLUSIVE: _more_rows(difference, -max_auc_loss, num_rows),
    }
    return _check_interval(difference, -max_auc_loss, reasons=reasons, advice=advice)


def _without_interval(name: str) -> _Check:
    reason = f"{name} has no interval: no rows are in the wrong order, or all but {MIN_DEGREES} requests hardly count"
    return _Check(INCONCLUSIVE, reason, _MORE_ROWS)


def _check_interval(
    found: AucEstimate | AucDifference, threshold: float, *, reasons: dict[str, str], advice: dict[str, str]
) -> _Check:
    decision = PASS if found.low >= threshold else FAIL if found.high < threshold else INCONCLUSIVE
    return _Check(decision, reasons[decision], advice.get(decision, ""))


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
        reason = f"{len(harmed)} of {len(p_values)} slices lose more than {part}: {', '.join(harmed[:5])}"
        return _Check(
            FAIL, reason, "the live model stays; bring rows of these slices, or allow it by gate.max_slice_loss"
        )
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
        advice = "check that the newest rows have all their clicks (extraction.attribution_hours), or allow it by "
        advice += "gate.max_calibration_factor"
        return _Check(FAIL, f"{words}, which is off by more than a factor of {factor:g}", advice)
    return _Check(PASS, words)


TOP_VALUES = 5
MAX_POSITION = 10
MAX_SHOWN = 40
"""Slices that are measured for people: those that speak most against the candidate."""
_HOUR_SECONDS = 3_600
_NOTHING = MISSING_CATEGORY - 1
"""In a place whose value the row already holds in another place, and in an empty one of a row that holds some value."""


def cut_slices(
    scored: ScoredHoldout, *, is_first_round: bool | None, shown: ShownValues
) -> dict[str, NDArray[np.bool_]]:
    """Whether each row [n] belongs to a slice, by the slice's name.

    In a first round every category is new, and a slice of new ones meaningless; None = which are new is not known. A
    column of which `shown` shows no value is not cut.
    """
    slices = {"all rows": np.ones(len(scored.labels), dtype=bool)}
    if is_first_round is not None:
        slices |= dict(_by_newness(scored, is_first_round))
    hours = (scored.event_seconds // _HOUR_SECONDS % 24).astype(np.int64)
    slices |= {f"hour: {hour:02}": hours == hour for hour in np.unique(hours)}
    for position in range(1, min(scored.positions.max(initial=0), MAX_POSITION) + 1):
        slices[f"position: {position}"] = scored.positions == position
    for column in dict.fromkeys(scored.columns):
        if column not in shown.hidden:
            values = scored.categories[:, [name == column for name in scored.columns]]
            slices |= dict(_by_value(column, values, shown))
    return slices


def measure_slices(
    scored: ScoredHoldout, slices: Mapping[str, NDArray[np.bool_]], p_values: Mapping[str, float]
) -> list[SliceQuality]:
    """The metrics of the slices that speak most against the candidate, by `p_values`, smallest first."""
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
    """The figures of one set of held-out rows; `estimates` = the AUCs' where they are known already."""
    known = estimates or estimate(scored.labels, scored.candidate, scored.champion, groups=scored.groups)

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
        lead = AucLead(auc=difference.auc, low=difference.low, high=difference.high, p_value=difference.p_value)
    return RowsQuality(
        candidate=quality(scored.candidate, known.candidate),
        champion=None if scored.champion is None else quality(scored.champion, known.champion),
        difference=None if scored.champion is None else lead,
        num_rows=len(scored.labels),
        num_clicks=int(scored.labels.sum()),
    )


def _by_newness(scored: ScoredHoldout, is_first_round: bool) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    new, unknown = scored.has_new_category, scored.has_unknown_category
    if not is_first_round:
        yield "categories: one or more got an id in this round", new
    yield "categories: one or more have no id of their own", unknown
    if is_first_round:
        yield "categories: all known", ~unknown
    else:
        yield "categories: all known before", ~(new | unknown)
    if scored.item_newness is not None:
        if not is_first_round:
            yield "item: got its id in this round", scored.item_newness == NEW_ITEM
        yield "item: has no id of its own", scored.item_newness == UNKNOWN_ITEM


def _by_value(column: str, values: NDArray[np.int64], shown: ShownValues) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """The slices of the values [n, places]; a row counts once for each value, and as missing where it holds none."""
    held = np.sort(values, axis=1)
    held[:, 1:][held[:, 1:] == held[:, :-1]] = _NOTHING
    held[:, 0][(held[:, 0] == MISSING_CATEGORY) & (values != MISSING_CATEGORY).any(axis=1)] = _NOTHING
    distinct, counts = np.unique(held[held != _NOTHING], return_counts=True)
    if len(distinct) < 2:
        return
    top = distinct[np.argsort(-counts, kind="stable")][:TOP_VALUES]
    for value in top:
        text = "missing" if value == MISSING_CATEGORY else shown.text(column, int(value))
        yield f"{column}: {text}", np.logical_or.reduce(held == value, axis=1)
    if len(distinct) > TOP_VALUES:
        is_other = np.isin(held, [*top, _NOTHING], invert=True)
        yield f"{column}: other {len(distinct) - TOP_VALUES} values", np.logical_or.reduce(is_other, axis=1)
