"""Asks Kafka how far a topic reaches and how far a group has read it, beside the consumer that reads.

A client of its own: a broker answers one connection's requests in order, so a question behind the reader's fetch
would wait as long as that waits for messages (measured: `fetch.wait.max.ms`, 0.5 s instead of 0.2 ms).
"""

from __future__ import annotations

from collections.abc import Collection

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from components.logs.kafka.place import KafkaPlace, sorted_error
from components.runtime.errors import PermanentError

ASK_SECONDS = 2.0
_END, _BEGIN = -1, -2
"""Times that stand for the newest and the oldest offset in a question for offsets by time."""


class Desk:
    """Questions about one topic and one group; joins no group and commits only what it is told."""

    def __init__(self, place: KafkaPlace, *, topic: str, group: str, seconds: float = ASK_SECONDS) -> None:
        self._place, self._topic, self._seconds = place, topic, seconds
        self._consumer = Consumer(
            # A question makes no topic, mistyped as it may be.
            place.client(group_id=group, enable_auto_commit=False, allow_auto_create_topics=False)
        )

    def partitions(self) -> list[int]:
        """The topic's partitions; empty where there is no such topic.

        Raises:
            TemporaryError: no broker answered.
            PermanentError: they refuse.
        """
        self._consumer.poll(0)  # serves the client's own log lines
        try:
            found = self._consumer.list_topics(self._topic, timeout=self._seconds).topics[self._topic]
        except KafkaException as error:
            raise sorted_error(error, f"asking {self._place.brokers} for topic {self._topic}") from error
        if found.error is not None:
            if found.error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
                return []
            raise sorted_error(found.error, f"asking {self._place.brokers} for topic {self._topic}")
        return sorted(found.partitions)

    def ends(self, partitions: Collection[int]) -> dict[int, int]:
        """One past the newest offset of each; errors as `partitions`."""
        return self._offsets(partitions, _END)

    def committed(self, partitions: Collection[int]) -> dict[int, int]:
        """Where the group reads on in each: what it committed, else the oldest offset; errors as `partitions`."""
        asked = [TopicPartition(self._topic, number) for number in partitions]
        if not asked:
            return {}
        try:
            answered = self._consumer.committed(asked, timeout=self._seconds)
        except KafkaException as error:
            raise sorted_error(error, f"asking {self._place.brokers} for committed offsets") from error
        found = {each.partition: _checked(each).offset for each in answered}
        fresh = [number for number, offset in found.items() if offset < 0]
        return {**found, **self._offsets(fresh, _BEGIN)}

    def commit(self, offsets: dict[int, int]) -> None:
        """Commits for the group, which must have no reader now; errors as `partitions`."""
        told = [TopicPartition(self._topic, number, offset) for number, offset in offsets.items()]
        try:
            self._consumer.commit(offsets=told, asynchronous=False)
        except KafkaException as error:
            raise sorted_error(error, f"committing to {self._place.brokers}") from error

    def close(self) -> None:
        """Ends the client."""
        self._consumer.close()

    def _offsets(self, partitions: Collection[int], moment: int) -> dict[int, int]:
        if not partitions:
            return {}
        asked = [TopicPartition(self._topic, number, moment) for number in partitions]
        try:
            answered = self._consumer.offsets_for_times(asked, timeout=self._seconds)
        except KafkaException as error:
            raise sorted_error(error, f"asking {self._place.brokers} for offsets of {self._topic}") from error
        return {each.partition: _checked(each).offset for each in answered}


def _checked(answer: TopicPartition) -> TopicPartition:
    if answer.error is not None:
        raise sorted_error(answer.error, f"offset of {answer.topic}, partition {answer.partition}")
    if answer.offset is None:
        raise PermanentError(f"offset of {answer.topic}, partition {answer.partition}: none")
    return answer
