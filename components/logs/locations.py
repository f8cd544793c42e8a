"""The URL that names a log, and how it is opened.

Joins the inference client, which publishes, to the monitor, which subscribes: both are given the same URL. Pub/Sub and
Kafka join here when they come; the log itself is `contracts.event_log`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from components.contracts.errors import ContractError
from components.logs.sqlite import SqliteLog

DEFAULT_LEASE_SECONDS = 30.0


class OpenLog(NamedTuple):
    """Both ends of a log, and for how long a killed reader keeps its messages."""

    log: SqliteLog
    lease_seconds: float


def open_log(url: str) -> OpenLog:
    """The log that `url` names; the SQLite file is created where there is none.

    `sqlite:///relative.db` and `sqlite:////absolute.db`, as SQLAlchemy writes them, percent-encoded where needed.

    Raises:
        ContractError: another scheme, a missing path or folder, or an unknown option.
        TemporaryError: the log cannot be opened now.
    """
    parts = urlsplit(url)
    if parts.scheme != "sqlite":
        raise ContractError(f"log is {url!r}, expected sqlite:///<path>; no other scheme is supported yet")
    path = Path(unquote(parts.path[1:]))
    if parts.netloc or not path.name:
        raise ContractError(f"log is {url!r}, expected sqlite:///<path> with three slashes")
    if not path.parent.is_dir():
        raise ContractError(f"log is {url!r}, but {path.parent} is no folder")
    options = parse_qs(parts.query)
    if unknown := options.keys() - {"lease_seconds"}:
        raise ContractError(f"log is {url!r}, with unknown options {sorted(unknown)}")
    text = options.get("lease_seconds", [str(DEFAULT_LEASE_SECONDS)])[-1]
    try:
        lease_seconds = float(text)
    except ValueError as error:
        raise ContractError(f"log is {url!r}, expected lease_seconds to be a number") from error
    if not lease_seconds > 0:
        raise ContractError(f"log is {url!r}, expected lease_seconds above 0")
    return OpenLog(SqliteLog(path, lease_seconds=lease_seconds), lease_seconds)
