"""The Dask scheduler that does the work, where a run names one: a cluster's, or one that is started here."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import dask

from components.runtime import forked
from components.runtime.errors import ContractError, TemporaryError, first_line

logger = logging.getLogger(__name__)

LOCAL = "local"
"""In place of an address: a LocalCluster of one process per core, which ends with the step."""
CONNECT_SECONDS = "20s"


@contextmanager
def dask_client(scheduler: str) -> Iterator[None]:
    """Runs Dask on the scheduler at that address, which NVTabular finds by itself; empty = no scheduler.

    Its workers must see the raw and the work folder under the same paths, and have this step's packages and code.

    Raises:
        ContractError: the address is none.
        TemporaryError: no scheduler answers there or starts here, it has no worker, or workers were killed at the work.
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

    if scheduler == LOCAL:
        # The workers may outlive their folder.
        scratch = tempfile.TemporaryDirectory(prefix="dask-", ignore_cleanup_errors=True)
        with scratch as folder, _local_client(folder) as client:
            yield client
        return
    try:
        get_address_host_port(scheduler)  # a client that refuses its address stays the process's default one
        client = Client(scheduler, timeout=CONNECT_SECONDS)
    except (ValueError, TypeError) as error:
        raise ContractError(
            f"dask_scheduler is {scheduler!r} ({first_line(error)}), expected an address such as "
            f"tcp://host:8786, {LOCAL!r}, or nothing for this process"
        ) from error
    except OSError as error:
        raise TemporaryError(f"Dask scheduler {scheduler} does not answer: {first_line(error)}") from error
    with client:
        yield client


@contextmanager
def _local_client(scratch: str) -> Iterator[Any]:
    """A client of a LocalCluster that ends with it. A cluster that does not end in time is only logged."""
    from distributed import Client, LocalCluster

    cores = min(forked.available_cores(), forked.MAX_PROCESSES)
    options = {"n_workers": cores, "threads_per_worker": 1, "dashboard_address": None, "local_directory": scratch}
    stack = ExitStack()
    try:
        client = stack.enter_context(Client(stack.enter_context(LocalCluster(**options))))
    except (OSError, RuntimeError) as error:
        stack.close()
        raise TemporaryError(f"Dask scheduler {LOCAL} did not start: {first_line(error)}") from error
    try:
        yield client
    finally:
        try:
            stack.close()
        except TimeoutError:  # the workers are ended with this process then
            logger.warning("Dask's LocalCluster did not end in time")
