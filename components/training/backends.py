"""Which trainer a name means. What every trainer promises is `trainer`'s."""

from __future__ import annotations

from components.contracts.errors import ContractError, PermanentError
from components.training.metrics_sink import MetricsSink
from components.training.trainer import Trainer

BACKENDS = ("pytorch", "hugectr")
"""Values of `Model.backend`."""


def make_trainer(backend: str, sink: MetricsSink) -> Trainer:
    """The trainer of that name.

    Raises:
        ContractError: no backend has this name.
        PermanentError: the backend is not in this version.
    """
    if backend == "pytorch":
        # Torch takes a second to import; a misuse is answered without it.
        from components.training.pytorch_trainer import PytorchTrainer

        return PytorchTrainer(sink)
    if backend == "hugectr":
        raise PermanentError("backend 'hugectr' is not in this version, expected pytorch")
    raise ContractError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
