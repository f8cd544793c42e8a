"""When a confirmed drift must wait: cool-down after a release, back-off after failures, a daily budget of runs.

In: a decision, the memory of past runs, the wall clock. Out: the decision as it may be acted on, and the new memory.
Keeping the memory is left to `monitoring.acting.retraining`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from components.runtime.errors import ContractError
from monitoring.deciding.decision import Action, Decision

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True)
class RestraintSettings:
    """How often a run may be asked for."""

    cooldown_seconds: float = 3600.0
    """Rest after a released run."""
    failure_backoff_seconds: float = 900.0
    """Rest after a run that failed or was refused; doubles with each further one, up to a day."""
    daily_budget: int = 4
    """Most requests in any 24 hours."""

    def __post_init__(self) -> None:
        """Refuses settings that never stop or never rest."""
        if self.daily_budget < 1:
            raise ContractError(f"daily_budget is {self.daily_budget}, expected at least 1")
        if not self.cooldown_seconds >= 0:
            raise ContractError(f"cooldown_seconds is {self.cooldown_seconds}, expected at least 0")
        if not self.failure_backoff_seconds > 0:
            raise ContractError(f"failure_backoff_seconds is {self.failure_backoff_seconds}, expected above 0")


@dataclass(frozen=True, kw_only=True)
class RestraintMemory:
    """What is remembered of past runs."""

    blocked_until: float = 0.0
    """No request before this time."""
    blocked_by: str = ""
    failures: int = 0
    """Runs in a row that released nothing."""
    failed: int = 0
    """The last of them in a row that failed, where others were refused."""
    requested_at: tuple[float, ...] = ()
    """Times of the requests of the last day."""


def restrain(decision: Decision, memory: RestraintMemory, settings: RestraintSettings, *, now: float) -> Decision:
    """The decision as it may be acted on: RETRAIN becomes HELD while a rest or the budget forbids a run."""
    if decision.action is not Action.RETRAIN or not (cause := _cause(memory, settings, now)):
        return decision
    return replace(decision, action=Action.HELD, reason=f"{decision.reason}; {cause}")


def _cause(memory: RestraintMemory, settings: RestraintSettings, now: float) -> str:
    rest = memory.blocked_until - now
    # No rest is longer: one that seems so was noted by a clock that has since been set back.
    if 0 < rest <= max(DAY_SECONDS, settings.cooldown_seconds):
        return f"held {rest:.0f} s more: {memory.blocked_by}"
    spent = sum(abs(t - now) < DAY_SECONDS for t in memory.requested_at)
    if spent >= settings.daily_budget:
        return f"held: {spent} requests in 24 hours, the daily budget is {settings.daily_budget}"
    return ""


def requested(memory: RestraintMemory, *, now: float) -> RestraintMemory:
    """The memory after a request was made."""
    recent = tuple(t for t in memory.requested_at if abs(t - now) < DAY_SECONDS)
    return replace(memory, requested_at=(*recent, now))


def ended(
    memory: RestraintMemory, outcome: str, settings: RestraintSettings, *, now: float, deed: str = ""
) -> RestraintMemory:
    """The memory after an action ended: what was done rests the cool-down, anything else backs off, longer each time.

    Args:
        memory: From before.
        outcome: Of a run, `released`, `notified` (there is nobody to run it) or another; of another action, `released`
            where it was done.
        settings: See the class.
        now: Seconds since the epoch.
        deed: The action, such as `a rollback`; empty = a run of the pipeline.
    """
    if outcome in ("released", "notified"):
        deed = deed or ("a release" if outcome == "released" else "a notice")
        rest, failures, cause = settings.cooldown_seconds, 0, f"cool-down after {deed}"
        failed = 0
    else:
        failures, failed = memory.failures + 1, memory.failed + 1 if outcome == "failed" else 0
        rest = max(settings.cooldown_seconds, settings.failure_backoff_seconds * 2.0 ** min(failures - 1, 30))
        rest = max(min(rest, DAY_SECONDS), settings.cooldown_seconds)
        cause = f"back-off after {failures} run{'s' if failures > 1 else ''} without a release"
        if deed:
            cause = f"back-off after {deed} that failed"
    return replace(memory, blocked_until=now + rest, blocked_by=cause, failures=failures, failed=failed)
