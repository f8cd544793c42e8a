"""Would a policy have fired: fires, delay, false alarms, GPU hours and AUC lost over recorded requests.

In: judgements of `monitoring.backtest.judging`, what a run costs, when the world changed if that is known. Out: one
`Backtest`. The records stay what they were: a fire changes no model, so what a second fire says assumes that the first
run's release changed nothing. Showing it is left to `monitoring.backtest.report`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from monitoring.backtest.settings import CostSettings, JudgingSettings
from monitoring.deciding.policy import Action, DecisionPoint
from monitoring.deciding.restraint import RestraintMemory, ended, requested, restrain

HOUR_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Fire:
    """A run that would have been asked for."""

    time: float
    """When: one attribution window after its decision point, seconds since the epoch."""
    version: int
    policy: str
    reason: str
    rows: int
    """Rows matured when it fired, since the archive's first."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The serving version's window at one decision point."""

    time: float
    version: int
    auc: float | None
    auc_low: float | None
    auc_high: float | None


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """What one setting of policies would have done; a number that does not exist is None."""

    policies: str
    decision_points: int
    rows: int
    """Rows that matured."""
    fires: tuple[Fire, ...]
    held: int
    """Decision points at which a run was held back by cool-down or budget."""
    false_alarms: int | None
    """Fires before the drift; None where it is not known when the world changed."""
    delay_seconds: float | None
    """From the drift to the first fire after it; None where either is unknown or absent."""
    delay_rows: int | None
    """Rows that matured meanwhile."""
    gpu_hours: float
    auc_hours_lost: float | None
    """Integral over time, in hours, of how far the AUC lay below its baseline, from the drift (or the first point)
    to the first fire after it (or the last point); None without a baseline."""
    points: tuple[Point, ...] = field(repr=False, default=())


def backtest(judgements: Iterable[DecisionPoint], settings: JudgingSettings, costs: CostSettings) -> Backtest:
    """Follows `judgements` with the live monitor's restraint under a virtual clock.

    Each fire's run is taken to be released `costs.run_seconds` later; while it runs, nothing else is asked for.
    """
    memory, running_until, held = RestraintMemory(), float("-inf"), 0
    fires: list[Fire] = []
    points: list[Point] = []
    baselines: list[float | None] = []
    rows: list[int] = []
    for judgement in judgements:
        now = judgement.time + settings.judge.attribution_window_seconds
        points.append(_point(judgement, now))
        rows.append(int(judgement.memory["matured_total"]))
        baselines.append(_baseline(judgement))
        if now < running_until:
            held += judgement.decision.action is Action.RETRAIN
            continue
        decision = restrain(judgement.decision, memory, settings.restraint, now=now)
        held += decision.action is Action.HELD
        if decision.action is Action.RETRAIN:
            fires.append(
                Fire(
                    time=now,
                    version=judgement.version,
                    policy=decision.policy,
                    reason=decision.reason,
                    rows=rows[-1],
                )
            )
            running_until = now + costs.run_seconds
            memory = ended(requested(memory, now=now), "released", settings.restraint, now=running_until)
    drift_at = costs.drift_at
    found = next((fire for fire in fires if drift_at is None or fire.time >= drift_at), None)
    false_alarms = delay_seconds = delay_rows = None
    if drift_at is not None:
        false_alarms = sum(fire.time < drift_at for fire in fires)
        if found is not None:
            delay_seconds = found.time - drift_at
            delay_rows = found.rows - max((n for point, n in zip(points, rows) if point.time < drift_at), default=0)
    return Backtest(
        policies=settings.policies.policies,
        decision_points=len(points),
        rows=rows[-1] if rows else 0,
        fires=tuple(fires),
        held=held,
        false_alarms=false_alarms,
        delay_seconds=delay_seconds,
        delay_rows=delay_rows,
        gpu_hours=len(fires) * costs.gpu_hours_per_run,
        auc_hours_lost=_auc_hours_lost(points, baselines, drift_at, found.time if found else None),
        points=tuple(points),
    )


def _point(judgement: DecisionPoint, now: float) -> Point:
    kpis = judgement.kpis
    return Point(time=now, version=judgement.version, auc=kpis.auc, auc_low=kpis.auc_low, auc_high=kpis.auc_high)


def _baseline(judgement: DecisionPoint) -> float | None:
    known = judgement.memory["baselines"].get(str(judgement.version))
    return None if known is None else float(known["auc"])


def _auc_hours_lost(
    points: list[Point], baselines: list[float | None], start: float | None, end: float | None
) -> float | None:
    lost, exists = 0.0, False
    for before, point, baseline in zip(points, points[1:], baselines[1:]):
        inside = (start is None or point.time >= start) and (end is None or point.time <= end)
        if inside and baseline is not None and point.auc is not None:
            exists = True
            lost += max(0.0, baseline - point.auc) * (point.time - before.time) / HOUR_SECONDS
    return lost if exists else None
