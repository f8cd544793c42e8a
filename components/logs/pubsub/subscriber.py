"""The reading end on Pub/Sub: a thread asks for messages and fills a bounded queue; `pull` takes from it at once.

The thread sends one unary pull after another, each of which waits at Pub/Sub until there is a message. It leases what
comes for `lease_seconds`; what is not acknowledged by then is forgotten here, and Pub/Sub delivers it again. Storing
before acknowledging is the caller's job; how far the log is read is estimated by `ReadMark`.

Dead letters have a topic of their own: put there, listed without being taken, published again. They are the payloads as
they came, with id, reason and time as attributes. What Pub/Sub itself moved there has no reason of ours, and is
recognised by that. Pub/Sub has no way to look without pulling: while one list or replay runs, and for `lease_seconds`
after one that was killed, another sees fewer messages.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from google.api_core import exceptions

from components.logs import event_log
from components.logs.event_log import DeadLetter, Delivery
from components.logs.pubsub.resources import (
    CALL_SECONDS,
    ID,
    MAX_ATTRIBUTE_BYTES,
    Names,
    publish_all,
    subscriber_client,
    translated,
)
from components.runtime.errors import PermanentError, TemporaryError

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

    def add(self, letters: Sequence[tuple[str, bytes, str]], *, now: float) -> None:
        """Keeps messages, each with id, payload and reason; confirmed by Pub/Sub when this returns."""
        kept = [
            (payload, {ID: name, REASON: cut_to_attribute(reason), DEAD_LETTERED_AT: repr(now)})
            for name, payload, reason in letters
        ]
        publish_all(self._publisher, self._names.dead_letters.topic_path, kept)

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


logger = logging.getLogger(__name__)

PULL_SECONDS = 30.0
"""Longest that one pull waits for a message."""
STEADY_SECONDS = 1.0
"""A pull that has waited so long has reached Pub/Sub, which would have refused it far sooner."""
GRACE_SECONDS = 3.0
"""An outage that lasts no longer is no problem yet: servers restart."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0
"""Pauses after failed pulls double from the first to the second."""
MAX_QUEUED_BYTES = 100_000_000
_FULL_SECONDS = 0.02
"""How often the thread looks for room while the queue is full."""
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class PubsubSettings:
    """How many messages are in hand, and how long to wait for what."""

    lease_seconds: float = 30.0
    """How long a killed reader keeps its messages from the next one; Pub/Sub takes 10 to 600."""
    settle_seconds: float = 5.0
    """How much later than others of its age a message may arrive; see `ReadMark`."""
    max_messages: int = 2000
    """Most messages in hand: queued, or pulled and not acknowledged."""
    list_seconds: float = 3.0
    """How long no message must come before all dead letters are thought to have come."""


@dataclass(frozen=True)
class _InHand:
    """A message that arrived and is not acknowledged."""

    ack_id: str
    message: Any
    lease_ends: float


class ReadMark:
    """How far a log has been read whose broker does not say: an estimate from the messages' publish times.

    Pub/Sub does not say what is left nor in which order it comes. What is known is the publish time of every message
    that came, and how long none came. So:

    - While messages come, everything published before the oldest one in hand (waiting here, or pulled and not
      acknowledged), or before the newest one ever seen where none is in hand, has come too;
    - once none has come for `settle_seconds`, everything published up to now has come;
    - less `settle_seconds` in both cases: how much later than others of its age a message may arrive. A message that is
      later still counts as a late one.
    - For `lease_seconds` after connecting nothing is known: a killed predecessor, or a call of ours that was cut off,
      may hold messages that come again only then.

    Publish times are the broker's clock, `now` is ours: their difference adds to the error, so both should keep time.
    Times called `at` are of a monotonic clock, `published` and `now` are seconds since the epoch.
    """

    def __init__(self, *, settle_seconds: float, lease_seconds: float) -> None:
        self._settle_seconds, self._lease_seconds = settle_seconds, lease_seconds
        self._newest_published: float | None = None
        self._last_arrival_at = float("-inf")
        self._mark: float | None = None

    def arrived(self, published: float, *, at: float) -> None:
        """Notes that a message came."""
        self._newest_published = max(published, self._newest_published or published)
        self._last_arrival_at = at

    def value(self, *, now: float, at: float, connected_at: float | None, oldest_in_hand: float | None) -> float | None:
        """Seconds since the epoch up to which all is read; None = unknown as yet.

        Args:
            now: The time.
            at: The same moment on the monotonic clock.
            connected_at: Since when pulls have succeeded; None = they fail, and the mark rests.
            oldest_in_hand: Smallest publish time of what came and is not acknowledged; None = nothing is.
        """
        if connected_at is not None and at - connected_at >= self._lease_seconds:
            reached = now if oldest_in_hand is None else min(now, oldest_in_hand)
            if at - max(self._last_arrival_at, connected_at) < self._settle_seconds:
                if self._newest_published is None:
                    return self._mark
                reached = min(reached, self._newest_published)
            self._mark = reached - self._settle_seconds
        return self._mark


class PubsubSubscriber:
    """Reads one subscription; use from one thread."""

    def __init__(
        self,
        names: Names,
        settings: PubsubSettings,
        *,
        publisher: Any,
        subscriber: Any,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes no message from another reader before the first `pull`.

        `publisher`, for dead letters, and `subscriber` are `resources`' clients, which are closed with this.
        """
        self._names, self._settings = names, settings
        self._clock, self._monotonic = clock, monotonic
        self._publisher, self._subscriber = publisher, subscriber
        self._dead_letters = PubsubDeadLetters(
            names, publisher=publisher, subscriber=subscriber, wait_seconds=settings.list_seconds
        )
        self._mark = ReadMark(settle_seconds=settings.settle_seconds, lease_seconds=settings.lease_seconds)
        self._lock = threading.Lock()
        self._queue: deque[_InHand] = deque()
        self._pulled: dict[str, _InHand] = {}
        """By acknowledgement id, which is the delivery's token."""
        self._pulling_client: Any = None
        """The receiving thread's own: closing it ends the pull under way."""
        self._receiver = threading.Thread(target=self._receive, name="Pub/Sub reader", daemon=True)
        self._closing = threading.Event()
        self._asked_at: float | None = None
        """When the pull under way began; None between two."""
        self._connected_at: float | None = None
        self._failure: TemporaryError | PermanentError | None = None
        """Of the newest pull; None = it succeeded."""
        self._failing_since = 0.0

    def pull(self, max_messages: int) -> list[Delivery]:
        """See `event_log.Subscriber`; while Pub/Sub is away there is nothing, and `problem` says so."""
        if self._pulling_client is None:
            self._pulling_client, self._connected_at = subscriber_client(), self._monotonic()
            self._receiver.start()
        if isinstance(self._failure, PermanentError):
            raise PermanentError(str(self._failure)) from self._failure
        with self._lock:
            self._forget_expired()
            pulled, num_bytes = list[Delivery](), 0
            while self._queue and len(pulled) < max_messages and num_bytes < event_log.MAX_PULL_BYTES:
                held = self._queue.popleft()
                self._pulled[held.ack_id] = held
                pulled.append(Delivery(message_id(held.message), bytes(held.message.data), held.ack_id))
                num_bytes += len(pulled[-1].payload)
        return pulled

    def acknowledge(self, tokens: Iterable[str]) -> None:
        """See `event_log.Subscriber`; what Pub/Sub did not confirm is delivered again."""
        with self._lock:
            self._forget_expired()
            ack_ids = [token for token in dict.fromkeys(tokens) if token in self._pulled]
        send_ack_ids(self._subscriber, "acknowledge", self._names.subscription_path, ack_ids=ack_ids)
        with self._lock:
            for ack_id in ack_ids:
                self._pulled.pop(ack_id, None)

    def dead_letter(self, bad: Sequence[tuple[str, str]]) -> None:
        """See `event_log.Subscriber`; of a reason longer than 1024 bytes the beginning is kept."""
        with self._lock:
            self._forget_expired()
            held = [(self._pulled[token].message, reason) for token, reason in bad if token in self._pulled]
        letters = [(message_id(message), bytes(message.data), reason) for message, reason in held]
        self._dead_letters.add(letters, now=self._clock())
        self.acknowledge([token for token, _ in bad])

    def list_dead_letters(self) -> list[DeadLetter]:
        """See `event_log.Subscriber`; what a list beside another one misses, see `dead_letters`."""
        return self._dead_letters.read()

    def replay_dead_letters(self) -> int:
        """See `event_log.Subscriber`."""
        return self._dead_letters.replay()

    def read_up_to(self) -> float | None:
        """See `event_log.Subscriber`: an estimate, see `ReadMark`."""
        with self._lock:
            self._note_steady_pull()
            in_hand = [_published(held.message) for held in (*self._queue, *self._pulled.values())]
            return self._mark.value(
                now=self._clock(),
                at=self._monotonic(),
                connected_at=self._connected_at,
                oldest_in_hand=min(in_hand, default=None),
            )

    def problem(self) -> str | None:
        """See `event_log.Subscriber`."""
        with self._lock:
            self._note_steady_pull()
            if isinstance(self._failure, TemporaryError) and self._monotonic() - self._failing_since < GRACE_SECONDS:
                return None
            return None if self._failure is None else str(self._failure)

    def backlog(self) -> None:
        """See `event_log.Subscriber`: Pub/Sub does not tell a subscriber, only Cloud Monitoring."""
        return

    def close(self) -> None:
        """Ends the pull under way and gives back what is in hand, so that the next reader has it at once."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._pulling_client is not None:
            self._pulling_client.close()
            self._receiver.join(_CLOSE_SECONDS)
        with self._lock:
            in_hand = [held.ack_id for held in (*self._queue, *self._pulled.values())]
            self._queue.clear()
            self._pulled.clear()
        try:
            self._set_lease(in_hand, 0)
        except (TemporaryError, PermanentError) as error:
            logger.warning("messages in hand are delivered again only when their leases run out: %s", error)
        self._publisher.stop()
        self._publisher.transport.close()
        self._subscriber.close()

    def _receive(self) -> None:
        """Fills the queue until `close`, through any outage; runs in a thread of its own."""
        subscription = self._names.subscription_path
        pause = FIRST_PAUSE_SECONDS
        while not self._closing.is_set():
            if not (room := self._room()):
                self._closing.wait(_FULL_SECONDS)
                continue
            self._asked_at = self._monotonic()
            try:
                self._take_in(pull_messages(self._pulling_client, subscription, room, seconds=PULL_SECONDS))
                pause = FIRST_PAUSE_SECONDS
            except (TemporaryError, PermanentError) as error:
                self._note_failure(error)
                self._closing.wait(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _room(self) -> int:
        """How many messages may come now."""
        with self._lock:
            self._forget_expired()
            is_full = sum(len(held.message.data) for held in self._queue) >= MAX_QUEUED_BYTES
            return 0 if is_full else self._settings.max_messages - len(self._queue) - len(self._pulled)

    def _take_in(self, received: list[Any]) -> None:
        leased_at = self._monotonic()
        self._set_lease([each.ack_id for each in received], round(self._settings.lease_seconds))
        with self._lock:
            self._note_success()
            for each in received:
                self._queue.append(_InHand(each.ack_id, each.message, leased_at + self._settings.lease_seconds))
                self._mark.arrived(_published(each.message), at=self._monotonic())

    def _set_lease(self, ack_ids: list[str], seconds: int) -> None:
        subscription = self._names.subscription_path
        send_ack_ids(
            self._subscriber, "modify_ack_deadline", subscription, ack_ids=ack_ids, ack_deadline_seconds=seconds
        )

    def _forget_expired(self) -> None:
        """Forgets what Pub/Sub delivers again, to this reader or another."""
        now = self._monotonic()
        self._queue = deque(held for held in self._queue if held.lease_ends > now)
        self._pulled = {ack_id: held for ack_id, held in self._pulled.items() if held.lease_ends > now}

    def _note_success(self) -> None:
        if self._connected_at is None:
            self._connected_at = self._asked_at
        self._failure, self._asked_at = None, None

    def _note_steady_pull(self) -> None:
        if self._asked_at is not None and self._monotonic() - self._asked_at >= STEADY_SECONDS:
            self._note_success()

    def _note_failure(self, error: TemporaryError | PermanentError) -> None:
        with self._lock:
            self._asked_at = self._connected_at = None
            if self._closing.is_set():
                return
            if self._failure is None:
                self._failing_since = self._monotonic()
                logger.warning("pulling fails and is tried again: %s", error)
            self._failure = error


def _published(message: Any) -> float:
    return float(message.publish_time.timestamp())
