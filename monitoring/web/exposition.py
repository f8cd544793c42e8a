"""The snapshot that the pages show, the loop's heartbeat, and whether the monitor is healthy and ready.

In: snapshots, one per turn of the loop. Out: reasons for not being healthy or ready. Rendering is left to
`web.metrics` and `web.page`, answering to `web.server`.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from monitoring.metrics.open_labels import OpenEstimate
from monitoring.metrics.window import Kpis
from monitoring.policies.policy import Decision
from monitoring.retraining.acting import ActingStatus
from monitoring.web.store_status import StoreStatus

STALL_SECONDS = 60.0
"""A loop that shows no sign of life for longer is stuck; longer than any single call that it makes may take."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything shown, as of one turn of the loop; a number that does not exist is None."""

    recommender: str = ""
    """Name of the recommender whose log is read; empty before the first turn."""
    time: float | None = None
    """When it was made, seconds since the epoch; None before the first turn."""
    counters: dict[str, float] = field(default_factory=dict)
    """Everything counted since the state folder was created; see `monitoring.state.store`."""
    pending_rows: int = 0
    """Rows whose attribution window is open."""
    log_backlog: int | None = None
    """Messages published and not acknowledged; None where the log cannot tell."""
    log_read_up_to: float | None = None
    """Every record published before this time has been read; None = not known."""
    log_problem: str | None = None
    """Why nothing can arrive from the log; None while connected."""
    last_record_time: float | None = None
    """Time of the newest prediction."""
    serving_version: int | None = None
    windows: tuple[Kpis, ...] = ()
    """One per model version."""
    open_labels: tuple[OpenEstimate, ...] = ()
    """One per model version with open rows."""
    drift: Mapping[str, Any] | None = None
    """The newest closed bucket of feature drift, a JSON object; None before one has closed."""
    decisions: tuple[Decision, ...] = ()
    """The decision of each policy at the last decision point."""
    decided_at: float | None = None
    """The last decision point: event time."""
    decision: str | None = None
    """The decision of all policies together as it was acted on, with its reason."""
    acting: ActingStatus | None = None
    """None before the first turn."""
    store_status: StoreStatus | None = None
    """The model store, the archive and the disks, as of a minute ago at most; None before they were first read."""

    @property
    def set_apart_rows(self) -> float:
        """Rows that could not be archived and are kept in the state folder."""
        return self.counters.get("set_apart", 0) + self.counters.get("given_up", 0)

    @property
    def threshold(self) -> float | None:
        """The AUC that the first policy which has one holds the serving version to; drawn on the page."""
        levels = (decision.numbers.get("threshold") for decision in self.decisions)
        return next((level for level in levels if level is not None), None)


class Exposition:
    """The newest snapshot and the loop's heartbeat."""

    def __init__(self, *, stall_seconds: float = STALL_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        """Shows nothing yet, healthy; `clock` returns monotonic seconds."""
        self._stall_seconds, self._clock = stall_seconds, clock
        self._last_beat = clock()
        self._ended: str | None = None
        self._failed_turn: str | None = None
        self.snapshot = Snapshot()

    def show(self, snapshot: Snapshot) -> None:
        """Shows a new snapshot; the loop is alive and its turn was complete."""
        self.snapshot = snapshot
        self._last_beat = self._clock()
        self._failed_turn = None

    def beat(self) -> None:
        """Note that the loop is alive, in the middle of a turn."""
        self._last_beat = self._clock()

    def note_failed_turn(self, reason: str) -> None:
        """The loop is alive, but its turn was cut short: the log or a folder could not be used."""
        self._last_beat, self._failed_turn = self._clock(), reason

    def end(self, reason: str) -> None:
        """The loop has ended; unhealthy from now on."""
        self._ended = reason

    def unhealthy(self) -> str | None:
        """Why a restart would help; None while it would not."""
        if self._ended is not None:
            return f"the loop has ended: {self._ended}"
        silence = self._clock() - self._last_beat
        return f"the loop is silent for {silence:.0f} s" if silence > self._stall_seconds else None

    def unready(self) -> str | None:
        """Why nothing is being monitored now; None while published records are taken in, or would be.

        An idle log is no reason; one that cannot deliver is (`Subscriber.problem`).
        """
        if reason := self.unhealthy():
            return reason
        if self._failed_turn is not None:
            return f"the last turn was cut short: {self._failed_turn}"
        if self.snapshot.time is None:
            return "no turn of the loop has ended yet"
        if self.snapshot.log_problem is not None:
            return f"the log cannot deliver: {self.snapshot.log_problem}"
        return None

    def status(self) -> bytes:
        """The snapshot as JSON."""
        known = {**asdict(self.snapshot), "unhealthy": self.unhealthy(), "unready": self.unready()}
        return json.dumps(known, indent=2, default=str).encode()
