"""One ONNX graph from raw features to probability: the feature workflow and the network, written down together.

Takes a fitted `FeatureWorkflow` and a model's weights, gives the bytes of an ONNX file with the tensors of
`contracts.serving`. So nothing is encoded outside the graph, and training and serving cannot encode differently.
Proving that the graph is right is left to `parity`; where it goes is left to `repository`.

The operator sets are those that both ONNX Runtime here and the one in Triton's images read: ai.onnx 17,
ai.onnx.ml 4 (whose LabelEncoder takes its keys as raw tensors: a fifth of the time of int lists at a million keys).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from components.contracts.criteo import CATEGORICAL, MISSING_CATEGORY, NUM_CATEGORICAL
from components.contracts.dcn import DcnConfig
from components.contracts.durable import sha256_tree, write_whole
from components.contracts.errors import ContractError
from components.contracts.manifests import Model
from components.contracts.model_files import ModelWeights, read_model
from components.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT, PROBABILITY_OUTPUT, Tensor
from components.contracts.uris import local_path
from components.contracts.workflow import FIRST_ID, MISSING_ID, OOV_ID, TOMBSTONE, FeatureWorkflow
from components.deployment.graph_files import GRAPH_FILE

OPSET = 17
ML_OPSET = 4
IR_VERSION = 8
MAX_GRAPH_BYTES = 2**31 - 1
"""Protobuf's limit for one message; a larger table would have to lie beside the graph as external data."""

_ELEMENT_TYPES = {"FP32": TensorProto.FLOAT, "INT64": TensorProto.INT64}


def build_graph(workflow: FeatureWorkflow, weights: ModelWeights, config: DcnConfig) -> bytes:
    """The ONNX file of `workflow` followed by the network; the same arguments give the same bytes.

    Raises:
        ContractError: the weights do not fit the workflow or `config`, or the file would exceed 2 GB.
    """
    rows = sum(workflow.slot_sizes)
    if weights.embeddings.shape != (rows, config.embedding_dim):
        raise ContractError(
            f"embeddings have shape {weights.embeddings.shape}, expected {(rows, config.embedding_dim)} "
            "from the workflow's vocabularies"
        )
    estimate = weights.embeddings.nbytes + 16 * rows
    if estimate > MAX_GRAPH_BYTES:
        raise ContractError(f"graph would have about {estimate} bytes, expected at most {MAX_GRAPH_BYTES}")
    parts = _Parts()
    _encode_dense(parts, workflow)
    _encode_categorical(parts, workflow)
    _look_up(parts, weights.embeddings)
    _network(parts, weights.dense, config)
    return parts.serialize()


def export(model: Model, folder: Path) -> None:
    """Writes the graph of a stored model into `folder` (`graph_files`).

    Raises:
        ContractError: the model's files are absent, damaged or not those that its manifest names.
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
    config = DcnConfig.from_document(model.config)
    graph = build_graph(workflow, read_model(stored / Model.WEIGHTS, config, model.slot_sizes), config)
    write_whole(folder / GRAPH_FILE, graph)


class _Parts:
    """Nodes and constants, collected in order."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Adds a constant; answers its name."""
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Adds a node with one output; answers the output's name."""
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def serialize(self) -> bytes:
        """The finished model's bytes."""
        graph = helper.make_graph(
            self.nodes,
            "click_model",
            [_value(DENSE_INPUT), _value(CATEGORICAL_INPUT)],
            [_value(PROBABILITY_OUTPUT)],
            initializer=self.constants,
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="evergreen", ir_version=IR_VERSION)
        content: bytes = model.SerializeToString(deterministic=True)
        return content


def _value(tensor: Tensor) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(tensor.name, _ELEMENT_TYPES[tensor.datatype], ["rows", tensor.width])


def _encode_dense(parts: _Parts, workflow: FeatureWorkflow) -> None:
    """Adds `dense_encoded` [n, 13], operator by operator as `FeatureWorkflow.encode_dense`."""
    missing = parts.node("IsNaN", [DENSE_INPUT.name], "dense_missing")
    fill = parts.constant("fill", np.array(workflow.fill, np.float32))
    filled = parts.node("Where", [missing, fill, DENSE_INPUT.name], "dense_filled")
    clip = parts.constant("clip_min", np.array(workflow.clip_min, np.float32))
    clipped = parts.node("Max", [filled, clip], "dense_clipped")
    shifted = parts.node("Add", [clipped, parts.constant("one", np.array(1, np.float32))], "dense_shifted")
    logged = parts.node("Log", [shifted], "dense_logged")
    centred = parts.node("Sub", [logged, parts.constant("means", workflow.means.astype(np.float32))], "dense_centred")
    parts.node("Div", [centred, parts.constant("stds", workflow.stds.astype(np.float32))], "dense_encoded")


def _encode_categorical(parts: _Parts, workflow: FeatureWorkflow) -> None:
    """Adds `table_rows` [n, 26]: per slot, the row of the fused table (slot offset + id) of each raw category."""
    columns = [f"raw_{name}" for name in CATEGORICAL]
    parts.nodes.append(helper.make_node("Split", [CATEGORICAL_INPUT.name], columns, name="raw_columns", axis=1))
    encoded, offset = [], 0
    for name, vocabulary, size in zip(CATEGORICAL, workflow.vocabularies, workflow.slot_sizes):
        ids = FIRST_ID + np.arange(len(vocabulary), dtype=np.int64)
        # An id without a category is no key: its mark, sent as a raw value, is out of vocabulary like any other.
        real = vocabulary != TOMBSTONE
        keys = np.concatenate([np.array([MISSING_CATEGORY], np.int64), vocabulary[real]])
        values = offset + np.concatenate([np.array([MISSING_ID], np.int64), ids[real]])
        encoded.append(
            parts.node(
                "LabelEncoder",
                [f"raw_{name}"],
                f"row_{name}",
                domain="ai.onnx.ml",
                keys_tensor=numpy_helper.from_array(keys, f"keys_{name}"),
                values_tensor=numpy_helper.from_array(values, f"values_{name}"),
                default_tensor=numpy_helper.from_array(np.array([offset + OOV_ID], np.int64), f"default_{name}"),
            )
        )
        offset += size
    parts.node("Concat", encoded, "table_rows", axis=1)


def _look_up(parts: _Parts, embeddings: NDArray[np.float32]) -> None:
    """Adds `x0` [n, 26 * dim + 13]: the slots' vectors in slot order, then the dense values."""
    table = parts.constant("embeddings", embeddings.astype(np.float32, copy=False))
    vectors = parts.node("Gather", [table, "table_rows"], "vectors", axis=0)
    width = NUM_CATEGORICAL * embeddings.shape[1]
    shape = parts.constant("vectors_shape", np.array([-1, width], np.int64))
    flat = parts.node("Reshape", [vectors, shape], "vectors_flat")
    parts.node("Concat", [flat, "dense_encoded"], "x0", axis=1)


def _network(parts: _Parts, dense: dict[str, NDArray[np.float32]], config: DcnConfig) -> None:
    """Adds the network on `x0` as `contracts.dcn` states it, down to the probability [n, 1]."""
    for name, value in dense.items():
        # A cross weight of DCN v1 is a vector; as a column, MatMul makes it one number per row.
        is_cross_vector = name.startswith("cross.") and name.endswith(".weight")
        parts.constant(name, value.reshape(-1, 1) if is_cross_vector else value)
    crossed = "x0"
    for i in range(config.num_cross_layers):
        crossed = (_cross_matrix if config.projection_dim else _cross_vector)(parts, i, crossed)
    hidden = "x0"
    for i in range(len(config.tower)):
        linear = parts.node("Gemm", [hidden, f"tower.{i}.weight", f"tower.{i}.bias"], f"tower_{i}_linear")
        hidden = parts.node("Relu", [linear], f"tower_{i}")
    joined = parts.node("Concat", [hidden, crossed], "final_input", axis=1)
    logit = parts.node("Gemm", [joined, "final.weight", "final.bias"], "logit")
    parts.node("Sigmoid", [logit], PROBABILITY_OUTPUT.name)


def _cross_vector(parts: _Parts, layer: int, crossed: str) -> str:
    """Adds a cross layer of DCN v1; answers its output's name."""
    product = parts.node("MatMul", [crossed, f"cross.{layer}.weight"], f"cross_{layer}_product")
    scaled = parts.node("Mul", ["x0", product], f"cross_{layer}_scaled")
    summed = parts.node("Add", [scaled, crossed], f"cross_{layer}_summed")
    return parts.node("Add", [summed, f"cross.{layer}.bias"], f"cross_{layer}")


def _cross_matrix(parts: _Parts, layer: int, crossed: str) -> str:
    """Adds a cross layer of DCN v2; answers its output's name."""
    projected = parts.node("MatMul", [crossed, f"cross.{layer}.u"], f"cross_{layer}_projected")
    product = parts.node("Gemm", [projected, f"cross.{layer}.v", f"cross.{layer}.bias"], f"cross_{layer}_product")
    scaled = parts.node("Mul", ["x0", product], f"cross_{layer}_scaled")
    return parts.node("Add", [scaled, crossed], f"cross_{layer}")
