"""Parts of the held-out rows on which a candidate may be weak although it is good on the whole.

All rows; how new their categories, and their items, are; hours of the day; positions in ranked lists; frequent values
of every column, and of a column of lists its frequent elements: a row belongs to the slice of each that it holds.
Columns that say who a user is are not cut by value.
The gate refuses a candidate that surely harms one (`gate.judge`); here they are cut, and measured for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts.features import MISSING_CATEGORY
from components.contracts.metrics import (
    AucDifference,
    AucEstimate,
    auc_difference,
    auc_estimate,
    calibration,
    click_rate,
    log_loss,
    normalized_entropy,
)
from components.contracts.words import ShownValues
from components.evaluation.scoring import NEW_ITEM, UNKNOWN_ITEM, ScoredHoldout

TOP_VALUES = 5
MAX_POSITION = 10
MAX_SHOWN = 40
"""Slices that are measured for people: those that speak most against the candidate."""
_HOUR_SECONDS = 3_600
_NOTHING = MISSING_CATEGORY - 1
"""In a place whose value the row already holds in another place, and in an empty one of a row that holds some value."""


class SliceMetrics(NamedTuple):
    """One line of the table; a number that does not exist is `None`."""

    name: str
    num_rows: int
    click_rate: float | None
    candidate: AucEstimate | None
    normalized_entropy: float | None
    calibration: float | None
    champion: AucEstimate | None
    difference: AucDifference | None
    log_loss_change: float | None
    """The candidate's log loss over the champion's, less 1."""
    p_value: float | None
    """One-sided, of the slice losing no more than is allowed; None where it was not tested."""


def cut_slices(scored: ScoredHoldout, *, is_first_round: bool, shown: ShownValues) -> dict[str, NDArray[np.bool_]]:
    """Whether each row [n] belongs to a slice, by the slice's name.

    Args:
        scored: The scored rows.
        is_first_round: Whether there is no parent; then every category is new and the slice is meaningless.
        shown: How the values of a column are named; a column of which none is shown is not cut.
    """
    slices = {"all rows": np.ones(len(scored.labels), dtype=bool)}
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
) -> list[SliceMetrics]:
    """The metrics of the slices that speak most against the candidate, by `p_values`, smallest first."""
    ordered = sorted(slices, key=lambda name: p_values.get(name, 1.0))
    return [_measure(scored, name, rows=slices[name], p_value=p_values.get(name)) for name in ordered[:MAX_SHOWN]]


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


def _measure(scored: ScoredHoldout, name: str, *, rows: NDArray[np.bool_], p_value: float | None) -> SliceMetrics:
    labels, candidate, groups = scored.labels[rows], scored.candidate[rows], scored.groups[rows]
    champion = scored.champion[rows] if scored.champion is not None else None
    weights = scored.weights[rows] if scored.weights is not None else None
    before = None if champion is None else log_loss(labels, champion, weights=weights)
    now = log_loss(labels, candidate, weights=weights)
    return SliceMetrics(
        name=name,
        num_rows=len(labels),
        click_rate=click_rate(labels, weights=weights),
        candidate=auc_estimate(labels, candidate, groups=groups),
        normalized_entropy=normalized_entropy(labels, candidate, weights=weights),
        calibration=calibration(labels, candidate, weights=weights),
        champion=auc_estimate(labels, champion, groups=groups) if champion is not None else None,
        difference=None if champion is None else auc_difference(labels, candidate, champion, groups=groups),
        log_loss_change=now / before - 1 if now is not None and before else None,
        p_value=p_value,
    )
