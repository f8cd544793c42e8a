"""The writing end of a Kafka log: messages of one topic, each keyed by its id; waiting for them is `sender`'s."""

from __future__ import annotations

from collections.abc import Sequence

from components.logs.event_log import MAX_MESSAGE_BYTES
from components.logs.kafka.place import KafkaPlace
from components.logs.kafka.sender import Outgoing, Sender
from components.runtime.errors import ContractError


class KafkaPublisher:
    """The writing end of `logs.event_log` on one topic. Threads may share one."""

    def __init__(self, place: KafkaPlace) -> None:
        self._topic, self._sender = place.topic, Sender(place)

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """See `event_log.Publisher`."""
        for message_id, payload in messages:
            if len(payload) > MAX_MESSAGE_BYTES:
                raise ContractError(
                    f"message {message_id} has {len(payload)} bytes, expected at most {MAX_MESSAGE_BYTES}"
                )
        self._sender.send([Outgoing(topic=self._topic, message_id=name, payload=payload) for name, payload in messages])

    def close(self) -> None:
        """See `event_log.Publisher`."""
        self._sender.close()
