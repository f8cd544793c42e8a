"""Offsets of a topic: its end, the progress of its group, and the held messages of this reader.

`PartitionProgress` needs no connection to a broker. `PartitionProgress` records which messages of a
partition are held, and which offset may be committed. `BacklogCounter` asks the brokers for the
number of messages that are left. The module `subscriber` reads the messages.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from evergreen.events.kafka.location import KafkaLocation, sorted_error
from evergreen.runtime.errors import PermanentError, TemporaryError

_ASK_SECONDS = 2.0
_ASK_AGAIN_SECONDS = 1.0
"""Pause after a request that no broker answered. Each request to a silent broker may block the
reader for `_ASK_SECONDS`."""
_CLOSE_SECONDS = 10.0
"""Maximum wait for a client to close, in seconds."""
_SETTLE_SECONDS = 0.02
"""Seconds without a callback after which a rebalance counts as ended. Only other threads of this
client can delay the next callback."""
_END, _BEGIN = -1, -2
"""Special values in a request for the offset of a time. `_END` requests the newest offset, and
`_BEGIN` requests the oldest one."""

logger = logging.getLogger(__name__)

M = TypeVar("M")


def close_consumer(consumer: Consumer) -> None:
    """Leave the group and close the client, within `_CLOSE_SECONDS`.

    The close function of librdkafka has two faults. The first fault: if a commit is pending and no
    broker answers, closing searches for the group's coordinator again and again (librdkafka issue
    3740). The function then stops waiting after `_CLOSE_SECONDS`. The client ends when a broker
    answers or when the process ends, and other readers get its partitions when its session times
    out. The second fault: a rebalance may still wait for its callback when closing begins. If the
    group has already ended, the callback blocks forever while it holds Python's interpreter lock.
    For this reason, the function ends rebalances before it closes the client.
    """
    deadline = time.monotonic() + _CLOSE_SECONDS
    _end_rebalances(consumer, deadline)
    closing = threading.Thread(target=consumer.close, name="close a Kafka client", daemon=True)
    closing.start()
    closing.join(max(0.0, deadline - time.monotonic()))
    if closing.is_alive():
        logger.warning(
            "a Kafka client did not close within %.0f s and was abandoned: no broker answers",
            _CLOSE_SECONDS,
        )


def _end_rebalances(consumer: Consumer, deadline: float) -> None:
    """Unsubscribe, and handle callbacks until no partition is assigned.

    The function returns only after `_SETTLE_SECONDS` without a callback.
    """
    try:
        consumer.unsubscribe()
    except KafkaException:
        return  # the client has no group, or a fatal error ended it
    while time.monotonic() < deadline:
        try:
            arrived = consumer.consume(1000, _SETTLE_SECONDS)
            if not arrived and not consumer.assignment():
                return
        except KafkaException as error:
            logger.debug("unsubscribing: %s", error)


@dataclass
class Held(Generic[M]):
    """A delivered message that is not yet acknowledged."""

    message: M
    until: float
    """End of the lease in seconds since the epoch."""
    attempt: int = 1


@dataclass
class PartitionProgress(Generic[M]):
    """Progress of one partition, from its assignment to its revocation.

    Kafka stores one committed offset per partition, and every message below that offset counts as
    done. Acknowledgements arrive in any order, so the committed offset may only move to the first
    unacknowledged message. Compacted or deleted messages leave gaps in the offsets, and the gaps
    count as done.
    """

    generation: int
    """Sequence number of the partition's assignment to this reader. Tokens from an earlier
    assignment of the partition are invalid."""
    next_offset: int | None = None
    """Offset that follows the newest delivered message. None before the first delivery."""
    held: dict[int, Held[M]] = field(default_factory=dict)
    """Held messages by ascending offset."""
    sent_offset: int | None = None
    """Last offset that was sent to be committed. None if no offset was sent, or if the commit
    failed."""

    def take(self, offset: int, message: M, *, until: float) -> bool:
        """Hold a newly arrived message, and return False if the message is already known."""
        if self.next_offset is not None and offset < self.next_offset:
            return False
        self.held[offset] = Held(message, until)
        self.next_offset = offset + 1
        return True

    def take_expired(self, now: float, count: int, *, until: float) -> list[int]:
        """Renew at most `count` expired leases of messages, and return the messages' offsets.

        The oldest messages come first. If a lease ends later than a new lease would end, it was
        acquired before the clock was set back. Therefore a lease with an implausibly late end
        counts as expired.
        """
        expired = [offset for offset, held in self.held.items() if not now < held.until <= until][
            :count
        ]
        for offset in expired:
            self.held[offset].until = until
            self.held[offset].attempt += 1
        return expired

    def find(self, offset: int, attempt: int) -> M | None:
        """Return the held message of a delivery, or None if the delivery has ended."""
        held = self.held.get(offset)
        return held.message if held is not None and held.attempt == attempt else None

    def end(self, offset: int, attempt: int) -> M | None:
        """End a delivery and return its message, or None if the delivery had already ended."""
        message = self.find(offset, attempt)
        if message is not None:
            del self.held[offset]
        return message

    def offset_to_commit(self) -> int | None:
        """Return the offset below which all messages are done, or None if it is unchanged."""
        done = next(iter(self.held), self.next_offset)
        return done if done != self.sent_offset else None

    def unfinished(self, start: int, end: int) -> int:
        """Return the number of unacknowledged messages before `end`.

        For a partition without any delivered message, reading begins at the offset `start`.
        """
        position = start if self.next_offset is None else self.next_offset
        return max(0, end - position) + len(self.held)


class BacklogCounter:
    """Counter of the messages that the group has not finished, in all partitions of the topic.

    The counter uses its own connections. A broker answers all requests of one connection in order.
    A request on the reader's connection would therefore wait until the reader's fetch ends, for up
    to `fetch.wait.max.ms`. Measured wait: 0.5 s on the reader's connection, and 0.2 ms on a
    separate one.
    """

    def __init__(self, location: KafkaLocation) -> None:
        self._location = location
        # A request must not create a topic, because the topic's name may be mistyped.
        self._consumer = Consumer(
            location.client(
                group_id=location.group, enable_auto_commit=False, allow_auto_create_topics=False
            )
        )
        self._silent_until = 0.0
        self.problem: str | None = None
        """Error of the last request, or a later error that the client reported. None if the request
        was answered."""

    def unfinished(self, progress: Mapping[int, PartitionProgress[Any]]) -> int | None:
        """Return the number of messages that are neither acknowledged nor dead-lettered.

        Returns None if no broker answers. In a partition of this reader (a key of `progress`), the
        number includes held messages and messages that have not arrived yet. In a partition of
        another reader, the number includes all messages after the group's committed offset.
        """
        if time.monotonic() < self._silent_until:
            return None
        try:
            partitions = list_partitions(self._consumer, self._location, self._location.topic)
            ends = self._offsets(partitions, _END)
            starts = self._committed(
                [p for p in partitions if p not in progress or progress[p].next_offset is None]
            )
        except (TemporaryError, PermanentError) as error:
            self.problem = str(error)
            self._silent_until = time.monotonic() + _ASK_AGAIN_SECONDS
            return None
        if not partitions:
            self.problem = (
                f"topic {self._location.topic} does not exist at {self._location.brokers}"
            )
            return None
        self.problem = None
        unknown = PartitionProgress[Any](0)
        return sum(
            progress.get(p, unknown).unfinished(starts.get(p, 0), ends[p]) for p in partitions
        )

    def close(self) -> None:
        """Close the client."""
        close_consumer(self._consumer)

    def _committed(self, partitions: Collection[int]) -> dict[int, int]:
        """Return the committed offset of each partition, or its oldest offset if there is none."""
        if not partitions:
            return {}
        requested = [TopicPartition(self._location.topic, number) for number in partitions]
        try:
            answered = self._consumer.committed(requested, timeout=_ASK_SECONDS)
        except KafkaException as error:
            raise sorted_error(
                error, f"asking {self._location.brokers} for committed offsets"
            ) from error
        found = {each.partition: _checked(each).offset for each in answered}
        return {
            **found,
            **self._offsets([number for number, offset in found.items() if offset < 0], _BEGIN),
        }

    def _offsets(self, partitions: Collection[int], moment: int) -> dict[int, int]:
        if not partitions:
            return {}
        requested = [TopicPartition(self._location.topic, number, moment) for number in partitions]
        try:
            answered = self._consumer.offsets_for_times(requested, timeout=_ASK_SECONDS)
        except KafkaException as error:
            topic = self._location.topic
            raise sorted_error(
                error, f"asking {self._location.brokers} for offsets of {topic}"
            ) from error
        return {each.partition: _checked(each).offset for each in answered}


def list_partitions(consumer: Consumer, location: KafkaLocation, topic: str) -> list[int]:
    """Return the topic's partitions. The list is empty if the topic does not exist.

    Raises:
        TemporaryError: no broker answered.
        PermanentError: the brokers refuse the request.
    """
    what = f"asking {location.brokers} for topic {topic}"
    consumer.poll(0)  # process the client's own log lines
    try:
        found = consumer.list_topics(topic, timeout=_ASK_SECONDS).topics[topic]
    except KafkaException as error:
        raise sorted_error(error, what) from error
    if found.error is None:
        return sorted(found.partitions)
    if found.error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
        return []
    raise sorted_error(found.error, what)


def _checked(answer: TopicPartition) -> TopicPartition:
    if answer.error is not None:
        raise sorted_error(answer.error, f"offset of {answer.topic}, partition {answer.partition}")
    if answer.offset is None:
        raise PermanentError(
            f"{answer.topic}, partition {answer.partition} has no offset, expected a number"
        )
    return answer
