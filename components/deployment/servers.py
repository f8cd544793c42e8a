"""One running server as a deployment sees it: what it can be told, how long to wait for it, whether it answers rightly.

`triton_client.Triton` is the real one. Which servers there are is `discovery`'s; what they are told is `switch`'s.
A server's word that it is ready is not trusted: with a dead Python stub it still says so, hence the golden rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from components.deployment.graph.parity import TOLERANCE, GoldenRows, check_scores
from components.runtime.errors import ContractError, PermanentError, TemporaryError

T = TypeVar("T")


class Server(Protocol):
    """What a deployment needs of a running Triton."""

    url: str

    def close(self) -> None:
        """Closes the connection."""

    def check_live(self) -> None:
        """Returns if the server answers; TemporaryError otherwise."""

    def load(self, name: str) -> None:
        """Loads or reloads a model as its configuration now says."""

    def unload(self, name: str) -> None:
        """Unloads a model; one that is not loaded is no error."""

    def is_ready(self, name: str, version: int) -> bool:
        """Whether that version says it can answer."""

    def infer(
        self, name: str, dense: NDArray[np.float32], categorical: NDArray[np.int64], *, version: int | None = None
    ) -> tuple[NDArray[np.float32], int]:
        """Probabilities [n] and the version that gave them."""


class NotListening(TemporaryError):
    """Nothing listens at the server's address: its process has not got so far yet, or is gone; it answers nobody."""


Connect = Callable[[str], Server]
"""Makes a connection from host:port."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a deployment waits, and by which clock."""

    lock_seconds: float = 10.0
    """For another deployment to end, or a watchdog that heals a server; 0 = not at all."""
    ready_seconds: float = 60.0
    """For one version to say it is ready after its load returned, and for a replica that is starting to listen."""
    leave_seconds: float = 20.0
    """For a name to forget a replica that stopped answering: one that ends refuses calls for 4 s (Triton 2.51), and
    a cluster's DNS may answer from its cache for 5 to 10 s more."""
    poll_seconds: float = 0.05
    """Between two questions."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        """Refuses waits that cannot be."""
        for name in ("ready_seconds", "leave_seconds", "poll_seconds"):
            if getattr(self, name) <= 0:
                raise ContractError(f"{name} is {getattr(self, name)}, expected more than 0")
        if self.lock_seconds < 0:
            raise ContractError(f"lock_seconds is {self.lock_seconds}, expected 0 or more")

    def until(self, answer: Callable[[], T], seconds: float) -> T:
        """What `answer` gives, asked again and again: the first that is true, or the one after `seconds`."""
        deadline = self.clock() + seconds
        while not (given := answer()) and self.clock() < deadline:
            self.sleep(self.poll_seconds)
        return given


def wait_until_ready(server: Server, name: str, version: int, patience: Patience) -> None:
    """Returns once the version says it is ready.

    Raises:
        TemporaryError: it did not within `patience.ready_seconds`.
    """
    if not patience.until(lambda: server.is_ready(name, version), patience.ready_seconds):
        raise TemporaryError(
            f"version {version} of {name} on triton {server.url} is not ready after {patience.ready_seconds} s"
        )


def bring_up(server: Server, name: str, version: int, golden: GoldenRows, patience: Patience) -> None:
    """Returns once the server has loaded the model as it is now, and that version of it answers golden rows rightly.

    Raises:
        TemporaryError, PermanentError: as `wait_until_ready` and `probe`, or it refuses to load.
    """
    server.load(name)
    wait_until_ready(server, name, version, patience)
    probe(server, name, version, golden)


def wait_until_live(server: Server, patience: Patience) -> None:
    """Returns once the server answers.

    Raises:
        TemporaryError: it did not within `patience.ready_seconds`.
    """
    deadline = patience.clock() + patience.ready_seconds
    while True:
        try:
            return server.check_live()
        except TemporaryError:
            if patience.clock() >= deadline:
                raise
        patience.sleep(patience.poll_seconds)


def shuffled(num_rows: int) -> NDArray[np.int64]:
    """An order that no earlier question had: a response cache knows requests by their bytes."""
    return np.random.default_rng().permutation(num_rows)


def probe(
    server: Server,
    name: str,
    version: int,
    golden: GoldenRows,
    *,
    named: bool = True,
    order: Callable[[int], NDArray[np.int64]] = shuffled,
) -> float:
    """The largest difference between served and expected scores of the golden rows.

    Args:
        server: Who is asked.
        name: Model.
        version: Version that must answer.
        golden: Rows and their training-side scores.
        named: Whether to ask for the version; otherwise Triton chooses, as it does for clients.
        order: The order in which n rows are asked, so that the model answers and no cache.

    Raises:
        PermanentError: another version answered, or a score is off by more than the tolerance.
    """
    at = order(len(golden))
    asked = GoldenRows(dense=golden.dense[at], categorical=golden.categorical[at], expected=golden.expected[at])
    scores, answered = server.infer(name, asked.dense, asked.categorical, version=version if named else None)
    if answered != version:
        raise PermanentError(f"triton {server.url} answered {name} from version {answered}, expected {version}")
    try:
        return check_scores(scores, asked, tolerance=TOLERANCE, source=f"version {version} of {name} on {server.url}")
    except ContractError as error:
        raise PermanentError(str(error)) from error
