"""What a decision asks the pipeline for: a request named by its data, incremental or full by a rule over past runs.

In: a confirmed decision, the memory of past runs, the time. Out: a `RetrainRequest`. An incremental run takes minutes
and keeps what the model has learned; a full one takes hours and forgets what no longer holds, such as the ids of
categories that are gone. Every rule for full runs is off by default. Submitting is left to `monitoring.acting`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

from components.contracts.retrain_request import CURRENT, NONE, RetrainRequest
from monitoring.deciding.policy import Decision
from monitoring.flags import expect

OBSERVED_NUMBERS = ("auc", "auc_low", "auc_high", "threshold", "rows", "clicks", "version", "rows_since_breach")
"""Numbers of a decision that its request reports."""
DRIFTED, JUDGED = "drifted_columns", "judged_columns"
"""Numbers of a decision that the rule of drift reads; a policy that knows no columns leaves them out."""


@dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """When a run starts from scratch."""

    full_every_releases: int = 0
    """Every how many releases one comes from a full run; 0 = this rule is off."""
    full_every_seconds: float = 0.0
    """Longest time between two full runs that were released; 0 = this rule is off."""
    full_after_refusals: int = 0
    """Incremental runs refused in a row after which the next run is full; 0 = this rule is off."""
    full_drift_share: float = 0.0
    """Share of the judged columns that must have drifted for a full run; 0 = this rule is off."""

    def __post_init__(self) -> None:
        """Refuses rules that no run can meet."""
        names = ("full_every_releases", "full_every_seconds", "full_after_refusals")
        expect(self, "at least 0", lambda value: value >= 0, *names)
        expect(self, "inside [0, 1]", lambda value: 0.0 <= value <= 1.0, "full_drift_share")


@dataclass(frozen=True, kw_only=True)
class RecipeMemory:
    """What is remembered of past runs."""

    releases_since_full: int = 0
    full_at: float | None = None
    """When the last full run was released; before the first one, when a run was first requested."""
    refusals: int = 0
    """Incremental runs refused in a row."""

    def dated(self, *, now: float) -> RecipeMemory:
        """The memory with an age of the last full run, which counts from the first request on."""
        return self if self.full_at is not None else replace(self, full_at=now)

    def ended(self, outcome: str, parent: str, *, now: float) -> RecipeMemory:
        """The memory after a run with this `parent`; one that failed says nothing about either kind of run."""
        if outcome == "released" and parent == NONE:
            return RecipeMemory(full_at=now)
        if outcome == "released":
            return replace(self, releases_since_full=self.releases_since_full + 1, refusals=0)
        if outcome == "refused":
            # After a refused full run the next may be incremental again, or full runs would follow each other.
            return replace(self, refusals=self.refusals + 1 if parent != NONE else 0)
        return self


def choose_parent(
    memory: RecipeMemory, settings: RecipeSettings, numbers: Mapping[str, float | None], *, now: float
) -> tuple[str, str]:
    """The parent of the next run, `none` or `current`, and the reason.

    >>> rules = RecipeSettings(full_after_refusals=2)
    >>> choose_parent(RecipeMemory(refusals=1), rules, {}, now=0.0)
    ('current', 'incremental run')
    >>> choose_parent(RecipeMemory(refusals=2), rules, {}, now=0.0)
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


def make_request(decision: Decision, *, parent: str, why: str, data_until: float, now: float) -> RetrainRequest:
    """The request for a run over the rows up to `data_until`.

    Its name follows from the version of the data: the end of its rows, the model that serves, and whether the run
    starts from scratch. Neither the clock nor the monitor that asks is part of it: two monitors that saw the same rows
    ask for the same run, which every trigger starts once.

    Args:
        decision: Confirmed.
        parent: `none` or `current`.
        why: Why this parent.
        data_until: Event time (seconds since the epoch) up to which, inclusive, every row is matured. The window's end
            is exclusive and the archive counts microseconds, so it lies one later.
        now: Seconds since the epoch.
    """
    end = datetime.fromtimestamp(data_until, timezone.utc)
    # Two decision points of one second must not share a name.
    fraction = f"{end.microsecond:06d}" if end.microsecond else ""
    version = decision.numbers["version"]
    name = f"drift-{end.strftime('%Y%m%dT%H%M%S')}{fraction}Z-v{version}{'-full' if parent == NONE else ''}"
    return RetrainRequest(
        request_id=name,
        reason=f"{decision.reason} ({why})",
        requested_at=datetime.fromtimestamp(now, timezone.utc).isoformat(),
        window_start="",
        window_end=(end + timedelta(microseconds=1)).isoformat(),
        parent=parent,
        observed={name: decision.numbers.get(name) for name in OBSERVED_NUMBERS},
    )
