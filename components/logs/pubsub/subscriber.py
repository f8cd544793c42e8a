"""The reading end on Pub/Sub: a stream fills a bounded queue, and `pull` takes from it without waiting.

The library leases every message while it is in hand and prolongs the lease; acknowledgements go in one confirmed
request, since the library sends its own later and reports no failure of them (it does only with exactly-once delivery,
which is off: it costs latency, and the monitor recognises redeliveries anyway). A message that was pulled
and not acknowledged within `lease_seconds` is given out again from here, as another backend's lease would run out.
Storing before acknowledging is the caller's; how far the log is read is estimated by `ReadMark`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from components.logs.event_log import DeadLetter, Delivery
from components.logs.pubsub.dead_letters import PubsubDeadLetters, message_id, send_ack_ids
from components.logs.pubsub.resources import Names
from components.logs.pubsub.stream import Stream, flow_control
from components.runtime.errors import PermanentError, TemporaryError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PubsubSettings:
    """How much is in hand, and how long one waits for what."""

    lease_seconds: float = 30.0
    """How long a killed reader keeps its messages from the next one; Pub/Sub takes 10 to 600."""
    settle_seconds: float = 5.0
    """How much later than others of its age a message may arrive; see `ReadMark`."""
    max_messages: int = 2000
    """Most messages in hand: queued, or pulled and not acknowledged."""
    max_bytes: int = 100_000_000
    """Most bytes of them."""
    list_seconds: float = 3.0
    """How long no message must come before all dead letters are thought to have come."""


@dataclass
class _InHand:
    """A message that arrived and has not ended."""

    message: Any
    published: float
    attempt: int
    lease_ends: float = float("inf")


class ReadMark:
    """How far a log has been read whose broker does not say: an estimate from the messages' publish times.

    Pub/Sub does not say what is left nor in which order it comes. What is known is the publish time of every message
    that came, and how long none came. So:

    - While messages come, everything published before the oldest one in hand (waiting here, or pulled and not
      acknowledged), or before the newest one ever seen where none is in hand, has come too;
    - once none has come for `settle_seconds`, everything published up to now has come;
    - less `settle_seconds` in both cases: how much later than others of its age a message may arrive. A message that is
      later still counts as a late one.
    - For `lease_seconds` after connecting nothing is known: a killed predecessor, or our own broken stream, may hold
      messages that come again only then.

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
            connected_at: Since when the stream has stood; None = it does not, and the mark rests.
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
        recreate: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the stream.

        Args:
            names: The log.
            settings: See `PubsubSettings`.
            publisher: A `resources.publisher_client` for dead letters; closed with this.
            subscriber: A `resources.subscriber_client`; closed with this.
            recreate: Makes topic and subscription again where they are gone; None = that is a `PermanentError`.
            clock: Seconds since the epoch.
            monotonic: Seconds, never set back.
        """
        self._names = names
        self._settings = settings
        self._clock = clock
        self._monotonic = monotonic
        self._publisher, self._subscriber = publisher, subscriber
        self._dead_letters = PubsubDeadLetters(
            names, publisher=publisher, subscriber=subscriber, wait_seconds=settings.list_seconds
        )
        self._lock = threading.Lock()
        self._queue: deque[_InHand] = deque()
        self._pulled: dict[str, _InHand] = {}
        self._ended: dict[str, Any] = {}
        """Messages that the caller has ended and Pub/Sub has not confirmed: acknowledgement id to message."""
        self._mark = ReadMark(settle_seconds=settings.settle_seconds, lease_seconds=settings.lease_seconds)
        self._numbers = itertools.count()
        self._closed = False
        self._stream = Stream(
            subscriber,
            names.subscription_path,
            self._receive_message,
            flow_control=flow_control(
                max_messages=settings.max_messages,
                max_bytes=settings.max_bytes,
                lease_seconds=settings.lease_seconds,
            ),
            monotonic=monotonic,
            recreate=recreate,
            reopened=self._forget_deliveries,
        )

    def pull(self, max_messages: int) -> list[Delivery]:
        """See `event_log.Subscriber`; while Pub/Sub is away there is nothing, and `problem` says so."""
        self._stream.keep_open()
        if self._ended:
            try:
                self._confirm_acknowledgements()
            except TemporaryError as error:
                logger.warning("acknowledgements wait: %s", error)
        pulled: list[Delivery] = []
        now = self._monotonic()
        with self._lock:
            self._requeue_overdue(now)
            while self._queue and len(pulled) < max_messages:
                taken = self._queue.popleft()
                taken.lease_ends = now + self._settings.lease_seconds
                token = f"{next(self._numbers)}"
                self._pulled[token] = taken
                pulled.append(Delivery(message_id(taken.message), bytes(taken.message.data), token, taken.attempt))
        return pulled

    def acknowledge(self, tokens: Iterable[str]) -> None:
        """See `event_log.Subscriber`; what cannot be confirmed now is tried again with every `pull`."""
        with self._lock:
            for token in tokens:
                if (ended := self._pulled.pop(token, None)) is not None:
                    self._ended[ended.message.ack_id] = ended.message
        self._confirm_acknowledgements()

    def dead_letter(self, token: str, reason: str) -> None:
        """See `event_log.Subscriber`; of a reason longer than 1024 bytes the beginning is kept."""
        if (kept := self._pulled.get(token)) is not None:
            self._dead_letters.add(message_id(kept.message), bytes(kept.message.data), reason, now=self._clock())
            self.acknowledge([token])

    def list_dead_letters(self) -> list[DeadLetter]:
        """See `event_log.Subscriber`; what a list beside another one misses, see `dead_letters`."""
        return self._dead_letters.read()

    def replay_dead_letters(self) -> int:
        """See `event_log.Subscriber`."""
        return self._dead_letters.replay()

    def read_up_to(self) -> float | None:
        """See `event_log.Subscriber`: an estimate, see `ReadMark`."""
        with self._lock:
            in_hand = [held.published for held in (*self._queue, *self._pulled.values())]
            return self._mark.value(
                now=self._clock(),
                at=self._monotonic(),
                connected_at=self._stream.connected_at(),
                oldest_in_hand=min(in_hand, default=None),
            )

    def problem(self) -> str | None:
        """See `event_log.Subscriber`."""
        return self._stream.problem()

    def backlog(self) -> None:
        """See `event_log.Subscriber`: Pub/Sub does not tell a subscriber, only Cloud Monitoring."""
        return

    def close(self) -> None:
        """Ends the stream and gives back what is in hand, so that the next reader has it at once."""
        if self._closed:
            return
        self._closed = True
        self._stream.close()
        with self._lock:
            in_hand = [held.message.ack_id for held in (*self._queue, *self._pulled.values())]
            self._queue.clear()
            self._pulled.clear()
        try:
            self._confirm_acknowledgements()
            subscription = self._names.subscription_path
            send_ack_ids(self._subscriber, "modify_ack_deadline", subscription, ack_ids=in_hand, ack_deadline_seconds=0)
        except (TemporaryError, PermanentError) as error:
            logger.warning("messages in hand are delivered again only when their leases run out: %s", error)
        self._publisher.stop()
        self._publisher.transport.close()
        self._subscriber.close()

    def _receive_message(self, message: Any) -> None:
        published = message.publish_time.timestamp()
        arrived = _InHand(message, published, message.delivery_attempt or 1)
        with self._lock:
            self._queue.append(arrived)
            self._mark.arrived(published, at=self._monotonic())

    def _requeue_overdue(self, now: float) -> None:
        """Puts what was pulled and not acknowledged in time in front of the queue again."""
        overdue = [token for token, held in self._pulled.items() if held.lease_ends <= now]
        for token in reversed(overdue):
            held = self._pulled.pop(token)
            held.attempt += 1
            self._queue.appendleft(held)

    def _confirm_acknowledgements(self) -> None:
        """Acknowledges what the caller has ended, and lets the library's lease on it go."""
        if not self._ended:
            return
        sent = dict(self._ended)
        send_ack_ids(self._subscriber, "acknowledge", self._names.subscription_path, ack_ids=list(sent))
        for ack_id, message in sent.items():
            del self._ended[ack_id]
            message.drop()

    def _forget_deliveries(self) -> None:
        """Lets go of what the ended stream brought: Pub/Sub delivers it again."""
        with self._lock:
            self._queue.clear()
            self._pulled.clear()
        self._ended.clear()
