"""The section `model`: the networks, and the configuration of each.

A configuration has the name of its network and all widths. The network can therefore be built
without a dataset. The module of a network is imported when the network is built
(`evergreen.networks.network.build_network`). This module does not import torch.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, ClassVar

from evergreen.config.features import MAX_WIDTH
from evergreen.config.reader import read_mapping
from evergreen.config.spec import Recommender
from evergreen.runtime.errors import ContractError

_MAX_LAYERS = 100
_MAX_TOWER_WIDTH = 65_536
"""Maximum width of a hidden layer, and of a cross layer's projection."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Settings that all networks have in common. The default values suit training on a laptop."""

    network: ClassVar[str]
    """Name of the network in `NETWORKS`, and of the module of `evergreen.networks` that implements
    it."""
    takes_widths: ClassVar[bool] = False
    """Whether the vectors of a row may have different widths."""
    fresh_vectors: ClassVar[float] = 1.0
    """Upper limit for the random values of a new vector, multiplied by the square root of the
    slot's size. The bound is 1 in HugeCTR. Networks that multiply vectors use smaller bounds,
    because products of large random values are noise that training must first remove."""
    takes_new_vectors_at_zero: ClassVar[bool] = False
    """Whether new vectors must start at zero when a column is added to a trained network. Set this
    to True if other vectors would change the network's logits. If False, the weights of the added
    column start at zero, and its vectors start as in a new network."""

    num_dense: int
    """Number of dense values in a row."""
    num_categorical: int
    """Number of embedding vectors in a row (`Features.vector_names`)."""
    embedding_dim: int = 16
    """Width of a category's vector."""
    widths: tuple[int, ...] = ()
    """Width of each vector of a row. An empty tuple means that every vector has `embedding_dim`
    values."""
    tower: tuple[int, ...] = (128, 64)
    """Widths of the tower's hidden layers."""
    dropout: float = 0.0
    """Share of tower activations that training sets to zero. 0 = no dropout."""

    def __post_init__(self) -> None:
        _require_at_least(0, "num_dense", self.num_dense)
        _require_at_least(0, "num_categorical", self.num_categorical)
        _require_at_least(1, "num_dense + num_categorical", self.num_dense + self.num_categorical)
        _require_at_least(1, "embedding_dim", self.embedding_dim)
        if self.widths and (len(self.widths) != self.num_categorical or min(self.widths) < 1):
            raise ContractError(
                f"widths are {self.widths}, expected {self.num_categorical} widths, each at least 1"
            )
        if self.widths and not self.takes_widths:
            raise ContractError(
                f"widths are {self.widths}, expected no widths, because {self.network} needs "
                "vectors of one width"
            )
        if not self.tower or min(self.tower) < 1:
            raise ContractError(f"tower is {self.tower}, expected one or more widths of at least 1")
        _require_at_most(MAX_WIDTH, "embedding_dim", self.embedding_dim)
        _require_at_most(MAX_WIDTH, "a width", max(self.widths, default=0))
        _require_at_most(_MAX_LAYERS, "the number of widths in tower", len(self.tower))
        _require_at_most(_MAX_TOWER_WIDTH, "a width of tower", max(self.tower))
        if not 0.0 <= self.dropout < 1.0:
            raise ContractError(f"dropout is {self.dropout}, expected a share in [0, 1)")

    @property
    def input_width(self) -> int:
        """Return the total number of input values of a row, from vectors and dense values."""
        return (sum(self.widths) or self.num_categorical * self.embedding_dim) + self.num_dense

    @property
    def table_widths(self) -> tuple[int, ...]:
        """Return the distinct widths in ascending order.

        Each vector length has its own table (`evergreen.networks.files`).
        """
        return tuple(sorted(set(self.widths))) or (self.embedding_dim,)

    def column_axes(
        self, vectors: Sequence[str], dense: Sequence[str]
    ) -> dict[str, tuple[int, list[Hashable]]]:
        """Return the dense parameters whose shapes depend on the columns.

        Adding columns does not change the logits while the weights at the new positions are zero.

        Args:
            vectors: Names of a row's vectors, [num_categorical].
            dense: Names of a row's dense values, [num_dense].

        Returns:
            A pair for each parameter. The first element is the number of the axis that depends on
            the columns. The second element names the column of each position on this axis.
        """
        raise NotImplementedError

    def as_document(self) -> dict[str, Any]:
        """Return the configuration as plain values for JSON."""
        return {
            "network": self.network,
            **asdict(self),
            "widths": list(self.widths),
            "tower": list(self.tower),
        }


@dataclass(frozen=True, kw_only=True)
class DcnConfig(NetworkConfig):
    """Deep & Cross Network (`dcn`)."""

    network = "dcn"
    takes_widths = True
    num_cross_layers: int = 3
    """Number of cross layers."""
    projection_dim: int = 0
    """Rank of the cross layers' matrices (DCN v2). 0 = DCN v1, whose cross layers have one weight
    vector each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_at_least(1, "num_cross_layers", self.num_cross_layers)
        _require_at_least(0, "projection_dim", self.projection_dim)
        _require_at_most(_MAX_LAYERS, "num_cross_layers", self.num_cross_layers)
        _require_at_most(_MAX_TOWER_WIDTH, "projection_dim", self.projection_dim)

    def column_axes(
        self, vectors: Sequence[str], dense: Sequence[str]
    ) -> dict[str, tuple[int, list[Hashable]]]:
        """Return the parameters whose size depends on the number of values of x0.

        See `NetworkConfig.column_axes`.
        """
        widths = self.widths or [self.embedding_dim] * len(vectors)
        x0: list[Hashable] = [
            *((name, i) for name, width in zip(vectors, widths) for i in range(width)),
            *dense,
        ]
        cross = {"cross_u": 1, "cross_v": 2} if self.projection_dim else {"cross_weight": 1}
        axes = {**cross, "cross_bias": 1, "tower.0.weight": 1, "final_cross": 1}
        return {name: (axis, x0) for name, axis in axes.items()}


@dataclass(frozen=True, kw_only=True)
class DeepFmConfig(NetworkConfig):
    """Factorization machine beside a tower (`deepfm`)."""

    network = "deepfm"
    fresh_vectors = 0.1
    takes_new_vectors_at_zero = True

    def __post_init__(self) -> None:
        """Refuse an `embedding_dim` below 2.

        The first value of a vector is the first-order weight, and the other values are the factor.
        """
        super().__post_init__()
        _require_at_least(2, "embedding_dim", self.embedding_dim)

    def column_axes(
        self, vectors: Sequence[str], dense: Sequence[str]
    ) -> dict[str, tuple[int, list[Hashable]]]:
        """Return the parameters of the numeric columns, and the input weights of the tower.

        See `NetworkConfig.column_axes`.
        """
        axes: dict[str, tuple[int, list[Hashable]]] = {
            "dense_factors": (0, [*dense]),
            "tower.0.weight": (1, [*product(vectors, range(1, self.embedding_dim)), *dense]),
        }
        return {**axes, "first_order.weight": (1, [*dense])} if dense else axes


@dataclass(frozen=True, kw_only=True)
class DlrmConfig(NetworkConfig):
    """Deep Learning Recommendation Model (`dlrm`)."""

    network = "dlrm"
    fresh_vectors = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_categorical + bool(self.num_dense) < 2:
            raise ContractError(
                f"num_categorical is {self.num_categorical} and num_dense is {self.num_dense}, "
                "expected at least two vectors for dlrm. Each categorical column has one vector, "
                "and all numeric columns together have one vector"
            )

    def column_axes(
        self, vectors: Sequence[str], dense: Sequence[str]
    ) -> dict[str, tuple[int, list[Hashable]]]:
        """Return the first-layer weights of both towers (see `NetworkConfig.column_axes`).

        The inputs of the top tower are the output of the bottom tower and the products of pairs of
        vectors.
        """
        bottom = [""] if dense else []
        multiplied = [*bottom, *vectors]
        pairs = [
            frozenset((multiplied[i], other))
            for i in range(len(multiplied))
            for other in multiplied[:i]
        ]
        axes: dict[str, tuple[int, list[Hashable]]] = {
            "tower.0.weight": (1, [*product(bottom, range(self.embedding_dim)), *pairs])
        }
        return {**axes, "bottom.0.weight": (1, [*dense])} if dense else axes


NETWORKS: dict[str, type[NetworkConfig]] = {
    each.network: each for each in (DcnConfig, DeepFmConfig, DlrmConfig)
}
"""All networks by name."""


def network_config(recommender: Recommender) -> NetworkConfig:
    """Return the network configuration that follows from the section `model`.

    The input widths of the network follow from the recommender's features. The setting `model.kind`
    is the name of the network.

    Raises:
        ContractError: no network has this name, the network does not have a setting, a value is out
            of range, or the recommender has too few features for the network.

    >>> from evergreen.config.features import Features
    >>> features = Features(numeric=("price",), categorical=("item", "shop"))
    >>> shop = Recommender(name="shop", features=features, settings={"model": {"embedding_dim": 8}})
    >>> network_config(shop).input_width
    17
    """
    settings = dict(recommender.settings.get("model", {}))
    kind = _config_class(settings.pop("kind", DcnConfig.network))
    features = recommender.features
    counts = {
        "num_dense": len(features.dense_inputs),
        "num_categorical": len(features.vector_names),
    }
    if stated := settings.keys() & {*counts, "widths"}:
        raise ContractError(f"model.{min(stated)} is not a setting: the features decide it")
    usual = read_mapping(kind, {**counts, **settings}, path="model")
    embeds = {name: features.embed_of(name) for name in features.vector_names}
    widths = {name: embed or usual.embedding_dim for name, embed in embeds.items()}
    if len(set(widths.values())) > 1:
        if not kind.takes_widths:
            name = next(name for name, width in widths.items() if width != usual.embedding_dim)
            group = next(
                group
                for group in ("numeric", "categorical", "lists")
                if name in getattr(features, group)
            )
            raise ContractError(
                f"features.{group}.{name}.embed is {widths[name]}, expected the model's "
                f"embedding_dim ({usual.embedding_dim}), because model.kind {kind.network} needs "
                "vectors of one width"
            )
        return replace(usual, widths=tuple(widths.values()))
    return replace(usual, embedding_dim=next(iter(widths.values()), usual.embedding_dim))


def config_from_document(document: Mapping[str, Any]) -> NetworkConfig:
    """Read the configuration from a document that `as_document` wrote.

    Raises:
        ContractError: the document's name is not the name of a network, or it has unknown or
            missing settings.
    """
    settings = {name: value for name, value in document.items() if name != "network"}
    kind = _config_class(document.get("network"))
    if wrong := settings.keys() ^ {each.name for each in fields(kind)}:
        raise ContractError(
            f"settings of network {kind.network!r} have unknown or missing names {sorted(wrong)}"
        )
    return kind(
        **{**settings, "widths": tuple(settings["widths"]), "tower": tuple(settings["tower"])}
    )


def network_changes(before: NetworkConfig, now: NetworkConfig) -> dict[str, Any]:
    """Return the settings of `now` that differ from `before`, apart from the columns.

    A model can be continued only if the result is empty.

    >>> before = DcnConfig(num_dense=1, num_categorical=2, tower=(8,))
    >>> network_changes(before, replace(before, num_dense=3, tower=(16,)))
    {'tower': [16]}
    """
    known, columns = before.as_document(), ("num_dense", "num_categorical", "widths")
    return {
        name: value
        for name, value in now.as_document().items()
        if name not in columns and known.get(name) != value
    }


def _config_class(network: object) -> type[NetworkConfig]:
    if not isinstance(network, str) or network not in NETWORKS:
        raise ContractError(f"model.kind is {network!r}, expected one of {', '.join(NETWORKS)}")
    return NETWORKS[network]


def _require_at_most(most: int, name: str, value: int) -> None:
    if value > most:
        raise ContractError(f"{name} is {value}, expected at most {most}")


def _require_at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise ContractError(f"{name} is {value}, expected at least {least}")
