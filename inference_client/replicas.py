"""Manage the replicas behind a server's name: their addresses, connections and states.

A replica is stalled if calls are waiting and nothing arrives, because the replica hangs or its
connection is half open. A stalled replica gets a new connection. While another replica answers,
requests of waiting callers do not go to the stalled replica. From time to time, the client sends a
copy of a request to the stalled replica. No caller waits for the answer to the copy. After an
answer, the replica is used again. The module `transport` distributes the calls.
"""

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from tritonclient.grpc.aio import InferenceServerClient

logger = logging.getLogger(__name__)

_STALL_SECONDS, _MAX_STALL_SECONDS = 2.0, 30.0
"""Seconds without any answer after which a connection with waiting calls is stalled. The limit
starts with `_STALL_SECONDS` and doubles after each consecutive stall up to `_MAX_STALL_SECONDS`.
The limit is at least three times the time of the slowest recent answer."""
_DOWN_SECONDS = 1.0
"""If a replica refuses its connection, callers' requests go to other replicas for this number of
seconds."""
CALLS_PER_SLOT = 4
"""Maximum number of calls on one connection, per slot. Calls whose callers stopped waiting are
included."""
_LISTED = re.compile(r"(ipv4|ipv6):(.+)")

SendCall = Callable[[InferenceServerClient], Awaitable[Any]]


class Connection:
    """One gRPC connection with its calls, which are never cancelled."""

    def __init__(self, triton: InferenceServerClient, clock: Callable[[], float]) -> None:
        self.triton, self._clock = triton, clock
        self.calls: dict[asyncio.Future[Any], float] = {}
        """Calls that were sent and not answered, with their start times, oldest first."""
        self.num_waiting = 0
        """Number of calls with a waiting caller."""
        self.slowest = 0.0
        """Duration of the slowest recent answer in seconds. After each faster answer, this duration
        decreases by at most 10 %."""
        self._last_end = clock()

    def start(self, send_call: SendCall) -> asyncio.Future[Any]:
        """Send a call."""
        call = asyncio.ensure_future(send_call(self.triton))
        self.calls[call] = self._clock()
        call.add_done_callback(self._end)
        return call

    def _end(self, call: asyncio.Future[Any]) -> None:
        self._last_end = self._clock()
        self.slowest = max(self._last_end - self.calls.pop(call), 0.9 * self.slowest)

    def silent_seconds(self) -> float:
        """Return the seconds since the waiting calls last got an answer, or 0 if no call waits."""
        if not self.calls:
            return 0.0
        return self._clock() - max(next(iter(self.calls.values())), self._last_end)

    async def close(self) -> None:
        """Close the connection after its calls have ended."""
        while self.calls:
            await asyncio.wait(set(self.calls))
        await self.triton.close()


class Replica:
    """Server replica at one address."""

    def __init__(
        self,
        address: str,
        connect: Callable[[str], InferenceServerClient],
        clock: Callable[[], float],
    ) -> None:
        """Prepare the connection, which is opened at the first call."""
        self.address = address
        self._connect, self._clock = connect, clock
        self.connection = Connection(connect(address), clock)
        self.is_out = False
        """Whether callers' requests go to other replicas. The flag has no effect if there is no
        other replica."""
        self._out_until = 0.0
        self._stalls = 0
        """Number of consecutive stalls."""

    def seconds_to_stall(self) -> float:
        """Return the number of seconds after which the connection counts as stalled.

        A result of 0 or less means that the connection is already stalled.
        """
        allowed = min(_STALL_SECONDS * 2.0**self._stalls, _MAX_STALL_SECONDS)
        return max(allowed, 3 * self.connection.slowest) - self.connection.silent_seconds()

    def replace_connection(self) -> Connection:
        """Replace the connection of a stalled replica, and return the old connection.

        Requests of callers go to other replicas until this replica answers again.
        """
        stalled, self.connection = (
            self.connection,
            Connection(self._connect(self.address), self._clock),
        )
        logger.warning(
            "server %s answered none of %d calls for %.1f s; reconnecting, and sending requests to "
            "other replicas",
            self.address,
            len(stalled.calls),
            stalled.silent_seconds(),
        )
        self._stop_using(min(_DOWN_SECONDS * 2.0**self._stalls, _MAX_STALL_SECONDS))
        self._stalls += 1
        return stalled

    def mark_down(self) -> None:
        """Stop using a replica that refuses its connection."""
        self._stop_using(_DOWN_SECONDS)

    def mark_answering(self) -> None:
        """Use a replica again, because it has answered."""
        if self.is_out:
            logger.info("server %s answers again", self.address)
        self.is_out, self._stalls = False, 0

    def _stop_using(self, seconds: float) -> None:
        self.is_out, self._out_until = True, self._clock() + seconds

    def is_due(self) -> bool:
        """Return whether it is time to test an unused replica with a copy of a request."""
        return self.is_out and not self.connection.calls and self._clock() >= self._out_until


def listed_addresses(server: str) -> list[str] | None:
    """Return the addresses in a server's name, formatted for gRPC.

    Returns None if the name needs DNS.

    >>> listed_addresses("127.0.0.1:8001"), listed_addresses("dns:///triton:8001")
    (['ipv4:127.0.0.1:8001'], None)
    """
    if match := _LISTED.fullmatch(server):
        return [f"{match[1]}:{each}" for each in match[2].split(",")]
    host, port = host_and_port(server)
    try:
        return [_address(str(ipaddress.ip_address(host)), port)]
    except ValueError:
        return None


def host_and_port(server: str) -> tuple[str, int]:
    """Split `host:port` or `dns:///host:port` into its two parts.

    >>> host_and_port("dns:///triton:8001"), host_and_port("[::1]:80")
    (('triton', 8001), ('::1', 80))
    """
    host, _, port = server.removeprefix("dns:///").rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _address(host: str, port: int) -> str:
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


async def resolve(server: str) -> list[str]:
    """Return the addresses of a server's name in DNS, without duplicates.

    Raises:
        OSError: the name has no address.
    """
    host, port = host_and_port(server)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(_address(str(address[0]), port) for *_, address in found))
