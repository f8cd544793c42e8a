"""The recent history for the status page: the newest lines of the monitor's files and of the promotion journal.

Read for each page from the ends of the files, so that what is shown survives a restart and costs the loop nothing.
Writing them is left to `monitoring.journal` and to deployment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from components.runtime.errors import ContractError
from components.store import promotion_journal
from monitoring.journal import EVENTS_FILE, TIMELINE_FILE

TAIL_BYTES = 2 * 2**20
"""Of each file: about 4,000 points of the timeline, or 7,000 events; read and parsed in about 30 ms."""
MAX_POINTS = 600
"""Points drawn of each version: more than a phone has pixels for."""


class History(NamedTuple):
    """What happened recently, oldest first."""

    points: list[dict[str, Any]]
    """Lines of the timeline: `time`, `version`, the fields of `measures.kpis.Kpis`."""
    events: list[dict[str, Any]]
    """`time`, `kind`, `text`: the monitor's own events and the store's releases and rollbacks."""


def read_history(state: Path, store: Path) -> History:
    """The newest lines in `state`, with the promotions of the model store `store`."""
    points = tail(state / TIMELINE_FILE)
    events = tail(state / EVENTS_FILE) + _promotion_events(store)
    return History(_thinned(points), sorted(events, key=lambda event: float(event["time"])))


def tail(path: Path, num_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The whole lines among the last `num_bytes` of a file of JSON lines; a torn one is left out.

    A file that is not there has none.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - num_bytes))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    if size > num_bytes:
        lines = lines[1:]
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # written this moment, or torn by a crash
    return found


def _thinned(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every n-th point of each version, counted from its newest."""
    by_version: dict[int, list[dict[str, Any]]] = {}
    for point in points:
        by_version.setdefault(int(point["version"]), []).append(point)
    kept: list[dict[str, Any]] = []
    for of_version in by_version.values():
        every = -(-len(of_version) // MAX_POINTS)
        kept += of_version[::-1][::every][::-1]
    return sorted(kept, key=lambda point: float(point["time"]))


def _promotion_events(store: Path) -> list[dict[str, Any]]:
    try:
        entries = promotion_journal.read_journal(store)
    except (ContractError, OSError):
        return []  # deployment reports a damaged journal; the page does without
    return [
        {
            "time": promotion_journal.moment_of(entry.time).timestamp(),
            "kind": entry.action,
            "text": f"model version {entry.version} serves: {entry.reason}",
        }
        for entry in entries
    ]
