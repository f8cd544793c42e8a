"""Parts of the held-out rows on which a candidate may be weak although it is good on the whole.

By day or hour, by the most frequent values of one column with few values, and by how new the rows' categories are.
Slices inform people; the gate judges the whole, since many small comparisons would fail by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import CATEGORICAL, MISSING_CATEGORY
from components.contracts.metrics import (
    AucDifference,
    AucEstimate,
    auc_difference,
    auc_estimate,
    calibration,
    normalized_entropy,
)
from components.contracts.workflow import FIRST_ID
from components.evaluation.scoring import ScoredHoldout

MAX_SLICES_PER_GROUP = 24
TOP_VALUES = 5
_DAY_SECONDS, _HOUR_SECONDS = 86_400, 3_600


class SliceMetrics(NamedTuple):
    """One line of the table; a number that does not exist is `None`."""

    group: str
    name: str
    num_rows: int
    click_rate: float | None
    candidate: AucEstimate | None
    normalized_entropy: float | None
    calibration: float | None
    champion: AucEstimate | None
    difference: AucDifference | None


def slice_column(slot_sizes: list[int]) -> int:
    """Position of the categorical column with the fewest ids among those with two categories or more."""
    return min(range(len(slot_sizes)), key=lambda i: (slot_sizes[i] < FIRST_ID + 2, slot_sizes[i], i))


def measure_slices(scored: ScoredHoldout, *, column: int, is_first_round: bool) -> list[SliceMetrics]:
    """The metrics of every slice, groups one after another.

    Args:
        scored: The scored rows.
        column: Which categorical column `scored.categories` holds.
        is_first_round: Whether there is no parent; then every category is new and the slice is meaningless.
    """
    groups = [_by_time(scored.event_seconds), _by_value(CATEGORICAL[column], scored.categories)]
    groups.append(_by_newness(scored, is_first_round))
    return [_measure(scored, group, name, rows=rows) for slices in groups for group, name, rows in slices]


_Slice = tuple[str, str, NDArray[np.bool_]]


def _by_time(event_seconds: NDArray[np.float64]) -> Iterator[_Slice]:
    if not len(event_seconds):
        return
    by_day = event_seconds.max() - event_seconds.min() > 2 * _DAY_SECONDS
    step, text = (_DAY_SECONDS, "%Y-%m-%d") if by_day else (_HOUR_SECONDS, "%Y-%m-%d %H:00")
    periods = (event_seconds // step).astype(np.int64)
    # The newest ones: they are the nearest to what the model will serve.
    for period in np.unique(periods)[-MAX_SLICES_PER_GROUP:]:
        start = datetime.fromtimestamp(int(period) * step, timezone.utc)
        yield ("day" if by_day else "hour", start.strftime(text), periods == period)


def _by_value(name: str, values: NDArray[np.int64]) -> Iterator[_Slice]:
    distinct, counts = np.unique(values, return_counts=True)
    top = distinct[np.argsort(-counts, kind="stable")][:TOP_VALUES]
    for value in top:
        yield name, "missing" if value == MISSING_CATEGORY else f"{int(value):08x}", values == value
    if len(distinct) > TOP_VALUES:
        yield name, f"other {len(distinct) - TOP_VALUES} values", ~np.isin(values, top)


def _by_newness(scored: ScoredHoldout, is_first_round: bool) -> Iterator[_Slice]:
    new, unknown = scored.has_new_category, scored.has_unknown_category
    if not is_first_round:
        yield "categories", "one or more got an id in this round", new
    yield "categories", "one or more have no id of their own", unknown
    yield (
        "categories",
        "all known" if is_first_round else "all known before",
        ~(unknown if is_first_round else new | unknown),
    )


def _measure(scored: ScoredHoldout, group: str, name: str, *, rows: NDArray[np.bool_]) -> SliceMetrics:
    labels, candidate, groups = scored.labels[rows], scored.candidate[rows], scored.groups[rows]
    champion = scored.champion[rows] if scored.champion is not None else None
    return SliceMetrics(
        group=group,
        name=name,
        num_rows=len(labels),
        click_rate=float(labels.mean()) if len(labels) else None,
        candidate=auc_estimate(labels, candidate, groups=groups),
        normalized_entropy=normalized_entropy(labels, candidate),
        calibration=calibration(labels, candidate),
        champion=auc_estimate(labels, champion, groups=groups) if champion is not None else None,
        difference=None if champion is None else auc_difference(labels, candidate, champion, groups=groups),
    )
