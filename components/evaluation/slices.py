"""Parts of the held-out rows on which a candidate may be weak although it is good on the whole.

All rows; how new their categories, and their items, are; hours of the day; positions in ranked lists; frequent values
of every column, and of a column of lists its frequent elements: a row belongs to the slice of each that it holds.
Columns that say who a user is are not cut by value.
The gate refuses a candidate that surely harms one (`gate.judge`); here they are cut, and measured for people.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from components.contracts.features import MISSING_CATEGORY
from components.contracts.manifests import AucLead, ModelQuality, RowsQuality
from components.contracts.metrics import (
    AucEstimate,
    UserQuality,
    calibration,
    click_rate,
    log_loss,
    normalized_entropy,
    roc_auc,
    user_quality,
)
from components.contracts.words import ShownValues
from components.evaluation.gate import Estimates, estimate
from components.evaluation.scoring import NEW_ITEM, UNKNOWN_ITEM, ScoredHoldout
from components.store.model_cards import SliceQuality

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
