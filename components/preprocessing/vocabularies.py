"""How one column's vocabulary goes from round to round: who enters, who leaves, and which id is free. Pure NumPy.

A category enters once its sightings, summed over the rounds, reach a threshold, and leaves after a time unseen. Ids
never move: who leaves leaves a tombstone, whose id a later round gives out again before it appends any. Everything
depends on the parent's column and this round's counts alone, so a round that is tried again decides the same. Counting
rows is left to `window_statistics`, the file between the rounds to `parent`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.contracts.workflow import TOMBSTONE


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Categories of a column that were seen too rarely so far, ascending; none of them is in its vocabulary."""

    categories: NDArray[np.int64]
    sightings: NDArray[np.int64]
    """Of each, over all rounds since it was last forgotten."""
    last_seen: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """A vocabulary and what is remembered of it for the next round; times are int64 microseconds of UTC since 1970."""

    vocabulary: NDArray[np.int64]
    """As `FeatureWorkflow.vocabularies`."""
    last_seen: NDArray[np.int64]
    """Per id, the newest row of the last window that held its category; 0 for a tombstone."""
    candidates: Candidates


def unseen_column(vocabulary: NDArray[np.int64]) -> Column:
    """A column without candidates, whose categories were never seen."""
    nothing = Candidates(**dict.fromkeys(("categories", "sightings", "last_seen"), np.zeros(0, np.int64)))
    return Column(vocabulary=vocabulary, last_seen=np.zeros(len(vocabulary), np.int64), candidates=nothing)


def next_column(
    parent: Column, seen: NDArray[np.int64], counts: NDArray[np.int64], *, now: int, rules: PreprocessingSettings
) -> Column:
    """The column after a round.

    `seen` are the distinct categories of this round's training rows, in any order, `counts` the sightings of each.
    `now`, the newest row of the round's window, is the `last_seen` of all that the window holds, whenever in it.

    New categories are ordered by sightings, most first, then by value. The first of them take the ids of the parent's
    tombstones, lowest first; the ids of categories that leave in this round stay free until the next.

    >>> parent = unseen_column(np.array([7, -2, 8]))
    >>> rules = PreprocessingSettings(frequency_threshold=2)
    >>> column = next_column(parent, np.array([4, 5, 8, 9]), np.array([1, 2, 1, 3]), now=1000, rules=rules)
    >>> column.vocabulary, column.last_seen, column.candidates.categories, column.candidates.sightings
    (array([7, 9, 8, 5]), array([   0, 1000, 1000, 1000]), array([4]), array([1]))
    """
    is_live, was_seen = np.isin(seen, parent.vocabulary), np.isin(parent.vocabulary, seen)
    vocabulary = parent.vocabulary.copy()
    last_seen = np.where(was_seen, np.maximum(parent.last_seen, now), parent.last_seen)
    if rules.ttl:
        vocabulary[now - last_seen > rules.ttl] = TOMBSTONE
    last_seen[vocabulary == TOMBSTONE] = 0

    counted = _counted_on(parent.candidates, seen[~is_live], counts[~is_live], now=now)
    # One whose count would do without this round (the threshold fell) has no row here to be learned from.
    is_here = np.isin(counted.categories, seen[~is_live], assume_unique=True)
    enters = is_here & (counted.sightings >= rules.frequency_threshold)
    new = counted.categories[enters][np.argsort(-counted.sightings[enters], kind="stable")]
    free = np.flatnonzero(parent.vocabulary == TOMBSTONE)[: len(new)]
    vocabulary[free], last_seen[free] = new[: len(free)], now
    appended = new[len(free) :]
    return Column(
        vocabulary=np.concatenate([vocabulary, appended]),
        last_seen=np.concatenate([last_seen, np.full(len(appended), now, np.int64)]),
        candidates=_chosen(counted, _worth_remembering(counted, ~enters, now=now, rules=rules)),
    )


def _counted_on(before: Candidates, seen: NDArray[np.int64], counts: NDArray[np.int64], *, now: int) -> Candidates:
    """The candidates with this round's sightings added."""
    categories, places = np.unique(np.concatenate([before.categories, seen]), return_inverse=True)
    old, here = np.split(places, [len(before.categories)])
    sightings, last_seen = np.zeros_like(categories), np.zeros_like(categories)
    sightings[old], last_seen[old] = before.sightings, before.last_seen
    sightings[here] += counts
    last_seen[here] = np.maximum(last_seen[here], now)
    return Candidates(categories=categories, sightings=sightings, last_seen=last_seen)


def _worth_remembering(
    counted: Candidates, is_out: NDArray[np.bool_], *, now: int, rules: PreprocessingSettings
) -> NDArray[np.int64]:
    """Places of those that the next round should know, ascending."""
    if rules.ttl:
        is_out = is_out & (now - counted.last_seen <= rules.ttl)
    places = np.flatnonzero(is_out)
    if len(places) > rules.max_candidates:
        # lexsort is stable, so equal ones stay in the order of their values.
        order = np.lexsort([-counted.last_seen[places], -counted.sightings[places]])
        places = np.sort(places[order[: rules.max_candidates]])
    return places


def _chosen(counted: Candidates, places: NDArray[np.int64]) -> Candidates:
    return Candidates(
        categories=counted.categories[places], sightings=counted.sightings[places], last_seen=counted.last_seen[places]
    )
