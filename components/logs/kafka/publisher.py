"""The writing end of a Kafka log, and the producer behind it, which waits until each message is stored.

`KafkaSender` serves publishing, keeping dead letters and replaying them alike: topic and headers are the caller's.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from components.logs.event_log import expect_size
from components.logs.kafka.location import MAX_SENT_BYTES, KafkaLocation, sorted_error
from components.runtime.errors import ContractError, TemporaryError

Report = Callable[[KafkaError | None, Message], None]
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0
"""By how much a report may come later than librdkafka's own deadline for it."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """One message to send; its id is the key, so a repetition comes to the same partition."""

    topic: str
    message_id: str
    payload: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


class KafkaSender:
    """An idempotent producer (acks=all) whose sends are awaited. Threads may share one.

    Idempotent means that librdkafka's own retries store a message once; a message sent again by the caller is stored
    again.
    """

    def __init__(self, location: KafkaLocation) -> None:
        self._location = location
        self._lock = threading.Lock()
        self._producer: Producer | None = None

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Returns when the brokers have stored all of `messages`.

        Raises:
            ContractError: a message is larger than a broker takes.
            TemporaryError: some were not stored in `delivery_seconds`; which is unknown: send all again.
            PermanentError: the brokers refuse.
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
            raise _gravest(errors, f"publishing {len(messages)} messages to {messages[0].topic}")
        if len(reports) < len(messages):
            raise TemporaryError(f"publishing to {messages[0].topic}: {self._location.brokers} did not answer in time")

    def _enqueue(self, producer: Producer, message: Outgoing, report: Report, *, deadline: float) -> None:
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
            except BufferError as error:  # librdkafka's queue is full: its reports make room
                if time.monotonic() > deadline:
                    raise TemporaryError(f"publishing to {message.topic}: the queue stayed full") from error
                producer.poll(_POLL_SECONDS)

    def close(self) -> None:
        """Ends the producer; nothing is under way, since every send was awaited."""
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
        """After a fatal error a producer sends no more; the next send opens another."""
        with self._lock:
            if self._producer is producer:
                self._producer = None


def _gravest(errors: Sequence[KafkaError], what: str) -> Exception:
    """The error to raise for several failures: one that no retry cures before one that it may."""
    if any(error.fatal() for error in errors):
        return TemporaryError(f"{what}: {errors[0].str()}; a new producer is needed")
    found = [sorted_error(error, what) for error in errors]
    return next((each for each in found if not isinstance(each, TemporaryError)), found[0])


class KafkaPublisher(KafkaSender):
    """The writing end of `logs.event_log` on the location's topic, each message keyed by its id."""

    def __init__(self, location: KafkaLocation) -> None:
        """Refuses settings at once: from `publish` a ContractError speaks of a message."""
        super().__init__(location)
        self._open_producer()

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """See `event_log.Publisher`."""
        for message_id, payload in messages:
            expect_size(message_id, payload)
        topic = self._location.topic
        self.send([Outgoing(topic=topic, message_id=name, payload=payload) for name, payload in messages])
