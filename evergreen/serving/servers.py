"""The running servers of a deployment: which there are, what each can do, and whether one answers correctly.

A server's readiness is not trusted: with a dead Python stub it still reports ready. Hence the golden rows. What
servers load is decided by `switch`.

Addresses are a list, or every address that a name resolves to. `dns:///triton-headless:8001` is a Kubernetes headless
Service with one address per pod. It needs `publishNotReadyAddresses: true`: a pod that read the old configuration while
it started, and was listed only once it was ready, would be notified of nothing and serve the old version from then on.
What a resolver's cache still hides when a switch ends is left to the watchdog, which compares every replica with the
journal.

The only module here that calls tritonclient; its exceptions become `TemporaryError` or `PermanentError`, once.
Deadlines are generous on purpose: Triton 2.51 can crash when gRPC calls are cancelled.
"""

import argparse
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evergreen.config.reader import make_settings, read_environment, read_flags
from evergreen.contracts.serving import GRPC_OPTIONS, INPUT_TYPES, PROBABILITY_OUTPUT, named_inputs
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError, first_line
from evergreen.serving.parity import GoldenRows, check_scores

CALL_SECONDS = 30.0
LOAD_SECONDS = 120.0
"""Loading a model of 700 MB takes 3 s and 5 GB of memory; a model that hangs its loader is given up after this."""

_TEMPORARY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED")


class NotListening(TemporaryError):
    """Nothing listens at the server's address: its process has not started to listen, or has ended."""


ACCESS_FLAGS, ACCESS_VARIABLES = "triton_", "EVERGREEN_TRITON_"
"""Prefixes of the flags and variables that hold a `TritonAccess`."""


@dataclass(frozen=True, kw_only=True)
class TritonAccess:
    """How servers are reached where something before them wants TLS or a token; without any, in plain text.

    Raises:
        ContractError: a file is absent, or an option has no effect without another.
    """

    ca: str = ""
    """PEM file of the certificates that a server's own must be signed by; turns TLS on."""
    certificate: str = ""
    """PEM file of this client's own certificate, for mutual TLS."""
    key: str = ""
    """PEM file of its private key."""
    name: str = ""
    """Name that the servers' certificates are for. A replica of a headless Service is reached by its address."""
    token_file: str = ""
    """File of the token that each call shows as `authorization: Bearer`; read anew at each, because tokens rotate."""

    def __post_init__(self) -> None:
        for path in filter(None, (self.ca, self.certificate, self.key, self.token_file)):
            if not Path(path).is_file():
                raise ContractError(f"{path} is no file, expected what the connection to Triton needs")
        if (self.certificate or self.key or self.name) and not self.ca:
            raise ContractError("a certificate, a key or a name for Triton is given without a CA, expected it too")
        if bool(self.certificate) != bool(self.key):
            raise ContractError("a certificate or a key for Triton is given alone, expected both or neither")

    def credentials(self) -> Any:
        """Return gRPC's credentials of a channel; None for plain text."""
        if not self.ca:
            return None
        import grpc

        files = (self.ca, self.key, self.certificate)
        return grpc.ssl_channel_credentials(*(Path(path).read_bytes() if path else None for path in files))

    def show_token(self, request: Any) -> None:
        """Add the token to a call of tritonclient.

        Raises:
            TemporaryError: its file cannot be read now.
        """
        try:
            token = Path(self.token_file).read_text().strip()
        except (OSError, ValueError) as error:
            raise TemporaryError(f"token file {self.token_file} cannot be read: {first_line(error)}") from error
        request.headers = {**(request.headers or {}), "authorization": f"Bearer {token}"}


def read_access(arguments: argparse.Namespace | None = None) -> TritonAccess:
    """Return what the flags of `site.add_site_flags` say, else `EVERGREEN_TRITON_CA` and its like.

    A step of the pipeline has no such flags.

    Raises:
        ContractError: See `TritonAccess`.
    """
    # Kubernetes makes variables of the same prefix for a service of this name.
    values = read_environment(TritonAccess, os.environ, prefix=ACCESS_VARIABLES, is_strict=False)
    if arguments is not None:
        values |= read_flags(TritonAccess, arguments, prefix=ACCESS_FLAGS)
    return make_settings(TritonAccess, **values)


class Triton:
    """A Triton in explicit model control, reached by gRPC at `url` (host:port).

    `access` None = that of the environment.
    """

    def __init__(self, url: str, access: TritonAccess | None = None) -> None:
        import tritonclient.grpc as grpc_client

        self.url = url
        self._grpc = grpc_client
        access = access or read_access()
        name = (("grpc.ssl_target_name_override", access.name),) if access.name else ()
        with self._translated("connect"):
            self._client = grpc_client.InferenceServerClient(
                url, creds=access.credentials(), channel_args=[*GRPC_OPTIONS, *name]
            )
            if access.token_file:
                shows = {"__call__": lambda _, request: access.show_token(request)}
                self._client.register_plugin(type("ShowsToken", (grpc_client.InferenceServerClientPlugin,), shows)())

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def check_live(self) -> None:
        """Returns if the server answers.

        Raises:
            NotListening: its port is closed.
            TemporaryError: it does not answer, or reports that it is not live.
        """
        try:
            with self._translated("liveness"):
                if not self._client.is_server_live(client_timeout=CALL_SECONDS):
                    raise TemporaryError(f"triton {self.url} is not live")
        except TemporaryError as error:
            # The system's word, which gRPC gives nowhere but in its message.
            if "Connection refused" in str(error):
                raise NotListening(str(error)) from error
            raise

    def load(self, name: str) -> None:
        """Loads or reloads the model as its folder is now; the versions that stay keep answering meanwhile."""
        with self._translated(f"load of {name}"):
            self._client.load_model(name, client_timeout=LOAD_SECONDS)

    def unload(self, name: str) -> None:
        """Unloads every version of the model."""
        with self._translated(f"unload of {name}"):
            self._client.unload_model(name, client_timeout=CALL_SECONDS)

    def is_ready(self, name: str, version: int) -> bool:
        """Whether that version reports that it is ready."""
        with self._translated(f"readiness of {name}"):
            return bool(self._client.is_model_ready(name, str(version), client_timeout=CALL_SECONDS))

    def infer(
        self, name: str, dense: NDArray[np.float32], categorical: NDArray[np.int64], *, version: int | None = None
    ) -> tuple[NDArray[np.float32], int]:
        """Probabilities [n], and the version that gave them; without `version`, the one that Triton chooses."""
        inputs = []
        for tensor, rows in named_inputs(dense, categorical).items():
            inputs.append(self._grpc.InferInput(tensor, list(rows.shape), INPUT_TYPES[tensor]))
            inputs[-1].set_data_from_numpy(np.ascontiguousarray(rows))
        with self._translated(f"inference on {name}"):
            answer: Any = self._client.infer(
                name, inputs, model_version="" if version is None else str(version), client_timeout=CALL_SECONDS
            )
            return self._read_reply(name, answer)

    def _read_reply(self, name: str, answer: Any) -> tuple[NDArray[np.float32], int]:
        """Return the probabilities [n] and the version of a reply."""
        reply, wanted = answer.get_response(), PROBABILITY_OUTPUT
        if reply.model_name != name:
            raise self._odd(name, f"as model {reply.model_name!r}")
        # A number that int() reads and Triton never writes, such as "+1" or 5,000 digits, is no version.
        if not re.fullmatch("[1-9][0-9]{0,18}", reply.model_version, re.ASCII):
            raise self._odd(name, f"from version {reply.model_version[:40]!r}")
        found = [(output.name, output.datatype) for output in reply.outputs]
        if found.count((wanted.name, wanted.datatype)) != 1 or len(dict(found)) != len(found):
            raise self._odd(name, f"with outputs {found[:8]}")
        scores = answer.as_numpy(wanted.name)
        if scores.dtype != np.float32:
            raise self._odd(name, f"with {wanted.name} of type {scores.dtype}")
        return scores.ravel(), int(reply.model_version)

    def _odd(self, name: str, how: str) -> PermanentError:
        wanted = PROBABILITY_OUTPUT
        return PermanentError(
            f"triton {self.url} answered {name} {how}, expected one output {wanted.name} of type {wanted.datatype} "
            f"from a version of {name}"
        )

    @contextmanager
    def _translated(self, call: str) -> Iterator[None]:
        from tritonclient.utils import InferenceServerException

        try:
            yield
        except (TemporaryError, PermanentError):
            raise
        except InferenceServerException as error:
            status = str(error.status() or "")
            message = f"triton {self.url}: {call} failed: {error.message()}"
            if any(name in status for name in _TEMPORARY):
                raise TemporaryError(message) from error
            raise PermanentError(message) from error
        except Exception as error:  # What tritonclient meets in a malformed reply has no type of its own.
            found = f"{type(error).__name__}: {first_line(error)}"
            raise PermanentError(f"triton {self.url}: {call} got a malformed reply: {found}") from error


logger = logging.getLogger(__name__)

T = TypeVar("T")

DNS = "dns:///"

Connect = Callable[[str], Triton]
"""Makes a connection from host:port."""
Resolve = Callable[[str, int], list[str]]
"""The addresses (host:port) that a name has now, for a port; empty where it has none."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a deployment waits, and by which clock."""

    lock_seconds: float = 10.0
    """For another deployment to end, or a watchdog that heals a server; 0 = not at all."""
    ready_seconds: float = 60.0
    """For one version to become ready after its load returned, and for a starting replica to listen."""
    leave_seconds: float = 20.0
    """For a name to drop a replica that stopped answering: a stopping one refuses calls for 4 s (Triton 2.51), and
    a cluster's DNS may answer from its cache for 5 to 10 s more."""
    poll_seconds: float = 0.05
    """Between two questions."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def until(self, answer: Callable[[], T], seconds: float) -> T:
        """What `answer` returns, called repeatedly: the first value that is true, or the one after `seconds`."""
        deadline = self.clock() + seconds
        while not (given := answer()) and self.clock() < deadline:
            self.sleep(self.poll_seconds)
        return given

    def until_done(self, act: Callable[[], T], seconds: float, *, but: type[TemporaryError] | tuple[()] = ()) -> T:
        """What `act` returns, tried again for `seconds` as long as it raises TemporaryError, but not `but`."""
        deadline = self.clock() + seconds
        while True:
            try:
                return act()
            except TemporaryError as error:
                if isinstance(error, but) or self.clock() >= deadline:
                    raise
            self.sleep(self.poll_seconds)


def wait_until_ready(server: Triton, name: str, version: int, *, patience: Patience) -> None:
    """Returns once the version reports that it is ready.

    Raises:
        TemporaryError: it did not within `patience.ready_seconds`.
    """
    if not patience.until(lambda: server.is_ready(name, version), patience.ready_seconds):
        raise TemporaryError(
            f"version {version} of {name} on triton {server.url} is not ready after {patience.ready_seconds} s"
        )


def bring_up(server: Triton, name: str, *, version: int, golden: GoldenRows, patience: Patience) -> None:
    """Returns once the server has loaded the model as it is now, and that version answers golden rows correctly.

    Raises:
        TemporaryError, PermanentError: as `wait_until_ready` and `probe`, or it refuses to load.
    """
    server.load(name)
    wait_until_ready(server, name, version, patience=patience)
    probe(server, name, version=version, golden=golden)


def probe(server: Triton, name: str, *, version: int, golden: GoldenRows, named: bool = True) -> None:
    """Returns if the server answers the golden rows with the expected scores.

    `named` asks for the version; otherwise Triton chooses, as it does for clients.

    Raises:
        PermanentError: another version answered, or a score is off by more than the tolerance.
    """
    # In a new order each time, so that the model answers: a response cache recognises requests by their bytes.
    rows = golden.take(np.random.default_rng().permutation(len(golden)))
    scores, answered = server.infer(name, rows.dense, rows.categorical, version=version if named else None)
    if answered != version:
        raise PermanentError(f"triton {server.url} answered {name} from version {answered}, expected {version}")
    try:
        check_scores(scores, rows, source=f"version {version} of {name} on {server.url}")
    except ContractError as error:
        raise PermanentError(str(error)) from error


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


def parse_urls(text: str) -> tuple[str, ...]:
    """The servers in a comma-separated `text`, each host:port or dns:///name:port; none in an empty one.

    Raises:
        ContractError: one is neither.

    >>> parse_urls("triton-0:8001, dns:///triton:8001"), parse_urls("")
    (('triton-0:8001', 'dns:///triton:8001'), ())
    """
    urls = tuple(part.strip() for part in text.split(",") if part.strip())
    for url in urls:
        host, _, port = url.removeprefix(DNS).rpartition(":")
        if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ContractError(f"triton url is {url!r}, expected host:grpc_port or {DNS}name:grpc_port")
    return urls


def addresses(urls: Sequence[str], resolve: Resolve) -> tuple[str, ...]:
    """host:port of every server that `urls` mean now, each once.

    Raises:
        TemporaryError: a name has no address: a change that reaches no server must not count as a success.
    """
    found: list[str] = []
    for url in urls:
        if not (here := addresses_of(url, resolve)):
            raise TemporaryError(f"{url} resolves to no address, expected at least one server")
        found += here
    return tuple(dict.fromkeys(found))


def addresses_of(url: str, resolve: Resolve) -> list[str]:
    """host:port of every server that `url` means now; empty where a name has no address."""
    host, _, port = url.removeprefix(DNS).rpartition(":")
    return resolve(host, int(port)) if url.startswith(DNS) else [url]


class Fleet:
    """Live connections to all servers of `urls`; to be closed.

    A replica that appears joins. One that stops answering is no failure once its name has dropped it, and is one while
    it is still listed. One whose port is closed is no failure either: a pod has its address minutes before its image is
    there, and neither a release nor a rollback may hang on that. It is waited for last, when all others serve, and then
    passed over: it reads what is published when it starts.

    Raises:
        TemporaryError: a server does not answer, or a name has no address.
    """

    def __init__(
        self, urls: Sequence[str], connect: Connect, *, patience: Patience, resolve: Resolve = resolve
    ) -> None:
        self._urls, self._connect, self._patience, self._resolve = list(urls), connect, patience, resolve
        self._servers: dict[str, Triton] = {}
        try:
            addresses(self._urls, resolve)
            if self._urls and not patience.until(self._connect_to_listed, patience.ready_seconds):
                raise TemporaryError(f"no server of {', '.join(self._urls)} listens")
        except BaseException:
            self.close()
            raise

    @property
    def servers(self) -> list[Triton]:
        """Those connected now."""
        return list(self._servers.values())

    def for_each(self, act: Callable[[Triton], object], servers: Sequence[Triton] | None = None) -> None:
        """Does `act` on one server after another; a replica that failed and has left is passed over.

        One after another: a load takes a replica's cores for as long as it lasts (with three servers on two cores, all
        at once was over in about half the time, and requests meanwhile had two to three times the p99). A version that
        only running servers can fail then fails on one of them, while the others have not heard of it.

        Raises:
            TemporaryError, PermanentError: of `act` on a server that is still listed; those after it were not reached.
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
                self._disconnect(address)

    def for_all(self, act: Callable[[Triton], object]) -> None:
        """As `for_each`, then the same for servers that appeared meanwhile, until no new one is listed.

        Those that do not listen yet are waited for at the end.
        """
        self.for_each(act)
        while newcomers := self._newcomers():
            self.for_each(act, newcomers)

    def close(self) -> None:
        """Closes every connection."""
        for address in list(self._servers):
            self._disconnect(address)

    def _listed(self) -> dict[str, str]:
        """The url that lists each address now."""
        return {address: url for url in self._urls for address in addresses_of(url, self._resolve)}

    def _connect_to_listed(self) -> list[Triton]:
        found = (self._connect_to(address, url) for address, url in self._listed().items())
        return [server for server in found if server is not None]

    def _connect_to(self, address: str, url: str) -> Triton | None:
        """A new connection; None for a server that is connected already, has left, or does not listen yet."""
        if address in self._servers:
            return None
        server = self._servers[address] = self._connect(address)
        try:
            seconds = self._patience.ready_seconds if url.startswith(DNS) else 0.0
            self._patience.until_done(server.check_live, seconds, but=NotListening)
        except TemporaryError as error:
            is_starting = url.startswith(DNS) and isinstance(error, NotListening)
            if not is_starting and not self._has_left(address):
                raise
            self._disconnect(address)
            return None
        return server

    def _newcomers(self) -> list[Triton]:
        """Connections to servers that are listed and were not connected yet, each live, as soon as one listens.

        None where all are connected, or the others do not listen within `ready_seconds`.

        Raises:
            TemporaryError: one listens and does not answer, or none is left.
        """
        deadline = self._patience.clock() + self._patience.ready_seconds
        while True:
            found = self._connect_to_listed()
            if self._urls and not self._servers:
                raise TemporaryError(f"no server is left of {', '.join(self._urls)}")
            starting = self._listed().keys() - self._servers.keys()
            if found or not starting:
                return found
            if self._patience.clock() >= deadline:
                logger.warning("passed over, since nothing listens there: %s", ", ".join(sorted(starting)))
                return []
            self._patience.sleep(self._patience.poll_seconds)

    def _has_left(self, address: str) -> bool:
        """Whether no name lists `address` any more; waits a little for the names to drop it."""
        if address in self._urls:
            return False
        return self._patience.until(lambda: address not in self._listed(), self._patience.leave_seconds)

    def _disconnect(self, address: str) -> None:
        with suppress(TemporaryError, PermanentError):
            self._servers.pop(address).close()
