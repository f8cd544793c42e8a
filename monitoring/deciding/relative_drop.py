"""A drop of the windowed AUC below what the gate measured of the same version, both with their intervals.

In: the window's AUC and the gate's. Out: a breach where the whole 95 % interval of "window less allowed share of the
gate's" lies below 0: the two are measured on different rows, so their variances add. Looked at again and again, it
fires falsely like any single-window test; `monitoring.deciding.sequential` does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from components.runtime.errors import ContractError
from monitoring.deciding.confirmation import ConfirmationSettings, confirm, confirmation_numbers, too_few
from monitoring.deciding.decision import Action, Decision
from monitoring.deciding.evidence import Baseline, Evidence, Memory
from monitoring.measures.kpis import Kpis


@dataclass(frozen=True, kw_only=True)
class RelativeDropSettings(ConfirmationSettings):
    """How much a version may lose."""

    max_relative_drop: float = 0.05
    """Share of the gate's AUC that may be lost before it is a breach."""

    def __post_init__(self) -> None:
        """Refuses shares that are none."""
        ConfirmationSettings.__post_init__(self)
        if not 0.0 <= self.max_relative_drop < 1.0:
            raise ContractError(f"max_relative_drop is {self.max_relative_drop}, expected in [0, 1)")


class RelativeDropPolicy:
    """See `evidence.Policy`."""

    name = "relative_drop"

    def __init__(self, settings: RelativeDropSettings) -> None:
        """Decides by `settings`."""
        self._settings = settings

    def decide(self, evidence: Evidence, memory: Memory) -> tuple[Decision, Memory]:
        """See `evidence.Policy`; memory is `confirmation.confirm`'s."""
        action, reason = _judge(evidence.kpis, evidence.baseline, self._settings)
        action, note, memory = confirm(action, evidence, memory, self._settings)
        baseline, kept = evidence.baseline, 1.0 - self._settings.max_relative_drop
        numbers = {
            **evidence.window_numbers(),
            "threshold": kept * baseline.auc if baseline else None,
            "gate_auc": baseline.auc if baseline else None,
            "gate_auc_low": baseline.low if baseline else None,
            "gate_auc_high": baseline.high if baseline else None,
            **confirmation_numbers(evidence, memory),
        }
        return Decision(policy=self.name, action=action, reason=reason + note, numbers=numbers), memory


def _judge(kpis: Kpis, baseline: Baseline | None, settings: RelativeDropSettings) -> tuple[Action, str]:
    """Whether this one window has dropped, and by how much."""
    over = f"over {kpis.rows} rows, {kpis.clicks} clicks, model version {kpis.version}"
    if baseline is None:
        return Action.UNDECIDABLE, f"the gate's auc of model version {kpis.version} is not known"
    if kpis.auc is None or kpis.auc_low is None or kpis.auc_high is None:
        return Action.UNDECIDABLE, f"auc or its interval undefined {over}"
    measured = f"auc {kpis.auc:.3f} against {baseline.auc:.3f} at the gate"
    if lacking := too_few(kpis, settings.min_clicks):
        return Action.UNDECIDABLE, f"{measured} {over}: {lacking}"
    kept = 1.0 - settings.max_relative_drop
    missing = kept * baseline.auc - kpis.auc
    # Half widths of 95 % intervals; an interval clipped at 0 or 1 counts by its longer side.
    half = math.hypot(_half_width(kpis.auc, kpis.auc_low, kpis.auc_high), kept * _half_width(*_ends(baseline)))
    said = f"{measured}, {missing:+.3f} (95 % {missing - half:+.3f}..{missing + half:+.3f}) below {kept:g} of it {over}"
    if missing <= 0:
        return Action.OK, said
    if missing - half <= 0:
        return Action.UNDECIDABLE, f"{said}: needs more rows"
    return Action.BREACH, said


def _ends(baseline: Baseline) -> tuple[float, float, float]:
    return baseline.auc, baseline.low, baseline.high


def _half_width(auc: float, low: float, high: float) -> float:
    return max(auc - low, high - auc)
