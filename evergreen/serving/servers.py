"""Connect to the running Triton servers, load models on them, and check their answers.

Triton's readiness is not sufficient, because a server with a dead Python stub still reports ready.
Servers are therefore probed with golden rows. `switch` decides what servers load.

Servers are listed one by one, or by a name that resolves to several addresses.
`dns:///triton-headless:8001` is a Kubernetes headless Service with one address per pod. The Service
needs `publishNotReadyAddresses: true`. Without this setting, a pod that reads the old configuration
while it starts is not listed until it is ready. A pod that is not listed misses the notification
and keeps serving the old version. At the end of a switch, the resolver's cache may still lack a new
pod. The watchdog compares every replica with the journal and later repairs pods that were missed.

No other module of this package calls tritonclient. Exceptions of tritonclient become
`TemporaryError` or `PermanentError`. The deadlines are long on purpose, because Triton 2.51 can
crash when gRPC calls are cancelled.
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

logger = logging.getLogger(__name__)

T = TypeVar("T")

DNS = "dns:///"
CALL_SECONDS = 30.0
LOAD_SECONDS = 120.0
"""Timeout of a load in seconds. Loading a model of 700 MB took 3 s and 5 GB of memory."""

_TEMPORARY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED")


class NotListening(TemporaryError):
    """The server's port is closed. The server's process has ended or does not listen yet."""


ACCESS_FLAGS, ACCESS_VARIABLES = "triton_", "EVERGREEN_TRITON_"
"""Prefixes of the flags and variables that hold a `TritonAccess`."""


@dataclass(frozen=True, kw_only=True)
class TritonAccess:
    """Options for TLS and a token. Without these options, the connection is not encrypted.

    Raises:
        ContractError: a file is absent, or an option is set without another option that it needs.
    """

    ca: str = ""
    """PEM file of the CA certificates that sign the servers' certificates. Turns TLS on."""
    certificate: str = ""
    """PEM file of this client's certificate, for mutual TLS."""
    key: str = ""
    """PEM file of the client certificate's private key."""
    name: str = ""
    """Host name in the servers' certificates. The certificate is checked against this name, because
    replicas of a headless Service are called by IP address."""
    token_file: str = ""
    """File with the token that is sent as `authorization: Bearer`. The file is read before each
    call, because tokens rotate."""

    def __post_init__(self) -> None:
        for path in filter(None, (self.ca, self.certificate, self.key, self.token_file)):
            if not Path(path).is_file():
                raise ContractError(
                    f"{path} is not a file, expected a PEM or token file for Triton"
                )
        if (self.certificate or self.key or self.name) and not self.ca:
            raise ContractError(
                "a certificate, a key or a name for Triton is given without a CA, expected a CA too"
            )
        if bool(self.certificate) != bool(self.key):
            raise ContractError(
                "a certificate or a key for Triton is given alone, expected both or neither"
            )

    def credentials(self) -> Any:
        """Return the gRPC channel credentials, or None for plain text."""
        if not self.ca:
            return None
        import grpc

        files = (self.ca, self.key, self.certificate)
        return grpc.ssl_channel_credentials(
            *(Path(path).read_bytes() if path else None for path in files)
        )

    def show_token(self, request: Any) -> None:
        """Add the token to a call of tritonclient.

        Raises:
            TemporaryError: the token file cannot be read now.
        """
        try:
            token = Path(self.token_file).read_text().strip()
        except (OSError, ValueError) as error:
            raise TemporaryError(
                f"token file {self.token_file} cannot be read: {first_line(error)}"
            ) from error
        request.headers = {**(request.headers or {}), "authorization": f"Bearer {token}"}


def read_access(arguments: argparse.Namespace | None = None) -> TritonAccess:
    """Return the options from the flags of `add_target_flags`, or else from the environment.

    The environment variables are `EVERGREEN_TRITON_CA` and others with the same prefix. Environment
    variables are needed because the steps of the pipeline have no flags for the access to Triton.

    Raises:
        ContractError: See `TritonAccess`.
    """
    # Kubernetes creates variables with the same prefix if a Service has this name.
    values = read_environment(TritonAccess, os.environ, prefix=ACCESS_VARIABLES, is_strict=False)
    if arguments is not None:
        values |= read_flags(TritonAccess, arguments, prefix=ACCESS_FLAGS)
    return make_settings(TritonAccess, **values)


class Triton:
    """gRPC connection to a Triton in explicit model control mode.

    Args:
        url: host:port.
        access: TLS and token options. None = the options in the environment.
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
                self._client.register_plugin(
                    type("ShowsToken", (grpc_client.InferenceServerClientPlugin,), shows)()
                )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def check_live(self) -> None:
        """Check that the server is live.

        Raises:
            NotListening: the server's port is closed.
            TemporaryError: the server does not answer, or reports that it is not live.
        """
        try:
            with self._translated("liveness"):
                if not self._client.is_server_live(client_timeout=CALL_SECONDS):
                    raise TemporaryError(f"triton {self.url} is not live")
        except TemporaryError as error:
            # gRPC reports a closed port only in the text of its message.
            if "Connection refused" in str(error):
                raise NotListening(str(error)) from error
            raise

    def load(self, name: str) -> None:
        """Load or reload a model from its folder.

        While the model is loaded, other versions continue to answer.
        """
        with self._translated(f"load of {name}"):
            self._client.load_model(name, client_timeout=LOAD_SECONDS)

    def unload(self, name: str) -> None:
        """Unload every version of the model."""
        with self._translated(f"unload of {name}"):
            self._client.unload_model(name, client_timeout=CALL_SECONDS)

    def is_ready(self, name: str, version: int) -> bool:
        """Return whether the server reports the version as ready."""
        with self._translated(f"readiness of {name}"):
            return bool(
                self._client.is_model_ready(name, str(version), client_timeout=CALL_SECONDS)
            )

    def infer(
        self,
        name: str,
        dense: NDArray[np.float32],
        categorical: NDArray[np.int64],
        *,
        version: int | None = None,
    ) -> tuple[NDArray[np.float32], int]:
        """Score rows, and return the probabilities [n] and the version that computed them.

        Args:
            name: Name of the model.
            dense: Dense features [n, features].
            categorical: Categorical ids [n, features].
            version: Version to call. None = the version that Triton chooses.
        """
        inputs = []
        for tensor, rows in named_inputs(dense, categorical).items():
            inputs.append(self._grpc.InferInput(tensor, list(rows.shape), INPUT_TYPES[tensor]))
            inputs[-1].set_data_from_numpy(np.ascontiguousarray(rows))
        with self._translated(f"inference on {name}"):
            answer: Any = self._client.infer(
                name,
                inputs,
                model_version="" if version is None else str(version),
                client_timeout=CALL_SECONDS,
            )
            return self._read_reply(name, answer)

    def _read_reply(self, name: str, answer: Any) -> tuple[NDArray[np.float32], int]:
        """Return the probabilities [n] and the version of a reply."""
        reply, wanted = answer.get_response(), PROBABILITY_OUTPUT
        if reply.model_name != name:
            raise self._unexpected_reply(name, f"as model {reply.model_name!r}")
        # int() also accepts "+1" and 5,000 digits, which Triton never sends as a version.
        if not re.fullmatch("[1-9][0-9]{0,18}", reply.model_version, re.ASCII):
            raise self._unexpected_reply(name, f"from version {reply.model_version[:40]!r}")
        found = [(output.name, output.datatype) for output in reply.outputs]
        if found.count((wanted.name, wanted.datatype)) != 1 or len(dict(found)) != len(found):
            raise self._unexpected_reply(name, f"with outputs {found[:8]}")
        scores = answer.as_numpy(wanted.name)
        if scores.dtype != np.float32:
            raise self._unexpected_reply(name, f"with {wanted.name} of type {scores.dtype}")
        return scores.ravel(), int(reply.model_version)

    def _unexpected_reply(self, name: str, how: str) -> PermanentError:
        wanted = PROBABILITY_OUTPUT
        return PermanentError(
            f"triton {self.url} answered a request for model {name} {how}. Expected an answer from "
            f"a version of {name} with exactly one output {wanted.name} of type {wanted.datatype}"
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
        except (
            Exception
        ) as error:  # tritonclient raises various exception types for a malformed reply
            found = f"{type(error).__name__}: {first_line(error)}"
            raise PermanentError(
                f"triton {self.url}: {call} got a malformed reply: {found}"
            ) from error


Connect = Callable[[str], Triton]
"""Function that opens a connection to host:port."""
Resolve = Callable[[str, int], list[str]]
"""Function that returns the current addresses (host:port) of a name and a port, or an empty list if
the name has no address."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts of a deployment, with the clock that measures them."""

    lock_seconds: float = 120.0
    """Seconds until a request that no controller accepts is withdrawn. While a command waits, it
    also tries to take the lock itself. If the timeout is 0, the command tries only once."""
    ready_seconds: float = 60.0
    """Seconds to wait until a loaded version is ready, or until a starting replica listens."""
    leave_seconds: float = 20.0
    """Seconds to wait until a name stops listing an unresponsive replica. A stopping replica
    rejects calls for 4 s (Triton 2.51), and a cluster's DNS cache may be 5 to 10 s old."""
    poll_seconds: float = 0.05
    """Seconds between two attempts."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @property
    def deadline_seconds(self) -> float:
        """Seconds from a command's request to its deadline.

        The result is at least 30, because a change can take longer than the wait for the lock.
        """
        return max(self.lock_seconds, 30.0)

    def until(self, answer: Callable[[], T], seconds: float) -> T:
        """Call `answer` until its value is true or `seconds` have passed. Return the last value."""
        deadline = self.clock() + seconds
        while not (given := answer()) and self.clock() < deadline:
            self.sleep(self.poll_seconds)
        return given

    def until_done(
        self, act: Callable[[], T], seconds: float, *, but: type[TemporaryError] | tuple[()] = ()
    ) -> T:
        """Call `act` until it succeeds, and return its value.

        Args:
            act: Function that is called again after a TemporaryError.
            seconds: Time after which the last TemporaryError is raised.
            but: Class of temporary errors that are raised at once, without a retry.
        """
        deadline = self.clock() + seconds
        while True:
            try:
                return act()
            except TemporaryError as error:
                if isinstance(error, but) or self.clock() >= deadline:
                    raise
            self.sleep(self.poll_seconds)


def wait_until_ready(server: Triton, name: str, version: int, *, timeouts: Timeouts) -> None:
    """Wait until the server reports the version as ready.

    Raises:
        TemporaryError: the version is not ready after `timeouts.ready_seconds`.
    """
    if not timeouts.until(lambda: server.is_ready(name, version), timeouts.ready_seconds):
        raise TemporaryError(
            f"version {version} of {name} on triton {server.url} is not ready after "
            f"{timeouts.ready_seconds} s"
        )


def bring_up(
    server: Triton, name: str, *, version: int, golden: GoldenRows, timeouts: Timeouts
) -> None:
    """Load the model, wait until its version is ready, and probe the version with golden rows.

    Raises:
        TemporaryError, PermanentError: the load fails, or `wait_until_ready` or `probe` raises.
    """
    server.load(name)
    wait_until_ready(server, name, version, timeouts=timeouts)
    probe(server, name, version=version, golden=golden)


def probe(
    server: Triton, name: str, *, version: int, golden: GoldenRows, named: bool = True
) -> None:
    """Check that the server returns the expected scores for the golden rows.

    Args:
        server: Server to probe.
        name: Name of the model.
        version: Version that must answer.
        golden: Rows with their expected scores.
        named: Whether the request names the version. If False, Triton chooses the version. Requests
            of clients name no version.

    Raises:
        PermanentError: another version answered, or a score differs by more than the tolerance.
    """
    # Shuffle the rows, so that the model computes the answer and no response cache returns it. A
    # response cache recognizes requests by their bytes.
    rows = golden.take(np.random.default_rng().permutation(len(golden)))
    scores, answered = server.infer(
        name, rows.dense, rows.categorical, version=version if named else None
    )
    if answered != version:
        raise PermanentError(
            f"triton {server.url} answered {name} from version {answered}, expected {version}"
        )
    try:
        check_scores(scores, rows, source=f"version {version} of {name} on {server.url}")
    except ContractError as error:
        raise PermanentError(str(error)) from error


def resolve(name: str, port: int) -> list[str]:
    """Resolve a name by the system's resolver, see `Resolve`.

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
    """Split a comma-separated list of servers, each host:port or dns:///name:port.

    An empty text gives an empty list.

    Raises:
        ContractError: an entry is neither host:port nor dns:///name:port.

    >>> parse_urls("triton-0:8001, dns:///triton:8001"), parse_urls("")
    (('triton-0:8001', 'dns:///triton:8001'), ())
    """
    urls = tuple(part.strip() for part in text.split(",") if part.strip())
    for url in urls:
        host, _, port = url.removeprefix(DNS).rpartition(":")
        if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ContractError(
                f"triton url is {url!r}, expected host:grpc_port or {DNS}name:grpc_port"
            )
    return urls


def addresses(urls: Sequence[str], resolve: Resolve) -> tuple[str, ...]:
    """Return the current addresses (host:port) of all `urls`, without duplicates.

    An absent address is an error, because otherwise a change could succeed without reaching any
    server.

    Raises:
        TemporaryError: a name has no address.
    """
    found: list[str] = []
    for url in urls:
        if not (here := addresses_of(url, resolve)):
            raise TemporaryError(f"{url} resolves to no address, expected at least one server")
        found += here
    return tuple(dict.fromkeys(found))


def addresses_of(url: str, resolve: Resolve) -> list[str]:
    """Return the current addresses (host:port) of `url`, or an empty list if the name has none."""
    host, _, port = url.removeprefix(DNS).rpartition(":")
    return resolve(host, int(port)) if url.startswith(DNS) else [url]


class Fleet:
    """Open connections to all servers of `urls`. Close the fleet after use.

    A new replica is added when the DNS name lists it. If a replica stops answering, this is an
    error only while the DNS name still lists the replica. A closed port is not an error. A starting
    pod gets its address minutes before its port is open, and this wait must not delay a release or
    a rollback. The fleet first waits until all replicas with an open port serve. Then the fleet
    waits for replicas with a closed port. If the port of a replica stays closed, the replica is
    skipped. A skipped replica reads the published configuration when it starts.

    Raises:
        TemporaryError: a server does not answer, or a name has no address.
    """

    def __init__(
        self,
        urls: Sequence[str],
        connect: Connect,
        *,
        timeouts: Timeouts,
        resolve: Resolve = resolve,
    ) -> None:
        self._urls, self._connect, self._timeouts, self._resolve = (
            list(urls),
            connect,
            timeouts,
            resolve,
        )
        self._servers: dict[str, Triton] = {}
        try:
            addresses(self._urls, resolve)
            if self._urls and not timeouts.until(self._connect_to_listed, timeouts.ready_seconds):
                raise TemporaryError(f"no server of {', '.join(self._urls)} listens")
        except BaseException:
            self.close()
            raise

    @property
    def servers(self) -> list[Triton]:
        """Connections that are open now."""
        return list(self._servers.values())

    def for_each(
        self, act: Callable[[Triton], object], servers: Sequence[Triton] | None = None
    ) -> None:
        """Call `act` on one server after another, and skip replicas that have left.

        The calls are sequential, because a load occupies a replica's cores. With three servers on
        two cores, parallel loads took about half the time, but during the loads the p99 of requests
        was two to three times as high. If a version fails only in a running server, it fails on the
        first server, and the other servers are not changed.

        Args:
            act: Function to call with each server.
            servers: Servers for which `act` is called. None = all.

        Raises:
            TemporaryError, PermanentError: `act` failed on a server that is still listed. If `act`
                fails on one server, the remaining servers are not called.
        """
        for address, server in list(self._servers.items()):
            if servers is not None and server not in servers:
                continue
            try:
                act(server)
            except (TemporaryError, PermanentError) as error:
                if not self._is_unlisted(address):
                    raise
                logger.info("triton %s has left: %s", address, error)
                self._disconnect(address)

    def for_all(self, act: Callable[[Triton], object]) -> None:
        """Call `act` on every server, including servers that are listed during the calls.

        Servers whose port is still closed are called last.
        """
        self.for_each(act)
        while newcomers := self._newcomers():
            self.for_each(act, newcomers)

    def close(self) -> None:
        """Close every connection."""
        for address in list(self._servers):
            self._disconnect(address)

    def _listed(self) -> dict[str, str]:
        """Return the url of each address that is listed now."""
        return {address: url for url in self._urls for address in addresses_of(url, self._resolve)}

    def _connect_to_listed(self) -> list[Triton]:
        found = (self._connect_to(address, url) for address, url in self._listed().items())
        return [server for server in found if server is not None]

    def _connect_to(self, address: str, url: str) -> Triton | None:
        """Connect to a server that is new, still listed and listening.

        Returns None if the server is connected already, has left, or does not listen yet.
        """
        if address in self._servers:
            return None
        server = self._servers[address] = self._connect(address)
        try:
            seconds = self._timeouts.ready_seconds if url.startswith(DNS) else 0.0
            self._timeouts.until_done(server.check_live, seconds, but=NotListening)
        except TemporaryError as error:
            is_starting = url.startswith(DNS) and isinstance(error, NotListening)
            if not is_starting and not self._is_unlisted(address):
                raise
            self._disconnect(address)
            return None
        return server

    def _newcomers(self) -> list[Triton]:
        """Connect to the listed servers that are not connected yet, as soon as one of them listens.

        Returns an empty list if all servers are connected, or if no other server listens within
        `ready_seconds`.

        Raises:
            TemporaryError: a server listens but does not answer, or no server is left.
        """
        deadline = self._timeouts.clock() + self._timeouts.ready_seconds
        while True:
            found = self._connect_to_listed()
            if self._urls and not self._servers:
                raise TemporaryError(f"no server is left of {', '.join(self._urls)}")
            starting = self._listed().keys() - self._servers.keys()
            if found or not starting:
                return found
            if self._timeouts.clock() >= deadline:
                logger.warning(
                    "skipped, because nothing listens there: %s", ", ".join(sorted(starting))
                )
                return []
            self._timeouts.sleep(self._timeouts.poll_seconds)

    def _is_unlisted(self, address: str) -> bool:
        """Wait at most `leave_seconds`, and return whether `address` is no longer listed."""
        if address in self._urls:
            return False
        return self._timeouts.until(
            lambda: address not in self._listed(), self._timeouts.leave_seconds
        )

    def _disconnect(self, address: str) -> None:
        with suppress(TemporaryError, PermanentError):
            self._servers.pop(address).close()
