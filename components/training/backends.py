"""The training backends by name: which of them can learn a network, and the engine of each."""

from collections import defaultdict
from pathlib import Path

from components.training.engine import Engine
from evergreen.config.features import Features
from evergreen.config.model import NetworkConfig
from evergreen.config.training import TrainingSettings
from evergreen.runtime.errors import ContractError, PermanentError

BACKENDS = ("pytorch", "hugectr", "torchrec")
"""Values of `Model.backend`."""


def require_backend(
    backend: str, config: NetworkConfig, features: Features | None = None, *, weight: str | None = None
) -> None:
    """Refuses what no engine supports, before anything is read.

    Raises:
        ContractError: no backend has this name, or it lacks the network, a kind of feature or weights.
    """
    if backend not in BACKENDS:
        raise ContractError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "hugectr" and config.network != "dcn":
        raise ContractError(f"network is {config.network!r}, expected dcn: backend hugectr builds no other")
    if backend != "pytorch" and not config.num_categorical:
        needs = {"hugectr": "reads no rows without keys", "torchrec": "shares out tables of vectors"}[backend]
        raise ContractError(f"num_categorical is 0, expected at least 1: backend {backend} {needs}")
    if backend == "hugectr" and features:
        pools: dict[str, dict[str, str]] = defaultdict(dict)
        for name in features.lists:
            options = features.list_options_of(name)
            pools[options.table or name][options.pool] = name
        for table, by_pool in pools.items():
            if len(by_pool) > 1:
                raise ContractError(
                    f"lists that look up the vectors of {table} are pooled by sum ({by_pool['sum']}) and by mean "
                    f"({by_pool['mean']}), expected one of both with backend hugectr: its embeddings pool one way"
                )
    if backend == "hugectr" and weight is not None:
        raise ContractError(
            f"data.weight is {weight!r}, expected none with backend hugectr: its readers take a label, dense values "
            "and keys of a row, and its losses no weight"
        )


def make_engine(
    backend: str,
    config: NetworkConfig,
    slot_sizes: list[int],
    *,
    settings: TrainingSettings,
    scratch: Path,
    num_gpus: int = 1,
    features: Features | None = None,
) -> Engine:
    """A new engine of that name, with a network that waits for its weights.

    `scratch` is a folder for files that an engine needs while it works; it is not created where it needs none.
    `num_gpus` of each node share a batch; PyTorch takes one. `features` say what a row looks up; without them it is
    every slot once.

    Raises:
        ContractError: no backend has this name, or it refuses the network or a setting.
        PermanentError: the backend's library is not installed, or its device is too small.
    """
    require_backend(backend, config, features)
    num_slots = len(features.slots) if features else config.num_categorical
    if len(slot_sizes) != num_slots or min(slot_sizes, default=1) < 1:
        raise ContractError(f"slot sizes are {slot_sizes}, expected {num_slots} of at least 1")
    places = features.id_places if features else None
    # Both libraries take seconds to import; a misuse is answered without them.
    if backend == "pytorch":
        from components.training.pytorch.engine import PytorchEngine

        return PytorchEngine(config, slot_sizes, settings, places=places)
    if backend == "torchrec":
        try:
            from components.training.torchrec.engine import TorchrecEngine
        except ImportError as error:
            raise PermanentError(f"backend torchrec cannot be imported here: {error}") from error
        return TorchrecEngine(config, slot_sizes, settings, places=places)
    from components.training.hugectr.engine import HugectrEngine

    return HugectrEngine(config, slot_sizes, settings, places=places, num_gpus=num_gpus, scratch=scratch)
