"""The log that carries records from the inference client to the monitor: what every backend promises.

Joins the client's publisher to the monitor's subscriber. Delivery is at least once: a published message is delivered
until it is acknowledged, possibly more than once and in any order; the consumer stores (fsync) before it
acknowledges and recognises redeliveries by message id. A message that cannot be used is set aside with its reason,
never dropped. Backends: `logs.sqlite`; Pub/Sub and Kafka take the same exam when they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

MAX_MESSAGE_BYTES = 1_000_000
"""Largest message every backend carries: Kafka's default limit, the smallest of the three."""


class Delivery(NamedTuple):
    """One delivery of one message."""

    message_id: str
    payload: bytes
    token: str
    """Names this delivery when it is acknowledged."""
    attempt: int
    """1 for the first delivery."""


class SetAside(NamedTuple):
    """A message that was set aside: its original bytes and why."""

    message_id: str
    payload: bytes
    reason: str
    time: float


class Publisher(Protocol):
    """The writing end."""

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Stores (id, payload) messages durably, all or none; an id published before is not stored again.

        Raises:
            ContractError: a payload is larger than `MAX_MESSAGE_BYTES`.
            TemporaryError: the log cannot be reached or is busy; publish the same messages again.
        """

    def close(self) -> None:
        """Releases the connection."""


class Subscriber(Protocol):
    """The reading end of one subscription; several readers share its messages."""

    def pull(self, max_messages: int) -> list[Delivery]:
        """Messages that nobody holds a lease on, oldest first; each is now leased to the caller. Never waits."""

    def acknowledge(self, tokens: Iterable[str]) -> None:
        """Ends the delivery of these messages; a token whose lease ran out is ignored."""

    def set_aside(self, token: str, reason: str) -> None:
        """Ends a delivery by keeping the message apart with `reason`."""

    def list_set_aside(self) -> list[SetAside]:
        """All messages set aside, oldest first."""

    def backlog(self) -> int:
        """Messages published and neither acknowledged nor set aside."""

    def close(self) -> None:
        """Releases the connection; open leases run out by themselves."""
