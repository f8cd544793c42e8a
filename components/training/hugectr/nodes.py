"""HugeCTR on several nodes: one process on each, started by MPI, which share every batch.

The first process runs the step. The others repeat what it asks of a model, in the same order, for HugeCTR does all of
it together: each process reads every batch and keeps its own GPUs' share, the first one gets the sum of the losses, and
all write into the files of an embedding. (So its sources say; it was not run.) Files are named by the first process, so
the engine's scratch folder must be one that all nodes see.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

from components.training.hugectr.layers import Blueprint, compiled_model


def communicator() -> Any | None:
    """MPI's communicator of all processes; None where mpirun started no more than this one."""
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) < 2:
        return None
    return importlib.import_module("mpi4py.MPI").COMM_WORLD


class _Everywhere:
    """A model or its reader on all nodes: a method that is called here is called on each of them."""

    def __init__(self, nodes: Any, part: str, own: Any) -> None:
        self._nodes, self._part, self._own = nodes, part, own

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._nodes.bcast((self._part, name, args, kwargs))
            try:
                return getattr(self._own, name)(*args, **kwargs)
            finally:
                self._nodes.Barrier()  # the engine may remove now what the others read

        return call


def built(hugectr: Any, blueprint: Blueprint, nodes: Any | None) -> tuple[Any, Any]:
    """The compiled model and its training reader, on all `nodes`; None = on this one."""
    if nodes is not None:
        nodes.bcast(("build", blueprint))
    model = compiled_model(hugectr, blueprint)
    reader = model.get_data_reader_train()
    if nodes is None:
        return model, reader
    return _Everywhere(nodes, "model", model), _Everywhere(nodes, "reader", reader)


def follow(hugectr: Any, nodes: Any) -> None:
    """Repeats what the first process asks for until it says None."""
    parts: dict[str, Any] = {}
    while (said := nodes.bcast(None)) is not None:
        if said[0] == "build":
            parts.clear()  # a model's GPU memory goes with it
            model = compiled_model(hugectr, said[1])
            parts.update(model=model, reader=model.get_data_reader_train())
        else:
            part, name, args, kwargs = said
            getattr(parts[part], name)(*args, **kwargs)
            nodes.Barrier()
