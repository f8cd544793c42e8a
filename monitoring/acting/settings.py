"""What acting depends on, in one settings class; each part's settings are described in its own module."""

from __future__ import annotations

from dataclasses import dataclass

from monitoring.acting.kinds import KindSettings
from monitoring.acting.leadership import LeadershipSettings
from monitoring.acting.notifications import NotificationSettings
from monitoring.acting.recipe import RecipeSettings
from monitoring.acting.restraint import RestraintSettings


@dataclass(frozen=True, kw_only=True)
class RetrainingSettings(RestraintSettings, RecipeSettings):
    """What a run depends on."""

    def __post_init__(self) -> None:
        """Refuses what either part refuses."""
        RestraintSettings.__post_init__(self)
        RecipeSettings.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class ActingSettings(RetrainingSettings, KindSettings, NotificationSettings, LeadershipSettings):
    """What every action depends on."""

    def __post_init__(self) -> None:
        """Refuses what any part refuses."""
        RetrainingSettings.__post_init__(self)
        KindSettings.__post_init__(self)
        NotificationSettings.__post_init__(self)
        LeadershipSettings.__post_init__(self)
