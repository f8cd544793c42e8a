"""The settings that decide when a run is requested: a recommender's section `monitor`.

The monitor keeps them in its state folder for incidents of it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from components.contracts.baking import BakingSettings
from components.contracts.recommender import Recommender, nearest, settings_of
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError, TemporaryError
from monitoring.deciding.judging import JudgeSettings
from monitoring.deciding.policies import PolicySettings
from monitoring.deciding.restraint import RecipeSettings, RestraintSettings
from monitoring.drift.comparison import DriftSettings
from monitoring.flags import flat_values, make_settings
from monitoring.flags import settings_of as flat_names

JUDGING_FILE = "judging.json"
MAX_GRACE_BUCKETS = 8
"""Ten buckets of three versions are open at a time then: no more than the drift watch holds."""


@dataclass(frozen=True, kw_only=True)
class JudgingSettings:
    """All that decides when a run is requested, given the records."""

    judge: JudgeSettings = JudgeSettings()
    policies: PolicySettings = PolicySettings()
    restraint: RestraintSettings = RestraintSettings()
    drift: DriftSettings = DriftSettings()
    recipe: RecipeSettings = RecipeSettings()
    baking: BakingSettings = BakingSettings()
    """Of the section `release`: what takes a new version back."""

    def __post_init__(self) -> None:
        """Refuses a window that is never judged, and a grace of more buckets than a replay could hold open at once."""
        window_rows, fewest = self.judge.window_rows, 2 * self.policies.min_clicks
        if window_rows < fewest:
            needed = f"{fewest}: min_clicks clicks and as many rows without one, or no window is judged"
            raise ContractError(f"window_rows is {window_rows}, expected at least {needed}")
        grace, bucket = self.judge.drift_grace_seconds, self.drift.drift_bucket_seconds
        if bucket and grace > MAX_GRACE_BUCKETS * bucket:
            raise ContractError(
                f"drift_grace_seconds is {grace}, expected at most {MAX_GRACE_BUCKETS} times drift_bucket_seconds, "
                f"which is {bucket}"
            )


def own_parts() -> dict[str, type[Any]]:
    """The parts of `JudgingSettings` that the section `monitor` sets, by name."""
    return {part: kind for part, kind in get_type_hints(JudgingSettings).items() if kind is not BakingSettings}


def judging_settings(recommender: Recommender) -> JudgingSettings:
    """The section `monitor` of a recommender, one flat list of its parts' settings, and limits of its `release`.

    Raises:
        ContractError: a setting is unknown, of another type, or out of range; the message has its path.
    """
    values, kinds = recommender.settings.get("monitor", {}), own_parts()
    known = [name for kind in kinds.values() for name in flat_names(kind)]
    if unknown := [name for name in values if name not in known]:
        raise ContractError(f"monitor.{unknown[0]} is no setting{nearest(unknown[0], known)}")
    parts: dict[str, Any] = {
        part: settings_of(kind, {name: values[name] for name in flat_names(kind) if name in values}, path="monitor")
        for part, kind in kinds.items()
    }
    release = recommender.settings.get("release", {})
    limits = {name: release[name] for name in flat_names(BakingSettings) if name in release}
    parts["baking"] = settings_of(BakingSettings, limits, path="release")
    try:
        return JudgingSettings(**parts)
    except ContractError as error:
        raise ContractError(f"monitor: {error}") from error


def write_judging(state: Path, settings: JudgingSettings) -> None:
    """Keep the settings in a monitor's state folder, for whoever records an incident of it.

    Raises:
        TemporaryError: the file cannot be written.
    """
    try:
        write_whole(state / JUDGING_FILE, json.dumps(flat_values(settings), indent=2) + "\n")
    except OSError as error:
        raise TemporaryError(f"the settings cannot be written: {error}") from error


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
