"""What the monitor tells people and the report: `<state>/timeline.jsonl` and `<state>/events.jsonl`.

One JSON object a line, appended and flushed to disk. After a crash an event can stand twice (it is written before
the step that it tells of is recorded), never be missing. A file that is full becomes `<name>.1` in place of the last
one. Prometheus metrics are left to `monitoring.showing.exposition`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.contracts.durable import append_line

logger = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.jsonl"
EVENTS_FILE = "events.jsonl"
MAX_FILE_BYTES = 64 * 2**20
"""About two days of a timeline with a point a second, at 400 bytes a point."""


class Journal:
    """Timeline and events of one state folder."""

    def __init__(self, state: Path, clock: Callable[[], float], *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Appends to the files in `state`; `clock` gives seconds since the epoch."""
        self._timeline, self._events, self._clock = state / TIMELINE_FILE, state / EVENTS_FILE, clock
        self._max_file_bytes = max_file_bytes

    def measure(self, point: dict[str, Any]) -> None:
        """Appends one point of the timeline."""
        self._append(self._timeline, {"time": self._clock(), **point})

    def tell(self, kind: str, text: str, **details: Any) -> None:
        """Appends one event and logs it."""
        self._append(self._events, {"time": self._clock(), "kind": kind, "text": text, **details})
        logger.info("%s: %s", kind, text)

    def _append(self, path: Path, line: dict[str, Any]) -> None:
        if path.exists() and path.stat().st_size >= self._max_file_bytes:
            os.replace(path, path.with_name(f"{path.name}.1"))
        append_line(path, json.dumps(line, allow_nan=False))
