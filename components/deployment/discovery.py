"""Which servers a deployment must tell: a list of addresses, or every address that a name resolves to.

`dns:///triton-headless:8001` is a Kubernetes headless Service: one address per pod. It needs `publishNotReadyAddresses:
true`: a pod that read the old configuration while it started, and was listed only once it was ready, would be told of
nothing and serve the old version from then on. Listed from its start, it is told as soon as it listens. What a
resolver's cache still hides when a switch ends is left to the watchdog, which compares every replica with the journal.

A replica that appears is told too; one that stopped answering is no failure once its name has forgotten it, and is
one while it is still listed. One whose port is closed is no failure either: a pod has its address minutes before its
image is there, and neither a release nor a rollback may hang on that. It is waited for last, when all others serve, and
then passed over: it reads what is published when it starts.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from components.deployment.servers import Connect, NotListening, Patience, Server, wait_until_live
from components.runtime.errors import ContractError, PermanentError, TemporaryError

logger = logging.getLogger(__name__)

DNS = "dns:///"

Resolve = Callable[[str, int], list[str]]
"""The addresses (host:port) that a name has now, for a port; empty where it has none."""


def resolve(name: str, port: int) -> list[str]:
    """See `Resolve`; asks the system's resolver.

    Raises:
        TemporaryError: the resolver does not answer.
    """
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
            return []
        raise TemporaryError(f"name {name} cannot be resolved: {error.strerror}") from error
    hosts = dict.fromkeys(str(address[0]) for *_, address in found)
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


def parse_urls(text: str) -> list[str]:
    """The servers in a comma-separated `text`, each host:port or dns:///name:port; none in an empty one.

    Raises:
        ContractError: one is neither.

    >>> parse_urls("triton-0:8001, dns:///triton:8001"), parse_urls("")
    (['triton-0:8001', 'dns:///triton:8001'], [])
    """
    urls = [part.strip() for part in text.split(",") if part.strip()]
    for url in urls:
        _split(url)
    return urls


def _split(url: str) -> tuple[str, int]:
    """Host and port of host:port or dns:///host:port."""
    host, _, port = url.removeprefix(DNS).rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ContractError(f"triton url is {url!r}, expected host:grpc_port or {DNS}name:grpc_port")
    return host, int(port)


def addresses(urls: Sequence[str], resolve: Resolve) -> tuple[str, ...]:
    """host:port of every server that `urls` mean now, each once.

    Raises:
        ContractError: one of `urls` is malformed.
        TemporaryError: a name has no address: who changes or counts nothing at all must not take that for success.
    """
    found: list[str] = []
    for url in urls:
        if not (here := addresses_of(url, resolve)):
            raise TemporaryError(f"{url} resolves to no address, expected at least one server")
        found += here
    return tuple(dict.fromkeys(found))


def addresses_of(url: str, resolve: Resolve) -> list[str]:
    """host:port of every server that `url` means now; empty where a name has no address.

    Raises:
        ContractError: it is malformed.
    """
    host, port = _split(url)
    return resolve(host, port) if url.startswith(DNS) else [url]


class Fleet:
    """Live connections to all servers of `urls`; to be closed.

    Raises:
        ContractError: one of `urls` is malformed.
        TemporaryError: a server does not answer, or a name has no address: a release that nobody hears of is none.
    """

    def __init__(
        self, urls: Sequence[str], connect: Connect, *, patience: Patience, resolve: Resolve = resolve
    ) -> None:
        self._urls, self._connect, self._patience, self._resolve = list(urls), connect, patience, resolve
        self._servers: dict[str, Server] = {}
        try:
            addresses(self._urls, resolve)
            self._first_servers()
        except BaseException:
            self.close()
            raise

    def _first_servers(self) -> None:
        """Meets who is there; where nobody listens yet, waits for the first who does."""
        if self._urls and not self._patience.until(self._look, self._patience.ready_seconds):
            raise TemporaryError(f"no server of {', '.join(self._urls)} listens")

    @property
    def servers(self) -> list[Server]:
        """Those known now."""
        return list(self._servers.values())

    def newcomers(self) -> list[Server]:
        """Connections to servers that are listed and were not known yet, each live.

        Raises:
            TemporaryError: one listens and does not answer, or none is left.
        """
        found = self._look()
        if self._urls and not self._servers:
            raise TemporaryError(f"no server is left of {', '.join(self._urls)}")
        return found

    def _look(self) -> list[Server]:
        listed = dict.fromkeys((address, url) for url in self._urls for address in self._addresses(url))
        return [server for address, url in listed if (server := self._meet(address, url)) is not None]

    def _meet(self, address: str, url: str) -> Server | None:
        """A connection to a server that is new; None for one that is known, has left, or does not listen yet."""
        if address in self._servers:
            return None
        server = self._servers[address] = self._connect(address)
        try:
            if not url.startswith(DNS):
                server.check_live()
            elif not self._listens(server):
                self._forget(address)
                return None
            else:
                wait_until_live(server, self._patience)
        except TemporaryError:
            if not self._has_left(address):
                raise
            self._forget(address)
            return None
        return server

    def _listens(self, server: Server) -> bool:
        try:
            server.check_live()
        except TemporaryError as error:
            return not isinstance(error, NotListening)
        return True

    def _wait_for_the_starting(self) -> list[Server]:
        """Those listed that begin to listen, as soon as one does; none when all listen, or after `ready_seconds`."""
        deadline = self._patience.clock() + self._patience.ready_seconds
        while starting := self._not_listening():
            if found := self.newcomers():
                return found
            if self._patience.clock() >= deadline:
                logger.warning("passed over, since nothing listens there: %s", ", ".join(starting))
                break
            self._patience.sleep(self._patience.poll_seconds)
        return []

    def _not_listening(self) -> list[str]:
        return [address for url in self._urls for address in self._addresses(url) if address not in self._servers]

    def tell(self, act: Callable[[Server], None], servers: Sequence[Server] | None = None) -> None:
        """Does `act` on one server after another; a replica that failed and has left is passed over.

        One after another: a load takes a replica's cores for as long as it lasts (with three servers on two cores, all
        at once was over in about half the time, and requests meanwhile had two to three times the p99), and a version
        that only running servers can fail then fails on one of them, while the others have not heard of it.

        Raises:
            TemporaryError, PermanentError: of `act` on a server that is still listed; those after it were not told.
        """
        for address, server in list(self._servers.items()):
            if servers is not None and server not in servers:
                continue
            try:
                act(server)
            except (TemporaryError, PermanentError) as error:
                if not self._has_left(address):
                    raise
                logger.info("triton %s has left: %s", address, error)
                self._forget(address)

    def tell_all(self, act: Callable[[Server], None]) -> None:
        """As `tell`, then the same for servers that appeared meanwhile, until no new one is listed.

        Those that do not listen yet are waited for at the end.
        """
        self.tell(act)
        while newcomers := self.newcomers() or self._wait_for_the_starting():
            self.tell(act, newcomers)

    def close(self) -> None:
        """Closes every connection."""
        for address in list(self._servers):
            self._forget(address)

    def _addresses(self, url: str) -> list[str]:
        return addresses_of(url, self._resolve)

    def _has_left(self, address: str) -> bool:
        """Whether no name lists `address` any more; waits a little for the names to forget it."""
        if address in self._urls:
            return False

        def is_forgotten() -> bool:
            return not any(address in self._addresses(url) for url in self._urls)

        return self._patience.until(is_forgotten, self._patience.leave_seconds)

    def _forget(self, address: str) -> None:
        with suppress(TemporaryError, PermanentError):
            self._servers.pop(address).close()
