"""What the loop puts on show, once per turn; a number that does not exist is None. Showing it is left to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from monitoring.measures.kpis import Kpis

LEADER, STANDBY = "leader", "standby"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the last look found; a number that does not exist is None."""

    store_problem: str | None = None
    """Why the model store cannot be read; then what follows of it is None or empty."""
    promotions: dict[str, int] = field(default_factory=dict)
    """Lines of the journal by action, intents left out."""
    live_version: int | None = None
    live_action: str | None = None
    """What made it live: `release`, `rollback` or `promote`."""
    live_since: float | None = None
    gate_refusals: int | None = None
    """Runs in a row that reached the gate and were refused by it."""
    last_run: Mapping[str, Any] | None = None
    """How the last run ended: `run`, `state`, `step`, `reason`, and `reports`, the steps that left one; None before one
    has ended."""
    last_run_end: float | None = None
    last_run_seconds: float | None = None
    """From the start of the last run's first step to its end."""
    unuploaded_files: int | None = None
    """Sealed archive files that are not in the lake; None without an uploader."""
    oldest_unuploaded: float | None = None
    """When the first of them was written."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything shown, as of one turn of the loop."""

    time: float | None = None
    """When it was made, seconds since the epoch; None before the first turn."""
    role: str = LEADER
    """`leader`, or `standby` while another replica holds the lease."""
    counters: dict[str, float] = field(default_factory=dict)
    """Everything counted since the state folder was created; see `monitoring.memory.store`."""
    pending_rows: int = 0
    """Rows whose attribution window is open."""
    log_backlog: int | None = None
    """Messages published and not acknowledged; None where the log cannot tell."""
    log_read_up_to: float | None = None
    """Every record published before this time is in; None = not known."""
    log_problem: str | None = None
    """Why nothing can arrive from the log; None while connected."""
    last_record_time: float | None = None
    """Time of the newest prediction."""
    serving_version: int | None = None
    windows: tuple[Kpis, ...] = ()
    """One per model version."""
    open_labels: tuple[Mapping[str, Any], ...] = ()
    """`measures.open_labels` per model version, as JSON takes it."""
    drift: Mapping[str, Any] | None = None
    """The newest closed bucket of feature drift, as JSON takes it; None before one has closed."""
    decisions: tuple[Mapping[str, Any], ...] = ()
    """What each policy said at the last decision point: `policy`, `action`, `reason`, `numbers`."""
    threshold: float | None = None
    """AUC below which the threshold policy speaks of a breach; drawn on the page."""
    decided_at: float | None = None
    """The last decision point: event time."""
    decision: str | None = None
    """The answer of all policies together, with its reason."""
    retraining: dict[str, Any] = field(default_factory=dict)
    """Where the request under way stands, and what restrains the next."""
    around: Surroundings | None = None
    """The model store and the archive, as of a minute ago at most; None before the first look."""

    @property
    def is_at_work(self) -> bool:
        """Whether the numbers are those of a turn of the loop: not before the first one, and not of a standby."""
        return self.time is not None and self.role == LEADER
