"""Build and store small models without torch.

A model has a workflow, an embedding table, and a network that is built from ONNX nodes. The toy
network is not part of the product. The network has one hidden layer, whose input is the vectors and
the dense values. Tests with the toy network depend only on the exported graph. `scores` computes
reference scores from raw values in float64 NumPy. The docstrings of `evergreen.contracts.workflow`
define the formulas.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from evergreen.config.features import MISSING_CATEGORY, Features
from evergreen.contracts.workflow import TOMBSTONE
from evergreen.networks.files import NETWORK_FILE, TABLE, new_model
from evergreen.runtime.durable import write_whole
from testing.networks import vectors_of
from testing.recommenders import SHOP
from tests.support.workflows import workflow_of

HIDDEN = 8


@dataclass(frozen=True, eq=False)
class ToyModel:
    """Weights of the toy network with its table."""

    features: Features
    table: np.ndarray
    dense: dict[str, np.ndarray]

    @property
    def document(self):
        """Configuration of the network for a manifest."""
        return {"network": "toy", "embedding_dim": self.table.shape[1]}

    def network(self):
        """Return the exported graph."""
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
        value, features = helper.make_tensor_value_info, self.features
        vectors = [len(features.vector_names), self.table.shape[1]]
        inputs = [
            value("dense", TensorProto.FLOAT, ["rows", len(features.dense_inputs)]),
            value("embeddings", TensorProto.FLOAT, ["rows", *vectors]),
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
        """Return the probabilities [n] of raw rows. All numeric columns use the default options."""
        p = {name: values.astype(np.float64) for name, values in self.dense.items()}
        tables = np.split(self.table, np.cumsum(workflow.slot_sizes)[:-1])
        vectors = vectors_of(tables, self.features.positions, ids_of(workflow, categorical))
        x = np.concatenate([*vectors, _scaled(workflow, dense)], axis=1)
        hidden = np.maximum(x @ p["hidden.weight"] + p["hidden.bias"], 0)
        logits = (hidden @ p["final.weight"])[:, 0] + p["bias"]
        return 1 / (1 + np.exp(np.minimum(-logits, 700.0)))


def toy_model(workflow, seed=0, *, embedding_dim=4, hidden=HIDDEN, scale=0.15):
    """Return random weights that fit the workflow."""
    random, features = np.random.default_rng(seed), workflow.features
    width = len(features.vector_names) * embedding_dim + len(features.dense_inputs)
    dense = {
        "hidden.weight": random.normal(0, scale, (width, hidden)),
        "hidden.bias": random.normal(0, scale, hidden),
        "final.weight": random.normal(0, 3 * scale, (hidden, 1)),
        "bias": random.normal(0, scale, 1),
    }
    table = random.normal(0, 0.3, (sum(workflow.slot_sizes), embedding_dim))
    return ToyModel(
        features,
        table.astype(np.float32),
        {name: values.astype(np.float32) for name, values in dense.items()},
    )


def toy_workflow(seed=0, vocabularies=None):
    """Return a workflow with cardinalities and keys of `raw_table`. One vocabulary is empty."""
    random, features = np.random.default_rng(seed), SHOP.features
    if vocabularies is None:
        vocabularies = []
        for i, name in enumerate(features.slots):
            keys = np.unique(np.random.default_rng(1000 + i).integers(0, 2**32 - 1, 3 + 7 * i))
            keys = np.arange(9) if name in features.lists else keys
            keep = random.permutation(keys)[: 0 if name == "shop" else max(1, len(keys) - 2)]
            vocabularies.append(keep.astype(np.int64))
    return workflow_of(
        vocabularies,
        means=random.normal(1.5, 0.5, len(features.numeric)).astype(np.float32),
        stds=random.uniform(0.5, 2.0, len(features.numeric)).astype(np.float32),
        frequency_threshold=2,
    )


def ids_of(workflow, categorical):
    """Return the ids of raw categories [n, positions], found one by one in a dictionary."""
    ids, features = np.empty_like(categorical), workflow.features
    for at, (name, slot) in enumerate(zip(features.position_features, features.positions.slots)):
        absent = 0 if name in features.lists else 1
        known = {
            int(key): 3 + i for i, key in enumerate(workflow.vocabularies[slot]) if key != TOMBSTONE
        } | {MISSING_CATEGORY: absent}
        ids[:, at] = [
            absent if name in workflow.excluded else known.get(int(key), 2)
            for key in categorical[:, at]
        ]
    return ids


def _scaled(workflow, dense):
    rows = []
    for row in dense.astype(np.float64):
        values = []
        columns = zip(workflow.features.numeric, row, workflow.means, workflow.stds)
        for name, value, mean, std in columns:
            filled = 0.0 if math.isnan(value) or name in workflow.excluded else float(value)
            values.append((math.log(1.0 + max(filled, 0.0)) - float(mean)) / float(std))
        rows.append(values)
    return np.array(rows)
