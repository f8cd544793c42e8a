"""Dead letters in a topic of their own: put there, listed without being taken, published again.

They are the payloads as they came, with id, reason and time as attributes. What Pub/Sub itself moved there has no
reason of ours, and is recognised by that. Pub/Sub has no way to look without pulling: while one list or replay runs,
and for `lease_seconds` after one that was killed, another sees fewer messages.
"""

import time
from typing import Any

from google.api_core import exceptions

from components.logs.event_log import DeadLetter
from components.logs.pubsub.publisher import publish_all
from components.logs.pubsub.resources import CALL_SECONDS, ID, MAX_ATTRIBUTE_BYTES, Names, translated

REASON = "reason"
DEAD_LETTERED_AT = "dead_lettered_at"
"""Attribute of a dead letter: seconds since the epoch."""
DELIVERY_COUNT = "CloudPubSubDeadLetterSourceDeliveryCount"
"""Attribute that Pub/Sub adds to a message it moves away itself."""
_CHUNK = 1000
"""Most messages in one request."""


def message_id(message: Any) -> str:
    """The id it was published with; one of another publisher, without an id, goes by the name Pub/Sub gave it."""
    return str(message.attributes.get(ID) or f"pubsub-{message.message_id}")


def send_ack_ids(subscriber: Any, call: str, subscription: str, *, ack_ids: list[str], **more: Any) -> None:
    """Sends `acknowledge` or `modify_ack_deadline` for all ids, which may be none, and waits for Pub/Sub's answer.

    Raises:
        TemporaryError, PermanentError: Pub/Sub cannot be reached, or refuses.
    """
    for start in range(0, len(ack_ids), _CHUNK):
        request = {"subscription": subscription, "ack_ids": ack_ids[start : start + _CHUNK], **more}
        try:
            getattr(subscriber, call)(request=request, retry=None, timeout=CALL_SECONDS)
        except Exception as error:
            raise translated(error, subscription) from error


def pull_messages(subscriber: Any, subscription: str, count: int, *, seconds: float) -> list[Any]:
    """At most `count` messages with their acknowledgement ids; waits for the first, and returns none after `seconds`.

    Raises:
        TemporaryError, PermanentError: Pub/Sub cannot be reached, or refuses.
    """
    request = {"subscription": subscription, "max_messages": min(count, _CHUNK)}
    try:
        return list(subscriber.pull(request=request, retry=None, timeout=seconds).received_messages)
    except exceptions.DeadlineExceeded:
        return []
    except Exception as error:
        raise translated(error, subscription) from error


class PubsubDeadLetters:
    """The dead letters of one log's reader."""

    def __init__(self, names: Names, *, publisher: Any, subscriber: Any, wait_seconds: float) -> None:
        """Reaches them through two clients.

        `wait_seconds` is how long no message must come before all are thought to have come.
        """
        self._names = names
        self._publisher = publisher
        self._subscriber = subscriber
        self._wait_seconds = wait_seconds

    def add(self, name: str, payload: bytes, reason: str, *, now: float) -> None:
        """Keeps a message; confirmed by Pub/Sub when this returns."""
        attributes = {ID: name, REASON: cut_to_attribute(reason), DEAD_LETTERED_AT: repr(now)}
        publish_all(self._publisher, self._names.dead_letters.topic_path, [(payload, attributes)])

    def read(self) -> list[DeadLetter]:
        """All of them, oldest first."""
        taken = self._take()
        self._give_back(list(taken))
        return sorted((_read_dead_letter(message) for message in taken.values()), key=lambda kept: kept.time)

    def replay(self) -> int:
        """Publishes all of them to the log again, and only then lets them go; how many."""
        taken = self._take()
        try:
            again = [(bytes(message.data), {ID: message_id(message)}) for message in taken.values()]
            publish_all(self._publisher, self._names.topic_path, again)
            subscription = self._names.dead_letters.subscription_path
            send_ack_ids(self._subscriber, "acknowledge", subscription, ack_ids=list(taken))
        except BaseException:
            self._give_back(list(taken))
            raise
        return len(taken)

    def _take(self) -> dict[str, Any]:
        """Everything that comes, leased, until none has come for `wait_seconds`: acknowledgement id to message."""
        subscription = self._names.dead_letters.subscription_path
        taken: dict[str, tuple[str, Any]] = {}
        empty_since = time.monotonic()
        while (left := empty_since + self._wait_seconds - time.monotonic()) > 0:
            answer = pull_messages(self._subscriber, subscription, _CHUNK, seconds=left)
            received = {each.message.message_id: (each.ack_id, each.message) for each in answer}
            if received.keys() - taken.keys():
                empty_since = time.monotonic()
            # What takes longer than its lease comes again, under a new id for its acknowledgement, without end.
            taken.update(received)
        return dict(taken.values())

    def _give_back(self, ack_ids: list[str]) -> None:
        subscription = self._names.dead_letters.subscription_path
        send_ack_ids(self._subscriber, "modify_ack_deadline", subscription, ack_ids=ack_ids, ack_deadline_seconds=0)


def cut_to_attribute(text: str) -> str:
    """`text` as an attribute takes it: its beginning where it is too long.

    >>> cut_to_attribute("short"), len(cut_to_attribute("é" * 1000).encode()) <= MAX_ATTRIBUTE_BYTES
    ('short', True)
    """
    raw = text.encode()
    if len(raw) <= MAX_ATTRIBUTE_BYTES:
        return text
    return raw[: MAX_ATTRIBUTE_BYTES - 3].decode(errors="ignore") + "..."


def _read_dead_letter(message: Any) -> DeadLetter:
    attributes = message.attributes
    reason = attributes.get(REASON)
    if reason is None:
        reason = f"dead letter of Pub/Sub after {attributes.get(DELIVERY_COUNT, 'an unknown number of')} deliveries"
    published = message.publish_time.timestamp()
    try:
        kept_at = float(attributes.get(DEAD_LETTERED_AT, published))
    except ValueError:
        kept_at = published
    return DeadLetter(message_id(message), bytes(message.data), reason, kept_at)
