"""Dead letters of a Kafka topic, in the topic `<topic>.dead-letters`: kept, listed, replayed.

A message is kept with its original bytes and key; reason and time are headers. Kafka forgets nothing on request: what
was replayed is struck out by a later record that names its offset, and where everything before an offset is struck out
the group `<group>.dead-letters` commits it, so that listings begin there. The topic's retention limits how long they
are kept: give it one that suits, or compaction (a record that strikes out is a tombstone too).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from components.logs.event_log import DeadLetter
from components.logs.kafka.location import DEAD_LETTER_ENDING, KafkaLocation, sorted_error
from components.logs.kafka.offsets import OffsetClient
from components.logs.kafka.publisher import KafkaSender, Outgoing
from components.runtime.errors import TemporaryError

MAX_REASON_BYTES = 4096
_REASON, _TIME, _STRUCK = "reason", "time", "replayed-offset"
_BATCH = 500


@dataclass(frozen=True, kw_only=True)
class _Entry:
    kept: DeadLetter
    partition: int
    first_offset: int
    """Where it lies first; a crash between keeping and acknowledging keeps a message twice."""
    last_offset: int


def message_id(message: Message) -> str:
    """The key as text; where a message of a foreign client has none, its place in the topic."""
    key = message.key()
    if key is None:
        return f"{message.topic()}/{message.partition()}/{message.offset()}"
    return key if isinstance(key, str) else key.decode(errors="backslashreplace")


class KafkaDeadLetters:
    """The dead-letter topic beside one topic."""

    def __init__(
        self, location: KafkaLocation, sender: KafkaSender, clock: Callable[[], float], *, seconds: float = 30.0
    ) -> None:
        self._location, self._sender, self._clock, self._seconds = location, sender, clock, seconds
        self._group = location.group + DEAD_LETTER_ENDING

    def keep(self, name: str, payload: bytes, reason: str) -> None:
        """Stores a message with the reason why; returns when the brokers have it, errors as `KafkaSender.send`."""
        cut = reason.encode(errors="backslashreplace")[:MAX_REASON_BYTES]
        headers = ((_REASON, cut), (_TIME, repr(self._clock()).encode()))
        outgoing = Outgoing(topic=self._location.dead_letter_topic, message_id=name, payload=payload, headers=headers)
        self._sender.send([outgoing])

    def kept(self) -> list[DeadLetter]:
        """What is kept and was not replayed since, oldest first; commits nothing.

        Raises:
            TemporaryError: no broker answers.
            PermanentError: they refuse.
        """
        entries, _ = self._read_entries()
        return [entry.kept for entry in entries]

    def replay(self, message_ids: Collection[str] | None) -> int:
        """Publishes kept messages again, then strikes them out; how many. Killed in between, it publishes them twice.

        Errors are those of `kept` and of `KafkaSender.send`.
        """
        entries, ends = self._read_entries()
        names = None if message_ids is None else frozenset(message_ids)
        chosen = [entry for entry in entries if names is None or entry.kept.message_id in names]
        for start in range(0, len(chosen), _BATCH):
            batch = chosen[start : start + _BATCH]
            again = [(e.kept.message_id, e.kept.payload) for e in batch]
            self._sender.send([Outgoing(topic=self._location.topic, message_id=name, payload=p) for name, p in again])
            self._sender.send([self._strike(entry) for entry in batch])
        if chosen:
            # By name: entries are compared byte by byte, and a reader that meets a newer schema keeps all that comes.
            left = [] if names is None else [entry for entry in entries if entry.kept.message_id not in names]
            self._commit(left, ends)
        return len(chosen)

    def _strike(self, entry: _Entry) -> Outgoing:
        return Outgoing(
            topic=self._location.dead_letter_topic,
            message_id=entry.kept.message_id,
            payload=None,
            headers=((_STRUCK, str(entry.last_offset).encode()),),
            partition=entry.partition,
        )

    def _commit(self, left: Collection[_Entry], ends: dict[int, int]) -> None:
        offsets = dict(ends)
        for entry in left:
            offsets[entry.partition] = min(offsets[entry.partition], entry.first_offset)
        client = OffsetClient(self._location, topic=self._location.dead_letter_topic, group=self._group)
        try:
            client.commit(offsets)
        finally:
            client.close()

    def _read_entries(self) -> tuple[list[_Entry], dict[int, int]]:
        """What is kept, oldest first, and where each partition ended when it was read."""
        client = OffsetClient(self._location, topic=self._location.dead_letter_topic, group=self._group)
        try:
            partitions = client.partitions()
            starts, ends = client.committed(partitions), client.ends(partitions)
        finally:
            client.close()
        found: dict[tuple[int, str], _Entry] = {}
        for message in self._messages({p: starts[p] for p in partitions if starts[p] < ends[p]}, ends):
            _note(message, found)
        return sorted(found.values(), key=lambda e: (e.kept.time, e.partition, e.first_offset)), ends

    def _messages(self, starts: dict[int, int], ends: dict[int, int]) -> list[Message]:
        """All messages from `starts` on, up to the end of each partition."""
        topic, messages, open_ = self._location.dead_letter_topic, [], set(starts)
        if not starts:
            return []
        # The end of a partition is told as an event: its last offsets may be gaps, and would never come.
        settings = self._location.client(
            group_id=self._group, enable_auto_commit=False, enable_partition_eof=True, auto_offset_reset="earliest"
        )
        consumer = Consumer(settings)
        try:
            consumer.assign([TopicPartition(topic, number, offset) for number, offset in starts.items()])
            deadline = time.monotonic() + self._seconds
            while open_:
                if time.monotonic() > deadline:
                    raise TemporaryError(
                        f"reading {topic} from {self._location.brokers} took over {self._seconds:.0f} s"
                    )
                for message in consumer.consume(_BATCH, 0.1):
                    error = message.error()
                    number, offset = message.partition(), message.offset()
                    if error is not None and error.code() != KafkaError._PARTITION_EOF:
                        raise sorted_error(error, f"reading {topic}")
                    if error is None and number in open_ and offset is not None:
                        messages.append(message)
                    if number in open_ and (error is not None or (offset or 0) + 1 >= ends[number]):
                        open_.discard(number)
        except KafkaException as error:
            raise sorted_error(error, f"reading {topic}") from error
        finally:
            consumer.close()
        return messages


def _headers(message: Message) -> list[tuple[str, Any]]:
    found: Any = message.headers()
    return list(found or [])


def _note(message: Message, found: dict[tuple[int, str], _Entry]) -> None:
    """Adds a kept message to `found`, or strikes one out."""
    headers = {name: value for name, value in _headers(message) if isinstance(value, bytes)}
    partition, offset, name = message.partition() or 0, message.offset() or 0, message_id(message)
    before = found.get((partition, name))
    if _STRUCK in headers:
        if before is not None and before.last_offset <= int(headers[_STRUCK]):
            del found[partition, name]
        return
    value = message.value()
    kept = DeadLetter(
        name,
        value if isinstance(value, bytes) else b"",
        headers.get(_REASON, b"").decode(errors="replace"),
        float(headers.get(_TIME, b"0")),
    )
    first = offset if before is None else before.first_offset
    found[partition, name] = _Entry(
        kept=before.kept if before else kept, partition=partition, first_offset=first, last_offset=offset
    )
