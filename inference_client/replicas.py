"""The replicas behind a server's name: their addresses, one connection to each, and which of them answer.

A replica that is silent, although calls wait for it, is stalled: it hangs, or its connection is half open and leads
nowhere. It gets a new connection, and no request of a caller while another replica answers. From time to time it gets a
copy of one, for whose answer nobody waits; with the first answer it is back. Which call goes where is left to
`transport`.
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

STALL_SECONDS, MAX_STALL_SECONDS = 2.0, 30.0
"""A connection on which calls wait and nothing came for so long is stalled: the first, doubled with each stall in a row
up to the second, and never less than three times the slowest of its latest answers."""
DOWN_SECONDS = 1.0
"""How long a replica that refused its connection gets no request of a caller, where another replica is there."""
CALLS_PER_SLOT = 4
"""Calls on one connection for each of its slots, those included whose callers have given up."""
_LISTED = re.compile(r"(ipv4|ipv6):(.+)")

Asked = Callable[[InferenceServerClient], Awaitable[Any]]


class Connection:
    """One gRPC connection and the calls on it, none of which is ever cancelled."""

    def __init__(self, triton: InferenceServerClient, clock: Callable[[], float]) -> None:
        self.triton, self._clock = triton, clock
        self.calls: dict[asyncio.Future[Any], float] = {}
        """On the wire, oldest first, with the time at which each began."""
        self.waited_for = 0
        """Calls whose callers wait."""
        self.slowest = 0.0
        """Seconds of the slowest of the latest answers; an older one counts for less."""
        self._last_end = clock()

    def start(self, asked: Asked) -> asyncio.Future[Any]:
        """Send a call."""
        call = asyncio.ensure_future(asked(self.triton))
        self.calls[call] = self._clock()
        call.add_done_callback(self._end)
        return call

    def _end(self, call: asyncio.Future[Any]) -> None:
        self._last_end = self._clock()
        self.slowest = max(self._last_end - self.calls.pop(call), 0.9 * self.slowest)

    def silent_seconds(self) -> float:
        """Return for how long calls have waited and none has ended."""
        if not self.calls:
            return 0.0
        return self._clock() - max(next(iter(self.calls.values())), self._last_end)

    async def close(self) -> None:
        """Close the connection, once its calls have ended."""
        while self.calls:
            await asyncio.wait(set(self.calls))
        await self.triton.close()


class Replica:
    """One address."""

    def __init__(
        self, address: str, connect: Callable[[str], InferenceServerClient], clock: Callable[[], float]
    ) -> None:
        """Prepare the connection, which is made at the first call."""
        self.address = address
        self._connect, self._clock = connect, clock
        self.connection = Connection(connect(address), clock)
        self.is_out = False
        """Whether callers' requests go to others, if there are others."""
        self._out_until = 0.0
        self._stalls = 0
        """In a row."""

    def seconds_to_stall(self) -> float:
        """Return how long the connection may stay silent from now on; below 0 = it is stalled."""
        allowed = min(STALL_SECONDS * 2.0**self._stalls, MAX_STALL_SECONDS)
        return max(allowed, 3 * self.connection.slowest) - self.connection.silent_seconds()

    def replace_connection(self) -> Connection:
        """Take a stalled replica out, with a new connection for what is sent to it next; return the old one."""
        stalled, self.connection = self.connection, Connection(self._connect(self.address), self._clock)
        logger.warning(
            "server %s answered none of %d calls for %.1f s; it gets a new connection, and requests go to others",
            self.address,
            len(stalled.calls),
            stalled.silent_seconds(),
        )
        self._take_out(min(DOWN_SECONDS * 2.0**self._stalls, MAX_STALL_SECONDS))
        self._stalls += 1
        return stalled

    def note_down(self) -> None:
        """Take out a replica that refuses its connection."""
        self._take_out(DOWN_SECONDS)

    def note_answer(self) -> None:
        """Take a replica back in that answers."""
        if self.is_out:
            logger.info("server %s answers again", self.address)
        self.is_out, self._stalls = False, 0

    def _take_out(self, seconds: float) -> None:
        self.is_out, self._out_until = True, self._clock() + seconds

    def is_to_be_tried(self) -> bool:
        """Return whether a replica that is out is due for the copy of a request."""
        return self.is_out and not self.connection.calls and self._clock() >= self._out_until


def listed_addresses(server: str) -> list[str] | None:
    """Return the addresses that a server's name lists itself, as gRPC writes them; None if DNS knows them.

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
    """Return the two parts of `host:port` or `dns:///host:port`.

    >>> host_and_port("dns:///triton:8001"), host_and_port("[::1]:80")
    (('triton', 8001), ('::1', 80))
    """
    host, _, port = server.removeprefix("dns:///").rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _address(host: str, port: int) -> str:
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


async def resolve(server: str) -> list[str]:
    """Return the addresses that DNS has for a server's name, each once.

    Raises:
        OSError: There are none.
    """
    host, port = host_and_port(server)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(_address(str(address[0]), port) for *_, address in found))
