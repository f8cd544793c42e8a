"""What a backtest depends on: the live monitor's own settings of judging, and what its numbers are made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from components.runtime.durable import write_whole
from components.runtime.errors import ContractError
from monitoring.deciding.judging import JudgeSettings
from monitoring.deciding.policies import PolicySettings
from monitoring.deciding.restraint import RestraintSettings
from monitoring.drift.settings import DriftSettings
from monitoring.flags import flat_values, make_settings

JUDGING_FILE = "judging.json"


@dataclass(frozen=True, kw_only=True)
class JudgingSettings:
    """All that decides when a run is requested, given the records; flags and defaults are the monitor's."""

    judge: JudgeSettings = JudgeSettings()
    policies: PolicySettings = PolicySettings()
    restraint: RestraintSettings = RestraintSettings()
    drift: DriftSettings = DriftSettings()


def write_judging(state: Path, settings: JudgingSettings) -> None:
    """Keeps the settings in a monitor's state folder, for whoever records an incident of it."""
    write_whole(state / JUDGING_FILE, json.dumps(flat_values(settings), indent=2) + "\n")


def read_judging(state: Path) -> JudgingSettings:
    """The settings that the monitor of this state folder was started with last.

    Raises:
        ContractError: there are none, or they are another version's.
    """
    path = state / JUDGING_FILE
    try:
        return make_settings(JudgingSettings, **json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, ContractError) as error:
        raise ContractError(f"{path} cannot be used: {error}; expected a monitor's state folder") from error


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """What a run costs, and what is known of the truth."""

    run_seconds: float = 600.0
    """How long a run takes until its release; the cool-down begins then."""
    gpu_hours_per_run: float = 0.5
    """GPU hours that one run takes."""
    drift_at: float | None = None
    """When the world changed, seconds since the epoch; None = not known, so no alarm can be called false."""

    def __post_init__(self) -> None:
        """Refuses negative costs."""
        for name in ("run_seconds", "gpu_hours_per_run"):
            if not getattr(self, name) >= 0:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 0")
