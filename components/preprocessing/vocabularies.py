"""Update the vocabulary of one column from run to run.

A category is admitted when its count, summed over the runs, reaches the frequency threshold. A
category is evicted if no row has contained it for a configured time. Ids never move: an evicted
category leaves a tombstone. A later run reuses the ids of tombstones before it appends new ids. The
result depends only on the parent's column and the counts of this run, so a retry has the same
result. `window_statistics` counts the rows. The module `parent` defines the file from which the
next run continues.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evergreen.config.preprocessing import PreprocessingSettings
from evergreen.contracts.workflow import TOMBSTONE


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Categories of a column that are too rare to have an id so far, ascending."""

    categories: NDArray[np.int64]
    frequencies: NDArray[np.int64]
    """Number of rows with each category, over all runs since the category was last dropped."""
    last_seen: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """A vocabulary, and the counts and times that the next run needs.

    Times are int64 microseconds since 1970 (UTC).
    """

    vocabulary: NDArray[np.int64]
    """See `FeatureWorkflow.vocabularies`."""
    last_seen: NDArray[np.int64]
    """Time at which each id's category was last seen. The value is the time of the newest row in
    the last window with the category. The time of a tombstone is 0."""
    candidates: Candidates


def unseen_column(vocabulary: NDArray[np.int64]) -> Column:
    """Return a column with unseen categories and without candidates."""
    nothing = Candidates(
        **dict.fromkeys(("categories", "frequencies", "last_seen"), np.zeros(0, np.int64))
    )
    return Column(
        vocabulary=vocabulary, last_seen=np.zeros(len(vocabulary), np.int64), candidates=nothing
    )


def next_column(
    parent: Column,
    seen: NDArray[np.int64],
    counts: NDArray[np.int64],
    *,
    now: int,
    rules: PreprocessingSettings,
) -> Column:
    """Update the parent's column with the categories of this run.

    New categories are ordered by count, largest first, then by value. The first new categories
    reuse the ids of the parent's tombstones, lowest id first. The ids of categories that are
    evicted in this run stay free until the next run.

    Args:
        parent: The parent's column.
        seen: Distinct categories of this run's training rows, in any order.
        counts: Number of rows of each category in `seen`.
        now: Time of the window's newest row. The time becomes the `last_seen` of all categories in
            the window.
        rules: Settings for the admission of categories.

    >>> parent = unseen_column(np.array([7, -2, 8]))
    >>> rules = PreprocessingSettings(frequency_threshold=2)
    >>> seen, counts = np.array([4, 5, 8, 9]), np.array([1, 2, 1, 3])
    >>> column = next_column(parent, seen, counts, now=1000, rules=rules)
    >>> column.vocabulary, column.last_seen
    (array([7, 9, 8, 5]), array([   0, 1000, 1000, 1000]))
    >>> column.candidates.categories, column.candidates.frequencies
    (array([4]), array([1]))
    """
    is_live, was_seen = np.isin(seen, parent.vocabulary), np.isin(parent.vocabulary, seen)
    vocabulary = parent.vocabulary.copy()
    last_seen = np.where(was_seen, np.maximum(parent.last_seen, now), parent.last_seen)
    if rules.ttl:
        vocabulary[now - last_seen > rules.ttl] = TOMBSTONE
    last_seen[vocabulary == TOMBSTONE] = 0

    counted = _add_counts(parent.candidates, seen[~is_live], counts[~is_live], now=now)
    # If the threshold was lowered, the counts of earlier runs alone may suffice. A category without
    # a row in this run could not be trained, so the category is not admitted.
    is_here = np.isin(counted.categories, seen[~is_live], assume_unique=True)
    enters = is_here & (counted.frequencies >= rules.frequency_threshold)
    new = counted.categories[enters][np.argsort(-counted.frequencies[enters], kind="stable")]
    free = np.flatnonzero(parent.vocabulary == TOMBSTONE)[: len(new)]
    vocabulary[free], last_seen[free] = new[: len(free)], now
    appended = new[len(free) :]
    return Column(
        vocabulary=np.concatenate([vocabulary, appended]),
        last_seen=np.concatenate([last_seen, np.full(len(appended), now, np.int64)]),
        candidates=_select(counted, _retained(counted, ~enters, now=now, rules=rules)),
    )


def _add_counts(
    before: Candidates, seen: NDArray[np.int64], counts: NDArray[np.int64], *, now: int
) -> Candidates:
    """Add the counts of this run to the candidates."""
    categories, positions = np.unique(
        np.concatenate([before.categories, seen]), return_inverse=True
    )
    old, here = np.split(positions, [len(before.categories)])
    frequencies, last_seen = np.zeros_like(categories), np.zeros_like(categories)
    frequencies[old], last_seen[old] = before.frequencies, before.last_seen
    frequencies[here] += counts
    last_seen[here] = np.maximum(last_seen[here], now)
    return Candidates(categories=categories, frequencies=frequencies, last_seen=last_seen)


def _retained(
    counted: Candidates, is_out: NDArray[np.bool_], *, now: int, rules: PreprocessingSettings
) -> NDArray[np.int64]:
    """Return the ascending positions of the candidates that are saved for the next run."""
    if rules.ttl:
        is_out = is_out & (now - counted.last_seen <= rules.ttl)
    positions = np.flatnonzero(is_out)
    if len(positions) > rules.max_candidates:
        # lexsort is stable, so equal candidates stay in the order of their values.
        order = np.lexsort([-counted.last_seen[positions], -counted.frequencies[positions]])
        positions = np.sort(positions[order[: rules.max_candidates]])
    return positions


def _select(counted: Candidates, positions: NDArray[np.int64]) -> Candidates:
    return Candidates(
        categories=counted.categories[positions],
        frequencies=counted.frequencies[positions],
        last_seen=counted.last_seen[positions],
    )
