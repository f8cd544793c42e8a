"""Encode and publish the records of one flush, and set aside records that cannot be published.

A record is set aside, with its error, if it cannot be encoded or is too large for the event log.
All other records of the flush are published. `publisher` decides when to flush and retry.
"""

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import OutcomeBatch, Record, record_id
from evergreen.events.event_log import Publisher
from evergreen.runtime.errors import ContractError

_RECORDS_PER_TURN = 16
"""Number of records that are encoded without a pause. 16 records take half a millisecond."""


class Message(NamedTuple):
    """Encoded record and its message id."""

    record: Record
    name: str
    payload: bytes


@dataclass
class Flush:
    """Records that are published together. Retries use the same ids with the same content."""

    records: list[Record]
    form: RecordFormat
    num_rows: int
    num_outcomes: int
    num_bytes: int
    """Memory in bytes that publishing this flush will free."""
    refused: list[tuple[Record, Exception]] = field(default_factory=list)
    """Records that cannot be published, with their errors. The publisher does not retry these
    records."""

    @cached_property
    def messages(self) -> list[Message]:
        """Messages that are not published yet."""
        encoded = []
        for number, record in enumerate(self.records):
            try:
                encoded.append(self._encoded(record))
            except Exception as error:  # another attempt would fail in the same way
                self.refused.append((record, error))
            if number % _RECORDS_PER_TURN == 0:
                # Release the interpreter's lock, because otherwise each wake-up of the event loop
                # would wait 5 ms for the lock.
                time.sleep(0)
        return encoded

    def _encoded(self, record: Record) -> Message:
        return Message(record, record_id(record), self.form.encode(record))

    def publish(self, log: Publisher) -> None:
        """Publish all messages of the flush together.

        If the event log rejects a message, the messages are published in smaller groups.
        """
        self._publish(log, list(self.messages))

    def _publish(self, log: Publisher, messages: list[Message]) -> None:
        if not messages:
            return
        try:
            log.publish([(each.name, each.payload) for each in messages])
            return
        except ContractError as error:
            if len(messages) == 1:
                self._refuse(log, messages[0], error)
                return
        # Split the messages, so that one bad message does not block the other messages.
        middle = len(messages) // 2
        self._publish(log, messages[:middle])
        self._publish(log, messages[middle:])

    def _refuse(self, log: Publisher, message: Message, error: ContractError) -> None:
        record = message.record
        self.messages.remove(message)
        if not isinstance(record, OutcomeBatch) or len(record) == 1:
            self.refused.append((record, error))
            return
        middle = len(record) // 2
        halves = [
            self._encoded(each)
            for each in (_part(record, slice(middle)), _part(record, slice(middle, None)))
        ]
        self.messages += halves
        self._publish(log, halves)


def _part(batch: OutcomeBatch, part: slice) -> OutcomeBatch:
    """Return a part of a batch, as its own batch.

    A batch may be too large for the event log. The part gets its own batch id.
    """
    return replace(
        batch,
        batch_id=f"{batch.batch_id}/{part.start or 0}-{part.stop or len(batch)}",
        request_ids=batch.request_ids[part],
        rows=batch.rows[part],
        times=batch.times[part],
    )
