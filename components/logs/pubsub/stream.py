"""The streaming pull: kept open, and its state reported truthfully.

The library silently repeats a stream that broke: so its calls and its channel are watched here, and `problem`
distinguishes a stream that is connected, idle or not, from one that is not. `keep_open` starts it anew, with growing
pauses, after the library has given up. What arrives is left to the receiver, here `subscriber`.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

from google.api_core import exceptions
from google.cloud import pubsub_v1
from google.cloud.pubsub_v1.subscriber.scheduler import Scheduler
from grpc import ChannelConnectivity

from components.logs.pubsub.resources import translated
from components.runtime.errors import PermanentError, TemporaryError, first_line

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 1.0
"""A call that has lasted so long, or brought a message, stands; Pub/Sub ends one that it refuses far sooner."""
GRACE_SECONDS = 3.0
"""A stream that is down for less is no problem: Pub/Sub ends each about every half hour, and the library reopens it."""
_CLOSE_SECONDS = 5.0


class Stream:
    """One streaming pull on one subscription; `receive` is called with each message, from a thread of the library."""

    def __init__(
        self,
        client: Any,
        subscription: str,
        receive: Callable[[Any], None],
        *,
        flow_control: Any,
        monotonic: Callable[[], float],
        recreate: Callable[[], None] | None = None,
        reopened: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens the stream; `problem` says whether it can be reached.

        Args:
            client: A `resources.subscriber_client`; left open.
            subscription: Full name.
            receive: Takes a message; must be quick.
            flow_control: The library's `FlowControl`: most messages in hand, and how long a lease is.
            monotonic: Seconds.
            recreate: Makes the subscription again where it is gone; None = that is a `PermanentError`.
            reopened: Called before a stream that ended is opened again: what came on the old one comes again.
        """
        self._client = client
        self._subscription = subscription
        self._receive = receive
        self._flow_control, self._monotonic = flow_control, monotonic
        self._recreate, self._reopened = recreate, reopened
        self._lock = threading.Lock()
        self._state: ChannelConnectivity = ChannelConnectivity.CONNECTING
        self._call: Any = None
        """The call that is open, and when it began."""
        self._call_at = 0.0
        self._failing_since: float | None = monotonic()
        self._failure = "not connected yet"
        self._pause, self._retry_at = FIRST_PAUSE_SECONDS, 0.0
        client.on_stream = self._note_call
        client.transport.grpc_channel.subscribe(self._note_state, try_to_connect=True)
        self._future = self._open()

    def keep_open(self) -> None:
        """Opens the stream again where it has ended and the pause is over; never waits for the server.

        Raises:
            PermanentError: Pub/Sub refuses: the subscription is gone, or the right to it.
        """
        if not self._future.done():
            return
        error = self._future.exception(timeout=0)
        self._failure = "the stream ended" if error is None else first_line(error)
        missing = isinstance(error, exceptions.NotFound) and self._recreate is not None
        if error is not None and not missing:
            failure = translated(error, self._subscription)
            if isinstance(failure, PermanentError):
                raise failure from error
        now = self._monotonic()
        if now < self._retry_at:
            return
        self._retry_at, self._pause = now + self._pause, min(2 * self._pause, MAX_PAUSE_SECONDS)
        logger.warning("%s: opening the stream again: %s", self._subscription, self._failure)
        try:
            if missing and self._recreate is not None:
                self._recreate()
        except TemporaryError as again:
            self._failure = str(again)
            return
        self._reopened()
        self._future = self._open()

    def connected_at(self) -> float | None:
        """Since when, on the monotonic clock, the stream has stood; None where it does not."""
        with self._lock:
            stands = self._call is not None and self._state is ChannelConnectivity.READY and not self._future.done()
            return self._call_at if stands else None

    def problem(self) -> str | None:
        """Why no message can come; None where one could."""
        if self._future.done():
            return f"{self._subscription}: stream ended: {self._future.exception(timeout=0) or self._failure}"
        now, connected_at = self._monotonic(), self.connected_at()
        with self._lock:
            if connected_at is not None and now - connected_at >= STEADY_SECONDS:
                self._failing_since, self._pause = None, FIRST_PAUSE_SECONDS
            if self._failing_since is None or now - self._failing_since < GRACE_SECONDS:
                return None
            if self._state is not ChannelConnectivity.READY:
                return f"{self._subscription}: Pub/Sub cannot be reached ({self._state.name.lower()})"
            return f"{self._subscription}: stream broken: {self._failure}"

    def close(self) -> None:
        """Ends the stream; what was received stays leased until it is given back or its lease runs out."""
        self._client.transport.grpc_channel.unsubscribe(self._note_state)
        self._future.cancel()
        try:
            self._future.result(timeout=_CLOSE_SECONDS)
        except Exception as error:
            logger.debug("%s: stream ended with %s", self._subscription, first_line(error))

    def _open(self) -> Any:
        return self._client.subscribe(
            self._subscription, self._note_message, flow_control=self._flow_control, scheduler=_AtOnce()
        )

    def _note_state(self, state: ChannelConnectivity) -> None:
        with self._lock:
            self._state = state
            if state is not ChannelConnectivity.READY and self._failing_since is None:
                self._failing_since = self._monotonic()

    def _note_call(self, call: Any) -> None:
        with self._lock:
            self._call, self._call_at = call, self._monotonic()
        if not call.add_callback(lambda: self._note_end(call)):
            self._note_end(call)

    def _note_end(self, call: Any) -> None:
        with self._lock:
            if call is self._call:
                self._call, self._failure = None, f"{call.code().name.lower()}: {call.details()}"
                if self._failing_since is None:
                    self._failing_since = self._monotonic()

    def _note_message(self, message: Any) -> None:
        self._failing_since = None
        self._receive(message)


def flow_control(*, max_messages: int, max_bytes: int, lease_seconds: float) -> Any:
    """At most so much in hand, received and not acknowledged; leases of this length, prolonged while in hand."""
    lease = math.ceil(lease_seconds)  # of a fraction the library makes no request, again and again, and says nothing
    return pubsub_v1.types.FlowControl(
        max_messages=max_messages,
        max_bytes=max_bytes,
        min_duration_per_lease_extension=lease,
        max_duration_per_lease_extension=lease,
    )


class _AtOnce(Scheduler):  # type: ignore[misc]  # the library has no types
    """Calls back in the library's receiving thread: putting a message into a queue needs no pool of ten."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()

    @property
    def queue(self) -> queue.Queue[Any]:
        """Where the library takes requests about messages from."""
        return self._queue

    def schedule(self, callback: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Calls back."""
        callback(*args, **kwargs)

    def shutdown(self, await_msg_callbacks: bool = False) -> list[Any]:
        """Leaves nothing behind."""
        return []
