"""Interface between a fit and the engine that computes it.

An `Engine` is one network with its optimizer. `fit` decides which rows are used, in which order,
how often, when to stop and what to save, in the same way for every engine. The engine only computes
the steps. Weights are exchanged as a folder (`components.models.files`). Therefore no engine needs
another's library, and saving needs no second copy of a large table in memory.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from components.contracts.features import Features
from components.models.configs import NetworkConfig
from components.runtime.errors import ContractError, PermanentError
from components.training.config import TrainingSettings
from components.training.rows import RowFolder, Rows

Rate = Callable[[int], float]
"""Learning rate as a function of the optimizer step. The first step of a model trained from scratch
is number 1."""

BACKENDS = ("pytorch", "hugectr", "torchrec")
"""Values of `Model.backend`."""


class Engine(Protocol):
    """One network and its optimizer."""

    backend: str
    """Value of `Model.backend`."""
    num_steps: int
    """Optimizer steps taken over all runs."""

    def restore(self, weights: Path) -> None:
        """Load the model in folder `weights`, with its optimizer state and step count.

        Without optimizer state both are zero.

        Raises:
            ContractError: a file is absent, corrupt or of another network.
        """

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state into the empty `folder`.

        Raises:
            PermanentError: the written files are not what the engine meant to write.
        """

    def open_rows(self, folders: Sequence[RowFolder], slot_sizes: list[int], cache: Path) -> Rows:
        """Return the training rows of these folders, see `rows.open_rows`."""

    def segment_batches(self, batch_size: int) -> int:
        """Return the number of batches that one call of `learn` should get.

        Between two calls a fit checks the loss and may save.
        """

    def learn(
        self, rows: Rows, order: NDArray[np.int64], *, batch_size: int, seed: int, rate: Rate | None = None
    ) -> float:
        """Train on the rows `order`, `batch_size` rows at a time. The last batch may be smaller.

        The loss of a batch is the mean of its rows' log losses, weighted if rows have weights. A
        batch whose weights are all 0 takes no step and has no loss.

        Args:
            rows: The rows, perhaps mapped from a file. Only the rows of a batch are copied.
            order: Row numbers in training order.
            batch_size: Rows of an optimizer step.
            seed: Seed of the dropout in this call.
            rate: Learning rate of each step. None for the constant rate of the settings.

        Returns:
            Mean of the batches' losses in nats. It is NaN or infinite if the loss of a batch is. It
            is 0 if no batch has a loss.
        """

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Return click probabilities of `rows`, [n], without dropout.

        An id outside its slot has a zero vector.
        """

    def close(self) -> None:
        """Release memory and devices. The engine cannot be used afterwards."""


def require_backend(
    backend: str, config: NetworkConfig, features: Features | None = None, *, weight: str | None = None
) -> None:
    """Check that a backend supports the network and the data, before anything is read.

    Args:
        backend: Name of the backend.
        config: Configuration of the network.
        features: The recommender's features. None skips the checks of list features.
        weight: Column with sample weights, or None.

    Raises:
        ContractError: there is no such backend, or it does not support the network, a kind of
            feature or weights.
    """
    if backend not in BACKENDS:
        raise ContractError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend == "hugectr" and config.network != "dcn":
        raise ContractError(f"network is {config.network!r}, expected dcn, the only network of backend hugectr")
    if backend != "pytorch" and not config.num_categorical:
        reason = {"hugectr": "reads only rows with keys", "torchrec": "shards embedding tables"}[backend]
        raise ContractError(f"num_categorical is 0, expected at least 1: backend {backend} {reason}")
    if backend == "hugectr" and features:
        pools: dict[str, dict[str, str]] = defaultdict(dict)
        for name in features.lists:
            options = features.list_options_of(name)
            pools[options.table or name][options.pool] = name
        for table, by_pool in pools.items():
            if len(by_pool) > 1:
                raise ContractError(
                    f"lists with the vectors of {table} are pooled by sum ({by_pool['sum']}) and "
                    f"by mean ({by_pool['mean']}), expected only one of the two with backend "
                    "hugectr, whose embeddings have one way of pooling"
                )
    if backend == "hugectr" and weight is not None:
        raise ContractError(
            f"data.weight is {weight!r}, expected none: backend hugectr does not support sample weights"
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
        scratch: Folder for temporary files. It is only created by an engine that needs it.
        num_gpus: GPUs of each node that share a batch. PyTorch uses one.
        features: Features that a row looks up. None to look up every slot once.

    Raises:
        ContractError: there is no such backend, or it does not support the network or a setting.
        PermanentError: the backend's library is not installed, or its device is too small.
    """
    require_backend(backend, config, features)
    num_slots = len(features.slots) if features else config.num_categorical
    if len(slot_sizes) != num_slots or min(slot_sizes, default=1) < 1:
        raise ContractError(f"slot sizes are {slot_sizes}, expected {num_slots} of at least 1")
    places = features.id_places if features else None
    # The libraries take seconds to import, so wrong arguments are reported first.
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
