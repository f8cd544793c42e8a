"""Dead letters of a Kafka topic, in the topic `<topic>.dead-letters`.

A dead letter has the message's original bytes and key. The reason and the time of a dead letter are
headers. Kafka cannot delete single messages. The group `<group>.dead-letters` therefore commits an
offset, at which the list of dead letters starts. A replay publishes the listed messages, and then
commits the offset after them. The retention of the topic limits how long dead letters are stored.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from evergreen.events.event_log import MAX_MESSAGE_BYTES, DeadLetter
from evergreen.events.kafka.location import (
    DEAD_LETTER_ENDING,
    MAX_SENT_BYTES,
    KafkaLocation,
    sorted_error,
)
from evergreen.events.kafka.offsets import close_consumer, list_partitions
from evergreen.events.kafka.publisher import KafkaSender, Outgoing
from evergreen.runtime.errors import TemporaryError

_MAX_REASON_BYTES = 4096
_MAX_KEY_BYTES = 1024
"""Maximum size of a truncated dead letter's key, in bytes. See `KafkaDeadLetters.keep`."""
_REASON, _TIME = "reason", "time"
_BATCH = 500


def message_id(message: Message) -> str:
    """Return the key as text, or the position in the topic if another client sent no key."""
    key = message.key()
    if key is None:
        return f"{message.topic()}/{message.partition()}/{message.offset()}"
    return key if isinstance(key, str) else key.decode(errors="backslashreplace")


class KafkaDeadLetters:
    """The dead-letter topic of one topic."""

    def __init__(
        self,
        location: KafkaLocation,
        sender: KafkaSender,
        clock: Callable[[], float],
        *,
        seconds: float = 30.0,
    ) -> None:
        self._location = location
        self._sender = sender
        self._clock = clock
        self._seconds = seconds
        self._group = location.group + DEAD_LETTER_ENDING

    def keep(self, letters: Sequence[tuple[str, bytes, str]]) -> None:
        """Store messages as dead letters, each with id, payload and reason.

        The call returns when the brokers have stored all dead letters. The errors are those of
        `KafkaSender.send`. The topic may contain messages that are too large for this client to
        publish. If a message is too large, it is truncated, and the stored reason says so.
        """
        topic, time_header = self._location.dead_letter_topic, (_TIME, repr(self._clock()).encode())
        kept = []
        for name, payload, reason in letters:
            if len(name.encode()) + len(payload) > MAX_SENT_BYTES - 2 * _MAX_REASON_BYTES:
                reason = (
                    f"{reason} (only the first {MAX_MESSAGE_BYTES} of {len(payload)} bytes are "
                    "stored)"
                )
                name, payload = (
                    name.encode()[:_MAX_KEY_BYTES].decode(errors="ignore"),
                    payload[:MAX_MESSAGE_BYTES],
                )
            text = reason.encode(errors="backslashreplace")[:_MAX_REASON_BYTES]
            headers = ((_REASON, text), time_header)
            kept.append(Outgoing(topic=topic, message_id=name, payload=payload, headers=headers))
        for start in range(0, len(kept), _BATCH):
            self._sender.send(kept[start : start + _BATCH])

    def stored(self) -> list[DeadLetter]:
        """Return the stored dead letters, oldest first, without a commit.

        Raises:
            TemporaryError: no broker answers.
            PermanentError: the brokers refuse the request.
        """
        with self._open_consumer() as consumer:
            letters, _ = self._read_letters(consumer)
        return letters

    def replay(self) -> int:
        """Publish all dead letters again, remove them from the list, and return their number.

        If the process is killed between publishing and removing, the next call publishes the dead
        letters again. Raises the errors of `stored` and `KafkaSender.send`.
        """
        with self._open_consumer() as consumer:
            letters, ends = self._read_letters(consumer)
            topic = self._location.topic
            again = [
                Outgoing(topic=topic, message_id=each.message_id, payload=each.payload)
                for each in letters
            ]
            for start in range(0, len(again), _BATCH):
                self._sender.send(again[start : start + _BATCH])
            if letters:
                consumer.commit(offsets=ends, asynchronous=False)
        return len(letters)

    @contextmanager
    def _open_consumer(self) -> Iterator[Consumer]:
        # Wait for the event that signals the end of a partition. The last offsets of a partition
        # may be gaps without a message.
        consumer = Consumer(
            self._location.client(
                group_id=self._group,
                enable_auto_commit=False,
                enable_auto_offset_store=False,
                enable_partition_eof=True,
                auto_offset_reset="earliest",
                allow_auto_create_topics=False,
            )
        )
        try:
            yield consumer
        except KafkaException as error:
            raise sorted_error(error, f"reading {self._location.dead_letter_topic}") from error
        finally:
            consumer.unassign()  # assigned by hand, because closing a consumer waits until its group revokes partitions  # noqa: E501
            close_consumer(consumer)

    def _read_letters(self, consumer: Consumer) -> tuple[list[DeadLetter], list[TopicPartition]]:
        """Return the stored dead letters, oldest first, and the end offset of each partition.

        If a reader crashes between storing and acknowledging, a message is stored twice. This
        function returns only one copy. Messages with the same key may be different messages.
        """
        topic, brokers = self._location.dead_letter_topic, self._location.brokers
        open_ = set(list_partitions(consumer, self._location, topic))
        # Reading starts at the group's committed offset, because no offset is given.
        consumer.assign([TopicPartition(topic, number) for number in open_])
        found: dict[tuple[str, bytes | None], DeadLetter] = {}
        ends: list[TopicPartition] = []
        deadline = time.monotonic() + self._seconds
        while open_:
            if time.monotonic() > deadline:
                raise TemporaryError(
                    f"reading {topic} from {brokers} took over {self._seconds:.0f} s"
                )
            for message in consumer.consume(_BATCH, 0.1):
                error, number = message.error(), message.partition()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise sorted_error(error, f"reading {topic}")
                if number not in open_:
                    continue
                if error is not None:
                    open_.discard(number)
                    ends.append(TopicPartition(topic, number, message.offset() or 0))
                else:
                    letter = _read_letter(message)
                    found.setdefault((letter.message_id, letter.payload), letter)
        return sorted(found.values(), key=lambda letter: letter.time), ends


def _read_letter(message: Message) -> DeadLetter:
    sent: Any = message.headers()
    headers = {name: value for name, value in sent or () if isinstance(value, bytes)}
    value = message.value()
    return DeadLetter(
        message_id(message),
        value if isinstance(value, bytes) else b"",
        headers.get(_REASON, b"").decode(errors="replace"),
        float(headers.get(_TIME, b"0")),
    )
