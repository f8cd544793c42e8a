"""The Deep & Cross Network's shape: settings, and the order of its dense parameters.

Joins training (HugeCTR or PyTorch) to evaluation and deployment: all three read the same flat weight file by this
layout. The arithmetic is in `components.dcn` (PyTorch) and in deployment's graph.

The network (as HugeCTR's MultiCross computes it): x0 = concat(embeddings of 26 slots, 13 dense values); cross layers;
tower of InnerProduct + ReLU on x0; logit = InnerProduct(concat(tower, cross)). Cross layer of DCN v1 (Wang et al. 2017,
arXiv 1708.05123): `x_{l+1} = x0 * (x_l . w_l) + x_l + b_l`; of DCN v2 with low-rank matrices (Wang et al. 2021,
arXiv 2008.13535): `x_{l+1} = x0 * (x_l U_l V_l + b_l) + x_l`, the bias inside the product.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.runtime.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class DcnConfig:
    """Shape of the network; defaults suit a laptop."""

    embedding_dim: int = 16
    """Width of one category's vector."""
    num_cross_layers: int = 3
    tower: tuple[int, ...] = (128, 64)
    """Widths of the tower's hidden layers."""
    dropout: float = 0.0
    """Share of tower activations zeroed in training; 0 = none."""
    projection_dim: int = 0
    """Rank of the cross layers' matrices (DCN v2); 0 = DCN v1, whose cross layers have one weight vector each."""

    def __post_init__(self) -> None:
        """Refuses shapes that no network has."""
        for name, value in (("embedding_dim", self.embedding_dim), ("num_cross_layers", self.num_cross_layers)):
            if value < 1:
                raise ContractError(f"{name} is {value}, expected at least 1")
        if not self.tower or min(self.tower) < 1:
            raise ContractError(f"tower is {self.tower}, expected one or more widths of at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ContractError(f"dropout is {self.dropout}, expected a share in [0, 1)")
        if self.projection_dim < 0:
            raise ContractError(f"projection_dim is {self.projection_dim}, expected 0 (DCN v1) or a rank")

    @property
    def input_width(self) -> int:
        """Width of x0: all embeddings, then the dense values."""
        return NUM_CATEGORICAL * self.embedding_dim + NUM_DENSE

    def as_document(self) -> dict[str, Any]:
        """The settings as JSON-ready values."""
        return {**asdict(self), "tower": list(self.tower)}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> DcnConfig:
        """The settings in `document`; documents from before DCN v2 have no `projection_dim`, which then is 0.

        Raises:
            ContractError: unknown or missing names.
        """
        document = {"projection_dim": 0, **document}
        if wrong := document.keys() ^ {f.name for f in fields(cls)}:
            raise ContractError(f"DCN settings have unknown or missing names {sorted(wrong)}")
        return cls(**{**document, "tower": tuple(document["tower"])})


def dense_layout(config: DcnConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of each dense parameter, in the order of HugeCTR's `_dense_N.model`.

    Order of layers: cross layers (weight, bias, weight, bias, ...; of DCN v2: u, v, bias, u, v, bias, ...), then tower
    layers, then the final InnerProduct, whose input is concat(tower, cross). Cross matrices u are [width, rank] and v
    [rank, width], InnerProduct weights [in, out], all row-major.

    >>> dense_layout(DcnConfig(embedding_dim=1, num_cross_layers=1, tower=(2,)))
    [('cross.0.weight', (39,)), ('cross.0.bias', (39,)), ('tower.0.weight', (39, 2)), ('tower.0.bias', (2,)), \
('final.weight', (41, 1)), ('final.bias', (1,))]
    """
    width = config.input_width
    layout: list[tuple[str, tuple[int, ...]]] = []
    for i in range(config.num_cross_layers):
        if config.projection_dim:
            layout += [
                (f"cross.{i}.u", (width, config.projection_dim)),
                (f"cross.{i}.v", (config.projection_dim, width)),
            ]
        else:
            layout += [(f"cross.{i}.weight", (width,))]
        layout += [(f"cross.{i}.bias", (width,))]
    fan_in = width
    for i, fan_out in enumerate(config.tower):
        layout += [(f"tower.{i}.weight", (fan_in, fan_out)), (f"tower.{i}.bias", (fan_out,))]
        fan_in = fan_out
    return [*layout, ("final.weight", (fan_in + width, 1)), ("final.bias", (1,))]


def dense_places(config: DcnConfig) -> list[tuple[str, slice, tuple[int, ...]]]:
    """Name, place and shape of each dense parameter in one flat array of them all, in `dense_layout` order.

    >>> dense_places(DcnConfig(embedding_dim=1, num_cross_layers=1, tower=(2,)))[1:3]
    [('cross.0.bias', slice(39, 78, None), (39,)), ('tower.0.weight', slice(78, 156, None), (39, 2))]
    """
    places, at = [], 0
    for name, shape in dense_layout(config):
        places.append((name, slice(at, at + prod(shape)), shape))
        at += prod(shape)
    return places
