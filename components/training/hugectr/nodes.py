"""Run HugeCTR on several nodes: MPI starts one process on each node, and all share every batch.

The first process runs the step. HugeCTR's calls are collective: all processes must make the same
calls. Therefore the other processes repeat each call of the first process, in the same order. Each
process reads every batch, and the GPUs of its node train on their share of the batch. The first
process receives the sum of the losses, and all processes write into the files of an embedding. This
description follows HugeCTR's sources. The processes were tested with Open MPI 5.0.11, and never
with HugeCTR itself. The first process names the files, so all nodes must see the engine's scratch
folder.

A process that fails ends all processes (`run_together`), because the others would wait for its next
call for ever.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from components.training.device_memory import free_memory
from components.training.hugectr.guard import bounded
from components.training.hugectr.layers import Blueprint, compiled_model
from evergreen.runtime.errors import PermanentError, first_line
from evergreen.runtime.exit_codes import ExitCode, exits_with_code

HUGECTR_ERRORS = (RuntimeError, MemoryError)
"""Errors that HugeCTR's calls raise. A failed allocation by RMM is a MemoryError in Python."""


def communicator() -> Any | None:
    """Return MPI's communicator of all processes, or None if there is only this process."""
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) < 2:
        return None
    return importlib.import_module("mpi4py.MPI").COMM_WORLD


def run_together(nodes: Any, part: Callable[[], int]) -> int:
    """Run this process's part of a step. If the part fails, end the processes of all nodes.

    Args:
        nodes: MPI's communicator.
        part: Function that returns an `ExitCode` or raises an error. All processes end with the
            exit code of the failed part.
    """
    code = exits_with_code(part)()
    if code:
        sys.stderr.flush()
        nodes.Abort(int(code))
    return code


class _OnAllNodes:
    """Proxy that calls each method of a model or reader on all nodes.

    After an error, there is no further communication, because another node may wait in the call.
    """

    def __init__(self, nodes: Any, part: str, own: Any) -> None:
        self._nodes, self._part, self._own = nodes, part, own

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._nodes.bcast((self._part, name, args, kwargs))
            result = getattr(self._own, name)(*args, **kwargs)
            # After the barrier, the engine may delete files that the other nodes have read.
            self._nodes.Barrier()
            return result

        return call


def built(hugectr: Any, blueprint: Blueprint, nodes: Any | None) -> tuple[Any, Any]:
    """Return the compiled model and its training reader.

    Model and reader are created on all `nodes`, or only in this process if `nodes` is None.
    """
    if nodes is not None:
        nodes.bcast(("build", blueprint))
    model = compiled_model(hugectr, blueprint)
    reader = model.get_data_reader_train()
    if nodes is None:
        return model, reader
    return _OnAllNodes(nodes, "model", model), _OnAllNodes(nodes, "reader", reader)


def follow(nodes: Any) -> int:
    """Repeat the calls of the first MPI process until the first process sends None.

    SIGTERM and SIGUSR1 are ignored. The first process handles these signals, and saves with the
    help of all processes.

    Returns:
        `ExitCode.DONE`.

    Raises:
        PermanentError: HugeCTR stopped on this node, or cannot be imported.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    try:
        hugectr = importlib.import_module("hugectr")
        repeat_calls(hugectr, nodes)
    except (ImportError, OSError, *HUGECTR_ERRORS) as error:
        raise PermanentError(
            f"HugeCTR stopped on node {nodes.Get_rank()} (free memory: {free_memory()}): "
            f"{first_line(error)}"
        ) from error
    return ExitCode.DONE


def repeat_calls(hugectr: Any, nodes: Any) -> None:
    """Repeat the calls of the first MPI process until the first process sends None."""
    parts: dict[str, Any] = {}
    minutes = 0.0
    while (request := nodes.bcast(None)) is not None:
        if request[0] == "build":
            minutes = request[1].settings.solver.call_minutes
            with bounded(minutes):
                parts.clear()  # releases the GPU memory of the previous model
                model = compiled_model(hugectr, request[1])
                parts.update(model=model, reader=model.get_data_reader_train())
        else:
            part, name, args, kwargs = request
            with bounded(minutes):
                getattr(parts[part], name)(*args, **kwargs)
            nodes.Barrier()
    if parts:
        with bounded(minutes):
            parts.clear()
