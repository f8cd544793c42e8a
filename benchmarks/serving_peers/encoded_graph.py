"""The Deep & Cross Network on rows that something else encoded, as an ONNX graph: the reference's second model.

Written apart from deployment's graph, so that equal scores say something about both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.models.configs import DcnConfig
from components.models.files import Tensors


def encoded_graph(config: DcnConfig, weights: Tensors, slot_sizes: list[int]) -> bytes:
    """The ONNX file: `dense_encoded` [n, 13] and `ids` [n, 26] to `probability` [n, 1]; DCN v1 only."""
    assert not config.projection_dim, "the reference's network is DCN v1"
    offsets = np.concatenate([[0], np.cumsum(slot_sizes)[:-1]]).astype(np.int64)
    width = NUM_CATEGORICAL * config.embedding_dim
    constants: dict[str, NDArray[Any]] = {
        "table": weights.table,
        "offsets": offsets,
        "flat": np.array([-1, width], np.int64),
        **{n: v for n, v in weights.dense.items() if n.startswith("tower") or n == "bias"},
    }
    for i in range(config.num_cross_layers):
        constants[f"cross.{i}.weight"] = weights.dense["cross_weight"][i][:, None]
        constants[f"cross.{i}.bias"] = weights.dense["cross_bias"][i]
    constants["final.weight"] = np.concatenate([weights.dense["final_tower"], weights.dense["final_cross"]], axis=1).T
    nodes = [
        helper.make_node("Add", ["ids", "offsets"], ["rows"]),
        helper.make_node("Gather", ["table", "rows"], ["vectors"]),
        helper.make_node("Reshape", ["vectors", "flat"], ["vectors_flat"]),
        helper.make_node("Concat", ["vectors_flat", "dense_encoded"], ["x0"], axis=1),
    ]
    crossed = deep = "x0"
    for i in range(config.num_cross_layers):
        nodes += [
            helper.make_node("MatMul", [crossed, f"cross.{i}.weight"], [f"dot{i}"]),
            helper.make_node("Mul", ["x0", f"dot{i}"], [f"scaled{i}"]),
            helper.make_node("Add", [f"scaled{i}", f"cross.{i}.bias"], [f"shifted{i}"]),
            helper.make_node("Add", [f"shifted{i}", crossed], [f"crossed{i}"]),
        ]
        crossed = f"crossed{i}"
    for i in range(len(config.tower)):
        names = [deep, f"tower.{3 * i}.weight", f"tower.{3 * i}.bias"]
        nodes.append(helper.make_node("Gemm", names, [f"linear{i}"], transB=1))
        nodes.append(helper.make_node("Relu", [f"linear{i}"], [f"deep{i}"]))
        deep = f"deep{i}"
    nodes += [
        helper.make_node("Concat", [deep, crossed], ["joined"], axis=1),
        helper.make_node("Gemm", ["joined", "final.weight", "bias"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["probability"]),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [
            helper.make_tensor_value_info("dense_encoded", TensorProto.FLOAT, ["n", NUM_DENSE]),
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", NUM_CATEGORICAL]),
        ],
        [helper.make_tensor_value_info("probability", TensorProto.FLOAT, ["n", 1])],
        initializer=[numpy_helper.from_array(np.ascontiguousarray(v), n) for n, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content
