"""Run HugeCTR on several nodes: MPI starts one process on each node, and all share every batch.

The first process runs the step. HugeCTR's calls are collective. Therefore the other processes
repeat each call of the first process on a model, in the same order. Each process reads every batch,
and its own GPUs train on their share of it. The first process receives the sum of the losses, and
all processes write into the files of an embedding. This description follows HugeCTR's sources and
has not been tested. The first process names the files, so all nodes must see the engine's scratch
folder.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

from components.training.hugectr.layers import Blueprint, compiled_model


def communicator() -> Any | None:
    """Return MPI's communicator of all processes, or None if there is only this process."""
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) < 2:
        return None
    return importlib.import_module("mpi4py.MPI").COMM_WORLD


class _OnAllNodes:
    """Proxy of a model or its reader that calls each method on all nodes."""

    def __init__(self, nodes: Any, part: str, own: Any) -> None:
        self._nodes, self._part, self._own = nodes, part, own

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._nodes.bcast((self._part, name, args, kwargs))
            try:
                return getattr(self._own, name)(*args, **kwargs)
            finally:
                self._nodes.Barrier()  # after this the engine may delete files that the other nodes have read  # noqa: E501

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


def follow(hugectr: Any, nodes: Any) -> None:
    """Repeat the calls of the first process until this process sends None."""
    parts: dict[str, Any] = {}
    while (request := nodes.bcast(None)) is not None:
        if request[0] == "build":
            parts.clear()  # releases the GPU memory of the previous model
            model = compiled_model(hugectr, request[1])
            parts.update(model=model, reader=model.get_data_reader_train())
        else:
            part, name, args, kwargs = request
            getattr(parts[part], name)(*args, **kwargs)
            nodes.Barrier()
