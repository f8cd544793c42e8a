"""HugeCTR's graph JSON of our network, as its `graph_to_json` writes it; reading is `contracts.graph_reader`'s.

Joins training, which keeps the graph beside the weights, to whoever builds the network without our code:
`hugectr.Model.construct_from_json`, NVIDIA's ONNX converter. Layout of 24.06: keys sorted, two spaces deep; one
`bottom` or `top` is a string, several are a list; HugeCTR's floats are float32, so 1e-7 reads 1.0000000116860974e-07.

What such a file does not hold, and a model manifest must: `projection_dim` (HugeCTR reads it but never writes it, so
its own file of a DCN v2 builds a v1; we write it), the dense optimizer, the solver, the initialisers where they are
HugeCTR's defaults, the slots' sizes of a DistributedSlot embedding, and how many GPUs shared the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.contracts.dcn import DcnConfig
from components.contracts.dcn_layers import CATEGORIES, DENSE, EMBEDDINGS, LABEL, Layer, dcn_layers
from components.contracts.sparse_files import max_vocabulary_size, workspace_mb
from components.runtime.durable import write_whole

DISTRIBUTED = "DistributedSlotSparseEmbeddingHash"
LOCALIZED = "LocalizedSlotSparseEmbeddingHash"


@dataclass(frozen=True, kw_only=True)
class EmbeddingTable:
    """What the graph says of the one table that all slots share."""

    workspace_mb: int
    """MiB per GPU."""
    max_vocabulary_size: int
    """Rows that fit, of all GPUs together (`sparse_files.max_vocabulary_size` each)."""
    type: str = DISTRIBUTED
    """Member of `hugectr.Embedding_t`."""
    slot_sizes: tuple[int, ...] | None = None
    """Number of ids per slot, where the embedding was told; None = it was not."""
    update_type: str = "Local"
    """Adam's, member of `hugectr.Update_t`: `Local` moves only the rows in the batch."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-7

    @classmethod
    def for_rows(cls, num_rows: int, dim: int, *, beta1: float, beta2: float, epsilon: float) -> EmbeddingTable:
        """The table of a model that one GPU holds: the smallest workspace for its rows and Adam's state."""
        needed = workspace_mb(num_rows, dim)
        return cls(
            workspace_mb=needed,
            max_vocabulary_size=max_vocabulary_size(needed, dim),
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A network and its table."""

    config: DcnConfig
    table: EmbeddingTable


def graph_document(graph: Graph) -> dict[str, Any]:
    """The graph as the JSON object that HugeCTR writes; of DCN v2 also `projection_dim`, which it only reads."""
    return {"layers": [_data(), _embedding(graph), *map(layer_document, dcn_layers(graph.config))]}


def write_graph(path: Path, graph: Graph) -> None:
    """Writes the graph JSON, whole or not at all."""
    write_whole(path, json.dumps(graph_document(graph), indent=2, sort_keys=True) + "\n")


def layer_document(layer: Layer) -> dict[str, Any]:
    """One dense layer as HugeCTR writes it."""
    document: dict[str, Any] = {
        "type": layer.type,
        "bottom": layer.bottoms[0] if len(layer.bottoms) == 1 else list(layer.bottoms),
        "top": layer.tops[0] if len(layer.tops) == 1 else list(layer.tops),
    }
    arguments = layer.arguments
    if layer.type == "Reshape":
        return {**document, "leading_dim": arguments["leading_dim"], "time_step": 0}
    if layer.type == "Concat":
        return {**document, "axis": 1}
    if layer.type == "Slice":
        return {**document, "ranges": [list(ends) for ends in arguments["ranges"]]}
    if layer.type == "MultiCross":
        cross = {"num_layers": arguments["num_layers"]}
        if rank := arguments["projection_dim"]:
            cross["projection_dim"] = rank
        return {**document, "mc_param": cross}
    if layer.type == "InnerProduct":
        return {**document, "fc_param": {"num_output": arguments["num_output"]}}
    if layer.type == "Dropout":
        return {**document, "rate": _float32(arguments["dropout_rate"])}
    return document


def _data() -> dict[str, Any]:
    return {
        "type": "Data",
        "label": {"top": LABEL, "label_dim": 1},
        "dense": {"top": DENSE, "dense_dim": NUM_DENSE},
        "sparse": [
            {
                "top": CATEGORIES,
                "nnz_per_slot": [1] * NUM_CATEGORICAL,
                "is_fixed_length": True,
                "slot_num": NUM_CATEGORICAL,
            }
        ],
    }


def _embedding(graph: Graph) -> dict[str, Any]:
    table = graph.table
    shape = {
        "workspace_size_per_gpu_in_mb": table.workspace_mb,
        "max_vocabulary_size_global": table.max_vocabulary_size,
        "embedding_vec_size": graph.config.embedding_dim,
        "combiner": "sum",
    }
    if table.slot_sizes is not None:
        shape["slot_size_array"] = list(table.slot_sizes)
    adam = {name: _float32(getattr(table, name)) for name in ("beta1", "beta2", "epsilon")}
    return {
        "type": table.type,
        "bottom": CATEGORIES,
        "top": EMBEDDINGS,
        "sparse_embedding_hparam": shape,
        "optimizer": {"type": "Adam", "update_type": table.update_type, "adam_hparam": adam},
    }


def _float32(value: float) -> float:
    return float(np.float32(value))
