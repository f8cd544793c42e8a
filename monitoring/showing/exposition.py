"""The snapshot on show, the loop's heartbeat, and whether the monitor lives and works.

In: snapshots that the loop puts up, one per turn. Out: reasons for not being healthy or ready. Drawing is left to
`showing.metrics` and `showing.page`, answering to `showing.server`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict

from monitoring.showing.snapshot import STANDBY, Snapshot

STALL_SECONDS = 60.0
"""A loop silent for longer is stuck; longer than any single call it makes may take."""


class Exposition:
    """The snapshot on show and the loop's heartbeat."""

    def __init__(self, *, stall_seconds: float = STALL_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        """Shows nothing yet, healthy.

        Args:
            stall_seconds: Silence of the loop after which it counts as stuck.
            clock: Monotonic seconds.
        """
        self._stall_seconds, self._clock = stall_seconds, clock
        self._last_beat = clock()
        self._ended: str | None = None
        self._cut_short: str | None = None
        self.snapshot = Snapshot()

    def beat(self, snapshot: Snapshot) -> None:
        """Shows a new snapshot; the loop is alive and its turn was whole."""
        self.snapshot, self._last_beat, self._cut_short = snapshot, self._clock(), None

    def stumble(self, reason: str) -> None:
        """The loop is alive, but its turn was cut short: the log or a folder could not be used."""
        self._last_beat, self._cut_short = self._clock(), reason

    def end(self, reason: str) -> None:
        """The loop has ended; from now on unhealthy."""
        self._ended = reason

    def unhealthy(self) -> str | None:
        """Why a restart would help; None while it would not."""
        if self._ended is not None:
            return f"the loop has ended: {self._ended}"
        silence = self._clock() - self._last_beat
        return f"the loop is silent for {silence:.0f} s" if silence > self._stall_seconds else None

    def unready(self) -> str | None:
        """Why nothing is being monitored now; None while records that are published come in, or would.

        An idle log is no reason: `Subscriber.problem` tells a dead one. A standby is ready, it waits as it should.
        """
        if reason := self.unhealthy():
            return reason
        if self._cut_short is not None:
            return f"the last turn was cut short: {self._cut_short}"
        if self.snapshot.time is None:
            return "no turn of the loop has ended yet"
        if self.snapshot.role != STANDBY and self.snapshot.log_problem is not None:
            return f"the log cannot deliver: {self.snapshot.log_problem}"
        return None

    def status(self) -> bytes:
        """The snapshot as JSON."""
        known = {**asdict(self.snapshot), "unhealthy": self.unhealthy(), "unready": self.unready()}
        return json.dumps(known, indent=2, default=str).encode()
