"""`graph_to_json` from the calls that the double saw, without what HugeCTR's own loses: `projection_dim`, `shape`.

Written from the description of HugeCTR's file, without the code that is tested against it.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def per_slot(sparse: Any) -> list[int]:
    """`nnz_per_slot` as a list, one number per slot."""
    return [sparse.nnz_per_slot] * sparse.slot_num if isinstance(sparse.nnz_per_slot, int) else sparse.nnz_per_slot


def write(path: str, name: str, data: Any, table: Any, optimizer: Any, layers: list[Any], *, num_gpus: int) -> None:
    """Writes the graph: input, embedding and dense layers in the order in which they were added."""
    document: dict[str, Any] = {"layers": [_data(data), _embedding(table, optimizer, num_gpus), *map(_dense, layers)]}
    if name:
        document["model_name"] = name
    Path(path).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def _single(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def _one_or_all(names: list[str]) -> Any:
    return names[0] if len(names) == 1 else list(names)


def _data(data: Any) -> dict[str, Any]:
    return {
        "type": "Data",
        "label": {"top": data.label_name, "label_dim": data.label_dim},
        "dense": {"top": data.dense_name, "dense_dim": data.dense_dim},
        "sparse": [
            {
                "top": sparse.top_name,
                "nnz_per_slot": per_slot(sparse),
                "is_fixed_length": sparse.is_fixed_length,
                "slot_num": sparse.slot_num,
            }
            for sparse in data.data_reader_sparse_param_array
        ],
    }


def _embedding(table: Any, optimizer: Any, num_gpus: int) -> dict[str, Any]:
    # Adam keeps two vectors beside each one.
    rows = table.workspace_size_per_gpu_in_mb * 1024 * 1024 // (3 * 4 * table.embedding_vec_size)
    shape = {
        "workspace_size_per_gpu_in_mb": table.workspace_size_per_gpu_in_mb,
        "max_vocabulary_size_global": rows * num_gpus,
        "embedding_vec_size": table.embedding_vec_size,
        "combiner": table.combiner,
    }
    if table.slot_size_array:
        shape["slot_size_array"] = table.slot_size_array
    return {
        "type": table.embedding_type.name,
        "bottom": table.bottom_name,
        "top": table.sparse_embedding_name,
        "sparse_embedding_hparam": shape,
        "optimizer": {
            "type": optimizer.optimizer_type.name,
            "update_type": optimizer.update_type.name,
            "adam_hparam": {name: _single(getattr(optimizer, name)) for name in ("beta1", "beta2", "epsilon")},
        },
    }


def _dense(layer: Any) -> dict[str, Any]:
    own = {
        "Reshape": lambda: {"leading_dim": layer.leading_dim, "time_step": layer.time_step},
        "Concat": lambda: {"axis": layer.axis},
        "Slice": lambda: {"ranges": [list(pair) for pair in layer.ranges]},
        "MultiCross": lambda: {"mc_param": {"num_layers": layer.num_layers}},
        "InnerProduct": lambda: {"fc_param": {"num_output": layer.num_output}},
        "Dropout": lambda: {"rate": _single(layer.dropout_rate)},
    }.get(layer.layer_type.name, dict)
    ends = {"bottom": _one_or_all(layer.bottom_names), "top": _one_or_all(layer.top_names)}
    return {"type": layer.layer_type.name, **ends, **own()}
