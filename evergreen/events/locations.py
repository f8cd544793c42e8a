"""URLs of event logs, and the functions that open them for writing and reading.

The inference client and the monitor get the same URL. The client publishes to the log, and the
monitor subscribes to it. A backend's library is imported only when its scheme is used.

A URL has one of these forms:

- `sqlite:///relative.db` or `sqlite:////absolute.db`, as in SQLAlchemy. The parameter
  `?lease_seconds=30` is optional.
- `pubsub://project/topic?subscription=name`. See `evergreen.events.pubsub`.
- `kafka://host:port[,host:port]/topic?group=name`. See `evergreen.events.kafka`.

A partitioned log consists of several logs, each with its own monitor. For example,
`kafka://host:port/topic-{0-3}` names four logs.
"""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evergreen.events.event_log import Publisher, Subscriber
from evergreen.events.sqlite import SqliteLog
from evergreen.events.urls import LogUrl, redacted
from evergreen.runtime.errors import ContractError, expect

SCHEMES = ("sqlite", "pubsub", "kafka")
_PARTITIONS = re.compile(r"\{0-([0-9]{1,3})\}")


@dataclass(frozen=True, kw_only=True)
class _SqliteOptions:
    """Options in the URL of an SQLite log."""

    lease_seconds: float = 30.0
    """Seconds for which the messages of a killed reader are not delivered to the next reader."""

    def __post_init__(self) -> None:
        expect(self, "a number above 0", lambda value: 0 < value < math.inf, "lease_seconds")


def partition_urls(url: str) -> list[str]:
    """Return the URLs of the logs that `url` names.

    If `url` has a range, there is one URL for each number of the range, else only `url`.

    The same range may occur several times in `url`.

    >>> partition_urls("pubsub://project/clicks-{0-1}?subscription=monitor-{0-1}")
    ['pubsub://project/clicks-0?subscription=monitor-0', 'pubsub://project/clicks-1?subscription=monitor-1']

    Raises:
        ContractError: two ranges differ.
    """
    lasts = set(_PARTITIONS.findall(url))
    if len(lasts) > 1:
        raise ContractError(
            f"log is {redacted(url)!r}, expected the same range of partitions everywhere"
        )
    return (
        [_PARTITIONS.sub(str(number), url) for number in range(int(lasts.pop()) + 1)]
        if lasts
        else [url]
    )


def open_publisher(url: str, *, clock: Callable[[], float] = time.time) -> Publisher:
    """Open the log that `url` names for writing. No permission to read the log is needed.

    Raises:
        ContractError: the scheme or an option is unknown, a part of the URL is missing, or a folder
            or library does not exist.
        TemporaryError: the log cannot be opened now.
    """
    parts = _parse_one(url)
    try:
        if parts.scheme == "pubsub":
            from evergreen.events.pubsub import location as pubsub

            return pubsub.open_publisher(parts)
        if parts.scheme == "kafka":
            from evergreen.events.kafka.location import KafkaLocation
            from evergreen.events.kafka.publisher import KafkaPublisher

            return KafkaPublisher(KafkaLocation.parse(parts))
    except ModuleNotFoundError as error:
        needed = f"evergreen-client[{parts.scheme}]"
        raise parts.refuse(
            f"expected {error.name} to be installed, as it is by {needed}"
        ) from error
    return _open_sqlite(parts, clock)


def open_subscriber(url: str, *, clock: Callable[[], float] = time.time) -> Subscriber:
    """Open the log that `url` names for reading. Raises the errors of `open_publisher`."""
    parts = _parse_one(url)
    if parts.scheme == "pubsub":
        from evergreen.events.pubsub import location as pubsub

        return pubsub.open_subscriber(parts, clock=clock)
    if parts.scheme == "kafka":
        from evergreen.events.kafka.location import KafkaLocation
        from evergreen.events.kafka.subscriber import KafkaSubscriber

        return KafkaSubscriber(KafkaLocation.parse(parts), clock=clock)
    return _open_sqlite(parts, clock)


def _parse_one(url: str) -> LogUrl:
    if (urls := partition_urls(url)) != [url]:
        raise ContractError(
            f"log is {redacted(url)!r}, expected one of its partitions, as {redacted(urls[0])!r}"
        )
    return LogUrl.parse(url)


def _open_sqlite(url: LogUrl, clock: Callable[[], float]) -> SqliteLog:
    path = Path(url.path)
    if url.scheme != "sqlite":
        raise url.refuse(f"expected sqlite:///<path>, or another scheme of {', '.join(SCHEMES)}")
    if url.authority or not path.name:
        raise url.refuse("expected sqlite:///<path> with three slashes")
    if not path.parent.is_dir():
        raise ContractError(f"log is {redacted(url.text)!r}, but {path.parent} is not a folder")
    return SqliteLog(path, lease_seconds=url.settings(_SqliteOptions).lease_seconds, clock=clock)
