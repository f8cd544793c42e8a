"""What the monitor tells people and the report: `<state>/timeline.jsonl` and `<state>/events.jsonl`.

One JSON object a line, appended and flushed to disk. After a crash an event can stand twice (it is written before
the step that it tells of is recorded), never be missing. Prometheus metrics are left to `monitoring.exposition`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.contracts.durable import append_line

logger = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.jsonl"
EVENTS_FILE = "events.jsonl"


class Journal:
    """Timeline and events of one state folder."""

    def __init__(self, state: Path, clock: Callable[[], float]) -> None:
        """Appends to the files in `state`; `clock` gives seconds since the epoch."""
        self._timeline, self._events, self._clock = state / TIMELINE_FILE, state / EVENTS_FILE, clock

    def measure(self, point: dict[str, Any]) -> None:
        """Appends one point of the timeline."""
        append_line(self._timeline, json.dumps({"time": self._clock(), **point}, allow_nan=False))

    def tell(self, kind: str, text: str, **details: Any) -> None:
        """Appends one event and logs it."""
        append_line(
            self._events, json.dumps({"time": self._clock(), "kind": kind, "text": text, **details}, allow_nan=False)
        )
        logger.info("%s: %s", kind, text)
