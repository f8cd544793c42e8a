"""What the monitor leaves for people, the report and the backtest: `timeline.jsonl`, `events.jsonl`, `decisions.jsonl`.

One JSON object a line in the state folder, appended and flushed to disk. After a crash an event can stand twice (it is
written before the step that it describes is recorded), but is never missing. While the disk is full, points and events
wait in memory; decisions do not, since nobody may act on one that is not written. A full file becomes `<name>.1` and
replaces the previous one. Prometheus metrics are left to `monitoring.web.metrics`.
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
MAX_FILE_BYTES = 64 * 2**20
"""About two days of a timeline with a point a second, at 400 bytes a point. Of decisions every 10 s, each with the
judge's memory: ten days with the threshold policy (750 bytes a line); other policies remember more. The full file is
kept beside the current one, so an incident can be recorded for that long at least."""

MAX_WAITING_LINES = 5_000
"""Lines that wait in memory while they cannot be written, some 5 MB; of more the oldest are dropped and counted."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, as people and programs read it."""

    time: float
    """Seconds since the epoch."""
    kind: str
    text: str
    """One line for people."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further values, JSON."""

    def document(self) -> dict[str, Any]:
        """The line in `events.jsonl`."""
        return {"time": self.time, "kind": self.kind, "text": self.text, **self.details}


class Journal:
    """The files of one state folder."""

    def __init__(self, state: Path, clock: Callable[[], float], *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Appends to the files in `state`; `clock` returns seconds since the epoch."""
        self._timeline, self._events, self._clock = state / TIMELINE_FILE, state / EVENTS_FILE, clock
        self._decisions = state / DECISIONS_FILE
        self._decided_until = _last_time(self._decisions)
        self._max_file_bytes = max_file_bytes
        self._waiting: deque[tuple[Path, str]] = deque()
        """Lines of points and events that could not be written yet, oldest first."""
        self._num_dropped = 0
        self.problem: str | None = None
        """Why lines wait to be written; None while none does."""
        self.listener: Callable[[Event], None] = lambda event: None
        """Called with each event after it was written."""

    def append_decisions(self, lines: Mapping[float, str]) -> None:
        """Appends decisions, given as canonical lines by their decision points, oldest first.

        Those that a predecessor wrote before it died are left out, so that every point stands once.

        Raises:
            TemporaryError: a line cannot be written; append it and those after it again.
        """
        for time, line in lines.items():
            if self._decided_until is None or time > self._decided_until:
                try:
                    self._append_line(self._decisions, line)
                except OSError as error:
                    raise TemporaryError(f"a decision cannot be written: {error}") from error
                self._decided_until = time

    def accept_earlier_decisions(self) -> None:
        """Append also decisions on earlier points: the clock was ahead, and was set right."""
        self._decided_until = None

    def append_point(self, point: dict[str, Any]) -> None:
        """Appends one point of the timeline."""
        self._add(self._timeline, json.dumps({"time": self._clock(), **point}, allow_nan=False))

    def emit(self, kind: str, text: str, **details: Any) -> None:
        """Appends one event, logs it and passes it to the listener."""
        event = Event(time=self._clock(), kind=kind, text=text, details=details)
        self._add(self._events, json.dumps(event.document(), allow_nan=False))
        logger.info("%s: %s", kind, text)
        self.listener(event)

    def write_waiting(self) -> None:
        """Write the lines that wait, until one cannot be written; `problem` says why."""
        self.problem = None
        while self._waiting:
            path, line = self._waiting[0]
            try:
                self._append_line(path, line)
            except OSError as error:
                self.problem = f"{len(self._waiting)} lines of events and numbers cannot be written: {error}"
                return
            self._waiting.popleft()
        if self._num_dropped:
            number, self._num_dropped = self._num_dropped, 0
            self.emit("lines_lost", f"{number} lines were lost while they could not be written", lines=number)

    def _add(self, path: Path, line: str) -> None:
        self._waiting.append((path, line))
        if len(self._waiting) > MAX_WAITING_LINES:
            self._waiting.popleft()
            self._num_dropped += 1
        self.write_waiting()

    def _append_line(self, path: Path, line: str) -> None:
        if path.exists() and path.stat().st_size >= self._max_file_bytes:
            os.replace(path, path.with_name(f"{path.name}.1"))
        append_line(path, line)


def _last_time(path: Path) -> float | None:
    """`time` of the last complete line of the file, or of the full file that it follows; None if there is none."""
    for each in (path, path.with_name(f"{path.name}.1")):
        if each.exists() and (complete := each.read_bytes().split(b"\n")[:-1]):
            return float(json.loads(complete[-1])["time"])
    return None
