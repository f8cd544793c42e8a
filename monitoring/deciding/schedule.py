"""Retrain by the calendar: once a version has served for long enough, whatever its numbers.

In: since when the version serves. Out: RETRAIN from then on. How soon a run that released nothing is tried again is
left to `monitoring.acting.restraint`.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.runtime.errors import ContractError
from monitoring.deciding.decision import Action, Decision
from monitoring.deciding.evidence import Evidence, Memory


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """How old a model may grow."""

    max_serving_seconds: float = 7 * 86_400.0
    """Time that a version may serve before the schedule asks for its successor."""

    def __post_init__(self) -> None:
        """Refuses an age that is none."""
        if not self.max_serving_seconds > 0:
            raise ContractError(f"max_serving_seconds is {self.max_serving_seconds}, expected above 0")


class SchedulePolicy:
    """See `evidence.Policy`."""

    name = "schedule"

    def __init__(self, settings: ScheduleSettings) -> None:
        """Decides by `settings`."""
        self._settings = settings

    def decide(self, evidence: Evidence, memory: Memory) -> tuple[Decision, Memory]:
        """See `evidence.Policy`; needs no memory."""
        served, longest = evidence.time - evidence.serving_since, self._settings.max_serving_seconds
        numbers: dict[str, float | None] = {
            **evidence.window_numbers(),
            "threshold": None,
            "rows_since_breach": 0,
            "serving_seconds": served,
        }
        action = Action.RETRAIN if served >= longest else Action.OK
        reason = f"model version {evidence.version} has served {served:.0f} s of at most {longest:.0f} s"
        return Decision(policy=self.name, action=action, reason=reason, numbers=numbers), {}
