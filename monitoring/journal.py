"""Append to the monitor's journal files: `timeline.jsonl`, `events.jsonl`, `decisions.jsonl`.

The files are read by people, by the page and by backtests. Each line in the state folder is one
JSON object, appended and flushed to disk. An event is written before the state records that the
step is done. After a crash, an event can therefore appear twice, but it is never missing. While the
disk is full, points and events wait in memory. Decisions are not buffered, because a decision must
be on disk before an action follows. A full file is renamed to `<name>.1` and replaces the previous
file of this name. `monitoring.web.metrics` exports the Prometheus metrics.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evergreen.runtime.durable import append_line
from evergreen.runtime.errors import TemporaryError

logger = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.jsonl"
EVENTS_FILE = "events.jsonl"
DECISIONS_FILE = "decisions.jsonl"
_MAX_FILE_BYTES = 64 * 2**20
"""Size of a full file, in bytes. A timeline of this size covers about two days, with a point of 400
bytes every second. A file of decisions covers ten days, if the threshold policy writes a line of
750 bytes every 10 s. Policies other than `threshold` write longer lines. The previous file is not
deleted, so an incident can cover at least the time of one full file."""

_MAX_WAITING_LINES = 5_000
"""Maximum number of lines that wait in memory while they cannot be written, about 5 MB. Older lines
are dropped and counted."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, for people and programs."""

    time: float
    """Time of the event in seconds since the epoch."""
    kind: str
    text: str
    """Text of the event for people, in one line."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further values of the event, as JSON."""

    def document(self) -> dict[str, Any]:
        """Return the line of `events.jsonl` as a JSON object."""
        return {"time": self.time, "kind": self.kind, "text": self.text, **self.details}


class Journal:
    """Journal files of one state folder."""

    def __init__(
        self, state: Path, clock: Callable[[], float], *, max_file_bytes: int = _MAX_FILE_BYTES
    ) -> None:
        """Open the files in `state` for appending. `clock` returns seconds since the epoch."""
        self._timeline, self._events, self._clock = (
            state / TIMELINE_FILE,
            state / EVENTS_FILE,
            clock,
        )
        self._decisions = state / DECISIONS_FILE
        self.last_decision = _last_line(self._decisions)
        """Newest line in the file of decisions when the monitor started, or None."""
        self._decided_until = (
            None if self.last_decision is None else float(self.last_decision["time"])
        )
        self._max_file_bytes = max_file_bytes
        self._waiting: deque[tuple[Path, str]] = deque()
        """Lines of points and events that could not be written yet, oldest first."""
        self._num_dropped = 0
        self.problem: str | None = None
        """Why lines wait to be written, or None."""
        self.listener: Callable[[Event], None] = lambda event: None
        """Called with each event after it was written."""

    def append_decisions(self, lines: Mapping[float, str]) -> None:
        """Append decisions, oldest first. `lines` maps each decision point to its line.

        Decisions that a predecessor wrote before it died are skipped, so that every point appears
        once.

        Raises:
            TemporaryError: A line cannot be written. After the error, the caller must append the
                failed line and all later lines again.
        """
        for time, line in lines.items():
            if self._decided_until is None or time > self._decided_until:
                try:
                    self._append_line(self._decisions, line)
                except OSError as error:
                    raise TemporaryError(f"a decision cannot be written: {error}") from error
                self._decided_until = time

    def accept_earlier_decisions(self) -> None:
        """Allow decisions on points that are older than the last decision.

        Such points occur after a clock that was fast is set back.
        """
        self._decided_until = None

    def append_point(self, point: dict[str, Any]) -> None:
        """Append one point of the timeline."""
        self._add(self._timeline, json.dumps({"time": self._clock(), **point}, allow_nan=False))

    def emit(self, kind: str, text: str, **details: Any) -> None:
        """Append one event, log it and pass it to the listener."""
        event = Event(time=self._clock(), kind=kind, text=text, details=details)
        self._add(self._events, json.dumps(event.document(), allow_nan=False))
        logger.info("%s: %s", kind, text)
        self.listener(event)

    def write_waiting(self) -> None:
        """Write the waiting lines until one cannot be written, and set `problem` accordingly."""
        self.problem = None
        while self._waiting:
            path, line = self._waiting[0]
            try:
                self._append_line(path, line)
            except OSError as error:
                self.problem = (
                    f"{len(self._waiting)} lines of events and numbers cannot be written: {error}"
                )
                return
            self._waiting.popleft()
        if self._num_dropped:
            number, self._num_dropped = self._num_dropped, 0
            self.emit(
                "lines_lost",
                f"{number} lines were lost while they could not be written",
                lines=number,
            )

    def _add(self, path: Path, line: str) -> None:
        self._waiting.append((path, line))
        if len(self._waiting) > _MAX_WAITING_LINES:
            self._waiting.popleft()
            self._num_dropped += 1
        self.write_waiting()

    def _append_line(self, path: Path, line: str) -> None:
        if path.exists() and path.stat().st_size >= self._max_file_bytes:
            os.replace(path, path.with_name(f"{path.name}.1"))
        append_line(path, line)


def _last_line(path: Path) -> dict[str, Any] | None:
    """Return the file's last complete line, or None.

    If the file has no complete line, return the last line of the rotated file (suffix `.1`).
    """
    for each in (path, path.with_name(f"{path.name}.1")):
        if each.exists() and (complete := each.read_bytes().split(b"\n")[:-1]):
            found: dict[str, Any] = json.loads(complete[-1])
            return found
    return None
