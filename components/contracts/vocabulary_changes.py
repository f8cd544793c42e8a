"""What one round did to the vocabularies: which ids got a category, and which lost theirs.

Joins preprocessing, which reports it, to training, which starts those ids' rows afresh, and evaluation, which measures
apart what holds them. Deciding who enters and leaves is preprocessing's.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from components.contracts.workflow import FIRST_ID, TOMBSTONE, FeatureWorkflow
from components.runtime.errors import ContractError


@dataclass(frozen=True, eq=False)
class VocabularyChange:
    """What became of one column's ids, each array ascending."""

    entered: NDArray[np.int64]
    """Ids that have a category and had none: appended ones, and tombstones given out again."""
    reused: NDArray[np.int64]
    """Those of `entered` that were tombstones."""
    evicted: NDArray[np.int64]
    """Ids that had a category and are tombstones."""


def vocabulary_changes(before: FeatureWorkflow | None, now: FeatureWorkflow) -> list[VocabularyChange]:
    """Per slot of `now`, what changed from `before`; None before, or without the slot = every category is new.

    Raises:
        ContractError: an id means another category than before with no round between as a tombstone, a category moved
            to another id, or a vocabulary shrank. Weights of the one workflow are then of no use under the other.
    """
    earlier = dict(zip(before.features.slots, before.vocabularies)) if before else {}
    nothing = np.zeros(0, np.int64)
    return [_change(name, earlier.get(name, nothing), each) for name, each in zip(now.features.slots, now.vocabularies)]


def _change(name: str, before: NDArray[np.int64], now: NDArray[np.int64]) -> VocabularyChange:
    if len(now) < len(before):
        raise ContractError(f"vocabulary of {name} has {len(now)} ids, expected at least the {len(before)} of before")
    kept = now[: len(before)]
    lived, lives = before != TOMBSTONE, kept != TOMBSTONE
    if len(replaced := np.flatnonzero(lived & lives & (kept != before))):
        at = replaced[0]
        raise ContractError(
            f"id {FIRST_ID + at} of {name} means category {kept[at]} and meant {before[at]} before, expected the same "
            f"or a tombstone ({len(replaced)} such ids)"
        )
    reused, evicted = np.flatnonzero(lives & ~lived), np.flatnonzero(lived & ~lives)
    appended = len(before) + np.flatnonzero(now[len(before) :] != TOMBSTONE)
    entered = np.concatenate([reused, appended])
    if len(moved := np.intersect1d(now[entered], before[evicted])):
        raise ContractError(f"category {moved[0]} of {name} moved to another id, expected it to keep its id")
    return VocabularyChange(entered=FIRST_ID + entered, reused=FIRST_ID + reused, evicted=FIRST_ID + evicted)
