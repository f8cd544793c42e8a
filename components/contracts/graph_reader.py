"""Reads a graph JSON of HugeCTR back as our network, and refuses any other network by the place where it differs.

The other half of `contracts.graph_json`, which says what such a file does not hold. Tensors may have any names: those
of NVIDIA's DCN sample, and the `_slice0`, `_slice1` of a Slice that HugeCTR put in by itself, fit as ours do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.contracts.dcn import DcnConfig
from components.contracts.dcn_layers import CATEGORIES, DENSE, EMBEDDINGS, LABEL, dcn_layers
from components.contracts.graph_json import DISTRIBUTED, LOCALIZED, EmbeddingTable, Graph, layer_document
from components.runtime.errors import ContractError

_INITIALISERS = {"weight_init", "bias_init"}
"""Written where they are not the default; the weights come from the model files, so they say nothing."""
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_MAX_INTEGER = 2**63 - 1
_NETWORK = ("Reshape", "Concat", "Slice", "MultiCross", "InnerProduct", "ReLU", "Dropout", "BinaryCrossEntropyLoss")


def read_graph(path: Path, *, projection_dim: int) -> Graph:
    """The network and table that the graph JSON at `path` describes.

    Args:
        path: The file.
        projection_dim: Of the model's manifest, because HugeCTR's file does not hold it; 0 = DCN v1.

    Raises:
        ContractError: the file cannot be read, or holds another network than our DCN; names the place, what is there
            and what was expected.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ContractError(f"graph {path} cannot be read: {error}") from error
    return graph_from_document(document, projection_dim=projection_dim, source=f"graph {path}")


def graph_from_document(document: Any, *, projection_dim: int, source: str) -> Graph:
    """The network in a parsed graph JSON; `source` is named in errors. See `read_graph`."""
    layers = _Place(source, document).keys({"layers"}, optional={"model_name"}).at("layers").items()
    if len(layers) < 3:
        raise ContractError(f"{source} has {len(layers)} layers, expected Data, an embedding and the network")
    names = _Names()
    _read_data(layers[0], names)
    table, dim = _read_embedding(layers[1], names)
    config = _config(layers[2:], dim, projection_dim, source)
    expected = dcn_layers(config)
    if (found := [layer.at("type").value for layer in layers[2:]]) != [layer.type for layer in expected]:
        raise ContractError(f"{source} has layers {found}, expected {[layer.type for layer in expected]}")
    for place, layer in zip(layers[2:], expected):
        described = layer_document(layer)
        if layer.type == "MultiCross" and "projection_dim" not in place.at("mc_param").value:
            described["mc_param"].pop("projection_dim", None)
        place.require(described)
        names.read(place.at("bottom"), layer.bottoms)
        names.write(place.at("top"), layer.tops)
    return Graph(config=config, table=table)


class _Place:
    """A value of the document with the words that find it."""

    def __init__(self, where: str, value: Any) -> None:
        self.where = where
        self.value = value

    def keys(self, required: set[str], optional: set[str] | None = None) -> _Place:
        if not isinstance(self.value, dict):
            raise ContractError(f"{self.where} is {self.value!r}, expected a JSON object")
        found = set(self.value)
        if wrong := (required - found) | (found - required - (optional or set())):
            raise ContractError(f"{self.where} has unknown or missing keys {sorted(wrong)}")
        return self

    def at(self, key: str) -> _Place:
        if not isinstance(self.value, dict) or key not in self.value:
            raise ContractError(f"{self.where} lacks {key!r}")
        return _Place(f"{self.where}: {key}", self.value[key])

    def items(self) -> list[_Place]:
        if not isinstance(self.value, list):
            raise ContractError(f"{self.where} is {self.value!r}, expected a list")
        return [_Place(f"{self.where}[{number}]", value) for number, value in enumerate(self.value)]

    def integer(self, at_least: int = 1) -> int:
        if type(self.value) is not int or not at_least <= self.value <= _MAX_INTEGER:
            raise ContractError(
                f"{self.where} is {self.value!r}, expected a whole number of at least {at_least} that 63 bits hold"
            )
        return self.value

    def number(self) -> float:
        """A float32 as its shortest decimal: 1.0000000116860974e-07 is 1e-07."""
        # JSON's integers know no limit and Python reads NaN; neither is a float32.
        if type(self.value) not in (int, float) or not abs(self.value) <= _MAX_FLOAT32:
            raise ContractError(f"{self.where} is {self.value!r}, expected a number that float32 holds")
        return _shortest(self.value)

    def share(self) -> float:
        """A number in [0, 1)."""
        if not 0.0 <= (found := self.number()) < 1.0:
            raise ContractError(f"{self.where} is {self.value!r}, expected a share in [0, 1)")
        return found

    def one_of(self, *expected: Any) -> Any:
        if self.value not in expected:
            raise ContractError(f"{self.where} is {self.value!r}, expected {' or '.join(map(repr, expected))}")
        return self.value

    def require(self, expected: dict[str, Any]) -> None:
        """Refuses other keys or values than those `expected`, names of tensors apart."""
        self.keys(set(expected), _INITIALISERS)
        for key, value in expected.items():
            if isinstance(value, dict):
                self.at(key).require(value)
            elif isinstance(value, float):
                found = self.at(key)
                _Place(found.where, found.number()).one_of(_shortest(value))
            elif key not in ("bottom", "top"):
                self.at(key).one_of(value)


class _Names:
    """Which name each of our tensors has in the file."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def write(self, place: _Place, ours: tuple[str, ...]) -> None:
        """Takes note of the tensors that a layer writes."""
        found = _as_list(place.value)
        if len(found) != len(ours) or not all(isinstance(name, str) for name in found):
            raise ContractError(f"{place.where} is {place.value!r}, expected {len(ours)} names of tensors")
        for name, our in zip(found, ours):
            if name in self._of.values():
                raise ContractError(f"{place.where} writes tensor {name!r}, which another layer writes")
            self._of[our] = name

    def read(self, place: _Place, ours: tuple[str, ...]) -> None:
        """Refuses a layer that reads other tensors than its place in the network says."""
        if _as_list(place.value) != (expected := [self._of[name] for name in ours]):
            raise ContractError(f"{place.where} is {place.value!r}, expected {expected}")


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read_data(place: _Place, names: _Names) -> None:
    place.keys({"type", "label", "dense", "sparse"}).at("type").one_of("Data")
    label, dense = place.at("label").keys({"top", "label_dim"}), place.at("dense").keys({"top", "dense_dim"})
    label.at("label_dim").one_of(1)
    dense.at("dense_dim").one_of(NUM_DENSE)
    if len(inputs := place.at("sparse").items()) != 1:
        raise ContractError(f"{place.where} has {len(inputs)} sparse inputs, expected 1 that all slots share")
    sparse = inputs[0].keys({"top", "nnz_per_slot", "is_fixed_length", "slot_num"})
    sparse.at("slot_num").one_of(NUM_CATEGORICAL)
    # The most keys that a slot may have: it sizes buffers, and with one key in each slot changes no result.
    most = sparse.at("nnz_per_slot")
    if len([place.integer() for place in most.items()]) != NUM_CATEGORICAL:
        raise ContractError(f"{most.where} is {most.value}, expected {NUM_CATEGORICAL} numbers")
    for part, ours in ((label, LABEL), (dense, DENSE), (sparse, CATEGORIES)):
        names.write(part.at("top"), (ours,))


def _read_embedding(place: _Place, names: _Names) -> tuple[EmbeddingTable, int]:
    """The table, and the width of its vectors."""
    place.keys({"type", "bottom", "top", "sparse_embedding_hparam", "optimizer"})
    names.read(place.at("bottom"), (CATEGORIES,))
    names.write(place.at("top"), (EMBEDDINGS,))
    shape = place.at("sparse_embedding_hparam").keys(
        {"workspace_size_per_gpu_in_mb", "max_vocabulary_size_global", "embedding_vec_size", "combiner"},
        optional={"slot_size_array"},
    )
    shape.at("combiner").one_of("sum")
    slot_sizes = None
    if "slot_size_array" in shape.value:
        slot_sizes = tuple(size.integer() for size in shape.at("slot_size_array").items())
        if len(slot_sizes) != NUM_CATEGORICAL:
            raise ContractError(f"{shape.where} has {len(slot_sizes)} slot sizes, expected {NUM_CATEGORICAL}")
    optimizer = place.at("optimizer").keys({"type", "update_type", "adam_hparam"})
    optimizer.at("type").one_of("Adam")
    adam = optimizer.at("adam_hparam").keys({"beta1", "beta2", "epsilon"})
    table = EmbeddingTable(
        type=place.at("type").one_of(DISTRIBUTED, LOCALIZED),
        workspace_mb=shape.at("workspace_size_per_gpu_in_mb").integer(),
        max_vocabulary_size=shape.at("max_vocabulary_size_global").integer(),
        slot_sizes=slot_sizes,
        update_type=optimizer.at("update_type").one_of("Local", "Global", "LazyGlobal"),
        beta1=adam.at("beta1").share(),
        beta2=adam.at("beta2").share(),
        epsilon=adam.at("epsilon").number(),
    )
    return table, shape.at("embedding_vec_size").integer()


def _config(layers: list[_Place], dim: int, projection_dim: int, source: str) -> DcnConfig:
    """The network's shape by its layers' sizes; whether they stand in the right places is not looked at."""
    by_type: dict[str, list[_Place]] = {type_: [] for type_ in _NETWORK}
    for layer in layers:
        by_type[layer.at("type").one_of(*_NETWORK)].append(layer)
    crosses, widths = by_type["MultiCross"], by_type["InnerProduct"]
    if len(crosses) != 1 or len(widths) < 2:
        raise ContractError(
            f"{source} has {len(crosses)} MultiCross and {len(widths)} InnerProduct layers, expected 1 and at least 2"
        )
    cross = crosses[0].at("mc_param").keys({"num_layers"}, _INITIALISERS | {"projection_dim"})
    if "projection_dim" in cross.value:
        cross.at("projection_dim").one_of(projection_dim)
    rates = [layer.at("rate").share() for layer in by_type["Dropout"]]
    return DcnConfig(
        embedding_dim=dim,
        num_cross_layers=cross.at("num_layers").integer(),
        tower=tuple(width.at("fc_param").at("num_output").integer() for width in widths[:-1]),
        dropout=rates[0] if rates else 0.0,
        projection_dim=projection_dim,
    )
