"""The Dask scheduler that does the work, where a run names one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask

from components.runtime.errors import ContractError, TemporaryError, first_line

CONNECT_SECONDS = "20s"


@contextmanager
def dask_client(scheduler: str) -> Iterator[None]:
    """Runs Dask on the scheduler at that address, which NVTabular finds by itself; empty = no scheduler.

    Its workers must see the raw and the work folder under the same paths, and have this step's packages and code.

    Raises:
        ContractError: the address is none.
        TemporaryError: no scheduler answers there, it has no worker, or workers were killed at the work.
    """
    if not scheduler:
        # Not Dask's threads: a process that is forked from this one would wait for them for ever.
        with dask.config.set(scheduler="synchronous"):
            yield
        return
    from distributed.scheduler import KilledWorker

    with _client(scheduler) as client:
        if not client.scheduler_info()["workers"]:
            raise TemporaryError(f"Dask scheduler {scheduler} has no worker, expected at least one")
        try:
            yield
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
