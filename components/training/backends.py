"""Which engine a name means. What every engine promises is `engine`'s."""

from __future__ import annotations

from pathlib import Path

from components.contracts.dcn import DcnConfig
from components.runtime.errors import ContractError
from components.training.config import TrainingSettings
from components.training.engine import Engine

BACKENDS = ("pytorch", "hugectr")
"""Values of `Model.backend`."""


def require_backend(backend: str, *, solver: str = "", profile_steps: int = 0) -> None:
    """Refuses what no engine does, before anything is read.

    Raises:
        ContractError: no backend has this name, or it has no such setting.
    """
    if backend not in BACKENDS:
        raise ContractError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    if backend != "hugectr" and solver:
        raise ContractError(f"solver is {solver!r} for backend {backend!r}, expected none: it is HugeCTR's")
    if profile_steps < 0:
        raise ContractError(f"profile_steps is {profile_steps}, expected at least 0")
    if backend != "pytorch" and profile_steps:
        raise ContractError(f"profile_steps is {profile_steps} for backend {backend!r}, expected 0: it traces pytorch")


def make_engine(
    backend: str,
    config: DcnConfig,
    slot_sizes: list[int],
    settings: TrainingSettings,
    *,
    scratch: Path,
    solver: str = "",
) -> Engine:
    """A new engine of that name, with a network that waits for its weights.

    Args:
        backend: One of `BACKENDS`.
        config: Shape of the network.
        slot_sizes: Number of ids per categorical column.
        settings: Optimizer and precision.
        scratch: Folder for files that an engine needs while it works; not created where it needs none.
        solver: HugeCTR's own settings as a JSON object; empty = its defaults.

    Raises:
        ContractError: no backend has this name, or it refuses a setting.
        PermanentError: the backend's library is not here, or its device is too small.
    """
    require_backend(backend, solver=solver)
    # Both libraries take seconds to import; a misuse is answered without them.
    if backend == "pytorch":
        from components.training.pytorch.engine import PytorchEngine

        return PytorchEngine(config, slot_sizes, settings)
    from components.training.hugectr.engine import HugectrEngine
    from components.training.hugectr.settings import parse_solver

    return HugectrEngine(config, slot_sizes, settings, parse_solver(solver), scratch=scratch)
