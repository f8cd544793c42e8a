"""Workers of a step: local processes, or the workers of a Dask scheduler that the run names.

Extraction and preprocessing use the workers to divide their rows. Extraction and preprocessing
define the work items, and ensure that the choice of worker does not change a result.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from evergreen.runtime import forked
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, TemporaryError, first_line

_CONNECT_SECONDS = "20s"
_SHARES_PER_THREAD = 4
"""The work is divided into this number of shares for each thread of a Dask worker. If a worker is
lost, other workers repeat only the shares of that worker."""


class Workers(NamedTuple):
    """The workers of one step."""

    run_all: Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
    """Function that applies another function to items, and returns the results in the order of the
    items."""
    num_shares: int
    """Number of items into which the work is divided."""


THIS_PROCESS = Workers(partial(forked.run_all, processes=1), 1)


class Pickled(NamedTuple):
    """A pickle file in the work folder.

    The hash of the file is verified before the file is read, because a pickle can contain code.
    """

    path: str
    sha256: str

    @classmethod
    def write(cls, path: Path, content: bytes) -> "Pickled":
        """Write the pickle atomically."""
        write_whole(path, content)
        return cls(str(path), hashlib.sha256(content).hexdigest())

    def read(self) -> Any:
        """Return the pickled object.

        Raises:
            TemporaryError: the file was changed.
        """
        content = Path(self.path).read_bytes()
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise TemporaryError(
                f"{self.path} was changed after a worker wrote it, expected sha256 {self.sha256}"
            )
        return pickle.loads(content)


@contextmanager
def workers_of(scheduler: str, *, processes: int, shared: Path) -> Iterator[Workers]:
    """Yield the workers of the Dask scheduler at the address `scheduler`.

    If `scheduler` is empty, the workers are local processes.

    The scheduler's workers must see the raw folder and the work folder under the same paths, and
    have the packages and code of this step. `shared` is an existing folder in the work folder. The
    workers leave no file in this folder. No task depends on another task's result, because a killed
    worker would lose that result. If a worker is lost, only the tasks that it was running must be
    repeated.

    Raises:
        ContractError: the address is invalid.
        TemporaryError: the scheduler does not answer, has no worker, or lost workers during the
            work.
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
            yield Workers(
                partial(_run_all, client=client, shared=shared), _SHARES_PER_THREAD * threads
            )
        except KilledWorker as error:
            raise TemporaryError(
                f"workers of Dask scheduler {scheduler} were killed: {first_line(error)}; smaller "
                "partitions take less memory"
            ) from error


def _run_all(
    function: Callable[[Any], Any], items: Sequence[Any], *, client: Any, shared: Path
) -> list[Any]:
    from distributed.protocol.pickle import dumps

    # The function is stored in a file instead of in each task's message, because the function may
    # contain vocabularies of gigabytes.
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
        get_address_host_port(
            scheduler
        )  # a client whose address is refused would stay the default client of the process
        client = Client(scheduler, timeout=_CONNECT_SECONDS)
    except (ValueError, TypeError) as error:
        raise ContractError(
            f"dask_scheduler is {scheduler!r} ({first_line(error)}), expected an address such as "
            "tcp://host:8786, or nothing for this process"
        ) from error
    except OSError as error:
        raise TemporaryError(
            f"Dask scheduler {scheduler} does not answer: {first_line(error)}"
        ) from error
    with client:
        yield client
