"""A sequential test whose false alarms are bounded over all time: is the served version's AUC below what was promised?

In: the fresh rows of each decision point. Out: RETRAIN once the evidence against "the AUC is at least theta" reaches
1 / alpha. Bound and conditions are `monitoring.deciding.betting`'s: for each served version, as long as its AUC is at
least theta, the probability that this policy *ever* says RETRAIN, however long it serves and however often one looks,
is at most alpha. A fleet that releases k versions has at most k alpha false alarms in the mean.

theta is the lower end of the gate's 95 % interval less a tolerance: the gate measured held-out rows of the lake, and
serving meets others. Without a gate's AUC it is `auc_threshold`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from components.runtime.errors import ContractError
from monitoring.deciding.betting import Wealth
from monitoring.deciding.decision import Action, Decision
from monitoring.deciding.evidence import Evidence, Memory
from monitoring.deciding.threshold import ThresholdSettings

MAX_VERSIONS = 8
"""Versions whose evidence is remembered: two may take turns during a roll-out."""


@dataclass(frozen=True, kw_only=True)
class SequentialSettings(ThresholdSettings):
    """What the sequential test promises."""

    sequential_alpha: float = 0.01
    """Largest probability of a false alarm per served version, over all the time that it serves."""
    sequential_tolerance: float = 0.02
    """AUC below the gate's interval that is no drift: serving meets other rows than the gate."""

    def __post_init__(self) -> None:
        """Refuses a test that never or always speaks."""
        ThresholdSettings.__post_init__(self)
        if not 0.0 < self.sequential_alpha < 1.0:
            raise ContractError(f"sequential_alpha is {self.sequential_alpha}, expected inside (0, 1)")
        if not 0.0 <= self.sequential_tolerance < 0.5:
            raise ContractError(f"sequential_tolerance is {self.sequential_tolerance}, expected in [0, 0.5)")


class SequentialPolicy:
    """See `evidence.Policy`."""

    name = "sequential"

    def __init__(self, settings: SequentialSettings) -> None:
        """Decides by `settings`."""
        self._settings = settings

    def decide(self, evidence: Evidence, memory: Memory) -> tuple[Decision, Memory]:
        """See `evidence.Policy`; memory: per version, its wealth, and `matured_at_alarm` once it was enough."""
        version = str(evidence.version)
        known: dict[str, Any] = dict(memory.get("versions", {}))
        state: dict[str, Any] = known.pop(version, {})
        enough = 1.0 / self._settings.sequential_alpha
        wealth = Wealth(self._theta(evidence), state)
        alarmed_at: int | None = state.get("matured_at_alarm")
        if alarmed_at is None and wealth.bet(evidence.rows, enough):
            alarmed_at = evidence.matured_total
        known[version] = {**wealth.memory(), "matured_at_alarm": alarmed_at}
        while len(known) > MAX_VERSIONS:
            del known[next(iter(known))]
        action, reason = self._judge(evidence, wealth, alarmed_at)
        numbers = {
            **evidence.window_numbers(),
            "threshold": wealth.theta,
            "evidence": wealth.value,
            "evidence_needed": enough,
            "rounds": wealth.rounds,
            "clicks_judged": wealth.clicks,
            "rows_since_breach": 0 if alarmed_at is None else evidence.matured_total - alarmed_at,
        }
        return Decision(policy=self.name, action=action, reason=reason, numbers=numbers), {"versions": known}

    def _theta(self, evidence: Evidence) -> float:
        if evidence.baseline is None:
            return self._settings.auc_threshold
        return min(max(evidence.baseline.low - self._settings.sequential_tolerance, 0.01), 0.99)

    def _judge(self, evidence: Evidence, wealth: Wealth, alarmed_at: int | None) -> tuple[Action, str]:
        settings = self._settings
        enough = 1.0 / settings.sequential_alpha
        said = f"evidence {wealth.value:.3g} of {enough:g} that the auc is below {wealth.theta:.3f}"
        said += f" after {wealth.clicks} clicks, model version {evidence.version}"
        if alarmed_at is not None:
            since = evidence.matured_total - alarmed_at
            said += f"; false with a probability of at most {settings.sequential_alpha:g}"
            if since < settings.min_rows_since_breach:
                return Action.BREACH, f"{said}; {since} of {settings.min_rows_since_breach} rows since"
            return Action.RETRAIN, said
        if not wealth.rounds:
            return Action.UNDECIDABLE, f"{said}: too few clicks to begin"
        return Action.OK, said
