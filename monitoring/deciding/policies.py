"""Which policies there are, their settings together, and those that a monitor's settings name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from components.runtime.errors import ContractError
from monitoring.deciding.data_drift import DataDriftPolicy, DataDriftSettings
from monitoring.deciding.evidence import Policy
from monitoring.deciding.relative_drop import RelativeDropPolicy, RelativeDropSettings
from monitoring.deciding.schedule import SchedulePolicy, ScheduleSettings
from monitoring.deciding.sequential import SequentialPolicy, SequentialSettings
from monitoring.deciding.threshold import ThresholdPolicy
from monitoring.deciding.volume import VolumePolicy, VolumeSettings


@dataclass(frozen=True, kw_only=True)
class PolicySettings(SequentialSettings, RelativeDropSettings, DataDriftSettings, VolumeSettings, ScheduleSettings):
    """Every policy's settings; those of policies that are not named are idle."""

    policies: str = "threshold"
    """Names by commas, of threshold, relative_drop, sequential, data_drift, volume, schedule: any that says retrain
    wins, the first of them gives the reason."""

    def __post_init__(self) -> None:
        """Refuses unknown names and what each policy refuses."""
        SequentialSettings.__post_init__(self)
        RelativeDropSettings.__post_init__(self)
        DataDriftSettings.__post_init__(self)
        VolumeSettings.__post_init__(self)
        ScheduleSettings.__post_init__(self)
        policy_names(self.policies)


POLICIES: dict[str, Callable[[Any], Policy]] = {
    ThresholdPolicy.name: ThresholdPolicy,
    RelativeDropPolicy.name: RelativeDropPolicy,
    SequentialPolicy.name: SequentialPolicy,
    DataDriftPolicy.name: DataDriftPolicy,
    VolumePolicy.name: VolumePolicy,
    SchedulePolicy.name: SchedulePolicy,
}
"""By name; each is made from `PolicySettings`."""


def make_policies(settings: PolicySettings) -> list[Policy]:
    """The policies that the settings name, in their order."""
    return [POLICIES[name](settings) for name in policy_names(settings.policies)]


def policy_names(text: str) -> list[str]:
    """The names in a comma list.

    Raises:
        ContractError: an unknown name, the same name twice, or none.

    >>> policy_names("threshold")
    ['threshold']
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in POLICIES]
    if unknown or len(set(names)) < len(names):
        raise ContractError(f"policies is {text!r}, expected some of {', '.join(POLICIES)}, by commas, each once")
    return names
