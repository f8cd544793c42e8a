"""One gRPC connection to Triton: calls bounded in number and in time, and never cancelled where that would crash it.

Triton before 2.68 (26.04) can crash when a gRPC call is cancelled or its deadline expires on the wire: 2.51, which runs
on a laptop, died in 7 of 7 loads with short deadlines (upstream fixes 7840, 8078, 8220, 8708). So the server is asked
for its version once. From 2.68 on, a call carries the caller's deadline and ends with its caller. Older servers get
`WIRE_SECONDS`, which ends calls to a machine that is gone; the caller still gets `DeadlineExpired` in time, while its
call goes on and keeps its slot until it ends. This is the back-pressure: a server that does not answer is not asked
more than `max_in_flight` times.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Coroutine
from typing import Any, TypeVar

from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from components.contracts.serving import GRPC_OPTIONS
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from inference_client.errors import DeadlineExpired, Overloaded, ServerBusy, ServerUnavailable, translated

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_SAFE_VERSION = (2, 68)
"""Triton 26.04: cancelled and expired calls end in order."""
WIRE_SECONDS = 300.0
"""The deadline that an older server sees, where the caller's is not longer still."""

CHANNEL_OPTIONS = [
    *GRPC_OPTIONS,
    # Requests go to every address of a name in turn: a headless Service names its pods, and one connection would keep
    # to one of them. With one address it changes nothing.
    ("grpc.lb_policy_name", "round_robin"),
    # A name is resolved again when a connection ends (tritonserver's --grpc-max-connection-age makes that happen, so
    # that new replicas are met); the default would not do so twice in 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # gRPC's default waits up to two minutes before it tries a restarted server again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class GrpcTransport:
    """Calls to one server, or to all replicas behind one name; use in one event loop."""

    def __init__(self, server: str, *, max_in_flight: int, safe_to_cancel: bool | None = None) -> None:
        """Prepares the connection, which is made at the first call.

        Args:
            server: host:port, or `dns:///name:port` for all addresses that a name has.
            max_in_flight: Calls on the wire at once, those included whose callers have given up.
            safe_to_cancel: Whether calls may be cancelled there; None = the server is asked for its version (one
                replica answers for all, so old replicas among new ones need False).
        """
        self.server = server
        self._triton = InferenceServerClient(server, channel_args=CHANNEL_OPTIONS)
        self._max_in_flight = max_in_flight
        self._slots = asyncio.Semaphore(max_in_flight)
        self._configured, self._safe_to_cancel = safe_to_cancel, safe_to_cancel
        self._asking: asyncio.Task[bool] | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        """Calls that go on when their callers give up; each holds a slot."""

    @property
    def in_flight(self) -> int:
        """Calls on the wire that nobody cancels; the callers of some may have given up."""
        return len(self._calls)

    async def infer(
        self, model: str, inputs: list[Any], outputs: list[Any], *, seconds: float, deadline_seconds: float
    ) -> Any:
        """Triton's reply.

        Args:
            model: Triton's name of the model.
            inputs: Input tensors.
            outputs: Requested output tensors.
            seconds: How long the caller waits.
            deadline_seconds: The deadline that an error names, of which `seconds` may be the rest.

        Raises:
            DeadlineExpired: no reply within `seconds`.
            Overloaded: not even a free slot within `seconds`; nothing was sent.
            Others: see `errors`.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        await self._take_slot(seconds, deadline_seconds)
        try:
            safe = await self._is_safe_to_cancel(end - clock(), deadline_seconds)
        except BaseException:
            self._slots.release()
            raise
        wire = end - clock() if safe else max(WIRE_SECONDS, deadline_seconds)
        call = self._infer(model, inputs, outputs, wire_seconds=wire, deadline_seconds=deadline_seconds)
        if not safe:
            task = self._track(call)
            task.add_done_callback(lambda _: self._slots.release())
            return await self._outlived(task, end - clock(), deadline_seconds)
        try:
            return await call
        finally:
            self._slots.release()

    async def close(self, seconds: float) -> None:
        """Closes the connection, when the calls in flight have ended or after `seconds`."""
        if self._calls:
            _, pending = await asyncio.wait(set(self._calls), timeout=seconds)
            if pending:
                logger.warning("closing on server %s with %d calls unanswered", self.server, len(pending))
        await self._triton.close()

    async def _take_slot(self, seconds: float, deadline_seconds: float) -> None:
        if not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            await asyncio.wait_for(self._slots.acquire(), seconds)
        except asyncio.TimeoutError:
            raise Overloaded(
                f"server {self.server} has {self._max_in_flight} requests to answer and ended none within "
                f"{deadline_seconds:g} s"
            ) from None

    async def _infer(
        self, model: str, inputs: list[Any], outputs: list[Any], *, wire_seconds: float, deadline_seconds: float
    ) -> Any:
        call = self._triton.infer(model, inputs, outputs=outputs, client_timeout=wire_seconds)
        try:
            return await self._translated(call, model, deadline_seconds)
        except ServerBusy:
            raise
        except ServerUnavailable:
            # The next answer may come from another server.
            self._safe_to_cancel = self._configured
            raise

    async def _translated(self, call: Coroutine[Any, Any, T], model: str, deadline_seconds: float) -> T:
        try:
            return await call
        except InferenceServerException as error:
            raise translated(error, server=self.server, model=model, deadline_seconds=deadline_seconds) from error

    async def _outlived(self, task: asyncio.Task[T], seconds: float, deadline_seconds: float) -> T:
        """The task's result within `seconds`; the task itself goes on whatever becomes of its caller."""
        # asyncio.wait leaves the task alone at the timeout, and when the caller is cancelled.
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise DeadlineExpired(f"server {self.server} did not answer within {deadline_seconds:g} s")
        return task.result()

    def _track(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        # Asking for the exception tells asyncio that it is not lost: its caller may be gone.
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("call to server %s ended with: %s", self.server, error)

    async def _is_safe_to_cancel(self, seconds: float, deadline_seconds: float) -> bool:
        if self._safe_to_cancel is None:
            if self._asking is None or self._asking.done():
                self._asking = self._track(self._ask_version(deadline_seconds))
            self._safe_to_cancel = await self._outlived(self._asking, seconds, deadline_seconds)
        return self._safe_to_cancel

    async def _ask_version(self, deadline_seconds: float) -> bool:
        call = self._triton.get_server_metadata(client_timeout=WIRE_SECONDS)
        try:
            answer = await self._translated(call, "", deadline_seconds)
        except (DeadlineExpired, ServerUnavailable):
            raise
        except (TemporaryError, PermanentError, ContractError) as error:
            # A server that answers but hides its version is treated as an old one.
            logger.debug("server %s does not state its version: %s", self.server, error)
            return False
        return is_safe_version(answer.version)


def is_safe_version(version: str) -> bool:
    """Whether a Triton of this version survives cancelled calls; False for text that is no version.

    >>> [is_safe_version(version) for version in ("2.51.0", "2.67.9", "2.68.0", "3.0.0", "unknown")]
    [False, False, True, True, False]
    """
    parts = re.match(r"(\d+)\.(\d+)", version)
    return parts is not None and (int(parts[1]), int(parts[2])) >= FIRST_SAFE_VERSION
