"""Calls to Triton by gRPC: bounded in number and in time, spread over replicas, and never cancelled.

Triton before 2.68 (26.04) can crash when a gRPC call is cancelled or its deadline expires on the wire: 2.51, which runs
on a laptop, died in 7 of 7 loads with short deadlines (upstream fixes 7840, 8078, 8220, 8708). So a call that its
caller has given up goes on until it ends: on the wire it has `WIRE_SECONDS`, which ends calls to a machine that is
gone. It leaves the count of its caller's slots, but a connection carries at most `CALLS_PER_SLOT` times as many calls
as slots: a server that does not answer is not asked for ever.

A call goes to the replica with the fewest calls on the wire. One that meets a replica that refuses its connection, or
that stalls, is asked again on another one, or on a new connection: scoring changes nothing. What a replica is, and when
it is stalled, is `replicas`' matter.
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
    Asked,
    Connection,
    Replica,
    host_and_port,
    listed_addresses,
    resolve,
)

logger = logging.getLogger(__name__)

WIRE_SECONDS = 300.0
"""The deadline that the server sees, where the caller's is not longer still."""
RESOLVE_SECONDS = 5.0
"""How old the addresses of a name may be before it is looked up again, beside the calls."""
_LOOK_SECONDS = 0.25
"""How often a caller without a slot looks whether a stalled connection was replaced."""

CHANNEL_OPTIONS = [
    *GRPC_OPTIONS,
    # gRPC's default waits up to two minutes before it tries a restarted server again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Ends the calls on a connection to a machine that is gone. Not more often: Triton counts pings without data as
    # abuse. A stalled connection is replaced long before.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Else a new channel to an address would share the half-open connection of the one that it replaces.
    ("grpc.use_local_subchannel_pool", 1),
]


class GrpcTransport:
    """Calls to one server, or to all replicas behind one name; use in one event loop."""

    def __init__(
        self,
        server: str,
        *,
        max_in_flight: int,
        access: ServerAccess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares the connections, which are made at the first calls.

        `server` is host:port, or `dns:///name:port`; both stand for all addresses that a name has. `max_in_flight` are
        the calls, of each address, whose callers wait.

        Raises:
            ContractError: a file of `access` cannot be read.
        """
        access = access or ServerAccess()
        self.server = server
        self._credentials, self._token = access.credentials(), Token(access.token_file, clock)
        self._max_in_flight, self._clock = max_in_flight, clock
        self._replicas: dict[str, Replica] = {}
        self._retired: dict[Connection, asyncio.Task[None]] = {}
        """Connections that get no new calls, until the last of theirs has ended."""
        self._resolving: asyncio.Task[None] | None = None
        self._resolved_at = clock()
        self._problem: OSError | None = None
        """Why the name could not be resolved the last time."""
        self._line = asyncio.Lock()
        """Held by the first caller that waits for a slot; the others wait for it, in order."""
        self._freed = asyncio.Event()
        self._turn = 0

    @property
    def num_slots(self) -> int:
        """Calls whose callers may wait at once."""
        return self._max_in_flight * max(len(self._replicas), 1)

    @property
    def num_calls(self) -> int:
        """Calls on the wire."""
        connections = [*(each.connection for each in self._replicas.values()), *self._retired]
        return sum(len(each.calls) for each in connections)

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
        wire_seconds = max(WIRE_SECONDS, deadline_seconds)

        def asked(triton: InferenceServerClient) -> Awaitable[Any]:
            reply: Awaitable[Any] = triton.infer(
                model, inputs, outputs=outputs, client_timeout=wire_seconds, headers=self._token.headers()
            )
            return reply

        return await self._call(asked, model, seconds=seconds, deadline_seconds=deadline_seconds)

    async def config(self, model: str, *, seconds: float, deadline_seconds: float) -> Any:
        """The model's configuration as it is loaded; else as `infer`."""
        wire_seconds = max(WIRE_SECONDS, deadline_seconds)

        def asked(triton: InferenceServerClient) -> Awaitable[Any]:
            reply: Awaitable[Any] = triton.get_model_config(
                model, client_timeout=wire_seconds, headers=self._token.headers()
            )
            return reply

        return (await self._call(asked, model, seconds=seconds, deadline_seconds=deadline_seconds)).config

    async def _call(self, asked: Asked, model: str, *, seconds: float, deadline_seconds: float) -> Any:
        """What `asked` answers."""
        end = self._clock() + seconds
        await self._find_addresses(end)
        copies = _Copies(self, asked)
        try:
            copies.send(await self._take_slot(asked, end, deadline_seconds))
            return await copies.first_answer(end)
        except asyncio.TimeoutError:
            raise DeadlineExpired(f"server {self.server} did not answer within {deadline_seconds:g} s") from None
        except InferenceServerException as error:
            raise translated(error, server=self.server, model=model, deadline_seconds=deadline_seconds) from error
        finally:
            copies.give_up()

    async def close(self, seconds: float) -> None:
        """Closes the connections, when the calls on them have ended or after `seconds`."""
        if self._resolving is not None:
            self._resolving.cancel()
        self._keep_addresses(())
        if self._retired:
            await asyncio.wait(set(self._retired.values()), timeout=seconds)
        if left := self.num_calls:
            logger.warning("closing on server %s with %d calls unanswered", self.server, left)
        for connection, closing in list(self._retired.items()):
            closing.cancel()
            await connection.triton.close()
        self._retired.clear()

    # -- addresses

    async def _find_addresses(self, end: float) -> None:
        """Makes sure that there is an address; looks the name up again, beside the calls, where it was long ago.

        Raises:
            ServerUnavailable: The name has no address.
        """
        if self._replicas and self._clock() - self._resolved_at < RESOLVE_SECONDS:
            return
        if self._resolving is None or self._resolving.done():
            self._resolving = asyncio.ensure_future(self._resolve())
        if not self._replicas:
            await asyncio.wait({self._resolving}, timeout=end - self._clock())
        if not self._replicas:
            raise ServerUnavailable(
                f"server {self.server} is unavailable: {self._problem or 'its name is not resolved'}"
            )

    async def _resolve(self) -> None:
        try:
            self._keep_addresses(listed_addresses(self.server) or await resolve(self.server))
        except OSError as error:
            # The addresses of before may still be right.
            self._problem = error
        self._resolved_at = self._clock()

    def _keep_addresses(self, addresses: Sequence[str]) -> None:
        before = self._replicas
        self._replicas = {each: before.get(each) or Replica(each, self._connect, self._clock) for each in addresses}
        for address, replica in before.items():
            if address not in self._replicas:
                self._retire(replica.connection)

    def _connect(self, address: str) -> InferenceServerClient:
        options: list[tuple[str, Any]] = list(CHANNEL_OPTIONS)
        if listed_addresses(self.server) is None:
            # The channel goes to an address; gateways and certificates know the name.
            host, port = host_and_port(self.server)
            options += [("grpc.default_authority", f"{host}:{port}"), ("grpc.ssl_target_name_override", host)]
        return InferenceServerClient(address, creds=self._credentials, channel_args=options)

    def _retire(self, connection: Connection) -> None:
        closing = asyncio.ensure_future(connection.close())
        self._retired[connection] = closing
        closing.add_done_callback(lambda _: self._retired.pop(connection, None))

    # -- slots

    async def _take_slot(self, asked: Asked, end: float, deadline_seconds: float) -> Replica:
        """A replica with a free slot."""
        if not self._line.locked() and (free := self.pick(asked)) is not None:
            return free
        full = Overloaded(
            f"server {self.server} has {self.num_calls} requests to answer and ended none within {deadline_seconds:g} s"
        )
        try:
            await asyncio.wait_for(self._line.acquire(), end - self._clock())
        except asyncio.TimeoutError:
            raise full from None
        try:
            while (free := self.pick(asked)) is None:
                if (left := end - self._clock()) <= 0:
                    raise full
                self._freed.clear()
                try:
                    await asyncio.wait_for(self._freed.wait(), min(left, _LOOK_SECONDS))
                except asyncio.TimeoutError:
                    continue
            return free
        finally:
            self._line.release()

    def pick(self, asked: Asked, *, avoid: Container[str] = ()) -> Replica | None:
        """The replica with the fewest calls among those that answer, else among all; None = none has a free slot.

        One that is out and due gets a copy of this call.
        """
        self._replace_stalled()
        here = [each for each in self._replicas.values() if each.address not in avoid]
        answering = [each for each in here if not each.is_out]
        for replica in self._replicas.values() if answering else ():
            if replica.is_to_be_tried():
                self.start(replica, asked)
        self._turn += 1
        in_turn = sorted(answering or here, key=lambda each: len(each.connection.calls))
        fewest = [each for each in in_turn if len(each.connection.calls) == len(in_turn[0].connection.calls)]
        in_turn = [fewest[self._turn % len(fewest)], *in_turn] if fewest else []
        return next((each for each in in_turn if self._has_slot(each.connection)), None)

    def _has_slot(self, connection: Connection) -> bool:
        most = self._max_in_flight
        return connection.waited_for < most and len(connection.calls) < CALLS_PER_SLOT * most

    def _replace_stalled(self) -> None:
        for replica in self._replicas.values():
            if replica.seconds_to_stall() <= 0:
                self._retire(replica.replace_connection())

    def start(self, replica: Replica, asked: Asked) -> asyncio.Future[Any]:
        """Sends a call to the replica, which is judged by how it ends."""
        connection = replica.connection
        call = connection.start(asked)
        call.add_done_callback(partial(self._note_end, replica, connection))
        return call

    def free_slot(self, connection: Connection) -> None:
        """Gives back what a caller took."""
        connection.waited_for -= 1
        self._freed.set()

    def _note_end(self, replica: Replica, connection: Connection, call: asyncio.Future[Any]) -> None:
        self._freed.set()
        if call.cancelled():
            return
        # Asked for also because the caller may be gone: asyncio would log it as never retrieved.
        if (error := call.exception()) is not None:
            logger.debug("call to server %s ended with: %s", replica.address, error)
        if connection is not replica.connection:
            return
        if is_down(error):
            replica.note_down()
        elif _status(error) not in ("DEADLINE_EXCEEDED", "CANCELLED"):
            replica.note_answer()


class _Copies:
    """The copies of one caller's call: one, or another where the first meets a replica that is down or stalled."""

    def __init__(self, transport: GrpcTransport, asked: Asked) -> None:
        self._transport, self._asked = transport, asked
        self._waited_for: dict[asyncio.Future[Any], tuple[Replica, Connection]] = {}
        self._down: set[str] = set()
        """Addresses that refused the call."""
        self._is_repeated = False

    def send(self, replica: Replica) -> None:
        """Sends a copy to a replica with a free slot."""
        replica.connection.waited_for += 1
        self._waited_for[self._transport.start(replica, self._asked)] = replica, replica.connection

    async def first_answer(self, end: float) -> Any:
        """The first answer.

        Raises:
            InferenceServerException: The last error, where there is no answer.
            TimeoutError: Nothing came by the time `end`.
        """
        clock = self._transport._clock
        while True:
            timeout = max(min(end - clock(), self._seconds_to_look()), 0.0)
            # asyncio.wait leaves the calls alone at the timeout, and when the caller is cancelled.
            done, _ = await asyncio.wait(self._waited_for, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for call in done:
                replica = self._drop(call)
                try:
                    return call.result()
                except InferenceServerException as error:
                    if is_down(error):
                        self._down.add(replica.address)
                        self._send_elsewhere()
                    if not self._waited_for:
                        raise
            if not done and clock() >= end:
                raise asyncio.TimeoutError
            if not done and not self._is_repeated:
                self._is_repeated = self._send_elsewhere()

    def _seconds_to_look(self) -> float:
        """When a copy may have stalled."""
        here = [replica for replica, connection in self._waited_for.values() if connection is replica.connection]
        if len(here) < len(self._waited_for) and not self._is_repeated:
            return _LOOK_SECONDS  # for a slot on another connection
        return min((each.seconds_to_stall() for each in here), default=float("inf"))

    def _send_elsewhere(self) -> bool:
        """Sends another copy where there is a free slot on a connection that has none."""
        replica = self._transport.pick(self._asked, avoid=self._down)
        if replica is None or any(replica.connection is each for _, each in self._waited_for.values()):
            return False
        self.send(replica)
        return True

    def _drop(self, call: asyncio.Future[Any]) -> Replica:
        replica, connection = self._waited_for.pop(call)
        self._transport.free_slot(connection)
        return replica

    def give_up(self) -> None:
        """Leaves what is still on the wire to end by itself."""
        for call in list(self._waited_for):
            self._drop(call)


def is_down(error: BaseException | None) -> bool:
    """Whether an error says that nobody answers at an address, rather than that a server has too much to do."""
    return _status(error) == "UNAVAILABLE" and not any(text in str(error) for text in QUEUE_REFUSALS)


def _status(error: BaseException | None) -> str:
    """The gRPC status of an error of tritonclient's; empty of anything else."""
    status = error.status() if isinstance(error, InferenceServerException) else None
    return str(status or "").rpartition(".")[2]
