"""Stored models without torch: a workflow, a table, and a network written as ONNX node by node.

The product does not know the toy network: one hidden layer on concat(vectors, dense values). Tests
with the toy network depend only on the exported graph. `scores` computes reference scores from raw
values, in float64 NumPy, row by row, by the docstrings of `evergreen.contracts.workflow`.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.workflow import TOMBSTONE
from evergreen.networks.files import NETWORK_FILE, TABLE, new_model
from evergreen.runtime.durable import write_whole
from tests.support.workflows import workflow_of

HIDDEN = 8


@dataclass(frozen=True, eq=False)
class ToyModel:
    """Weights of the toy network with its table."""

    table: np.ndarray
    dense: dict[str, np.ndarray]

    @property
    def document(self):
        """Configuration of the network for a manifest."""
        return {"network": "toy", "embedding_dim": self.table.shape[1]}

    def network(self):
        """Return the exported graph."""
        width = len(self.dense["hidden.weight"])
        dim, num_slots = self.table.shape[1], (width - 13) // self.table.shape[1]
        nodes = [
            helper.make_node("Flatten", ["embeddings"], ["flat"]),
            helper.make_node("Concat", ["flat", "dense"], ["all"], axis=1),
            helper.make_node("Gemm", ["all", "hidden.weight", "hidden.bias"], ["linear"]),
            helper.make_node("Relu", ["linear"], ["hidden"]),
            helper.make_node("Gemm", ["hidden", "final.weight", "bias"], ["column"]),
            helper.make_node("Flatten", ["column"], ["logits"], axis=0),
            helper.make_node("Reshape", ["logits", "all_rows"], ["logit"]),
        ]
        constants = [numpy_helper.from_array(values, name) for name, values in self.dense.items()]
        constants.append(numpy_helper.from_array(np.array([-1]), "all_rows"))
        value = helper.make_tensor_value_info
        inputs = [
            value("dense", TensorProto.FLOAT, ["rows", 13]),
            value("embeddings", TensorProto.FLOAT, ["rows", num_slots, dim]),
        ]
        graph = helper.make_graph(
            nodes, "toy", inputs, [value("logit", TensorProto.FLOAT, ["rows"])], constants
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def save(self, folder: Path) -> None:
        """Write the model's files."""
        shapes = {
            TABLE: self.table.shape,
            **{name: values.shape for name, values in self.dense.items()},
        }
        with new_model(folder, shapes, with_moments=False) as stored:
            stored.weights.table[:] = self.table
            for name, values in self.dense.items():
                stored.weights.dense[name][:] = values
        write_whole(folder / NETWORK_FILE, self.network().SerializeToString(deterministic=True))

    def scores(self, workflow, dense, categorical):
        """Return the probabilities [n] of raw rows."""
        p = {name: values.astype(np.float64) for name, values in self.dense.items()}
        known, answers = _known(workflow), []
        for dense_row, categorical_row in zip(dense, categorical):
            values, rows = _encode(workflow, known, dense_row, categorical_row)
            x = np.concatenate([self.table[rows].astype(np.float64).ravel(), values])
            hidden = np.maximum(x @ p["hidden.weight"] + p["hidden.bias"], 0)
            logit = (hidden @ p["final.weight"])[0] + p["bias"][0]
            answers.append(1 / (1 + np.exp(np.minimum(-logit, 700.0))))
        return np.array(answers)


def toy_model(workflow, seed=0, *, embedding_dim=4, hidden=HIDDEN, scale=0.15):
    """Return random weights that fit the workflow."""
    random = np.random.default_rng(seed)
    width = 26 * embedding_dim + 13
    dense = {
        "hidden.weight": random.normal(0, scale, (width, hidden)),
        "hidden.bias": random.normal(0, scale, hidden),
        "final.weight": random.normal(0, 3 * scale, (hidden, 1)),
        "bias": random.normal(0, scale, 1),
    }
    table = random.normal(0, 0.3, (sum(workflow.slot_sizes), embedding_dim))
    return ToyModel(
        table.astype(np.float32),
        {name: values.astype(np.float32) for name, values in dense.items()},
    )


def toy_workflow(seed=0, vocabularies=None):
    """Return a workflow with the cardinalities and keys of `raw_table`.

    One vocabulary in five is empty.
    """
    random = np.random.default_rng(seed)
    if vocabularies is None:
        vocabularies = []
        for i in range(26):
            keys = np.unique(np.random.default_rng(1000 + i).integers(0, 2**32 - 1, 3 + 7 * i))
            keep = random.permutation(keys)[: 0 if i % 5 == 4 else max(1, len(keys) - 2)]
            vocabularies.append(keep.astype(np.int64))
    return workflow_of(
        vocabularies,
        means=random.normal(1.5, 0.5, 13).astype(np.float32),
        stds=random.uniform(0.5, 2.0, 13).astype(np.float32),
        frequency_threshold=2,
    )


def _known(workflow):
    """Map each key of each vocabulary to the row that the key has in the table."""
    return [
        {int(k): 3 + i for i, k in enumerate(vocabulary) if k != TOMBSTONE}
        for vocabulary in workflow.vocabularies
    ]


def _encode(workflow, known, dense_row, categorical_row):
    values = []
    for value, mean, std in zip(dense_row, workflow.means, workflow.stds):
        value = 0.0 if math.isnan(value) else float(value)
        values.append((math.log(1.0 + max(value, 0.0)) - float(mean)) / float(std))
    rows, offset = [], 0
    for key, vocabulary, rows_of_keys in zip(categorical_row, workflow.vocabularies, known):
        rows.append(offset + (1 if key == MISSING_CATEGORY else rows_of_keys.get(int(key), 2)))
        offset += 3 + len(vocabulary)
    return values, rows
