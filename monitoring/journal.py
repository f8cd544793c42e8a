"""What the monitor tells people, report and backtest: `timeline.jsonl`, `events.jsonl`, `decisions.jsonl` in `<state>`.

One JSON object a line, appended and flushed to disk. After a crash an event can stand twice (it is written before
the step that it tells of is recorded), never be missing. A file that is full becomes `<name>.1` in place of the last
one. Prometheus metrics are left to `monitoring.showing.exposition`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from components.runtime.durable import append_line

logger = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.jsonl"
EVENTS_FILE = "events.jsonl"
DECISIONS_FILE = "decisions.jsonl"
MAX_FILE_BYTES = 64 * 2**20
"""About two days of a timeline with a point a second, at 400 bytes a point. Of decisions every 10 s, each with the
judge's memory: ten days with the threshold policy (750 bytes a line), 32 hours with all six (5.8 kB). The full file is
kept beside the current one, so an incident can be recorded for that long at least."""


class Journal:
    """Timeline and events of one state folder."""

    def __init__(self, state: Path, clock: Callable[[], float], *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Appends to the files in `state`; `clock` gives seconds since the epoch."""
        self._timeline, self._events, self._clock = state / TIMELINE_FILE, state / EVENTS_FILE, clock
        self._decisions = state / DECISIONS_FILE
        self._decided_until = _last_time(self._decisions)
        self._max_file_bytes = max_file_bytes
        self.listener: Callable[[dict[str, Any]], None] = lambda event: None
        """Given each event after it was written."""

    def decide(self, lines: Mapping[float, str]) -> None:
        """Appends judgements, given as canonical lines by their decision points, oldest first.

        Those that a predecessor wrote before it died are left out, so that every point stands once.
        """
        for time, line in lines.items():
            if self._decided_until is None or time > self._decided_until:
                self._append_text(self._decisions, line)
                self._decided_until = time

    def measure(self, point: dict[str, Any]) -> None:
        """Appends one point of the timeline."""
        self._append(self._timeline, {"time": self._clock(), **point})

    def tell(self, kind: str, text: str, **details: Any) -> None:
        """Appends one event and logs it."""
        event = {"time": self._clock(), "kind": kind, "text": text, **details}
        self._append(self._events, event)
        logger.info("%s: %s", kind, text)
        self.listener(event)

    def _append(self, path: Path, line: dict[str, Any]) -> None:
        self._append_text(path, json.dumps(line, allow_nan=False))

    def _append_text(self, path: Path, line: str) -> None:
        if path.exists() and path.stat().st_size >= self._max_file_bytes:
            os.replace(path, path.with_name(f"{path.name}.1"))
        append_line(path, line)


def _last_time(path: Path) -> float | None:
    """`time` of the last whole line; None where there is none, also of the full file that this one follows."""
    for each in (path, path.with_name(f"{path.name}.1")):
        if each.exists() and (whole := each.read_bytes().split(b"\n")[:-1]):
            return float(json.loads(whole[-1])["time"])
    return None
