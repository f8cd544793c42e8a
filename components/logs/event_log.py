"""The log that carries records from the inference client to the monitor: what every backend promises.

Joins the client's publisher to the monitor's subscriber. Delivery is at least once: a published message is delivered
until it is acknowledged, possibly more than once and in any order; the consumer stores (fsync) before it
acknowledges and recognises redeliveries by message id. A message that cannot be used becomes a dead letter: kept with
the reason, never dropped. Backends: `logs.sqlite`, `logs.pubsub` and `logs.kafka`; all take the same exam. Which one a
URL names is left to `logs.locations`.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from components.runtime.errors import ContractError

MAX_MESSAGE_BYTES = 1_000_000
"""Largest message every backend carries: Kafka's default limit, the smallest of the three."""


MAX_PULL_BYTES = 16 << 20
"""A pull ends with the message by which its payloads reach this size: what a reader decodes is several times larger."""


class Delivery(NamedTuple):
    """One delivery of one message."""

    message_id: str
    payload: bytes
    token: str
    """Names this delivery when it is acknowledged."""


class DeadLetter(NamedTuple):
    """A message that could not be used: its original bytes and why."""

    message_id: str
    payload: bytes
    reason: str
    time: float
    """Seconds since the epoch when it became a dead letter."""


class Publisher(Protocol):
    """The writing end."""

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Stores (id, payload) messages durably: all of them once this returns.

        After an error some may be stored: publish all again, with the same ids. An id published twice may be delivered
        twice; SQLite delivers it once. Another payload under a known id is another message, which is delivered too.

        Raises:
            ContractError: a payload is larger than `MAX_MESSAGE_BYTES`; nothing was sent.
            TemporaryError: the log cannot be reached or is busy; publish the same messages again.
            PermanentError: the log refuses, for ever (no such topic, no right to it).
        """

    def close(self) -> None:
        """Releases the connection."""


class Subscriber(Protocol):
    """The reading end of one subscription; several readers share its messages.

    Every method but `problem` and `close` raises TemporaryError where the log cannot be reached or is busy, and
    PermanentError where it refuses for ever.
    """

    def pull(self, max_messages: int) -> list[Delivery]:
        """Messages that nobody holds a lease on, oldest first where the backend has an order; each is now leased.

        Never waits for a message. Ends with the message by which the payloads reach `MAX_PULL_BYTES`. Short of both
        bounds, or empty, when no more are here now.
        """

    def acknowledge(self, tokens: Iterable[str]) -> None:
        """Ends the delivery of these messages; a token whose lease ran out is ignored."""

    def dead_letter(self, bad: Sequence[tuple[str, str]]) -> None:
        """Ends deliveries, each a token and a reason, by keeping the messages apart: kept first, then acknowledged."""

    def list_dead_letters(self) -> list[DeadLetter]:
        """All dead letters, oldest first; listing takes none away."""

    def replay_dead_letters(self) -> int:
        """Publishes all dead letters again with their original bytes, then lets them go; how many."""

    def read_up_to(self) -> float | None:
        """Seconds since the epoch up to which every published message is read, as far as the backend can know.

        Read means: pulled by a living reader, and where that is this one, also acknowledged or dead-lettered. Ask after
        acknowledging. None while unknown: before the first pull that left nothing, or while messages may be leased to a
        killed predecessor. May move back where a clock is set right.
        """

    def problem(self) -> str | None:
        """Why no message can arrive (pulls fail, broker away, file gone); None while connected.

        An idle log has no problem. Never raises, never waits for the network.
        """

    def backlog(self) -> int | None:
        """Messages published and neither acknowledged nor dead-lettered; None where the backend cannot tell."""

    def close(self) -> None:
        """Releases the connection; open leases run out by themselves."""


def is_short(pulled: Sequence[Delivery], max_messages: int) -> bool:
    """Return whether a pull took all that was there: it reached neither of its bounds."""
    return len(pulled) < max_messages and sum(len(each.payload) for each in pulled) < MAX_PULL_BYTES


def expect_size(message_id: str, payload: bytes) -> None:
    """Checks that every backend carries the message.

    Raises:
        ContractError: it is larger than `MAX_MESSAGE_BYTES`.

    >>> expect_size("small", b"payload")
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ContractError(f"message {message_id} has {len(payload)} bytes, expected at most {MAX_MESSAGE_BYTES}")


def partition_of(request_id: str, count: int) -> int:
    """Which of the `count` logs that are the partitions of one holds everything about this request.

    Every writer must take the same: the prediction and its outcomes meet in one partition's monitor alone.

    >>> partition_of("request 1", 4), partition_of("request 2", 4)
    (0, 2)
    """
    return zlib.crc32(request_id.encode()) % count
