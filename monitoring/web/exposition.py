"""Data that the loop shares with the HTTP server: the pages' snapshot, and the loop's heartbeat.

The loop passes one snapshot per iteration. `web.metrics` and `web.page` render the snapshot, and
`web.server` answers requests and health checks.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from monitoring.metrics.open_labels import OpenEstimate
from monitoring.metrics.window import Kpis
from monitoring.policies.policy import Decision
from monitoring.retraining.actions import ActionStatus
from monitoring.web.store_status import StoreStatus

STALL_SECONDS = 60.0
"""Seconds without a heartbeat after which the loop counts as stuck. Each single call of the loop
takes less time than `STALL_SECONDS`."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that the pages show, as of one iteration of the loop.

    An undefined number is None.
    """

    recommender: str = ""
    """Name of the recommender whose log is read. Empty before the first iteration."""
    time: float | None = None
    """Time of the snapshot in seconds since the epoch. None before the first iteration."""
    counters: dict[str, float] = field(default_factory=dict)
    """Counters since the state folder was created, see `monitoring.state.store`."""
    pending_rows: int = 0
    """Number of rows whose attribution window is open."""
    log_backlog: int | None = None
    """Number of published messages that are not acknowledged. None if the log does not report
    it."""
    log_read_up_to: float | None = None
    """Watermark: every record published before this time was read. None if unknown."""
    log_problem: str | None = None
    """Reason why no record can arrive from the log. None while connected."""
    last_record_time: float | None = None
    """Time of the newest prediction."""
    serving_version: int | None = None
    windows: tuple[Kpis, ...] = ()
    """KPIs of each model version."""
    open_labels: tuple[OpenEstimate, ...] = ()
    """Estimated AUC of each model version that has open rows."""
    drift: Mapping[str, Any] | None = None
    """Newest closed bucket of feature drift, a JSON object. None before the first bucket has
    closed."""
    decisions: tuple[Decision, ...] = ()
    """Decision of each policy at the last decision point."""
    decided_at: float | None = None
    """Event time of the last decision point."""
    decision: str | None = None
    """Combined decision after rate limits, with its reason."""
    actions: ActionStatus | None = None
    """Status of the actions on decisions. None before the first iteration."""
    store_status: StoreStatus | None = None
    """Status of the registry, the archive and the disks, at most a minute old. None before the
    first read."""

    @property
    def set_apart_rows(self) -> float:
        """Number of rows that could not be archived and stay in the state folder."""
        return self.counters.get("set_apart", 0) + self.counters.get("given_up", 0)

    @property
    def threshold(self) -> float | None:
        """AUC limit shown in the chart, from the first policy with an AUC limit."""
        levels = (decision.numbers.get("threshold") for decision in self.decisions)
        return next((level for level in levels if level is not None), None)


class Exposition:
    """The newest snapshot and the loop's heartbeat."""

    def __init__(
        self, *, stall_seconds: float = STALL_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start healthy and without a snapshot. `clock` returns monotonic seconds."""
        self._stall_seconds, self._clock = stall_seconds, clock
        self._last_beat = clock()
        self._ended: str | None = None
        self._failed_turn: str | None = None
        self.snapshot = Snapshot()

    def show(self, snapshot: Snapshot) -> None:
        """Publish a new snapshot after a complete iteration of the loop."""
        self.snapshot = snapshot
        self._last_beat = self._clock()
        self._failed_turn = None

    def beat(self) -> None:
        """Record during an iteration that the loop is alive."""
        self._last_beat = self._clock()

    def record_failed_iteration(self, reason: str) -> None:
        """Record that the loop is alive, but its iteration failed."""
        self._last_beat, self._failed_turn = self._clock(), reason

    def end(self, reason: str) -> None:
        """Record that the loop has ended. The monitor is unhealthy from now on."""
        self._ended = reason

    def unhealthy(self) -> str | None:
        """Return the reason for a restart, or None."""
        if self._ended is not None:
            return f"the loop has ended: {self._ended}"
        silence = self._clock() - self._last_beat
        return f"the loop is silent for {silence:.0f} s" if silence > self._stall_seconds else None

    def unready(self) -> str | None:
        """Return why published records are not being processed, or None.

        The monitor is ready if the log is idle, but not if the log cannot deliver records (see
        `Subscriber.problem`).
        """
        if reason := self.unhealthy():
            return reason
        if self._failed_turn is not None:
            return f"the last iteration failed: {self._failed_turn}"
        if self.snapshot.time is None:
            return "no iteration of the loop has ended yet"
        if self.snapshot.log_problem is not None:
            return f"the log cannot deliver: {self.snapshot.log_problem}"
        return None

    def status(self) -> bytes:
        """Return the snapshot as JSON."""
        known = {**asdict(self.snapshot), "unhealthy": self.unhealthy(), "unready": self.unready()}
        return json.dumps(known, indent=2, default=str).encode()
