"""One gRPC connection to Triton: calls bounded in number and in time, and never cancelled, which could crash it.

Triton before 2.68 (26.04) can crash when a gRPC call is cancelled or its deadline expires on the wire: 2.51, which runs
on a laptop, died in 7 of 7 loads with short deadlines (upstream fixes 7840, 8078, 8220, 8708). So a call that its
caller has given up goes on and keeps its slot until it ends: on the wire it has `WIRE_SECONDS`, which ends calls to a
machine that is gone. This is the back-pressure: a server that does not answer is not asked more than `max_in_flight`
times.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from components.contracts.serving import GRPC_OPTIONS
from inference_client.errors import DeadlineExpired, Overloaded, translated

logger = logging.getLogger(__name__)

WIRE_SECONDS = 300.0
"""The deadline that the server sees, where the caller's is not longer still."""

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

    def __init__(self, server: str, *, max_in_flight: int) -> None:
        """Prepares the connection, which is made at the first call.

        `server` is host:port, or `dns:///name:port` for all addresses that a name has. `max_in_flight` counts calls
        whose callers have given up too.
        """
        self.server = server
        self._triton = InferenceServerClient(server, channel_args=CHANNEL_OPTIONS)
        self._max_in_flight = max_in_flight
        self._slots = asyncio.Semaphore(max_in_flight)
        self._calls: set[asyncio.Task[Any]] = set()
        """Each holds a slot, also after its caller has given up."""

    async def infer(
        self, model: str, inputs: list[Any], outputs: list[Any], *, seconds: float, deadline_seconds: float
    ) -> Any:
        """Triton's reply.

        The caller waits for `seconds`, which may be the rest of the `deadline_seconds` that an error names.

        Raises:
            DeadlineExpired: no reply within `seconds`.
            Overloaded: not even a free slot within `seconds`; nothing was sent.
            Others: see `errors`.
        """
        return await self._call(
            lambda wire_seconds: self._triton.infer(model, inputs, outputs=outputs, client_timeout=wire_seconds),
            model,
            seconds=seconds,
            deadline_seconds=deadline_seconds,
        )

    async def config(self, model: str, *, seconds: float, deadline_seconds: float) -> Any:
        """The model's configuration as it is loaded; else as `infer`."""
        reply = await self._call(
            lambda wire_seconds: self._triton.get_model_config(model, client_timeout=wire_seconds),
            model,
            seconds=seconds,
            deadline_seconds=deadline_seconds,
        )
        return reply.config

    async def _call(
        self, asked: Callable[[float], Awaitable[Any]], model: str, *, seconds: float, deadline_seconds: float
    ) -> Any:
        """What `asked` answers, given its deadline on the wire."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        await self._take_slot(seconds, deadline_seconds)
        left = end - clock()
        call = asyncio.ensure_future(asked(max(WIRE_SECONDS, deadline_seconds)))
        self._calls.add(call)
        call.add_done_callback(self._release_slot)
        # asyncio.wait leaves the call alone at the timeout, and when the caller is cancelled.
        await asyncio.wait({call}, timeout=left)
        if not call.done():
            raise DeadlineExpired(f"server {self.server} did not answer within {deadline_seconds:g} s")
        try:
            return call.result()
        except InferenceServerException as error:
            raise translated(error, server=self.server, model=model, deadline_seconds=deadline_seconds) from error

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

    def _release_slot(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        self._slots.release()
        # Without this, asyncio would log the exception as never retrieved: the caller may be gone.
        if not call.cancelled() and (error := call.exception()) is not None:
            logger.debug("call to server %s ended with: %s", self.server, error)
