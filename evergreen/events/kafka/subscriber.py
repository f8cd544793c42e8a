"""The reading side of a Kafka log: one topic, read by one consumer group.

Readers share the partitions of the topic. For each partition, a reader commits the offset below
which all messages are acknowledged (`offsets`). If the reader is killed, the next reader therefore
gets the unacknowledged messages again. `dead_letters` stores dead letters, and `offsets` counts the
backlog.

Other programs must publish with plain or idempotent producers. A transactional producer leaves
markers among the offsets, so a reader would never reach the end of the topic.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from evergreen.events.event_log import DeadLetter, Delivery, is_short
from evergreen.events.kafka.dead_letters import KafkaDeadLetters, message_id
from evergreen.events.kafka.location import KafkaLocation, sorted_error
from evergreen.events.kafka.offsets import BacklogCounter, PartitionProgress, close_consumer
from evergreen.events.kafka.publisher import KafkaSender
from evergreen.runtime.errors import ContractError, PermanentError

_MAX_HELD_BYTES = 256 * 2**20
"""Highest number of bytes that are pulled and not acknowledged. The limit keeps the memory of a
reader bounded while it cannot store messages."""

_CONSUMED_AT_ONCE = 50
"""Number of messages that one call requests from librdkafka. If a pull reaches its byte limit, it
still returns all messages of its last request."""


class KafkaSubscriber:
    """Subscriber of one topic. A lock admits one thread at a time."""

    def __init__(self, location: KafkaLocation, *, clock: Callable[[], float] = time.time) -> None:
        """Open the connections. The first `pull` joins the group.

        Messages arrive once the group has assigned partitions to this reader. A reader that never
        calls `pull` gets no partition.

        Raises:
            ContractError: librdkafka refuses a setting.
        """
        self._location, self._clock = location, clock
        self._lock = threading.RLock()
        self._progress: dict[int, PartitionProgress[Message]] = {}
        self._generations = itertools.count(1)
        self._held_bytes = 0
        self._refused: str | None = None
        """Reason why reading fails although brokers answer. A new partition or a new message resets
        the reason to None."""
        self._fatal: str | None = None
        self._joined = self._closed = False
        self._read_up_to: float | None = None
        self._sender = KafkaSender(location)
        self._dead_letters = KafkaDeadLetters(location, self._sender, clock)
        try:
            self._backlog = BacklogCounter(location)
            self._consumer = Consumer(self._consumer_settings())
        except KafkaException as error:
            raise ContractError(f"Kafka's settings are refused: {error}") from error

    def _consumer_settings(self) -> dict[str, object]:
        lease_ms = int(self._location.lease_seconds * 1000)
        settings = self._location.client(
            group_id=self._location.group,
            enable_auto_commit=False,
            enable_auto_offset_store=False,
            auto_offset_reset="earliest",
            allow_auto_create_topics=True,
            # When a reader joins or leaves, the other readers retain their partitions and held
            # messages.
            partition_assignment_strategy="cooperative-sticky",
            session_timeout_ms=lease_ms,
            heartbeat_interval_ms=max(1, min(3000, lease_ms // 3)),
            max_poll_interval_ms=max(300_000, lease_ms),
            # Fetch large batches under load, without a long wait when there is little traffic.
            fetch_wait_max_ms=100,
            fetch_queue_backoff_ms=50,
            fetch_message_max_bytes=4 * 2**20,
            queued_max_messages_kbytes=64 * 2**10,
        )
        return {**settings, "error_cb": self._on_error, "on_commit": self._on_committed}

    # -- Callbacks, which the consumer calls within `consume`.

    def _on_assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._refused = None
        for each in partitions:
            self._progress[each.partition] = PartitionProgress(next(self._generations))

    def _on_revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            gone = self._progress.pop(each.partition, None)
            if gone is not None:
                self._held_bytes -= sum(_size(held.message) for held in gone.held.values())

    def _on_committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        for each in partitions:
            progress = self._progress.get(each.partition)
            if progress is not None and (error is not None or each.error is not None):
                progress.sent_offset = None  # the next pull commits the offset again

    def _on_error(self, error: KafkaError) -> None:
        # A single lost connection is not a problem, because librdkafka reconnects or uses another
        # connection.
        text = f"{self._location.brokers}: {error.str()}"
        if error.fatal():
            self._fatal = text
        elif error.code() in (
            KafkaError._ALL_BROKERS_DOWN,
            KafkaError._AUTHENTICATION,
            KafkaError._SSL,
        ):
            self._backlog.problem = text

    # -- The interface.

    def pull(self, max_messages: int) -> list[Delivery]:
        """See `event_log.Subscriber`.

        The messages of each partition are in order, oldest first. The result is empty if no broker
        answers.
        """
        if self._fatal is not None:
            raise PermanentError(self._fatal)
        now = self._clock()
        until = now + self._location.lease_seconds
        with self._lock:
            self._join_group()
            pulled = self._take_expired(now, max_messages, until)
            while is_short(pulled, max_messages) and self._held_bytes < _MAX_HELD_BYTES:
                arrived = self._consume_messages(min(max_messages - len(pulled), _CONSUMED_AT_ONCE))
                if not arrived:
                    break
                pulled += [
                    delivery
                    for message in arrived
                    for delivery in self._take_message(message, until)
                ]
            self._commit_offsets()
        return pulled

    def acknowledge(self, tokens: Iterable[str]) -> None:
        """See `event_log.Subscriber`.

        A failed commit is repeated. An interrupted commit causes a redelivery.
        """
        with self._lock:
            for token in tokens:
                self._end_delivery(token)
            self._commit_offsets()

    def dead_letter(self, bad: Sequence[tuple[str, str]]) -> None:
        """See `event_log.Subscriber`. Returns when the brokers have stored the dead letters."""
        with self._lock:
            found = [(token, self._find(token), reason) for token, reason in bad]
            held = [
                (token, message, reason) for token, message, reason in found if message is not None
            ]
            self._dead_letters.keep(
                [(message_id(each), _payload(each), reason) for _, each, reason in held]
            )
            self.acknowledge([token for token, _, _ in held])

    def list_dead_letters(self) -> list[DeadLetter]:
        """See `event_log.Subscriber`."""
        return self._dead_letters.stored()

    def replay_dead_letters(self) -> int:
        """See `event_log.Subscriber`."""
        return self._dead_letters.replay()

    def read_up_to(self) -> float | None:
        """See `event_log.Subscriber`.

        Returns the time of the newest check that found no unread message.

        The check passes if two conditions hold. This reader has pulled and acknowledged all
        messages of its partitions. For the partitions of other readers, the committed offset is the
        end of the partition. While no broker answers, the watermark does not move.
        """
        with self._lock:
            requested_at = self._clock()
            if self._backlog.unfinished(self._progress) == 0:
                self._read_up_to = requested_at
            return self._read_up_to

    def backlog(self) -> int | None:
        """See `event_log.Subscriber`. Returns None while no broker answers."""
        with self._lock:
            return self._backlog.unfinished(self._progress)

    def problem(self) -> str | None:
        """See `event_log.Subscriber`."""
        return self._fatal or self._backlog.problem or self._refused

    def close(self) -> None:
        """See `event_log.Subscriber`.

        The reader leaves the group, so that other readers get its partitions at once.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._commit_offsets()
            close_consumer(self._consumer)
            self._backlog.close()
            self._sender.close()

    # -- Parts.

    def _join_group(self) -> None:
        if not self._joined:
            self._joined = True
            self._consumer.subscribe(
                [self._location.topic],
                on_assign=self._on_assigned,
                on_revoke=self._on_revoked,
                on_lost=self._on_revoked,
            )

    def _consume_messages(self, count: int) -> list[Message]:
        try:
            return self._consumer.consume(count, 0)
        except KafkaException as error:
            raise sorted_error(error, f"reading {self._location.topic}") from error

    def _take_expired(self, now: float, count: int, until: float) -> list[Delivery]:
        pulled: list[Delivery] = []
        for partition, progress in self._progress.items():
            for offset in progress.take_expired(now, count - len(pulled), until=until):
                pulled.append(_delivery(partition, offset, progress))
        return pulled

    def _take_message(self, message: Message, until: float) -> list[Delivery]:
        """Return a list with the delivery of a message.

        The list is empty if the partition is now assigned elsewhere.
        """
        error = message.error()
        self._refused = (
            f"reading {self._location.topic}: {error.str()}" if error is not None else None
        )
        if error is not None:
            return []
        partition, offset = message.partition(), message.offset()
        progress = self._progress.get(-1 if partition is None else partition)
        if (
            progress is None
            or partition is None
            or offset is None
            or not progress.take(offset, message, until=until)
        ):
            return []
        self._held_bytes += _size(message)
        return [_delivery(partition, offset, progress)]

    def _find(self, token: str) -> Message | None:
        """Return the message of a delivery that has not ended."""
        generation, partition, offset, attempt = map(int, token.split("/"))
        progress = self._progress.get(partition)
        return (
            None
            if progress is None or progress.generation != generation
            else progress.find(offset, attempt)
        )

    def _end_delivery(self, token: str) -> None:
        generation, partition, offset, attempt = map(int, token.split("/"))
        progress = self._progress.get(partition)
        if progress is not None and progress.generation == generation:
            message = progress.end(offset, attempt)
            if message is not None:
                self._held_bytes -= _size(message)

    def _commit_offsets(self) -> None:
        """Commit the offsets of finished messages without waiting.

        If a commit is lost, messages are delivered again. No message is lost, because uncommitted
        messages are delivered again.
        """
        moved = {number: p.offset_to_commit() for number, p in self._progress.items()}
        offsets = [
            TopicPartition(self._location.topic, number, to)
            for number, to in moved.items()
            if to is not None
        ]
        if not offsets:
            return
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException:
            return  # No partition is assigned now. The next pull commits these offsets.
        for each in offsets:
            self._progress[each.partition].sent_offset = each.offset


def _delivery(partition: int, offset: int, progress: PartitionProgress[Message]) -> Delivery:
    held = progress.held[offset]
    token = f"{progress.generation}/{partition}/{offset}/{held.attempt}"
    return Delivery(message_id(held.message), _payload(held.message), token)


def _payload(message: Message) -> bytes:
    value = message.value()
    return value if isinstance(value, bytes) else b""


def _size(message: Message) -> int:
    return len(_payload(message))
