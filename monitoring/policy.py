"""When to ask for a retraining run: a threshold on the serving version's windowed AUC. Decides, never acts.

In: the KPIs of a window, the policy's own memory, the time. Out: a decision with its reason and numbers, and the new
memory. Acting on it is left to `monitoring.retraining`; keeping the memory to `monitoring.store`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from components.contracts.errors import ContractError
from monitoring.kpis import Kpis

DAY_SECONDS = 86_400.0


class Action(str, Enum):
    """What a decision says."""

    OK = "ok"
    """AUC is not below the threshold."""
    UNDECIDABLE = "undecidable"
    """The window cannot tell; the reason says what is missing."""
    BREACH = "breach"
    """Below the threshold, not confirmed yet."""
    HELD = "held"
    """Confirmed, but a cool-down or the daily budget forbids a run."""
    RETRAIN = "retrain"
    """Confirmed: ask for a run."""


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The thresholds of judgement."""

    auc_threshold: float = 0.74
    """A windowed AUC below this is a breach."""
    min_clicks: int = 200
    """Fewest clicks, and fewest rows without one, that a window is judged on."""
    require_confidence: bool = True
    """A breach counts only if the whole 95 % interval lies below the threshold."""
    consecutive_breaches: int = 3
    """Breaches in a row, one per measurement, that confirm a drift."""
    min_rows_since_breach: int = 0
    """Rows that must mature after the first breach: the run needs rows of the changed world to learn from."""
    cooldown_seconds: float = 3600.0
    """Rest after a released run."""
    failure_backoff_seconds: float = 900.0
    """Rest after a run that failed or was refused; doubles with each further one, up to a day."""
    daily_budget: int = 4
    """Most requests in any 24 hours."""

    def __post_init__(self) -> None:
        """Refuses thresholds that decide nothing or never stop."""
        if not 0.0 < self.auc_threshold < 1.0:
            raise ContractError(f"auc_threshold is {self.auc_threshold}, expected inside (0, 1)")
        for name in ("min_clicks", "consecutive_breaches", "daily_budget"):
            if getattr(self, name) < 1:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("min_rows_since_breach", "cooldown_seconds"):
            if not getattr(self, name) >= 0:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 0")
        if not self.failure_backoff_seconds > 0:
            raise ContractError(f"failure_backoff_seconds is {self.failure_backoff_seconds}, expected above 0")


@dataclass(frozen=True, kw_only=True)
class PolicyMemory:
    """What the policy remembers between measurements."""

    version: int | None = None
    """The version judged last."""
    breaches: int = 0
    """Breaches in a row."""
    matured_at_breach: int = 0
    """`matured_total` at the first of them."""
    blocked_until: float = 0.0
    """No request before this time."""
    blocked_by: str = ""
    failures: int = 0
    """Runs in a row that released nothing."""
    requested_at: tuple[float, ...] = ()
    """Times of the requests of the last day."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action, its reason in one line, and the numbers behind it."""

    action: Action
    reason: str
    numbers: dict[str, float | None]


def decide(
    kpis: Kpis, memory: PolicyMemory, settings: PolicySettings, *, matured_total: int, now: float
) -> tuple[Decision, PolicyMemory]:
    """Judges one window of the serving version; the second value is the memory for the next call.

    Args:
        kpis: Of the serving version; rows of other versions never count.
        memory: From the last call.
        settings: Thresholds.
        matured_total: Rows matured so far, of all versions; only grows.
        now: Seconds since the epoch.
    """
    if memory.version != kpis.version:
        memory = replace(memory, version=kpis.version, breaches=0, matured_at_breach=0)
    action, reason = _judge(kpis, settings)
    if action is Action.OK:
        memory = replace(memory, breaches=0, matured_at_breach=0)
    elif action is Action.BREACH:
        first = matured_total if memory.breaches == 0 else memory.matured_at_breach
        memory = replace(memory, breaches=memory.breaches + 1, matured_at_breach=first)
        action, note = _confirm(memory, settings, matured_total - first, now)
        reason += note
    numbers: dict[str, float | None] = {
        "auc": kpis.auc,
        "auc_low": kpis.auc_low,
        "auc_high": kpis.auc_high,
        "threshold": settings.auc_threshold,
        "rows": kpis.rows,
        "clicks": kpis.clicks,
        "version": kpis.version,
        "breaches": memory.breaches,
        "rows_since_breach": matured_total - memory.matured_at_breach if memory.breaches else 0,
    }
    return Decision(action=action, reason=reason, numbers=numbers), memory


def requested(memory: PolicyMemory, *, now: float) -> PolicyMemory:
    """The memory after a request was made."""
    recent = tuple(t for t in memory.requested_at if abs(t - now) < DAY_SECONDS)
    return replace(memory, requested_at=(*recent, now), breaches=0, matured_at_breach=0)


def ended(memory: PolicyMemory, outcome: str, settings: PolicySettings, *, now: float) -> PolicyMemory:
    """The memory after a run ended: `released` rests the cool-down, anything else backs off, longer each time."""
    if outcome == "released":
        rest, failures, cause = settings.cooldown_seconds, 0, "cool-down after a release"
    else:
        failures = memory.failures + 1
        rest = max(settings.cooldown_seconds, settings.failure_backoff_seconds * 2.0 ** min(failures - 1, 30))
        rest = max(min(rest, DAY_SECONDS), settings.cooldown_seconds)
        cause = f"back-off after {failures} run{'s' if failures > 1 else ''} without a release"
    return replace(
        memory, blocked_until=now + rest, blocked_by=cause, failures=failures, breaches=0, matured_at_breach=0
    )


def _judge(kpis: Kpis, settings: PolicySettings) -> tuple[Action, str]:
    """Whether this one window breaches, and why."""
    others, threshold = kpis.rows - kpis.clicks, f"{settings.auc_threshold:.3f}"
    over = f"over {kpis.rows} rows, {kpis.clicks} clicks, model version {kpis.version}"
    if kpis.auc is None:
        return Action.UNDECIDABLE, f"auc undefined {over}: needs both clicks and rows without one"
    measured = f"auc {kpis.auc:.3f}"
    if kpis.auc_low is not None and kpis.auc_high is not None:
        measured += f" (95 % {kpis.auc_low:.3f}..{kpis.auc_high:.3f})"
    if min(kpis.clicks, others) < settings.min_clicks:
        lacking = f"{kpis.clicks} clicks and {others} others, needs {settings.min_clicks} of each"
        return Action.UNDECIDABLE, f"{measured} {over}: too few to judge, {lacking}"
    if kpis.auc >= settings.auc_threshold:
        return Action.OK, f"{measured} >= {threshold} {over}"
    if settings.require_confidence and (kpis.auc_high is None or kpis.auc_high >= settings.auc_threshold):
        return Action.UNDECIDABLE, f"{measured} {over}: the interval straddles {threshold}, needs more rows"
    return Action.BREACH, f"{measured} < {threshold} {over}"


def _confirm(memory: PolicyMemory, settings: PolicySettings, rows_since_breach: int, now: float) -> tuple[Action, str]:
    """Whether the breaches so far allow a run, and what is missing otherwise."""
    if memory.breaches < settings.consecutive_breaches:
        return Action.BREACH, f"; breach {memory.breaches} of {settings.consecutive_breaches}"
    if rows_since_breach < settings.min_rows_since_breach:
        return Action.BREACH, f"; {rows_since_breach} of {settings.min_rows_since_breach} rows since the first breach"
    rest = memory.blocked_until - now
    # No rest is longer: one that seems so was noted by a clock that has since been set back.
    if 0 < rest <= max(DAY_SECONDS, settings.cooldown_seconds):
        return Action.HELD, f"; held {rest:.0f} s more: {memory.blocked_by}"
    spent = sum(abs(t - now) < DAY_SECONDS for t in memory.requested_at)
    if spent >= settings.daily_budget:
        return Action.HELD, f"; held: {spent} requests in 24 hours, the daily budget is {settings.daily_budget}"
    return Action.RETRAIN, ""
