"""Who does the work: processes of this machine, or the workers of a Dask scheduler, where a run names one.

Extraction and preprocessing divide their rows so. What an item is, and that no result depends on who works on it, is
theirs.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from components.runtime import forked
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError, TemporaryError, first_line

CONNECT_SECONDS = "20s"
SHARES_PER_THREAD = 4
"""Of a Dask worker: of what a lost worker did, others do a share again."""


class Workers(NamedTuple):
    """Those that share the rows."""

    run_all: Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
    """The function's results, in the order of the items."""
    num_shares: int
    """Into how many items to divide the work."""


THIS_PROCESS = Workers(partial(forked.run_all, processes=1), 1)


class Pickled(NamedTuple):
    """A file in the work folder that holds a pickle. Its bytes are proven before they are read: it could hold code."""

    path: str
    sha256: str

    @classmethod
    def write(cls, path: Path, content: bytes) -> "Pickled":
        """Writes it, whole."""
        write_whole(path, content)
        return cls(str(path), hashlib.sha256(content).hexdigest())

    def read(self) -> Any:
        """What it holds.

        Raises:
            TemporaryError: the file was changed.
        """
        content = Path(self.path).read_bytes()
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise TemporaryError(f"{self.path} is not what a worker wrote, expected sha256 {self.sha256}")
        return pickle.loads(content)


@contextmanager
def workers_of(scheduler: str, *, processes: int, shared: Path) -> Iterator[Workers]:
    """The workers of the Dask scheduler at that address; empty = as many processes of this machine.

    The scheduler's workers must see the raw and the work folder under the same paths, and have this step's packages and
    code. `shared` is a folder of the work folder that is there; nothing stays in it. Tasks take no other task's result,
    which a killed worker would take with it: a loss costs the tasks that it was at, and no other.

    Raises:
        ContractError: the address is none.
        TemporaryError: no scheduler answers there, it has no worker, or workers were killed at the work.
    """
    if not scheduler:
        yield Workers(partial(forked.run_all, processes=processes), processes)
        return
    from distributed.scheduler import KilledWorker

    with _client(scheduler) as client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise TemporaryError(f"Dask scheduler {scheduler} has no worker, expected at least one")
        try:
            yield Workers(partial(_run_all, client=client, shared=shared), SHARES_PER_THREAD * threads)
        except KilledWorker as error:
            raise TemporaryError(
                f"workers of Dask scheduler {scheduler} were killed: {first_line(error)}; smaller partitions take less "
                "memory"
            ) from error


def _run_all(function: Callable[[Any], Any], items: Sequence[Any], *, client: Any, shared: Path) -> list[Any]:
    from distributed.protocol.pickle import dumps

    # By a file, and not in each task's message: a function may hold vocabularies of gigabytes.
    path = shared / f".function-{uuid4().hex}"
    try:
        held = Pickled.write(path, dumps(function))
        return list(client.gather(client.map(partial(_called, held), items, pure=False)))
    finally:
        path.unlink(missing_ok=True)


def _called(held: Pickled, item: Any) -> Any:
    return _read_once(held)(item)


@lru_cache(maxsize=1)
def _read_once(held: Pickled) -> Any:
    return held.read()


@contextmanager
def _client(scheduler: str) -> Iterator[Any]:
    from distributed import Client
    from distributed.comm import get_address_host_port

    try:
        get_address_host_port(scheduler)  # a client that refuses its address stays the process's default one
        client = Client(scheduler, timeout=CONNECT_SECONDS)
    except (ValueError, TypeError) as error:
        raise ContractError(
            f"dask_scheduler is {scheduler!r} ({first_line(error)}), expected an address such as tcp://host:8786, or "
            "nothing for this process"
        ) from error
    except OSError as error:
        raise TemporaryError(f"Dask scheduler {scheduler} does not answer: {first_line(error)}") from error
    with client:
        yield client
