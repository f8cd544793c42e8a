"""Read a monitor's last snapshot: from the monitor itself, or from its state folder.

The journal files, the rules and the database of a stopped monitor are enough for `evergreen
status`. The program writes nothing, and does not lock the folder.
"""

import json
import sqlite3
import urllib.request
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from evergreen.runtime.errors import ContractError, TemporaryError
from monitoring.journal import DECISIONS_FILE, TIMELINE_FILE
from monitoring.metrics.window import Kpis
from monitoring.policies.policy import Decision
from monitoring.policies.rate_limit import PastRuns
from monitoring.retraining.actions import ActionStatus, describe_actions
from monitoring.retraining.notifications import DRIFT as DRIFT_INCIDENT
from monitoring.retraining.notifications import INCIDENTS, OpenIncident
from monitoring.retraining.retraining import PROGRESS, RATE_LIMITS, RunProgress
from monitoring.state.drift_state import DOCUMENT as DRIFT
from monitoring.state.rules_file import read_rules
from monitoring.state.store import STORE_FILE
from monitoring.web.exposition import Snapshot
from monitoring.web.page import tail
from monitoring.web.server import HTTP_FILE

TIMEOUT_SECONDS = 2.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener without a proxy, because a monitor's address is inside the installation."""


def find_address(state: Path) -> str | None:
    """Return the address that the monitor of a state folder wrote at its start, or None."""
    try:
        known = json.loads((state / HTTP_FILE).read_bytes())
        return f"http://{known['host']}:{known['port']}"
    except (OSError, ValueError, KeyError):
        return None


def fetch_snapshot(address: str) -> tuple[Snapshot, str | None]:
    """Return a running monitor's snapshot, and the reason why the monitor is not ready, or None.

    Raises:
        TemporaryError: nothing responds at the address.
        ContractError: the response is not a monitor's status.
    """
    url = f"{address.rstrip('/')}/status"
    try:
        with DIRECT.open(url, timeout=TIMEOUT_SECONDS) as response:
            content = response.read()
    except (OSError, ValueError) as error:
        raise TemporaryError(f"no monitor responds at {url}: {error}") from error
    try:
        known = json.loads(content)
        return msgspec.convert(known, Snapshot), known["unready"]
    except (ValueError, KeyError, TypeError) as error:
        raise ContractError(f"{url} returned no status of a monitor: {error}") from error


def read_snapshot(state: Path, *, now: float) -> Snapshot:
    """Return the last snapshot of a monitor from its state folder.

    The snapshot has no status of the registry, and the status of the log is unknown.

    Args:
        state: State folder of a monitor. A missing file counts as an empty file.
        now: Seconds since the epoch, for the rate limits.

    Raises:
        ContractError: the database or the rules were written by another version.
    """
    points = {int(point["version"]): point for point in tail(state / TIMELINE_FILE)}
    last = next(reversed(tail(state / DECISIONS_FILE)), None)
    documents = _read_database(state / STORE_FILE)
    version = int(last["version"]) if last else max(points, default=None)
    names = {each.name for each in fields(Kpis)}
    return Snapshot(
        time=max((float(point["time"]) for point in points.values()), default=None),
        counters=documents.counters,
        serving_version=version,
        windows=tuple(
            Kpis(**{name: value for name, value in point.items() if name in names})
            for point in points.values()
        ),
        drift=_shown_drift(documents.content.get(DRIFT), version),
        decided_at=float(last["time"]) if last else None,
        decision=f"{last['action']}: {last['reason']}" if last else None,
        decisions=tuple(map(Decision.of, last["decisions"] if last else ())),
        actions=_actions(state, documents.content, now) if documents.content else None,
    )


class _Documents(msgspec.Struct):
    content: dict[str, dict[str, Any]]
    counters: dict[str, float]


def _read_database(path: Path) -> _Documents:
    if not path.exists():
        return _Documents({}, {})
    names = (PROGRESS, RATE_LIMITS, INCIDENTS, DRIFT)
    placeholders = ", ".join("?" * len(names))
    query = f"SELECT name, content FROM documents WHERE name IN ({placeholders})"
    try:
        with closing(
            sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)
        ) as database:
            found = {name: json.loads(text) for name, text in database.execute(query, names)}
            counters = dict(database.execute("SELECT name, value FROM counters"))
    except (sqlite3.Error, ValueError) as error:
        raise ContractError(
            f"{path} cannot be read: {error}, expected a monitor's state"
        ) from error
    return _Documents(found, counters)


def _shown_drift(document: Mapping[str, Any] | None, version: int | None) -> Any:
    shown = {each["version"]: each for each in (document or {}).get("shown", ())}
    return shown.get(version, next(reversed(shown.values()), None))


def _actions(state: Path, content: Mapping[str, Any], now: float) -> ActionStatus:
    incident = content.get(INCIDENTS, {}).get(DRIFT_INCIDENT)
    return describe_actions(
        msgspec.convert(content.get(PROGRESS, {}), RunProgress),
        msgspec.convert(content.get(RATE_LIMITS, {}), PastRuns),
        msgspec.convert(incident, OpenIncident) if incident else None,
        daily_budget=read_rules(state).rate_limit.daily_budget,
        messages_waiting=None,
        now=now,
    )
