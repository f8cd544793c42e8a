"""The reference's policy: a threshold on the serving version's windowed AUC, with a minimum of clicks.

In: evidence and the policy's own memory. Out: a decision and the new memory. Its false alarms are bounded only by the
interval of one window at a time: over months it fires falsely; `monitoring.deciding.sequential` is bounded over all
of them. Cool-down and budget are left to `monitoring.acting.restraint`.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.runtime.errors import ContractError
from monitoring.deciding.confirmation import ConfirmationSettings, confirm, confirmation_numbers, too_few
from monitoring.deciding.decision import Action, Decision
from monitoring.deciding.evidence import Evidence, Memory
from monitoring.measures.kpis import Kpis


@dataclass(frozen=True, kw_only=True)
class ThresholdSettings(ConfirmationSettings):
    """The thresholds of judgement."""

    auc_threshold: float = 0.74
    """A windowed AUC below this is a breach."""
    require_confidence: bool = True
    """A breach counts only if the whole 95 % interval lies below the threshold."""

    def __post_init__(self) -> None:
        """Refuses thresholds that decide nothing."""
        ConfirmationSettings.__post_init__(self)
        if not 0.0 < self.auc_threshold < 1.0:
            raise ContractError(f"auc_threshold is {self.auc_threshold}, expected inside (0, 1)")


class ThresholdPolicy:
    """See `evidence.Policy`."""

    name = "threshold"

    def __init__(self, settings: ThresholdSettings) -> None:
        """Decides by `settings`."""
        self._settings = settings

    def decide(self, evidence: Evidence, memory: Memory) -> tuple[Decision, Memory]:
        """See `evidence.Policy`; memory is `confirmation.confirm`'s."""
        action, reason = _judge(evidence.kpis, self._settings)
        action, note, memory = confirm(action, evidence, memory, self._settings)
        numbers = {
            **evidence.window_numbers(),
            "threshold": self._settings.auc_threshold,
            **confirmation_numbers(evidence, memory),
        }
        return Decision(policy=self.name, action=action, reason=reason + note, numbers=numbers), memory


def _judge(kpis: Kpis, settings: ThresholdSettings) -> tuple[Action, str]:
    """Whether this one window breaches, and why."""
    threshold = f"{settings.auc_threshold:.3f}"
    over = f"over {kpis.rows} rows, {kpis.clicks} clicks, model version {kpis.version}"
    if kpis.auc is None:
        return Action.UNDECIDABLE, f"auc undefined {over}: needs both clicks and rows without one"
    measured = f"auc {kpis.auc:.3f}"
    if kpis.auc_low is not None and kpis.auc_high is not None:
        measured += f" (95 % {kpis.auc_low:.3f}..{kpis.auc_high:.3f})"
    if lacking := too_few(kpis, settings.min_clicks):
        return Action.UNDECIDABLE, f"{measured} {over}: {lacking}"
    if kpis.auc >= settings.auc_threshold:
        return Action.OK, f"{measured} >= {threshold} {over}"
    if settings.require_confidence and (kpis.auc_high is None or kpis.auc_high >= settings.auc_threshold):
        return Action.UNDECIDABLE, f"{measured} {over}: the interval straddles {threshold}, needs more rows"
    return Action.BREACH, f"{measured} < {threshold} {over}"
