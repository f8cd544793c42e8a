"""Whether a run continues the live model or starts from nothing: a rule over past runs and the drift's width.

In: the memory of past runs, a decision's numbers, the wall clock. Out: the request's `parent` and why. An incremental
run is minutes and keeps what the model knows; a full one is hours and forgets what no longer holds, such as the ids of
categories that are gone. Every rule is off by default: then each run is incremental.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from components.contracts.retrain_request import CURRENT, NONE
from components.runtime.errors import ContractError

DRIFTED, JUDGED = "drifted_columns", "judged_columns"
"""Numbers of a decision that the rule of drift reads; a policy that knows no columns leaves them out."""


@dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """When a run starts from nothing."""

    full_every_releases: int = 0
    """Every which release is of a full run; 0 = none for this reason."""
    full_every_seconds: float = 0.0
    """Longest time between two full runs that were released; 0 = none for this reason."""
    full_after_refusals: int = 0
    """Incremental runs refused in a row after which the next is full; 0 = none for this reason."""
    full_drift_share: float = 0.0
    """Share of the judged columns that must have drifted for a full run; 0 = none for this reason."""

    def __post_init__(self) -> None:
        """Refuses rules that nothing can meet."""
        for name in ("full_every_releases", "full_every_seconds", "full_after_refusals"):
            if not getattr(self, name) >= 0:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 0")
        if not 0.0 <= self.full_drift_share <= 1.0:
            raise ContractError(f"full_drift_share is {self.full_drift_share}, expected inside [0, 1]")


@dataclass(frozen=True, kw_only=True)
class RecipeMemory:
    """What is remembered of past runs."""

    releases_since_full: int = 0
    full_at: float | None = None
    """When the last full run was released; before the first one, when the rule first looked."""
    refusals: int = 0
    """Incremental runs refused in a row."""


def choose(
    memory: RecipeMemory, settings: RecipeSettings, numbers: Mapping[str, float | None], *, now: float
) -> tuple[str, str]:
    """The parent that the next run is given, `none` or `current`, and why.

    >>> rules = RecipeSettings(full_after_refusals=2)
    >>> choose(RecipeMemory(refusals=1), rules, {}, now=0.0)
    ('current', 'incremental run')
    >>> choose(RecipeMemory(refusals=2), rules, {}, now=0.0)
    ('none', 'full run: 2 incremental runs in a row were refused')
    """
    if settings.full_after_refusals and memory.refusals >= settings.full_after_refusals:
        return NONE, f"full run: {memory.refusals} incremental runs in a row were refused"
    if settings.full_every_releases and memory.releases_since_full + 1 >= settings.full_every_releases:
        return NONE, f"full run: {memory.releases_since_full} releases since the last full run"
    if settings.full_every_seconds and memory.full_at is not None:
        age = now - memory.full_at
        if age >= settings.full_every_seconds:
            return NONE, f"full run: the last full run is {age:.0f} s old"
    drifted, judged = numbers.get(DRIFTED), numbers.get(JUDGED)
    if settings.full_drift_share and drifted is not None and judged and drifted >= settings.full_drift_share * judged:
        return NONE, f"full run: {drifted:.0f} of {judged:.0f} columns drifted"
    return CURRENT, "incremental run"


def looked(memory: RecipeMemory, *, now: float) -> RecipeMemory:
    """The memory after the rule was asked: from the first time on, the age of the last full run counts."""
    return memory if memory.full_at is not None else replace(memory, full_at=now)


def ended(memory: RecipeMemory, outcome: str, parent: str, *, now: float) -> RecipeMemory:
    """The memory after a run with this `parent` was `released` or `refused`; a failed run tells nothing of either."""
    if outcome == "released" and parent == NONE:
        return RecipeMemory(full_at=now)
    if outcome == "released":
        return replace(memory, releases_since_full=memory.releases_since_full + 1, refusals=0)
    if outcome == "refused" and parent != NONE:
        return replace(memory, refusals=memory.refusals + 1)
    if outcome == "refused":
        # A full run was refused as well: the next may be incremental again, or full runs would follow each other.
        return replace(memory, refusals=0)
    return memory
