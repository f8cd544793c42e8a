"""Changing which versions the running Tritons serve, or leaving everything as it was.

Shared by `release` (previous and new version) and `rollback` (the old one alone): write the configuration whole, load
on every server, wait for readiness, ask golden rows. A server's word that it is ready is not trusted: with a dead
Python stub it still says so. A failure, of the record too, restores the configuration, reloads, and raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from components.contracts.errors import ContractError, PermanentError, TemporaryError
from components.contracts.serving import MODEL_NAME
from components.deployment.parity import TOLERANCE, GoldenRows, check_scores
from components.deployment.repository import ModelRepository
from components.deployment.triton_client import Triton
from components.deployment.triton_config import triton_config

logger = logging.getLogger(__name__)


class Server(Protocol):
    """What a switch needs of a running Triton (`triton_client.Triton`)."""

    url: str

    def close(self) -> None:
        """Closes the connection."""

    def check_live(self) -> None:
        """Returns if the server answers; TemporaryError otherwise."""

    def load(self, name: str) -> None:
        """Loads or reloads a model."""

    def unload(self, name: str) -> None:
        """Unloads a model."""

    def is_ready(self, name: str, version: int) -> bool:
        """Whether that version says it can answer."""

    def infer(
        self, name: str, dense: NDArray[np.float32], categorical: NDArray[np.int64], *, version: int | None = None
    ) -> tuple[NDArray[np.float32], int]:
        """Probabilities [n] and the version that gave them."""


Connect = Callable[[str], Server]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a switch waits, and by which clock."""

    ready_seconds: float = 60.0
    """For one version to say it is ready, after its load returned."""
    poll_seconds: float = 0.05
    """Between two questions."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        """Refuses waits that cannot be."""
        for name, value in (("ready_seconds", self.ready_seconds), ("poll_seconds", self.poll_seconds)):
            if value <= 0:
                raise ContractError(f"{name} is {value}, expected more than 0")


@contextmanager
def connected(urls: list[str], connect: Connect = Triton) -> Iterator[list[Server]]:
    """Yields a live connection to every server of `urls`.

    Raises:
        TemporaryError: one of them does not answer.
    """
    with ExitStack() as stack:
        servers = []
        for url in urls:
            server = connect(url)
            stack.callback(server.close)
            server.check_live()
            servers.append(server)
        yield servers


def parse_urls(text: str) -> list[str]:
    """The host:port addresses in a comma-separated `text`; none in an empty one.

    Raises:
        ContractError: one is not host:port.

    >>> parse_urls("triton-0:8001, triton-1:8001"), parse_urls("")
    (['triton-0:8001', 'triton-1:8001'], [])
    """
    urls = [part.strip() for part in text.split(",") if part.strip()]
    for url in urls:
        host, _, port = url.rpartition(":")
        if not host or "/" in url or not port.isdigit() or not 0 < int(port) < 65536:
            raise ContractError(f"triton url is {url!r}, expected host:grpc_port")
    return urls


def wait_until_ready(server: Server, name: str, version: int, patience: Patience) -> None:
    """Returns once the version says it is ready.

    Raises:
        TemporaryError: it did not within `patience.ready_seconds`.
    """
    deadline = patience.clock() + patience.ready_seconds
    while not server.is_ready(name, version):
        if patience.clock() >= deadline:
            raise TemporaryError(
                f"version {version} of {name} on triton {server.url} is not ready after {patience.ready_seconds} s"
            )
        patience.sleep(patience.poll_seconds)


def probe(server: Server, name: str, version: int, golden: GoldenRows, *, named: bool = True) -> float:
    """The largest difference between served and expected scores of the golden rows.

    Args:
        server: Who is asked.
        name: Model.
        version: Version that must answer.
        golden: Rows and their training-side scores.
        named: Whether to ask for the version; otherwise Triton chooses, as it does for clients.

    Raises:
        PermanentError: another version answered, or a score is off by more than the tolerance.
    """
    scores, answered = server.infer(name, golden.dense, golden.categorical, version=version if named else None)
    if answered != version:
        raise PermanentError(f"triton {server.url} answered {name} from version {answered}, expected {version}")
    try:
        return check_scores(scores, golden, tolerance=TOLERANCE, source=f"version {version} of {name} on {server.url}")
    except ContractError as error:
        raise PermanentError(str(error)) from error


def switch(
    repository: ModelRepository,
    servers: list[Server],
    *,
    versions: list[int],
    golden: GoldenRows,
    server_kind: str,
    patience: Patience,
    record: Callable[[], None],
) -> None:
    """Makes every server serve exactly `versions`, the highest of them answering clients, then calls `record`.

    Raises:
        TemporaryError: a server failed to load or get ready in time; everything is as it was before.
        PermanentError: a server refused or answered wrongly; everything is as it was before.
    """
    live = max(versions)
    before = repository.read_config()
    try:
        repository.write_config(triton_config(MODEL_NAME, server_kind, versions))
        for server in servers:
            server.load(MODEL_NAME)
            wait_until_ready(server, MODEL_NAME, live, patience)
            probe(server, MODEL_NAME, live, golden)
            probe(server, MODEL_NAME, live, golden, named=False)
            logger.info("triton %s serves version %d", server.url, live)
        record()
    except BaseException as error:
        logger.error("version %d is not served, restoring: %s", live, error)
        _restore(repository, servers, before)
        raise


def _restore(repository: ModelRepository, servers: list[Server], config: str | None) -> None:
    """Puts the configuration back and tells every server; a server that is gone reads it when it returns."""
    repository.write_config(config)
    for server in servers:
        try:
            if config is None:
                server.unload(MODEL_NAME)
            else:
                server.load(MODEL_NAME)
        except (TemporaryError, PermanentError) as error:
            logger.error("triton %s could not be told to go back: %s", server.url, error)
