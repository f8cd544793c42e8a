"""Who does the work: processes of this machine, or the workers of a Dask scheduler, where a run names one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from components.runtime import forked
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


@contextmanager
def workers_of(scheduler: str, *, processes: int) -> Iterator[Workers]:
    """The workers of the Dask scheduler at that address; empty = as many processes of this machine.

    The scheduler's workers must see the raw and the work folder under the same paths, and have this step's packages and
    code.

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
            yield Workers(
                lambda function, items: client.gather(client.map(function, items, pure=False)),
                SHARES_PER_THREAD * threads,
            )
        except KilledWorker as error:
            raise TemporaryError(
                f"workers of Dask scheduler {scheduler} were killed: {first_line(error)}; smaller partitions take less "
                "memory"
            ) from error


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
