"""Training backends by name: checks of what they support, and their engines."""

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
    backend: str,
    config: NetworkConfig,
    features: Features | None = None,
    *,
    weight: str | None = None,
) -> None:
    """Check that a backend supports the network and the data, before anything is read.

    Args:
        backend: Name of the backend.
        config: Configuration of the network.
        features: The recommender's features. None skips the check of list features.
        weight: Column with sample weights, or None.

    Raises:
        ContractError: there is no such backend, or it does not support the network, a kind of
            feature or weights.
    """
    if backend not in BACKENDS:
        raise ContractError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "hugectr" and config.network != "dcn":
        raise ContractError(
            f"network is {config.network!r}, expected dcn, the only network of backend hugectr"
        )
    if backend != "pytorch" and not config.num_categorical:
        reason = {"hugectr": "reads only rows with keys", "torchrec": "shards embedding tables"}[
            backend
        ]
        raise ContractError(
            f"num_categorical is 0, expected at least 1: backend {backend} {reason}"
        )
    if backend == "hugectr" and features:
        pools: dict[str, dict[str, str]] = defaultdict(dict)
        for name in features.lists:
            options = features.list_options_of(name)
            pools[options.table or name][options.pool] = name
        for table, by_pool in pools.items():
            if len(by_pool) > 1:
                raise ContractError(
                    f"lists in table {table} are pooled by sum ({by_pool['sum']}) and by mean "
                    f"({by_pool['mean']}), expected one kind of pooling for each table with "
                    "backend hugectr"
                )
    if backend == "hugectr" and weight is not None:
        raise ContractError(
            f"data.weight is {weight!r}, expected none: backend hugectr does not support sample "
            "weights"
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
    """Return a new engine, whose network has no weights until `restore` is called.

    Args:
        backend: Name of the backend.
        config: Configuration of the network.
        slot_sizes: Number of ids of each slot.
        settings: Settings of the fit.
        scratch: Folder for HugeCTR's temporary files on several nodes. All nodes see this folder.
            One node uses a folder on its own disk, below TMPDIR.
        num_gpus: GPUs of each node that share a batch. PyTorch uses one GPU.
        features: Features of the recommender. If `features` is None, a row has exactly one id in
            each slot.

    Raises:
        ContractError: there is no such backend, or it does not support the network or a setting.
        PermanentError: the backend's library is not installed, or its device is too small.
    """
    require_backend(backend, config, features)
    num_slots = len(features.slots) if features else config.num_categorical
    if len(slot_sizes) != num_slots or min(slot_sizes, default=1) < 1:
        raise ContractError(
            f"slot sizes are {slot_sizes}, expected {num_slots} sizes, each at least 1"
        )
    positions = features.id_positions if features else None
    # The libraries take seconds to import, so they are imported after the arguments are checked.
    if backend == "pytorch":
        from components.training.pytorch.engine import PytorchEngine

        return PytorchEngine(config, slot_sizes, settings, positions=positions)
    if backend == "torchrec":
        try:
            from components.training.torchrec.engine import TorchrecEngine
        except ImportError as error:
            raise PermanentError(f"backend torchrec cannot be imported here: {error}") from error
        return TorchrecEngine(config, slot_sizes, settings, positions=positions)
    from components.training.hugectr.engine import HugectrEngine
    from components.training.hugectr.nodes import communicator

    return HugectrEngine(
        config,
        slot_sizes,
        settings,
        positions=positions,
        num_gpus=num_gpus,
        scratch=scratch if communicator() else None,
    )
