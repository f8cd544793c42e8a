"""The settings that decide when a run is requested: the monitor's, kept in its state folder for incidents of it."""

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
MAX_GRACE_BUCKETS = 8
"""Ten buckets of three versions are open at a time then: no more than the drift watch holds."""


@dataclass(frozen=True, kw_only=True)
class JudgingSettings:
    """All that decides when a run is requested, given the records; flags and defaults are the monitor's."""

    judge: JudgeSettings = JudgeSettings()
    policies: PolicySettings = PolicySettings()
    restraint: RestraintSettings = RestraintSettings()
    drift: DriftSettings = DriftSettings()

    def __post_init__(self) -> None:
        """Refuses a grace of so many buckets that a replay, which reads records once, could not hold them all open."""
        grace, bucket = self.judge.drift_grace_seconds, self.drift.drift_bucket_seconds
        if bucket and grace > MAX_GRACE_BUCKETS * bucket:
            raise ContractError(
                f"drift_grace_seconds is {grace}, expected at most {MAX_GRACE_BUCKETS} times drift_bucket_seconds, "
                f"which is {bucket}"
            )


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
