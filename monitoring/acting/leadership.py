"""Which replica of the monitor works: the holder of a numbered lease in a folder or bucket. The others stand by.

In: the storage that the replicas share, this replica's name. Out: whether it leads, and its term, which rises with each
taking: the fencing token that requests carry and that `monitoring.acting.ledger` refuses a stale holder by. The lease
is renewed from a thread of its own, so that a long turn of the loop does not lose it; a process that is stopped or
frozen does. What a standby may do is `monitoring.__main__`'s: nothing but wait and say so.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from components.runtime.durable import write_whole
from components.runtime.errors import ContractError, TemporaryError
from components.storage.lease import Lease
from components.storage.objects import Objects

LEASE_FILE = "monitor.lease"
NO_LEASE = "none"
REPLICA_FILE = "replica.txt"
LEADER, STANDBY = "leader", "standby"


@dataclass(frozen=True, kw_only=True)
class LeadershipSettings:
    """How replicas agree on who works."""

    lease: str = ""
    """Folder or bucket (URI) where replicas agree on who works; empty = `leases` in the model store, or in
    the state folder where the store is read-only (replicas must then share that); `none` = this is the only replica.
    Replicas of different models need different ones."""
    lease_seconds: float = 30.0
    """A replica silent for longer is replaced. Longer than two machines' clocks may differ."""

    def __post_init__(self) -> None:
        """Refuses a lease that ends before it is renewed."""
        if not self.lease_seconds >= 1:
            raise ContractError(f"lease_seconds is {self.lease_seconds}, expected at least 1")


class NotLeading(TemporaryError):
    """This replica no longer holds the lease: it must stop acting and stand by."""


class Leadership:
    """This replica's claim to work."""

    def __init__(
        self,
        objects: Objects,
        *,
        replica: str,
        seconds: float,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Claims nothing yet.

        Args:
            objects: Where the lease is kept.
            replica: Names this replica, the same after a restart; see `replica_name`.
            seconds: See `LeadershipSettings.lease_seconds`.
            clock: Seconds since the epoch.
            monotonic: Seconds by a clock that nobody sets.
        """
        self.objects = objects

        def make() -> Lease:
            return Lease(
                objects, LEASE_FILE, holder=replica, seconds=seconds, numbered=True, clock=clock, monotonic=monotonic
            )

        self._make: Callable[[], Lease] = make
        self._lease = make()

    @property
    def term(self) -> int:
        """The fencing token: higher than that of every earlier holder; 0 before the lease was taken."""
        return self._lease.term

    @property
    def leads(self) -> bool:
        """Whether the lease has not ended by this process's clock; costs nothing, for every turn of the loop."""
        return self._lease.is_held

    def take(self, *, after: int = 0) -> None:
        """Takes the lease; the caller holds the state folder's lock, so who bore this replica's name before is dead.

        Args:
            after: A term that others are known to have had; this one's is above it.

        Raises:
            TemporaryError: another replica holds it, or the storage does not answer.
        """
        self._lease = self._make()
        self._lease.acquire(heir=True, after=after)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renews the lease that was taken, and gives it back at the end."""
        with self._lease.kept():
            yield

    def check(self) -> None:
        """Returns if this replica leads; asks the storage, for the moment before an act.

        Raises:
            NotLeading: the lease ended, or another replica took it over.
            TemporaryError: the storage does not answer.
        """
        try:
            self._lease.check()
        except TemporaryError as error:
            if self._lease.is_held:
                raise
            raise NotLeading(str(error)) from error


def replica_name(state: Path) -> str:
    """This replica's name, the same as long as its state folder lives: host and process are for people's eyes.

    A replica that restarts over its own state folder takes its own lease back without waiting for its end.
    """
    path = state / REPLICA_FILE
    with suppress(FileNotFoundError):
        if name := path.read_text().strip():
            return name
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
    write_whole(path, name + "\n")
    return name
