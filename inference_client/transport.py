"""Call Triton's replicas by gRPC. Calls are limited in number and time, and are never cancelled.

Triton before 2.68 (26.04) can crash when a gRPC call is cancelled or its deadline expires on the
wire. Version 2.51, which runs on a laptop, crashed in 7 of 7 load tests with short deadlines
(upstream fixes 7840, 8078, 8220, 8708). Calls are therefore never cancelled: if a caller stops
waiting, its call continues until it ends. Each call has the deadline `_WIRE_SECONDS` on the wire.
The deadline ends calls to machines that are gone. An abandoned call frees its caller's slot, but a
connection carries at most `CALLS_PER_SLOT` calls per slot. The limit protects a server that does
not answer.

A call goes to the replica with the fewest calls on the wire. If a replica refuses the connection or
stalls, the call is repeated on another replica or connection. Repeating a call is safe, because
scoring has no side effects. The module `replicas` defines when a replica is stalled.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from functools import partial
from typing import Any

from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from evergreen.contracts.serving import GRPC_OPTIONS, QUEUE_REFUSALS
from inference_client.access import ServerAccess, Token
from inference_client.errors import DeadlineExpired, Overloaded, ServerUnavailable, translated
from inference_client.replicas import (
    CALLS_PER_SLOT,
    Connection,
    Replica,
    SendCall,
    host_and_port,
    listed_addresses,
    resolve,
)

logger = logging.getLogger(__name__)

_WIRE_SECONDS = 300.0
"""Deadline in seconds that the server gets with a call, unless the caller's deadline is longer."""
_RESOLVE_SECONDS = 5.0
"""Seconds after which a name is resolved again. Calls continue meanwhile."""
_CHECK_SECONDS = 0.25
"""Interval in seconds at which a waiting caller checks whether a connection was replaced."""

_CHANNEL_OPTIONS = [
    *GRPC_OPTIONS,
    # By default, gRPC waits up to two minutes before it reconnects to a restarted server.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # If the machine of a connection is gone, a ping without a reply ends the connection's calls. A
    # shorter interval is not possible, because Triton treats frequent pings without data as abuse.
    # The client itself replaces a stalled connection much earlier.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Without this option, a new channel would reuse the half-open connection of the old channel.
    ("grpc.use_local_subchannel_pool", 1),
]


class GrpcTransport:
    """Calls to one server, or to all replicas behind one name.

    Use an object in one event loop only.
    """

    def __init__(
        self,
        server: str,
        *,
        max_in_flight: int,
        access: ServerAccess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the connections, which open at the first calls.

        Args:
            server: host:port or `dns:///name:port`. A name with `dns:///` means all addresses of
                the name.
            max_in_flight: Maximum number of calls per address whose callers are waiting.
            access: TLS and token options.
            clock: Monotonic clock in seconds.

        Raises:
            ContractError: a file of `access` cannot be read.
        """
        access = access or ServerAccess()
        self.server = server
        self._credentials, self._token = access.credentials(), Token(access.token_file, clock)
        self._max_in_flight, self._clock = max_in_flight, clock
        self._replicas: dict[str, Replica] = {}
        self._retired: dict[Connection, asyncio.Task[None]] = {}
        """Connections that get no new calls. Each connection closes when its last call ends."""
        self._resolving: asyncio.Task[None] | None = None
        self._resolved_at = clock()
        self._problem: OSError | None = None
        """Error of the last name resolution, if it failed."""
        self._line = asyncio.Lock()
        """Lock that orders the waiting callers. The first caller holds the lock while it waits for
        a slot. All other callers wait for the lock, in order."""
        self._freed = asyncio.Event()
        self._turn = 0

    @property
    def num_slots(self) -> int:
        """Maximum number of calls whose callers are waiting, summed over all replicas."""
        return self._max_in_flight * max(len(self._replicas), 1)

    @property
    def num_calls(self) -> int:
        """Number of calls that were sent and not answered."""
        connections = [*(each.connection for each in self._replicas.values()), *self._retired]
        return sum(len(each.calls) for each in connections)

    async def infer(
        self,
        model: str,
        inputs: list[Any],
        outputs: list[Any],
        *,
        seconds: float,
        deadline_seconds: float,
    ) -> Any:
        """Call the model, and return Triton's reply.

        Args:
            model: Name of the model.
            inputs: Input tensors.
            outputs: Requested outputs.
            seconds: Time that the caller waits. The caller may already have used a part of
                `deadline_seconds`.
            deadline_seconds: Total deadline, for error messages.

        Raises:
            DeadlineExpired: no reply arrived within `seconds`.
            Overloaded: no slot was free within `seconds`. Nothing was sent.
            Others: see `errors`.
        """
        wire_seconds = max(_WIRE_SECONDS, deadline_seconds)

        def send_call(triton: InferenceServerClient) -> Awaitable[Any]:
            reply: Awaitable[Any] = triton.infer(
                model,
                inputs,
                outputs=outputs,
                client_timeout=wire_seconds,
                headers=self._token.headers(),
            )
            return reply

        return await self._call(
            send_call, model, seconds=seconds, deadline_seconds=deadline_seconds
        )

    async def config(self, model: str, *, seconds: float, deadline_seconds: float) -> Any:
        """Return the loaded model's configuration.

        Arguments and errors are the same as for `infer`.
        """
        wire_seconds = max(_WIRE_SECONDS, deadline_seconds)

        def send_call(triton: InferenceServerClient) -> Awaitable[Any]:
            reply: Awaitable[Any] = triton.get_model_config(
                model, client_timeout=wire_seconds, headers=self._token.headers()
            )
            return reply

        return (
            await self._call(send_call, model, seconds=seconds, deadline_seconds=deadline_seconds)
        ).config

    async def _call(
        self, send_call: SendCall, model: str, *, seconds: float, deadline_seconds: float
    ) -> Any:
        """Send a call when a slot is free, and return the first answer.

        Copies of the call may go to other replicas (`_Copies`).
        """
        end = self._clock() + seconds
        await self._find_addresses(end)
        copies = _Copies(self, send_call)
        try:
            copies.send(await self._take_slot(send_call, end, deadline_seconds))
            return await copies.first_answer(end)
        except asyncio.TimeoutError:
            raise DeadlineExpired(
                f"server {self.server} did not answer within {deadline_seconds:g} s"
            ) from None
        except InferenceServerException as error:
            raise translated(
                error, server=self.server, model=model, deadline_seconds=deadline_seconds
            ) from error
        finally:
            copies.give_up()

    async def close(self, seconds: float) -> None:
        """Close the connections when their calls have ended, or after `seconds`."""
        if self._resolving is not None:
            self._resolving.cancel()
        self._set_addresses(())
        if self._retired:
            await asyncio.wait(set(self._retired.values()), timeout=seconds)
        if left := self.num_calls:
            logger.warning(
                "closing the connections to server %s with %d unanswered calls", self.server, left
            )
        for connection, closing in list(self._retired.items()):
            closing.cancel()
            await connection.triton.close()
        self._retired.clear()

    # Addresses

    async def _find_addresses(self, end: float) -> None:
        """Wait until at least one address is known, and resolve the name again after some time.

        Raises:
            ServerUnavailable: the name has no address.
        """
        if self._replicas and self._clock() - self._resolved_at < _RESOLVE_SECONDS:
            return
        if self._resolving is None or self._resolving.done():
            self._resolving = asyncio.ensure_future(self._resolve())
        if not self._replicas:
            await asyncio.wait({self._resolving}, timeout=end - self._clock())
        if not self._replicas:
            raise ServerUnavailable(
                f"server {self.server} is unavailable: "
                f"{self._problem or 'its name is not resolved'}"
            )

    async def _resolve(self) -> None:
        try:
            self._set_addresses(listed_addresses(self.server) or await resolve(self.server))
        except OSError as error:
            # The addresses that are already known may still be right.
            self._problem = error
        self._resolved_at = self._clock()

    def _set_addresses(self, addresses: Sequence[str]) -> None:
        before = self._replicas
        self._replicas = {
            each: before.get(each) or Replica(each, self._connect, self._clock)
            for each in addresses
        }
        for address, replica in before.items():
            if address not in self._replicas:
                self._retire(replica.connection)

    def _connect(self, address: str) -> InferenceServerClient:
        options: list[tuple[str, Any]] = list(_CHANNEL_OPTIONS)
        if listed_addresses(self.server) is None:
            # The channel connects to an IP address, but gateways and certificates need the name.
            host, port = host_and_port(self.server)
            options += [
                ("grpc.default_authority", f"{host}:{port}"),
                ("grpc.ssl_target_name_override", host),
            ]
        return InferenceServerClient(address, creds=self._credentials, channel_args=options)

    def _retire(self, connection: Connection) -> None:
        closing = asyncio.ensure_future(connection.close())
        self._retired[connection] = closing
        closing.add_done_callback(lambda _: self._retired.pop(connection, None))

    # Slots

    async def _take_slot(self, send_call: SendCall, end: float, deadline_seconds: float) -> Replica:
        """Wait until a replica has a free slot, and return this replica."""
        if not self._line.locked() and (free := self.pick(send_call)) is not None:
            return free
        full = Overloaded(
            f"server {self.server} has {self.num_calls} unanswered requests and freed no slot "
            f"within {deadline_seconds:g} s"
        )
        try:
            await asyncio.wait_for(self._line.acquire(), end - self._clock())
        except asyncio.TimeoutError:
            raise full from None
        try:
            while (free := self.pick(send_call)) is None:
                if (left := end - self._clock()) <= 0:
                    raise full
                self._freed.clear()
                try:
                    await asyncio.wait_for(self._freed.wait(), min(left, _CHECK_SECONDS))
                except asyncio.TimeoutError:
                    continue
            return free
        finally:
            self._line.release()

    def pick(self, send_call: SendCall, *, avoid: Container[str] = ()) -> Replica | None:
        """Return the replica that has a free slot and the fewest calls, or None.

        A replica that answers is preferred to a replica that does not answer. If a failing replica
        is due for a new attempt, it gets a copy of this call.
        """
        self._replace_stalled()
        here = [each for each in self._replicas.values() if each.address not in avoid]
        answering = [each for each in here if not each.is_out]
        for replica in self._replicas.values() if answering else ():
            if replica.is_due():
                self.start(replica, send_call)
        self._turn += 1
        in_turn = sorted(answering or here, key=lambda each: len(each.connection.calls))
        fewest = [
            each
            for each in in_turn
            if len(each.connection.calls) == len(in_turn[0].connection.calls)
        ]
        in_turn = [fewest[self._turn % len(fewest)], *in_turn] if fewest else []
        return next((each for each in in_turn if self._has_slot(each.connection)), None)

    def _has_slot(self, connection: Connection) -> bool:
        most = self._max_in_flight
        return connection.num_waiting < most and len(connection.calls) < CALLS_PER_SLOT * most

    def _replace_stalled(self) -> None:
        for replica in self._replicas.values():
            if replica.seconds_to_stall() <= 0:
                self._retire(replica.replace_connection())

    def start(self, replica: Replica, send_call: SendCall) -> asyncio.Future[Any]:
        """Send a call to the replica, and update the replica's state when it ends."""
        connection = replica.connection
        call = connection.start(send_call)
        call.add_done_callback(partial(self._record_end, replica, connection))
        return call

    def free_slot(self, connection: Connection) -> None:
        """Release the slot that a caller has used."""
        connection.num_waiting -= 1
        self._freed.set()

    def _record_end(
        self, replica: Replica, connection: Connection, call: asyncio.Future[Any]
    ) -> None:
        self._freed.set()
        if call.cancelled():
            return
        # Retrieve the exception even if no caller waits for the call. Otherwise, asyncio would log
        # the exception.
        if (error := call.exception()) is not None:
            logger.debug("call to server %s ended with: %s", replica.address, error)
        if connection is not replica.connection:
            return
        if _is_down(error):
            replica.mark_down()
        elif _status(error) not in ("DEADLINE_EXCEEDED", "CANCELLED"):
            replica.mark_answering()


class _Copies:
    """All copies of one caller's call.

    A second copy is sent if a replica is down or stalled.
    """

    def __init__(self, transport: GrpcTransport, send_call: SendCall) -> None:
        self._transport, self._send_call = transport, send_call
        self._calls: dict[asyncio.Future[Any], tuple[Replica, Connection]] = {}
        self._down: set[str] = set()
        """Addresses of replicas that refused this call."""
        self._is_repeated = False

    def send(self, replica: Replica) -> None:
        """Send a copy to a replica with a free slot."""
        replica.connection.num_waiting += 1
        self._calls[self._transport.start(replica, self._send_call)] = replica, replica.connection

    async def first_answer(self, end: float) -> Any:
        """Return the first answer.

        Raises:
            InferenceServerException: every copy failed. The error of the last copy is raised.
            TimeoutError: no answer came before `end`.
        """
        clock = self._transport._clock
        while True:
            timeout = max(min(end - clock(), self._seconds_to_check()), 0.0)
            # asyncio.wait cancels no call, neither at the timeout nor if the caller is cancelled.
            done, _ = await asyncio.wait(
                self._calls, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            for call in done:
                replica = self._drop(call)
                try:
                    return call.result()
                except InferenceServerException as error:
                    if _is_down(error):
                        self._down.add(replica.address)
                        self._send_to_other_replica()
                    if not self._calls:
                        raise
            if not done and clock() >= end:
                raise asyncio.TimeoutError
            if not done and not self._is_repeated:
                self._is_repeated = self._send_to_other_replica()

    def _seconds_to_check(self) -> float:
        """Return the number of seconds after which to check for a stalled copy."""
        here = [
            replica
            for replica, connection in self._calls.values()
            if connection is replica.connection
        ]
        if len(here) < len(self._calls) and not self._is_repeated:
            return _CHECK_SECONDS  # check whether another connection has a free slot
        return min((each.seconds_to_stall() for each in here), default=float("inf"))

    def _send_to_other_replica(self) -> bool:
        """Send another copy of the call, if a connection without a copy has a free slot.

        Returns True if a copy was sent.
        """
        replica = self._transport.pick(self._send_call, avoid=self._down)
        if replica is None or any(replica.connection is each for _, each in self._calls.values()):
            return False
        self.send(replica)
        return True

    def _drop(self, call: asyncio.Future[Any]) -> Replica:
        replica, connection = self._calls.pop(call)
        self._transport.free_slot(connection)
        return replica

    def give_up(self) -> None:
        """Abandon all unanswered copies of the request. Abandoned calls end on their own."""
        for call in list(self._calls):
            self._drop(call)


def _is_down(error: BaseException | None) -> bool:
    """Return whether an error means that a server is unreachable, rather than overloaded."""
    return _status(error) == "UNAVAILABLE" and not any(
        text in str(error) for text in QUEUE_REFUSALS
    )


def _status(error: BaseException | None) -> str:
    """Return the gRPC status of a tritonclient error, or an empty text for other errors."""
    status = error.status() if isinstance(error, InferenceServerException) else None
    return str(status or "").rpartition(".")[2]
