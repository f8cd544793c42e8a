"""Write a model of the registry as files for NVIDIA's converter `hugectr2onnx`.

The converter reads the graph as JSON and HugeCTR's weight files (`files`). The JSON is the document
that HugeCTR's `graph_to_json` writes. `keys.json` maps the id columns to the converter's inputs,
because the converter expects keys and not ids.

Two kinds of DCN are refused. The converter ignores `projection_dim`, so it computes a wrong DCN v2
(scores differ by up to 0.31). The converter computes the mean of a list with the list's maximum
length instead of the number of its elements (scores differ by up to 0.018).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.training.hugectr.embeddings import Embedding, embeddings_of, max_vocabulary_size
from components.training.hugectr.files import export_model
from components.training.hugectr.layers import DENSE, LABEL, MODEL_NAME, Layer, dcn_layers
from evergreen.config.features import FeaturePositions
from evergreen.config.model import DcnConfig, NetworkConfig
from evergreen.config.training import TrainingSettings
from evergreen.networks.files import StoredModel, open_model
from evergreen.runtime.errors import ContractError

GRAPH_FILE, KEYS_FILE = f"{MODEL_NAME}.json", "keys.json"


def require_convertible(config: NetworkConfig, positions: FeaturePositions) -> None:
    """Check that NVIDIA's converter computes this network.

    Raises:
        ContractError: the network is not a DCN v1 with categorical columns, or a list is pooled by
            mean.
    """
    if not isinstance(config, DcnConfig):
        raise ContractError(
            f"network is {config.network!r}, expected dcn, the only network of backend hugectr"
        )
    if config.projection_dim:
        raise ContractError(
            f"projection_dim is {config.projection_dim}, expected 0: NVIDIA's converter ignores "
            "projection_dim and would write another network"
        )
    if not config.num_categorical:
        raise ContractError(
            "num_categorical is 0, expected at least 1: HugeCTR reads rows with keys"
        )
    if any(each.pool == "mean" for each in positions.lists):
        raise ContractError(
            "a list is pooled by mean, expected sum: NVIDIA's converter divides by the list's "
            "maximum length and not by its number of elements"
        )


def write_for_converter(
    weights: Path,
    config: NetworkConfig,
    slot_sizes: Sequence[int],
    *,
    positions: FeaturePositions,
    columns: Sequence[str],
    folder: Path,
) -> None:
    """Write a stored model into `folder` in the form that the converter reads.

    Args:
        weights: Folder of the model's weights.
        config: Configuration of the network.
        slot_sizes: Number of ids of each slot.
        positions: Slot of each categorical position, and the positions of each list.
        columns: Name of each id column.
        folder: Folder to write, created if it is absent.

    Raises:
        ContractError: the converter does not compute this network, or the weights are corrupt.
        OSError: the disk is full or fails.
    """
    require_convertible(config, positions)
    assert isinstance(config, DcnConfig), "require_convertible has checked it"
    stored = open_model(weights, slot_sizes)
    embeddings = embeddings_of(config, slot_sizes, positions)
    without_state = StoredModel(weights=stored.weights, moments=None, step=0)
    export_model(without_state, config, embeddings, num_gpus=1, folder=folder)
    graph = graph_document(config, embeddings)
    (folder / GRAPH_FILE).write_text(json.dumps(graph, indent=2, sort_keys=True) + "\n")
    keys = keys_document(embeddings, columns)
    (folder / KEYS_FILE).write_text(json.dumps(keys, indent=2) + "\n")


def graph_document(config: DcnConfig, embeddings: Sequence[Embedding]) -> dict[str, Any]:
    """Return the graph as HugeCTR's `graph_to_json` writes it for one GPU."""
    settings = TrainingSettings()
    optimizer = {
        "type": "Adam",
        "update_type": "Local",
        "adam_hparam": {
            "beta1": settings.beta1,
            "beta2": settings.beta2,
            "epsilon": settings.epsilon,
        },
    }
    data = {
        "type": "Data",
        "label": {"top": LABEL, "label_dim": 1},
        "dense": {"top": DENSE, "dense_dim": config.num_dense},
        "sparse": [
            {
                "top": f"keys_{each.number}",
                "nnz_per_slot": [len(slot.columns) for slot in each.slots],
                "is_fixed_length": not any(slot.is_list for slot in each.slots),
                "slot_num": len(each.slots),
            }
            for each in embeddings
        ],
    }
    tables = [
        {
            "type": "DistributedSlotSparseEmbeddingHash",
            "bottom": f"keys_{each.number}",
            "top": f"embedding_{each.number}",
            "sparse_embedding_hparam": {
                "workspace_size_per_gpu_in_mb": each.workspace_mb(1),
                "max_vocabulary_size_global": max_vocabulary_size(each.workspace_mb(1), each.width),
                "embedding_vec_size": each.width,
                "combiner": each.combiner,
            },
            "optimizer": optimizer,
        }
        for each in embeddings
    ]
    layers = [_layer_document(each) for each in dcn_layers(config, embeddings)]
    return {"layers": [data, *tables, *layers], "model_name": MODEL_NAME}


def _layer_document(layer: Layer) -> dict[str, Any]:
    """Return the JSON entry of a dense layer.

    One tensor is written as its name, and several tensors are written as a list of names.
    """
    given, details = layer.arguments, dict[str, Any]()
    match layer.type:
        case "Reshape":
            details = {"leading_dim": given["leading_dim"], "time_step": 0}
        case "Concat":
            details = {"axis": 1}
        case "Slice":
            details = {"ranges": [list(each) for each in given["ranges"]]}
        case "MultiCross":
            details = {"mc_param": {"num_layers": given["num_layers"]}}
        case "InnerProduct":
            details = {"fc_param": {"num_output": given["num_output"]}}
        case "Dropout":
            details = {"rate": given["dropout_rate"]}
    tensors = {
        name: each[0] if len(each) == 1 else each
        for name, each in (("bottom", layer.bottoms), ("top", layer.tops))
    }
    return {"type": layer.type, **tensors, **details}


def keys_document(embeddings: Sequence[Embedding], columns: Sequence[str]) -> dict[str, Any]:
    """Return each id column's position in the inputs of the converted graph, and its first key.

    The key of an id is `first_key` plus the id. `padding` is a key without a vector. The key fills
    unused positions of an input, for example after a short list.
    """
    found = {
        column: {
            "input": f"keys_{each.number}",
            "slot": at,
            "position": position,
            "first_key": slot.first_key,
        }
        for each in embeddings
        for at, slot in enumerate(each.slots)
        for position, column in enumerate(slot.columns)
    }
    return {
        "padding": {f"keys_{each.number}": each.num_keys for each in embeddings},
        "columns": {name: found[column] for column, name in enumerate(columns)},
    }
