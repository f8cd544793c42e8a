"""The reference's policy: a threshold on the serving version's windowed AUC, with a minimum of clicks.

In: evidence and the policy's own memory. Out: a decision and the new memory. Its false alarms are bounded only by the
interval of one window at a time: over months it fires falsely; `monitoring.deciding.sequential` is bounded over all
of them. Cool-down and budget are left to `monitoring.acting.restraint`.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.contracts.errors import ContractError
from monitoring.deciding.decision import Action, Decision
from monitoring.deciding.evidence import Evidence, Memory
from monitoring.measures.kpis import Kpis


@dataclass(frozen=True, kw_only=True)
class ThresholdSettings:
    """The thresholds of judgement."""

    auc_threshold: float = 0.74
    """A windowed AUC below this is a breach."""
    min_clicks: int = 200
    """Fewest clicks, and fewest rows without one, that a window is judged on."""
    require_confidence: bool = True
    """A breach counts only if the whole 95 % interval lies below the threshold."""
    consecutive_breaches: int = 3
    """Breaches in a row, one per decision point, that confirm a drift."""
    min_rows_since_breach: int = 0
    """Rows that must mature after the first breach: the run needs rows of the changed world to learn from."""

    def __post_init__(self) -> None:
        """Refuses thresholds that decide nothing."""
        if not 0.0 < self.auc_threshold < 1.0:
            raise ContractError(f"auc_threshold is {self.auc_threshold}, expected inside (0, 1)")
        for name in ("min_clicks", "consecutive_breaches"):
            if getattr(self, name) < 1:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.min_rows_since_breach < 0:
            raise ContractError(f"min_rows_since_breach is {self.min_rows_since_breach}, expected at least 0")


class ThresholdPolicy:
    """See `evidence.Policy`."""

    name = "threshold"

    def __init__(self, settings: ThresholdSettings) -> None:
        """Decides by `settings`."""
        self._settings = settings

    def decide(self, evidence: Evidence, memory: Memory) -> tuple[Decision, Memory]:
        """See `evidence.Policy`; memory: `version` judged last, `breaches` in a row, `matured_at_breach`."""
        settings, kpis, total = self._settings, evidence.kpis, evidence.matured_total
        of_version = memory.get("version") == kpis.version
        breaches = int(memory["breaches"]) if of_version else 0
        first = int(memory["matured_at_breach"]) if of_version else 0
        action, reason = _judge(kpis, settings)
        if action is Action.OK:
            breaches, first = 0, 0
        elif action is Action.BREACH:
            first = total if breaches == 0 else first
            breaches += 1
            action, note = _confirm(breaches, total - first, settings)
            reason += note
        numbers: dict[str, float | None] = {
            "auc": kpis.auc,
            "auc_low": kpis.auc_low,
            "auc_high": kpis.auc_high,
            "threshold": settings.auc_threshold,
            "rows": kpis.rows,
            "clicks": kpis.clicks,
            "version": kpis.version,
            "breaches": breaches,
            "rows_since_breach": total - first if breaches else 0,
        }
        decision = Decision(policy=self.name, action=action, reason=reason, numbers=numbers)
        return decision, {"version": kpis.version, "breaches": breaches, "matured_at_breach": first}


def _judge(kpis: Kpis, settings: ThresholdSettings) -> tuple[Action, str]:
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


def _confirm(breaches: int, rows_since_breach: int, settings: ThresholdSettings) -> tuple[Action, str]:
    """Whether the breaches so far confirm a drift, and what is missing otherwise."""
    if breaches < settings.consecutive_breaches:
        return Action.BREACH, f"; breach {breaches} of {settings.consecutive_breaches}"
    if rows_since_breach < settings.min_rows_since_breach:
        return Action.BREACH, f"; {rows_since_breach} of {settings.min_rows_since_breach} rows since the first breach"
    return Action.RETRAIN, ""
