"""The network as a list of HugeCTR's layers, under the names that both its Python API and its graph JSON use.

Joins training, which makes a `hugectr.DenseLayer` of each, to `contracts.graph_json`, which writes and reads them as
JSON. The order is that of the weights in the dense file (`contracts.dcn.dense_layout`): cross layers, tower, final.
Data and embeddings come before and belong to whoever knows the data.

x0 feeds two layers. HugeCTR would put a Slice before them by itself, as in NVIDIA's DCN sample; here it stands in the
list, so that the graph that is built, the graph that is saved and this list are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from components.contracts.criteo import NUM_CATEGORICAL
from components.contracts.dcn import DcnConfig

LABEL = "label"
DENSE = "dense"
CATEGORIES = "categories"
"""The reader's keys, one per slot."""
EMBEDDINGS = "embeddings"
"""[batch, slots, dim]."""
LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One dense layer."""

    type: str
    """Member of `hugectr.Layer_t`, and `type` in the graph JSON."""
    bottoms: tuple[str, ...]
    """Tensors read."""
    tops: tuple[str, ...]
    """Tensors written."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `hugectr.DenseLayer`, by name."""


def dcn_layers(config: DcnConfig) -> list[Layer]:
    """The dense layers of the network, from the embeddings to the loss.

    Without dropout there are no Dropout layers: HugeCTR's take rates above 0 only.

    >>> for layer in dcn_layers(DcnConfig(embedding_dim=1, num_cross_layers=2, tower=(8,))):
    ...     print(layer.type, layer.bottoms, layer.tops, layer.arguments)
    Reshape ('embeddings',) ('embeddings_flat',) {'leading_dim': 26}
    Concat ('embeddings_flat', 'dense') ('x0',) {}
    Slice ('x0',) ('x0_cross', 'x0_tower') {'ranges': [(0, 39), (0, 39)]}
    MultiCross ('x0_cross',) ('cross',) {'num_layers': 2, 'projection_dim': 0}
    InnerProduct ('x0_tower',) ('tower_0_linear',) {'num_output': 8}
    ReLU ('tower_0_linear',) ('tower_0_relu',) {}
    Concat ('tower_0_relu', 'cross') ('final_input',) {}
    InnerProduct ('final_input',) ('logit',) {'num_output': 1}
    BinaryCrossEntropyLoss ('logit', 'label') ('loss',) {}
    """
    flat_width = NUM_CATEGORICAL * config.embedding_dim
    whole = (0, config.input_width)
    cross = {"num_layers": config.num_cross_layers, "projection_dim": config.projection_dim}
    layers = [
        _layer("Reshape", [EMBEDDINGS], ["embeddings_flat"], leading_dim=flat_width),
        _layer("Concat", ["embeddings_flat", DENSE], ["x0"]),
        _layer("Slice", ["x0"], ["x0_cross", "x0_tower"], ranges=[whole, whole]),
        _layer("MultiCross", ["x0_cross"], ["cross"], **cross),
    ]
    hidden = "x0_tower"
    for i, width in enumerate(config.tower):
        layers += [
            _layer("InnerProduct", [hidden], [f"tower_{i}_linear"], num_output=width),
            _layer("ReLU", [f"tower_{i}_linear"], [f"tower_{i}_relu"]),
        ]
        hidden = f"tower_{i}_relu"
        if config.dropout:
            layers += [_layer("Dropout", [hidden], [f"tower_{i}_dropout"], dropout_rate=config.dropout)]
            hidden = f"tower_{i}_dropout"
    return [
        *layers,
        _layer("Concat", [hidden, "cross"], ["final_input"]),
        _layer("InnerProduct", ["final_input"], ["logit"], num_output=1),
        _layer("BinaryCrossEntropyLoss", ["logit", LABEL], [LOSS]),
    ]


def _layer(type_: str, bottoms: list[str], tops: list[str], **arguments: Any) -> Layer:
    return Layer(type=type_, bottoms=tuple(bottoms), tops=tuple(tops), arguments=arguments)
