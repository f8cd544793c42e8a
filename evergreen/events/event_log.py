"""Interface of the event log between the inference client and the monitor.

A message is delivered at least once: the log delivers it until it is acknowledged, possibly several
times and in any order. The consumer stores each message durably (fsync) before it acknowledges the
message. The consumer recognizes redeliveries by message id. An unusable message becomes a dead
letter with a reason and is never dropped. The backends `evergreen.events.sqlite`,
`evergreen.events.pubsub` and `evergreen.events.kafka` pass the same conformance suite.
`evergreen.events.locations` maps a URL to a backend.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from evergreen.runtime.errors import ContractError

MAX_MESSAGE_BYTES = 1_000_000
"""All backends accept messages of up to this number of bytes. The value is Kafka's default limit,
which is the smallest of the three backends' limits."""


MAX_PULL_BYTES = 16 << 20
"""Payload bytes after which a pull ends. The pull may exceed this limit by its last message.
Decoded records take several times as much memory as their payloads."""


class Delivery(NamedTuple):
    """Delivery of a message to a reader."""

    message_id: str
    payload: bytes
    token: str
    """Identifier of this delivery, needed to acknowledge it."""


class DeadLetter(NamedTuple):
    """Message that could not be used, with its original bytes and the reason."""

    message_id: str
    payload: bytes
    reason: str
    time: float
    """Time when the message became a dead letter, in seconds since the epoch."""


class Publisher(Protocol):
    """The writing side of a log."""

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Store (id, payload) messages durably. When the call returns, all messages are stored.

        After an error, some of the messages may be stored. Publish all messages again with the same
        ids. If a message is published twice, every backend except SQLite may deliver it twice. A
        different payload under a known id counts as another message and is delivered too.

        Raises:
            ContractError: a payload is larger than `MAX_MESSAGE_BYTES`. Nothing was sent.
            TemporaryError: the log is unreachable or busy. Publish the same messages again after
                this error.
            PermanentError: the log refuses the messages permanently, for example because the topic
                or the permission is missing.
        """

    def close(self) -> None:
        """Release the connection."""


class Subscriber(Protocol):
    """The reading side of one subscription. Several readers of a subscription share its messages.

    Every method except `problem` and `close` raises TemporaryError if the log is unreachable or
    busy, and PermanentError if the log refuses the call permanently.
    """

    def pull(self, max_messages: int) -> list[Delivery]:
        """Return messages that no reader has leased, and lease each of them.

        The oldest messages come first if the backend orders messages. The call never waits for a
        message. The call ends with the message that brings the total payload to `MAX_PULL_BYTES`.
        If a pull reaches neither of its two limits, the log has no more messages at the moment.
        """

    def acknowledge(self, tokens: Iterable[str]) -> None:
        """Acknowledge deliveries. A token with an expired lease is ignored."""

    def dead_letter(self, bad: Sequence[tuple[str, str]]) -> None:
        """Store the messages of deliveries as dead letters, then acknowledge them.

        `bad` has a token and a reason for each delivery.
        """

    def list_dead_letters(self) -> list[DeadLetter]:
        """Return all dead letters, oldest first, without removing any."""

    def replay_dead_letters(self) -> int:
        """Publish all dead letters again with their original bytes, and return their number.

        A dead letter is removed once it is published.
        """

    def read_up_to(self) -> float | None:
        """Return the watermark: every message that was published before this time has been read.

        The time is in seconds since the epoch, and as precise as the backend allows. A message
        counts as read once any active reader has pulled it. Messages that this reader has pulled
        must also be acknowledged or dead-lettered, so call this method after acknowledging. Returns
        None while the watermark is unknown: before the first pull that found no further message,
        and while a killed predecessor may hold leases. The watermark can move back if a clock is
        corrected.
        """

    def problem(self) -> str | None:
        """Return the reason why no message can arrive, or None if there is none.

        Examples of a problem are failing pulls, an unreachable broker, and a missing file. An idle
        log is not a problem. The call raises nothing and does not wait for the network.
        """

    def backlog(self) -> int | None:
        """Return the number of published messages that are neither acknowledged nor dead-lettered.

        Returns None if the backend does not know the number.
        """

    def close(self) -> None:
        """Release the connection. Leases that are still open expire on their own."""


def is_short(pulled: Sequence[Delivery], max_messages: int) -> bool:
    """Return whether a pull ended before reaching either of its limits.

    A short pull found all available messages.
    """
    return len(pulled) < max_messages and sum(len(each.payload) for each in pulled) < MAX_PULL_BYTES


def expect_size(message_id: str, payload: bytes) -> None:
    """Check that the message is small enough for every backend.

    Raises:
        ContractError: the message is larger than `MAX_MESSAGE_BYTES`.

    >>> expect_size("small", b"payload")
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ContractError(
            f"message {message_id} has {len(payload)} bytes, expected at most {MAX_MESSAGE_BYTES}"
        )


def partition_of(request_id: str, count: int) -> int:
    """Return the number of the partition, below `count`, that gets all records of a request.

    All writers must choose the same partition, because a prediction and its outcomes are joined
    within one partition.

    >>> partition_of("request 1", 4), partition_of("request 2", 4)
    (0, 2)
    """
    return zlib.crc32(request_id.encode()) % count
