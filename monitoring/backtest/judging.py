"""The live judge over archived requests, and what its policies would have done: fires, delay, false alarms, cost.

In: requests in order of event time. Out: decision points, whose lines are those that the monitor wrote over the same
records, and one `Backtest` per setting of policies. The lines differ where the monitor received a record after its
decision point had passed (it no longer judges it; the archive cannot show this), and where its settings, verdicts or
training statistics were others. A fire changes no model here, so the second fire assumes that the first run's release
changed nothing. Pure; reading is left to `archived_requests`, showing to `report`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from components.contracts.reference_statistics import ReferenceStatistics
from monitoring.backtest.archived_requests import ArchivedRequest
from monitoring.backtest.settings import CostSettings, JudgingSettings
from monitoring.deciding.judging import Judge, no_baseline
from monitoring.deciding.policies import make_policies
from monitoring.deciding.policy import Action, Baseline, DecisionPoint
from monitoring.deciding.restraint import RestraintMemory, ended, requested, restrain
from monitoring.drift.watch import DriftWatch
from monitoring.rows import MaturedRequest

EVERY_REQUESTS = 1000
"""Requests between two checks whether a decision point has passed; it changes no decision."""


def no_reference(version: int) -> ReferenceStatistics | None:
    """No version has training statistics."""
    return None


def judge_requests(
    requests: Iterable[ArchivedRequest],
    settings: JudgingSettings,
    *,
    baseline: Callable[[int], Baseline | None] = no_baseline,
    reference: Callable[[int], ReferenceStatistics | None] = no_reference,
    memory: Mapping[str, Any] | None = None,
) -> Iterator[DecisionPoint]:
    """Judges `requests`, ordered by (time, request id), to their end.

    Args:
        requests: What was served.
        settings: How to judge.
        baseline: What the gate measured of a version.
        reference: A version's training statistics; asked only for requests that have features.
        memory: Of a judge that stopped at `judged`: requests up to there fill the windows, those after are judged.
    """
    judge = Judge(settings.judge, make_policies(settings.policies), baseline=baseline, memory=memory)
    stream = _Stream(judge, DriftWatch(reference, settings.drift), settings)
    for number, request in enumerate(requests):
        stream.take_in(request)
        if number % EVERY_REQUESTS == 0:
            yield from stream.pass_until(request.matured.time)
    yield from stream.end()


class _Stream:
    """Feeds a judge and a drift watch, in order of event time."""

    def __init__(self, judge: Judge, watch: DriftWatch, settings: JudgingSettings) -> None:
        self._judge, self._watch, self._settings = judge, watch, settings
        self._warm: list[MaturedRequest] = []
        self._newest: float | None = None
        judged = judge.judged_until
        self._judged = -math.inf if judged is None else judged
        self._known_until = self._judged + settings.judge.attribution_window_seconds
        """What the judge's memory knows already of who served."""
        self._drift_known_until = self._known_until - settings.judge.drift_grace_seconds
        """And of what drifted."""

    def take_in(self, request: ArchivedRequest) -> None:
        matured = request.matured
        self._newest = matured.time
        if matured.time > self._known_until:
            self._judge.note_prediction(matured.time, matured.model_version, is_canary=request.is_canary)
        if request.features is not None:
            self._watch.observe(request.features)
        if matured.time <= self._judged:
            self._warm.append(matured)
        else:
            self._restore()
            self._judge.observe(matured)

    def pass_until(self, predicted_until: float) -> Iterator[DecisionPoint]:
        """Judges what is final once every prediction before `predicted_until` is in."""
        before = predicted_until - 1e-6  # requests of that very microsecond may follow
        for report in self._watch.close(before - self._settings.judge.drift_grace_seconds):
            if report.bucket_end > self._drift_known_until:
                self._judge.note_drift(report.evidence())
        final_until = before - self._settings.judge.attribution_window_seconds
        if final_until > self._judged:
            self._restore()
            yield from self._judge.decide_up_to(final_until)

    def end(self) -> Iterator[DecisionPoint]:
        """Judges the rest: every bucket and point that the last request belongs to is over."""
        if self._newest is not None:
            judge, drift = self._settings.judge, self._settings.drift
            yield from self.pass_until(self._newest + drift.drift_bucket_seconds + judge.drift_grace_seconds)
            last = self._newest + judge.decide_seconds
            yield from self.pass_until(last + judge.attribution_window_seconds)

    def _restore(self) -> None:
        if self._warm:
            self._judge.restore(self._warm)
            self._warm = []


@dataclass(frozen=True, kw_only=True)
class Fire:
    """A run that would have been requested."""

    time: float
    """When: one attribution window after its decision point, seconds since the epoch."""
    version: int
    policy: str
    reason: str
    rows: int
    """Rows matured when it fired, since the archive's first."""


@dataclass(frozen=True, kw_only=True)
class WindowPoint:
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
    points: tuple[WindowPoint, ...] = field(repr=False, default=())


def backtest(judgements: Iterable[DecisionPoint], settings: JudgingSettings, costs: CostSettings) -> Backtest:
    """Follows `judgements` with the live monitor's restraint under a virtual clock.

    Each fire's run is taken to be released `costs.run_seconds` later; meanwhile no other run is requested.
    """
    memory, running_until, held = RestraintMemory(), float("-inf"), 0
    fires: list[Fire] = []
    points: list[WindowPoint] = []
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
        auc_hours_lost=_auc_hours_lost(points, baselines, start=drift_at, end=found.time if found else None),
        points=tuple(points),
    )


def _point(judgement: DecisionPoint, now: float) -> WindowPoint:
    kpis = judgement.kpis
    return WindowPoint(time=now, version=judgement.version, auc=kpis.auc, auc_low=kpis.auc_low, auc_high=kpis.auc_high)


def _baseline(judgement: DecisionPoint) -> float | None:
    known = judgement.memory["baselines"].get(str(judgement.version))
    return None if known is None else float(known["auc"])


def _auc_hours_lost(
    points: list[WindowPoint], baselines: list[float | None], *, start: float | None, end: float | None
) -> float | None:
    lost, exists = 0.0, False
    for before, point, baseline in zip(points, points[1:], baselines[1:]):
        inside = (start is None or point.time >= start) and (end is None or point.time <= end)
        if inside and baseline is not None and point.auc is not None:
            exists = True
            lost += max(0.0, baseline - point.auc) * (point.time - before.time) / 3600.0
    return lost if exists else None
