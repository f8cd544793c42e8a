"""One flush to the log: its records as messages, and what becomes of one that the log takes in no message.

A record that is too large for the log, or that cannot be encoded, is set aside with the reason, and the others go on.
When to flush, and how often to try again, is left to `publisher`.
"""

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import OutcomeBatch, Record, record_id
from evergreen.events.event_log import Publisher
from evergreen.runtime.errors import ContractError

RECORDS_PER_TURN = 16
"""Encoded without a pause, which takes half a millisecond."""


class Message(NamedTuple):
    """A record as the log takes it."""

    record: Record
    name: str
    payload: bytes


@dataclass
class Flush:
    """Records that are published together; their ids never name other content, however often they are published."""

    records: list[Record]
    form: RecordFormat
    num_rows: int
    num_outcomes: int
    num_bytes: int
    """Of memory that is free once they are published."""
    refused: list[tuple[Record, Exception]] = field(default_factory=list)
    """Those that the log takes in no message, and why; they are not tried again."""

    @cached_property
    def messages(self) -> list[Message]:
        """The messages that are still to be published."""
        encoded = []
        for number, record in enumerate(self.records):
            try:
                encoded.append(self._encoded(record))
            except Exception as error:  # whatever it is: the next try would meet it again
                self.refused.append((record, error))
            if number % RECORDS_PER_TURN == 0:
                # Lets go of the interpreter's lock: the event loop else waits 5 ms for it each time that it wakes.
                time.sleep(0)
        return encoded

    def _encoded(self, record: Record) -> Message:
        return Message(record, record_id(record), self.form.encode(record))

    def publish(self, log: Publisher) -> None:
        """Publishes the messages, all at once unless the log refuses one of them."""
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
        # What one message spoils must not keep the others out.
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
        halves = [self._encoded(each) for each in (_part(record, slice(middle)), _part(record, slice(middle, None)))]
        self.messages += halves
        self._publish(log, halves)


def _part(batch: OutcomeBatch, part: slice) -> OutcomeBatch:
    """Some outcomes of a batch that is too large for a log, under an id of their own."""
    return replace(
        batch,
        batch_id=f"{batch.batch_id}/{part.start or 0}-{part.stop or len(batch)}",
        request_ids=batch.request_ids[part],
        rows=batch.rows[part],
        times=batch.times[part],
    )
