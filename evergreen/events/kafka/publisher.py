"""The writing side of a Kafka log, and a producer that waits until each message is stored.

`KafkaSender` publishes messages, stores dead letters and replays them. The callers of `KafkaSender`
choose the topic and the headers.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from evergreen.events.event_log import expect_size
from evergreen.events.kafka.location import MAX_SENT_BYTES, KafkaLocation, sorted_error
from evergreen.runtime.errors import ContractError, TemporaryError

_Report = Callable[[KafkaError | None, Message], None]
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0
"""Maximum delay of a delivery report after librdkafka's own deadline, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One message to send.

    The message id is the key, so a message that is sent again goes to the same partition.
    """

    topic: str
    message_id: str
    payload: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


class KafkaSender:
    """An idempotent producer (acks=all) that waits for each send.

    Several threads may share one producer.

    A message is stored once even if librdkafka retries it. If the caller sends a message again, it
    is stored again.
    """

    def __init__(self, location: KafkaLocation) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._producer: Producer | None = None

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Send `messages`, and return when the brokers have stored all of them.

        Raises:
            ContractError: a message is larger than a broker accepts.
            TemporaryError: some messages were not stored within `delivery_seconds`. The error does
                not say which messages are missing, so send all of them again.
            PermanentError: the brokers refuse the request.
        """
        producer = self._open_producer()
        reports: list[KafkaError | None] = []

        def report(error: KafkaError | None, _: Message) -> None:
            reports.append(error)

        deadline = time.monotonic() + self._location.delivery_seconds + _GRACE_SECONDS
        try:
            for message in messages:
                self._enqueue(producer, message, report, deadline=deadline)
        except KafkaException as error:
            raise sorted_error(error, f"publishing to {self._location.brokers}") from error
        while len(reports) < len(messages) and time.monotonic() < deadline:
            producer.poll(_POLL_SECONDS)
        errors = [error for error in reports if error is not None]
        if any(error.fatal() for error in errors):
            self._forget_producer(producer)
        if errors:
            raise _worst_error(
                errors, f"publishing {len(messages)} messages to {messages[0].topic}"
            )
        if len(reports) < len(messages):
            raise TemporaryError(
                f"publishing to {messages[0].topic}: {self._location.brokers} did not answer in "
                "time"
            )

    def _enqueue(
        self, producer: Producer, message: Outgoing, report: _Report, *, deadline: float
    ) -> None:
        while True:
            try:
                producer.produce(
                    message.topic,
                    message.payload,
                    key=message.message_id.encode(),
                    headers=list(message.headers),
                    on_delivery=report,
                )
                return
            except (
                BufferError
            ) as error:  # librdkafka's queue is full, and processing its reports frees space
                if time.monotonic() > deadline:
                    raise TemporaryError(
                        f"publishing to {message.topic}: the queue stayed full"
                    ) from error
                producer.poll(_POLL_SECONDS)

    def close(self) -> None:
        """Close the producer. No message is pending, because every send waited for its reports."""
        with self._lock:
            self._producer = None

    def _open_producer(self) -> Producer:
        with self._lock:
            if self._producer is None:
                settings = self._location.client(
                    acks="all",
                    enable_idempotence=True,
                    linger_ms=5,
                    message_max_bytes=MAX_SENT_BYTES,
                    delivery_timeout_ms=int(self._location.delivery_seconds * 1000),
                )
                try:
                    self._producer = Producer(settings)
                except KafkaException as error:
                    raise ContractError(f"Kafka's settings are refused: {error}") from error
            return self._producer

    def _forget_producer(self, producer: Producer) -> None:
        """Drop a producer that had a fatal error. The next call of `send` opens a new producer."""
        with self._lock:
            if self._producer is producer:
                self._producer = None


def _worst_error(errors: Sequence[KafkaError], what: str) -> Exception:
    """Return the error that represents several failed deliveries.

    A permanent error has priority over a temporary error.
    """
    if any(error.fatal() for error in errors):
        return TemporaryError(f"{what}: {errors[0].str()}; a new producer is needed")
    found = [sorted_error(error, what) for error in errors]
    return next((each for each in found if not isinstance(each, TemporaryError)), found[0])


class KafkaPublisher(KafkaSender):
    """Publisher to the topic of a location. The key of a message is its id."""

    def __init__(self, location: KafkaLocation) -> None:
        """Check the settings early. A ContractError from `publish` must be about a message."""
        super().__init__(location)
        self._open_producer()

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """See `event_log.Publisher`."""
        for message_id, payload in messages:
            expect_size(message_id, payload)
        topic = self._location.topic
        self.send(
            [Outgoing(topic=topic, message_id=name, payload=payload) for name, payload in messages]
        )
