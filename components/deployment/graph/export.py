"""One ONNX graph from raw features to probability: the feature workflow and the network, written down together.

Takes a fitted `FeatureWorkflow` and a model's weights, gives a graph with the tensors of `contracts.serving`. So
nothing is encoded outside the graph, and training and serving cannot encode differently. The encoding's nodes are
`graph.encoding`'s; the network is the exported graph that lies beside the weights in every model of the store
(`components.models.files`), taken as it is, with a prefix on its names. The files are written by `graph.parts`; proving
that the graph is right is left to `parity`, and where it goes to `repository`.

The tables lie in `model.data`, whose size only the disk limits. What stops next is this process's memory, which maps
the table while it writes it, then the server's, then `graph.encoding.MAX_KEYS` vocabulary entries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from components.contracts.features import MISSING_CATEGORY
from components.contracts.manifests import Model
from components.contracts.serving import CATEGORICAL_INPUT, PROBABILITY_OUTPUT, input_tensors
from components.contracts.workflow import FeatureWorkflow
from components.deployment.graph.encoding import DENSE, PREFIX, encode_categorical, encode_dense
from components.deployment.graph.parts import OPSET, Parts
from components.models.files import NETWORK_FILE, open_model
from components.runtime.durable import sha256_tree
from components.runtime.errors import ContractError, first_line
from components.storage.uris import local_path

EMBEDDINGS, LOGIT = f"{PREFIX}embeddings", f"{PREFIX}logit"
"""Tensors of the network in the served graph: [n, F, E] and [n]; its dense input is `DENSE`."""


def write_graph(
    folder: Path, workflow: FeatureWorkflow, table: NDArray[np.float32], *, network: Any, name: str
) -> None:
    """Writes encoding, look-up and network into `folder` as one graph; the same arguments give the same bytes.

    Args:
        folder: Where the graph's files go.
        workflow: The fitted feature workflow.
        table: Vectors of all its ids.
        network: See `read_network`.
        name: The recommender's.

    Raises:
        ContractError: the table does not fit the workflow, or is beyond what a graph can hold.
    """
    if len(table) != sum(workflow.slot_sizes):
        raise ContractError(
            f"embeddings have {len(table)} rows, expected {sum(workflow.slot_sizes)} from the workflow's vocabularies"
        )
    parts = Parts(input_tensors(workflow.features))
    encode_dense(parts, workflow)
    encode_categorical(parts, workflow)
    # An empty table is no entry of `model.data`: ONNX Runtime maps no bytes.
    vectors = parts.table("embeddings", table) if len(table) else parts.constant("embeddings", table)
    if workflow.features.lists:
        _pool(parts, parts.node("Gather", [vectors, "table_rows"], "vectors", axis=0), workflow)
    else:
        parts.node("Gather", [vectors, "table_rows"], EMBEDDINGS, axis=0)
    _add_network(parts, network)
    parts.write(folder, name)


def _pool(parts: Parts, vectors: str, workflow: FeatureWorkflow) -> None:
    """Adds the network's vectors [n, F, E] from those of the places: as they are, then pooled per list.

    A weight matrix [n, 1, places] times the vectors; a place without an element has weight 0 whatever its row holds.
    """
    features = workflow.features
    axis, one = parts.constant("places_axis", np.array([1])), parts.constant("one_element", np.array(1, np.float32))
    missing = parts.constant("no_element", np.array(MISSING_CATEGORY))
    absent = parts.node("Equal", [CATEGORICAL_INPUT, missing], "is_absent")
    excluded = parts.constant("places_excluded", np.isin(features.place_features, workflow.excluded))
    present = parts.node("Not", [parts.node("Or", [absent, excluded], "is_left_out")], "is_present")
    weights = parts.node("Cast", [present], "weights", to=TensorProto.FLOAT)

    def places(source: str, name: str, part: slice) -> str:
        ends = [parts.constant(f"{name}_{end}", np.array([getattr(part, end)])) for end in ("start", "stop")]
        return parts.node("Slice", [source, *ends, axis], name)

    pieces = [places(vectors, "own_vectors", slice(0, len(features.categorical)))]
    for i, (start, stop, pool) in enumerate(features.places.lists):
        of_list = places(weights, f"weights_{i}", slice(start, stop))
        if pool == "mean":
            count = parts.node("ReduceSum", [of_list, axis], f"count_{i}", keepdims=1)
            divisor = parts.node("Max", [count, one], f"divisor_{i}")
            of_list = parts.node("Div", [of_list, divisor], f"shares_{i}")
        row = parts.node("Unsqueeze", [of_list, axis], f"row_{i}")
        of_vectors = places(vectors, f"vectors_{i}", slice(start, stop))
        pieces.append(parts.node("MatMul", [row, of_vectors], f"pooled_{i}"))
    if features.bucketed:
        pieces.append(places(vectors, "bucket_vectors", slice(features.places.lists[-1].stop, len(features.id_names))))
    parts.node("Concat", pieces, EMBEDDINGS, axis=1)


def export(model: Model, folder: Path) -> None:
    """Writes the graph of a stored model into `folder` (`store.models`).

    Raises:
        ContractError: the model's files are absent, damaged or not those that its manifest names; as `write_graph`.
    """
    stored = local_path(model.uri)
    for part in (Model.WEIGHTS, Model.WORKFLOW):
        found = sha256_tree(stored / part)
        if found != model.sha256.get(part):
            raise ContractError(
                f"{stored / part} has sha256 {found}, expected {model.sha256.get(part)} as in its manifest"
            )
    workflow = FeatureWorkflow.load(stored / Model.WORKFLOW)
    if workflow.slot_sizes != model.slot_sizes:
        raise ContractError(
            f"model {model.model_id} has slot sizes {model.slot_sizes}, its workflow {workflow.slot_sizes}"
        )
    weights = stored / Model.WEIGHTS
    table = open_model(weights, model.slot_sizes).weights.table
    write_graph(folder, workflow, table, network=read_network(weights / NETWORK_FILE), name=model.recommender.name)


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


def _add_network(parts: Parts, network: Any) -> None:
    """Adds the network on the encoded values and vectors, down to the probability [n, 1]."""
    graph = onnx.compose.add_prefix(network, PREFIX).graph
    for tensor in graph.initializer:
        parts.constant(tensor.name, numpy_helper.to_array(tensor))
    parts.nodes.extend(graph.node)
    column = parts.constant("column", np.array([-1, 1]))
    logits = parts.node("Reshape", [LOGIT, column], "logits")
    parts.node("Sigmoid", [logits], PROBABILITY_OUTPUT.name)
