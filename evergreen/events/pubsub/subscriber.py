"""The reading side of a Pub/Sub log: a thread fills a bounded queue that `pull` empties.

The thread sends pull requests, one at a time. Each pull waits at Pub/Sub until there is a message,
and leases the message for `lease_seconds`. A message that is not acknowledged before its lease ends
is dropped from the queue, and Pub/Sub delivers it again. The caller stores a message before it
acknowledges it. `Watermark` estimates the watermark of the log.

Dead letters have their own topic. A dead letter is the original payload with id, reason and time as
attributes. If Pub/Sub itself moved a message to this topic, the message has no attribute with a
reason. Pub/Sub cannot list messages without pulling them. While one call lists or replays dead
letters, another call of this kind sees fewer messages. If a process is killed while it lists or
replays dead letters, the next calls see fewer messages for `lease_seconds`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from google.api_core import exceptions

from evergreen.events import event_log
from evergreen.events.event_log import DeadLetter, Delivery
from evergreen.events.pubsub.resources import (
    CALL_SECONDS,
    ID,
    MAX_ATTRIBUTE_BYTES,
    Names,
    publish_all,
    subscriber_client,
    translated,
)
from evergreen.runtime.errors import PermanentError, TemporaryError

_REASON = "reason"
_DEAD_LETTERED_AT = "dead_lettered_at"
"""Attribute of a dead letter: its time in seconds since the epoch."""
_DELIVERY_COUNT = "CloudPubSubDeadLetterSourceDeliveryCount"
"""Attribute of a message that Pub/Sub itself moved to the dead-letter topic."""
_CHUNK = 1000
"""Highest number of messages per request."""


def _message_id(message: Any) -> str:
    """Return the message's id attribute. A message of another publisher gets Pub/Sub's own id."""
    return str(message.attributes.get(ID) or f"pubsub-{message.message_id}")


def _send_ack_ids(
    subscriber: Any, call: str, subscription: str, *, ack_ids: list[str], **more: Any
) -> None:
    """Send `acknowledge` or `modify_ack_deadline` for all ids, and wait for Pub/Sub's answer.

    `ack_ids` may be empty.

    Raises:
        TemporaryError, PermanentError: Pub/Sub is unreachable, or refuses the request.
    """
    for start in range(0, len(ack_ids), _CHUNK):
        request = {"subscription": subscription, "ack_ids": ack_ids[start : start + _CHUNK], **more}
        try:
            getattr(subscriber, call)(request=request, retry=None, timeout=CALL_SECONDS)
        except Exception as error:
            raise translated(error, subscription) from error


def pull_messages(subscriber: Any, subscription: str, count: int, *, seconds: float) -> list[Any]:
    """Return at most `count` messages with their acknowledgement ids.

    The call waits up to `seconds` for the first message, and returns an empty list if none arrives.

    Raises:
        TemporaryError, PermanentError: Pub/Sub is unreachable, or refuses the request.
    """
    request = {"subscription": subscription, "max_messages": min(count, _CHUNK)}
    try:
        return list(subscriber.pull(request=request, retry=None, timeout=seconds).received_messages)
    except exceptions.DeadlineExceeded:
        return []
    except Exception as error:
        raise translated(error, subscription) from error


class PubsubDeadLetters:
    """Dead letters of one log."""

    def __init__(
        self, names: Names, *, publisher: Any, subscriber: Any, wait_seconds: float
    ) -> None:
        """Store the clients for publishing and for reading.

        After `wait_seconds` without a message, all dead letters are assumed to have arrived.
        """
        self._names = names
        self._publisher = publisher
        self._subscriber = subscriber
        self._wait_seconds = wait_seconds

    def add(self, letters: Sequence[tuple[str, bytes, str]], *, now: float) -> None:
        """Store messages, each with id, payload and reason.

        The call returns when Pub/Sub has confirmed all dead letters.
        """
        kept = [
            (payload, {ID: name, _REASON: _cut_to_attribute(reason), _DEAD_LETTERED_AT: repr(now)})
            for name, payload, reason in letters
        ]
        publish_all(self._publisher, self._names.dead_letters.topic_path, kept)

    def read(self) -> list[DeadLetter]:
        """Return all dead letters, oldest first."""
        leased = self._lease_all()
        self._release(list(leased))
        return sorted(
            (_read_dead_letter(message) for message in leased.values()),
            key=lambda letter: letter.time,
        )

    def replay(self) -> int:
        """Publish all dead letters to the log again, then remove them, and return their number."""
        leased = self._lease_all()
        try:
            again = [
                (bytes(message.data), {ID: _message_id(message)}) for message in leased.values()
            ]
            publish_all(self._publisher, self._names.topic_path, again)
            subscription = self._names.dead_letters.subscription_path
            _send_ack_ids(self._subscriber, "acknowledge", subscription, ack_ids=list(leased))
        except BaseException:
            self._release(list(leased))
            raise
        return len(leased)

    def _lease_all(self) -> dict[str, Any]:
        """Pull messages until none arrives for `wait_seconds`.

        Returns each acknowledgement id with its message.
        """
        subscription = self._names.dead_letters.subscription_path
        leased: dict[str, tuple[str, Any]] = {}
        empty_since = time.monotonic()
        while (left := empty_since + self._wait_seconds - time.monotonic()) > 0:
            answer = pull_messages(self._subscriber, subscription, _CHUNK, seconds=left)
            received = {each.message.message_id: (each.ack_id, each.message) for each in answer}
            if received.keys() - leased.keys():
                empty_since = time.monotonic()
            # If a message is held longer than its lease, it arrives again under a new
            # acknowledgement id. A message that arrives again does not restart the wait, because
            # the loop might never end.
            leased.update(received)
        return dict(leased.values())

    def _release(self, ack_ids: list[str]) -> None:
        subscription = self._names.dead_letters.subscription_path
        _send_ack_ids(
            self._subscriber,
            "modify_ack_deadline",
            subscription,
            ack_ids=ack_ids,
            ack_deadline_seconds=0,
        )


def _cut_to_attribute(text: str) -> str:
    """Return `text`, truncated to the length of an attribute.

    >>> _cut_to_attribute("short")
    'short'
    >>> len(_cut_to_attribute("é" * 1000).encode()) <= MAX_ATTRIBUTE_BYTES
    True
    """
    raw = text.encode()
    if len(raw) <= MAX_ATTRIBUTE_BYTES:
        return text
    return raw[: MAX_ATTRIBUTE_BYTES - 3].decode(errors="ignore") + "..."


def _read_dead_letter(message: Any) -> DeadLetter:
    attributes = message.attributes
    reason = attributes.get(_REASON)
    if reason is None:
        reason = (
            "dead letter of Pub/Sub after "
            f"{attributes.get(_DELIVERY_COUNT, 'an unknown number of')} deliveries"
        )
    published = message.publish_time.timestamp()
    try:
        dead_lettered_at = float(attributes.get(_DEAD_LETTERED_AT, published))
    except ValueError:
        dead_lettered_at = published
    return DeadLetter(_message_id(message), bytes(message.data), reason, dead_lettered_at)


logger = logging.getLogger(__name__)

_PULL_SECONDS = 30.0
"""Longest wait of one pull for a message."""
_STEADY_SECONDS = 1.0
"""Seconds after which a waiting pull has certainly reached Pub/Sub. If Pub/Sub refuses a pull, the
error arrives much sooner."""
_GRACE_SECONDS = 3.0
"""Longest outage in seconds that is not reported as a problem, because servers restart."""
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.5, 30.0
"""First pause and longest pause after failed pulls, in seconds. Each further failure doubles the
pause."""
_MAX_QUEUED_BYTES = 100_000_000
_FULL_SECONDS = 0.02
"""Seconds between two checks for free space while the queue is full."""
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class PubsubSettings:
    """Limits and timeouts of a Pub/Sub reader."""

    lease_seconds: float = 30.0
    """Seconds for which the messages of a killed reader are not delivered to the next reader.
    Pub/Sub accepts 10 to 600 seconds."""
    settle_seconds: float = 5.0
    """Maximum delay of a message in seconds, compared with messages of the same age. See
    `Watermark`."""
    max_messages: int = 2000
    """Highest number of messages that are queued, or pulled and not acknowledged."""
    list_seconds: float = 3.0
    """Seconds without a message after which all dead letters are assumed to have arrived."""


@dataclass(frozen=True)
class _LeasedMessage:
    """Message that has arrived and is not acknowledged yet."""

    ack_id: str
    message: Any
    lease_ends: float


class Watermark:
    """Estimates the watermark from publish times, because the broker reports no watermark.

    Pub/Sub reports neither the number nor the order of the messages that are left. The estimate
    depends on the publish times of arrived messages, and on the time since the last arrival:

    - While messages arrive, the watermark is the publish time of the oldest message that is queued
      or not acknowledged. If all messages are acknowledged, the watermark is the newest publish
      time so far.
    - After `settle_seconds` without a message, the watermark is the current time.
    - In both cases, `settle_seconds` are subtracted from the watermark, to allow for messages that
      arrive with a longer delay than others. A message with a larger delay counts as late.
    - For `lease_seconds` after connecting, the watermark is unknown, because a killed predecessor
      or an interrupted call may hold messages.

    Publish times come from the broker's clock, and `now` comes from the reader's clock. A
    difference between the two clocks makes the estimate wrong by that amount. Arguments with the
    name `at` are times of a monotonic clock. `published` and `now` are in seconds since the epoch.
    """

    def __init__(self, *, settle_seconds: float, lease_seconds: float) -> None:
        self._settle_seconds, self._lease_seconds = settle_seconds, lease_seconds
        self._newest_published: float | None = None
        self._last_arrival_at = float("-inf")
        self._watermark: float | None = None

    def arrived(self, published: float, *, at: float) -> None:
        """Record the arrival of a message."""
        self._newest_published = max(published, self._newest_published or published)
        self._last_arrival_at = at

    def value(
        self, *, now: float, at: float, connected_at: float | None, oldest_in_hand: float | None
    ) -> float | None:
        """Return the watermark in seconds since the epoch, or None while it is unknown.

        Args:
            now: Current time.
            at: Current time of the monotonic clock.
            connected_at: Start of the current period of successful pulls. None while pulls fail.
                While pulls fail, the watermark does not move.
            oldest_in_hand: Earliest publish time of the messages that are not acknowledged. None if
                all messages are acknowledged.
        """
        if connected_at is not None and at - connected_at >= self._lease_seconds:
            reached = now if oldest_in_hand is None else min(now, oldest_in_hand)
            if at - max(self._last_arrival_at, connected_at) < self._settle_seconds:
                if self._newest_published is None:
                    return self._watermark
                reached = min(reached, self._newest_published)
            self._watermark = reached - self._settle_seconds
        return self._watermark


class PubsubSubscriber:
    """Subscriber of one subscription, for use from one thread."""

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
        """Store the clients.

        Before the first `pull`, this reader leases no messages. `publisher` and `subscriber` are
        clients from the module `resources`. `publisher` is used for dead letters. Closing this
        subscriber closes both clients.
        """
        self._names, self._settings = names, settings
        self._clock, self._monotonic = clock, monotonic
        self._publisher, self._subscriber = publisher, subscriber
        self._dead_letters = PubsubDeadLetters(
            names, publisher=publisher, subscriber=subscriber, wait_seconds=settings.list_seconds
        )
        self._watermark = Watermark(
            settle_seconds=settings.settle_seconds, lease_seconds=settings.lease_seconds
        )
        self._lock = threading.Lock()
        self._queue: deque[_LeasedMessage] = deque()
        self._pulled: dict[str, _LeasedMessage] = {}
        """Pulled messages by acknowledgement id. The acknowledgement id is the token of a
        delivery."""
        self._pulling_client: Any = None
        """Client of the thread that receives messages. Closing this client ends a waiting pull."""
        self._receiver = threading.Thread(target=self._receive, name="Pub/Sub reader", daemon=True)
        self._closing = threading.Event()
        self._requested_at: float | None = None
        """Start of the current pull. None while no pull is running."""
        self._connected_at: float | None = None
        self._failure: TemporaryError | PermanentError | None = None
        """Error of the newest pull. None if the newest pull succeeded."""
        self._failing_since = 0.0

    def pull(self, max_messages: int) -> list[Delivery]:
        """See `event_log.Subscriber`.

        During an outage, the result is empty, and `problem` reports the outage.
        """
        if self._pulling_client is None:
            self._pulling_client, self._connected_at = subscriber_client(), self._monotonic()
            self._receiver.start()
        if isinstance(self._failure, PermanentError):
            raise PermanentError(str(self._failure)) from self._failure
        with self._lock:
            self._forget_expired()
            pulled, num_bytes = list[Delivery](), 0
            while (
                self._queue and len(pulled) < max_messages and num_bytes < event_log.MAX_PULL_BYTES
            ):
                held = self._queue.popleft()
                self._pulled[held.ack_id] = held
                pulled.append(
                    Delivery(_message_id(held.message), bytes(held.message.data), held.ack_id)
                )
                num_bytes += len(pulled[-1].payload)
        return pulled

    def acknowledge(self, tokens: Iterable[str]) -> None:
        """See `event_log.Subscriber`.

        Pub/Sub may deliver a message again as long as it has not confirmed the acknowledgement.
        """
        with self._lock:
            self._forget_expired()
            ack_ids = [token for token in dict.fromkeys(tokens) if token in self._pulled]
        _send_ack_ids(
            self._subscriber, "acknowledge", self._names.subscription_path, ack_ids=ack_ids
        )
        with self._lock:
            for ack_id in ack_ids:
                self._pulled.pop(ack_id, None)

    def dead_letter(self, bad: Sequence[tuple[str, str]]) -> None:
        """See `event_log.Subscriber`. A reason is truncated to 1024 bytes."""
        with self._lock:
            self._forget_expired()
            held = [
                (self._pulled[token].message, reason)
                for token, reason in bad
                if token in self._pulled
            ]
        letters = [(_message_id(message), bytes(message.data), reason) for message, reason in held]
        self._dead_letters.add(letters, now=self._clock())
        self.acknowledge([token for token, _ in bad])

    def list_dead_letters(self) -> list[DeadLetter]:
        """See `event_log.Subscriber`.

        If two lists run at once, they share the messages, so each list misses some messages.
        """
        return self._dead_letters.read()

    def replay_dead_letters(self) -> int:
        """See `event_log.Subscriber`."""
        return self._dead_letters.replay()

    def read_up_to(self) -> float | None:
        """See `event_log.Subscriber`. Returns the estimate of `Watermark`."""
        with self._lock:
            self._note_steady_pull()
            in_hand = [_published(held.message) for held in (*self._queue, *self._pulled.values())]
            return self._watermark.value(
                now=self._clock(),
                at=self._monotonic(),
                connected_at=self._connected_at,
                oldest_in_hand=min(in_hand, default=None),
            )

    def problem(self) -> str | None:
        """See `event_log.Subscriber`."""
        with self._lock:
            self._note_steady_pull()
            if (
                isinstance(self._failure, TemporaryError)
                and self._monotonic() - self._failing_since < _GRACE_SECONDS
            ):
                return None
            return None if self._failure is None else str(self._failure)

    def backlog(self) -> None:
        """See `event_log.Subscriber`.

        Returns None, because only Cloud Monitoring knows the backlog.
        """
        return

    def close(self) -> None:
        """Stop the current pull, and release all held messages for the next reader."""
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
            logger.warning(
                "held messages are delivered again only after their leases expire: %s", error
            )
        self._publisher.stop()
        self._publisher.transport.close()
        self._subscriber.close()

    def _receive(self) -> None:
        """Fill the queue until `close` is called, even during outages.

        This method runs in its own thread.
        """
        subscription = self._names.subscription_path
        pause = _FIRST_PAUSE_SECONDS
        while not self._closing.is_set():
            if not (space := self._queue_space()):
                self._closing.wait(_FULL_SECONDS)
                continue
            self._requested_at = self._monotonic()
            try:
                self._add_received(
                    pull_messages(self._pulling_client, subscription, space, seconds=_PULL_SECONDS)
                )
                pause = _FIRST_PAUSE_SECONDS
            except (TemporaryError, PermanentError) as error:
                self._note_failure(error)
                self._closing.wait(pause)
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _queue_space(self) -> int:
        """Return the number of messages that the queue can still accept."""
        with self._lock:
            self._forget_expired()
            is_full = sum(len(held.message.data) for held in self._queue) >= _MAX_QUEUED_BYTES
            return (
                0 if is_full else self._settings.max_messages - len(self._queue) - len(self._pulled)
            )

    def _add_received(self, received: list[Any]) -> None:
        leased_at = self._monotonic()
        self._set_lease([each.ack_id for each in received], round(self._settings.lease_seconds))
        with self._lock:
            self._note_success()
            for each in received:
                self._queue.append(
                    _LeasedMessage(
                        each.ack_id, each.message, leased_at + self._settings.lease_seconds
                    )
                )
                self._watermark.arrived(_published(each.message), at=self._monotonic())

    def _set_lease(self, ack_ids: list[str], seconds: int) -> None:
        subscription = self._names.subscription_path
        _send_ack_ids(
            self._subscriber,
            "modify_ack_deadline",
            subscription,
            ack_ids=ack_ids,
            ack_deadline_seconds=seconds,
        )

    def _forget_expired(self) -> None:
        """Drop held messages with an expired lease. Pub/Sub delivers them again."""
        now = self._monotonic()
        self._queue = deque(held for held in self._queue if held.lease_ends > now)
        self._pulled = {
            ack_id: held for ack_id, held in self._pulled.items() if held.lease_ends > now
        }

    def _note_success(self) -> None:
        if self._connected_at is None:
            self._connected_at = self._requested_at
        self._failure, self._requested_at = None, None

    def _note_steady_pull(self) -> None:
        if (
            self._requested_at is not None
            and self._monotonic() - self._requested_at >= _STEADY_SECONDS
        ):
            self._note_success()

    def _note_failure(self, error: TemporaryError | PermanentError) -> None:
        with self._lock:
            self._requested_at = self._connected_at = None
            if self._closing.is_set():
                return
            if self._failure is None:
                self._failing_since = self._monotonic()
                logger.warning("pulling failed and is retried: %s", error)
            self._failure = error


def _published(message: Any) -> float:
    return float(message.publish_time.timestamp())
