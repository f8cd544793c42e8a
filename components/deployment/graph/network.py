"""The network between the encoding and the probability: its own exported graph, taken as it is.

`network.onnx` lies beside the weights in every model of the store (`components.models.files`); which network it is,
nothing here knows. Its tensors and nodes get a prefix, so that the encoding can write its two inputs by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from components.contracts.serving import PROBABILITY_OUTPUT
from components.deployment.graph.parts import OPSET, Parts
from components.runtime.errors import ContractError, first_line

PREFIX = "network/"
DENSE, EMBEDDINGS, LOGIT = (f"{PREFIX}{name}" for name in ("dense", "embeddings", "logit"))
"""Tensors of the network in the served graph: [n, D], [n, F, E] and [n]."""


def read_network(path: Path) -> Any:
    """The network's graph at `path`.

    Raises:
        ContractError: it cannot be read, or is no graph of dense values and embeddings to a logit.
    """
    try:
        network = onnx.load(str(path))
        onnx.checker.check_model(network)
    except Exception as error:  # Protobuf's error for a damaged message has no public class.
        raise ContractError(f"network {path} cannot be read: {first_line(error)}") from error
    found = [value.name for value in (*network.graph.input, *network.graph.output)]
    if found != (expected := [name.removeprefix(PREFIX) for name in (DENSE, EMBEDDINGS, LOGIT)]):
        raise ContractError(f"network {path} has tensors {found}, expected {expected}")
    opsets = {opset.domain: opset.version for opset in network.opset_import}
    if opsets != {"": OPSET}:
        raise ContractError(f"network {path} has operator sets {opsets}, expected version {OPSET} of ONNX's own")
    return network


def look_up(parts: Parts, table: NDArray[np.float32]) -> None:
    """Adds the vectors of `table_rows`, the network's embeddings."""
    parts.node("Gather", [parts.table("embeddings", table), "table_rows"], EMBEDDINGS, axis=0)


def add_network(parts: Parts, network: Any) -> None:
    """Adds the network on the encoded values and vectors, down to the probability [n, 1]."""
    graph = onnx.compose.add_prefix(network, PREFIX).graph
    for tensor in graph.initializer:
        parts.constant(tensor.name, numpy_helper.to_array(tensor))
    parts.nodes.extend(graph.node)
    column = parts.constant("column", np.array([-1, 1]))
    logits = parts.node("Reshape", [LOGIT, column], "logits")
    parts.node("Sigmoid", [logits], PROBABILITY_OUTPUT.name)
