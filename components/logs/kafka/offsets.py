"""How far a topic reaches, how far its group has read it, and what this reader holds of it.

`PartitionProgress` is pure: which messages of a partition are held, and which offset may be committed. `BacklogCounter`
asks the brokers what is left. Reading messages is left to `subscriber`.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from components.logs.kafka.location import KafkaLocation, sorted_error
from components.runtime.errors import PermanentError, TemporaryError

ASK_SECONDS = 2.0
ASK_AGAIN_SECONDS = 1.0
"""After a question that nobody answered: each may wait for `ASK_SECONDS`, and the reader has more to do."""
CLOSE_SECONDS = 10.0
"""Longest wait for a client to close."""
SETTLE_SECONDS = 0.02
"""A rebalance's next callback comes sooner: it waits for this client's own threads only."""
_END, _BEGIN = -1, -2
"""Times that stand for the newest and the oldest offset in a question for offsets by time."""

logger = logging.getLogger(__name__)

M = TypeVar("M")


def close_consumer(consumer: Consumer) -> None:
    """Leaves the group and ends the client, within `CLOSE_SECONDS`.

    librdkafka's close fails its caller in two ways. While a commit is under way and no broker answers, it looks for the
    group's coordinator again and again (librdkafka, issue 3740): that wait is given up, and the client ends when a
    broker answers or with the process; its partitions go to other readers when its session times out. And a rebalance
    that waits for its callback when the close begins may be answered to a group that has ended: the callback then
    waits for ever and holds Python's interpreter lock meanwhile. So rebalances end before the close begins.
    """
    deadline = time.monotonic() + CLOSE_SECONDS
    _end_rebalances(consumer, deadline)
    closing = threading.Thread(target=consumer.close, name="close a Kafka client", daemon=True)
    closing.start()
    closing.join(max(0.0, deadline - time.monotonic()))
    if closing.is_alive():
        logger.warning("a Kafka client did not close within %.0f s and is given up: no broker answers", CLOSE_SECONDS)


def _end_rebalances(consumer: Consumer, deadline: float) -> None:
    """Unsubscribes and serves callbacks until no partition is assigned and nothing came for `SETTLE_SECONDS`."""
    try:
        consumer.unsubscribe()
    except KafkaException:
        return  # not in a group, or a fatal error has ended it
    while time.monotonic() < deadline:
        try:
            arrived = consumer.consume(1000, SETTLE_SECONDS)
            if not arrived and not consumer.assignment():
                return
        except KafkaException as error:
            logger.debug("unsubscribing: %s", error)


@dataclass
class Held(Generic[M]):
    """A message that was delivered and not yet acknowledged."""

    message: M
    until: float
    """End of the lease, seconds since the epoch."""
    attempt: int = 1


@dataclass
class PartitionProgress(Generic[M]):
    """One partition, from its assignment to its revocation.

    Kafka remembers one number for each partition: everything below it is done. Acknowledgements come in any order, so
    the number may only move to the first message that is not yet acknowledged. Offsets may have gaps, where Kafka
    compacted or deleted; a gap counts as done.
    """

    generation: int
    """Differs between two assignments of the same partition: tokens of the earlier one are void."""
    next_offset: int | None = None
    """One past the newest message delivered; None before the first."""
    held: dict[int, Held[M]] = field(default_factory=dict)
    """By offset, ascending."""
    sent_offset: int | None = None
    """What was last asked to be committed; None = nothing, or the commit failed."""

    def take(self, offset: int, message: M, *, until: float) -> bool:
        """Holds a newly arrived message; False for one that came already."""
        if self.next_offset is not None and offset < self.next_offset:
            return False
        self.held[offset] = Held(message, until)
        self.next_offset = offset + 1
        return True

    def take_expired(self, now: float, count: int, *, until: float) -> list[int]:
        """Offsets of at most `count` messages whose lease ran out, oldest first; each is leased anew.

        A lease that ends later than a new one was taken before the clock was set back, and counts as over.
        """
        expired = [offset for offset, held in self.held.items() if not now < held.until <= until][:count]
        for offset in expired:
            self.held[offset].until = until
            self.held[offset].attempt += 1
        return expired

    def find(self, offset: int, attempt: int) -> M | None:
        """The message that this delivery handed out, while it is held; None when the delivery is over."""
        held = self.held.get(offset)
        return held.message if held is not None and held.attempt == attempt else None

    def end(self, offset: int, attempt: int) -> M | None:
        """Ends a delivery and returns its message; None where it was over already."""
        message = self.find(offset, attempt)
        if message is not None:
            del self.held[offset]
        return message

    def offset_to_commit(self) -> int | None:
        """The offset below which all is done, if it has moved since it was last sent; None otherwise."""
        done = next(iter(self.held), self.next_offset)
        return done if done != self.sent_offset else None

    def unfinished(self, start: int, end: int) -> int:
        """Messages before `end` that are not acknowledged; `start` is where reading begins while nothing came."""
        position = start if self.next_offset is None else self.next_offset
        return max(0, end - position) + len(self.held)


class BacklogCounter:
    """Counts what the group has not finished of a topic, over all partitions, this reader's and others'.

    It asks by a client of its own beside the consumer that reads: a broker answers one connection's requests in order,
    so a question behind the reader's fetch would wait as long as that waits for messages (measured:
    `fetch.wait.max.ms`, 0.5 s instead of 0.2 ms).
    """

    def __init__(self, location: KafkaLocation) -> None:
        self._location = location
        # A question makes no topic, mistyped as it may be.
        self._consumer = Consumer(
            location.client(group_id=location.group, enable_auto_commit=False, allow_auto_create_topics=False)
        )
        self._silent_until = 0.0
        self.problem: str | None = None
        """What the newest question met, or what the reader's client said since; None = answered."""

    def unfinished(self, progress: Mapping[int, PartitionProgress[Any]]) -> int | None:
        """Messages that are neither acknowledged nor dead-lettered; None where no broker answers.

        In a partition of this reader (a key of `progress`) those are held or not yet come; in any other they lie beyond
        what the group has committed.
        """
        if time.monotonic() < self._silent_until:
            return None
        try:
            partitions = list_partitions(self._consumer, self._location, self._location.topic)
            ends = self._offsets(partitions, _END)
            starts = self._committed([p for p in partitions if p not in progress or progress[p].next_offset is None])
        except (TemporaryError, PermanentError) as error:
            self.problem = str(error)
            self._silent_until = time.monotonic() + ASK_AGAIN_SECONDS
            return None
        if not partitions:
            self.problem = f"topic {self._location.topic} does not exist at {self._location.brokers}"
            return None
        self.problem = None
        unknown = PartitionProgress[Any](0)
        return sum(progress.get(p, unknown).unfinished(starts.get(p, 0), ends[p]) for p in partitions)

    def close(self) -> None:
        """Ends the client."""
        close_consumer(self._consumer)

    def _committed(self, partitions: Collection[int]) -> dict[int, int]:
        """Where the group reads on in each: what it committed, else the oldest offset."""
        if not partitions:
            return {}
        places = [TopicPartition(self._location.topic, number) for number in partitions]
        try:
            answered = self._consumer.committed(places, timeout=ASK_SECONDS)
        except KafkaException as error:
            raise sorted_error(error, f"asking {self._location.brokers} for committed offsets") from error
        found = {each.partition: _checked(each).offset for each in answered}
        return {**found, **self._offsets([number for number, offset in found.items() if offset < 0], _BEGIN)}

    def _offsets(self, partitions: Collection[int], moment: int) -> dict[int, int]:
        if not partitions:
            return {}
        places = [TopicPartition(self._location.topic, number, moment) for number in partitions]
        try:
            answered = self._consumer.offsets_for_times(places, timeout=ASK_SECONDS)
        except KafkaException as error:
            topic = self._location.topic
            raise sorted_error(error, f"asking {self._location.brokers} for offsets of {topic}") from error
        return {each.partition: _checked(each).offset for each in answered}


def list_partitions(consumer: Consumer, location: KafkaLocation, topic: str) -> list[int]:
    """The topic's partitions; empty where there is no such topic.

    Raises:
        TemporaryError: no broker answered.
        PermanentError: they refuse.
    """
    what = f"asking {location.brokers} for topic {topic}"
    consumer.poll(0)  # serves the client's own log lines
    try:
        found = consumer.list_topics(topic, timeout=ASK_SECONDS).topics[topic]
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
        raise PermanentError(f"offset of {answer.topic}, partition {answer.partition}: none")
    return answer
