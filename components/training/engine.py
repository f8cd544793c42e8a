"""The seam between a fit and what does its arithmetic: `Engine`, one network with its optimizer.

Which rows, in which order, how often, when to stop and what to keep is `fit`'s, the same for every engine; how a step
is computed is the engine's. Weights cross this seam as a folder (`components.models.files`), so no engine needs
another's library, and no copy of a large table is held in memory for saving.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from components.config.features import Features
from components.config.model import NetworkConfig
from components.config.training import TrainingSettings
from components.runtime.errors import ContractError, PermanentError
from components.training.rows import RowFolder, Rows

Rate = Callable[[int], float]
"""The learning rate of an optimizer step, by its number; the first step of a model from scratch is number 1."""

BACKENDS = ("pytorch", "hugectr", "torchrec")
"""Values of `Model.backend`."""


class Engine(Protocol):
    """One network and its optimizer."""

    backend: str
    """Value of `Model.backend`."""
    num_steps: int
    """Optimizer steps taken, over all rounds."""

    def restore(self, weights: Path) -> None:
        """Takes over the model in folder `weights`, its optimizer state and step count (zero where it has none).

        Raises:
            ContractError: a file is absent, damaged or of another network.
        """

    def save(self, folder: Path) -> None:
        """Writes weights and optimizer state into `folder`, which is empty.

        Raises:
            PermanentError: what was written is not what was meant to be.
        """

    def open_rows(self, folders: Sequence[RowFolder], slot_sizes: list[int], cache: Path) -> Rows:
        """The rows that a fit learns from these folders, see `rows.open_rows`."""

    def segment_batches(self, batch_size: int) -> int:
        """Batches that one call of `learn` should get; between calls a fit checks the loss and may save."""

    def learn(
        self, rows: Rows, order: NDArray[np.int64], *, batch_size: int, seed: int, rate: Rate | None = None
    ) -> float:
        """Steps through the rows `order`, `batch_size` at a time; the last batch may be smaller.

        Returns the mean over the batches of their mean log loss, in nats; NaN or infinite where a batch's was. Rows
        with weights count by them in the mean of their batch; a batch that has no weight takes no step and does not
        count, and without any other the mean is 0. The rows are perhaps mapped from a file, so only those of a batch
        are copied. `seed` decides dropout within this call; `rate` is the learning rate of each step, None = the
        settings' at all of them.
        """

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Click probabilities of `rows`, [n], without dropout; ids outside their slot have a zero vector."""

    def close(self) -> None:
        """Releases memory and devices; the engine is of no use afterwards."""


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
