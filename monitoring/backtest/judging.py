"""The live judge over archived requests, and what its policies would have done: fires, delay, false alarms, cost.

In: requests in order of event time. Out: decision points, whose lines are those that the monitor wrote over the same
records, and one `Backtest` per setting of policies. The lines differ where the monitor received a record after its
decision point had passed (it no longer judges it; the archive cannot show this), and where its settings, verdicts or
training statistics were others. A fire changes no model here, so the second fire assumes that the first run's release
changed nothing. Pure; reading is left to `archived_requests`, printing to the command.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from components.contracts.features import Features
from components.contracts.reference_statistics import ReferenceStatistics
from monitoring.backtest.archived_requests import ArchivedRequest
from monitoring.backtest.settings import JudgingSettings
from monitoring.deciding.judging import Judge, no_baseline, serving_ahead
from monitoring.deciding.policies import make_policies
from monitoring.deciding.policy import Action, Baseline, DecisionPoint
from monitoring.deciding.restraint import RunMemory, ended, requested, restrain
from monitoring.drift.watch import DriftWatch
from monitoring.rows import MaturedRequest


def no_reference(version: int) -> ReferenceStatistics | None:
    """No version has training statistics."""
    return None


def judge_requests(
    requests: Iterable[ArchivedRequest],
    settings: JudgingSettings,
    *,
    baseline: Callable[[int], Baseline | None] = no_baseline,
    reference: Callable[[int], ReferenceStatistics | None] = no_reference,
    features: Features | None = None,
    memory: Mapping[str, Any] | None = None,
) -> Iterator[DecisionPoint]:
    """Judges `requests`, ordered by (time, request id), to their end.

    A version's training statistics are looked up only for requests that have features; `features` are their columns.
    With the memory of a judge that stopped at `judged`, requests up to there fill the windows and those after are
    judged.
    """
    judge = Judge(settings.judge, make_policies(settings.policies, settings.baking), baseline=baseline, memory=memory)
    stream = _Stream(judge, DriftWatch(reference, settings.drift, features=features), settings)
    # At least once in each bucket of the drift watch, which holds few open at a time.
    step = settings.drift.drift_bucket_seconds or settings.judge.decide_seconds
    passed = math.inf
    for request in requests:
        time = request.matured.time
        if time - passed >= step:
            yield from stream.pass_until(time)
            passed = time
        passed = min(passed, time)
        stream.take_in(request)
    yield from stream.end()


class _Stream:
    """Feeds a judge and a drift watch, in order of event time."""

    def __init__(self, judge: Judge, watch: DriftWatch, settings: JudgingSettings) -> None:
        self._judge = judge
        self._watch = watch
        self._settings = settings
        self._warm: list[MaturedRequest] = []
        self._newest: float | None = None
        judged = judge.judged_until
        self._judged = -math.inf if judged is None else judged
        self._known_until = self._judged + serving_ahead(settings.judge)
        """What the judge's memory knows already of who served."""
        window, grace = settings.judge.attribution_window_seconds, settings.judge.drift_grace_seconds
        self._drift_known_until = self._judged + window - grace
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
    """Matured when it fired, since the archive's first."""


class _Point(NamedTuple):
    """The serving version's window at one decision point."""

    time: float
    """One attribution window after the decision point: when the monitor judged it."""
    rows: int
    """Matured since the archive's first."""
    auc_loss: float | None
    """How far the AUC lay below the gate's; None where either does not exist."""


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
    auc_hours_lost: float | None
    """Integral over time, in hours, of how far the AUC lay below the gate's, from the drift (or the first point) to the
    first fire after it (or the last point); None without a gate's AUC."""


def backtest(
    judgements: Iterable[DecisionPoint], settings: JudgingSettings, *, run_seconds: float, drift_at: float | None = None
) -> Backtest:
    """Follows `judgements` with the live monitor's restraint under a virtual clock.

    The cool-down begins `run_seconds` after a fire, at its run's release, and no other run is requested before.
    `drift_at` is when the world changed; None = not known, so no alarm can be called false.
    """
    memory = RunMemory()
    running_until = -math.inf
    held = 0
    fires: list[Fire] = []
    points: list[_Point] = []
    for judgement in judgements:
        point = _point(judgement, settings)
        points.append(point)
        if point.time < running_until:
            held += judgement.decision.action is Action.RETRAIN
            continue
        decision = restrain(judgement.decision, memory, settings.restraint, now=point.time)
        held += decision.action is Action.HELD
        if decision.action is Action.RETRAIN:
            fires.append(
                Fire(
                    time=point.time,
                    version=judgement.version,
                    policy=decision.policy,
                    reason=decision.reason,
                    rows=point.rows,
                )
            )
            running_until = point.time + run_seconds
            memory = ended(requested(memory, now=point.time), "released", settings.restraint, now=running_until)
    start = -math.inf if drift_at is None else drift_at
    found = next((fire for fire in fires if fire.time >= start), None)
    is_delay_known = found is not None and drift_at is not None
    rows_before = max((point.rows for point in points if point.time < start), default=0)
    return Backtest(
        policies=settings.policies.policies,
        decision_points=len(points),
        rows=points[-1].rows if points else 0,
        fires=tuple(fires),
        held=held,
        false_alarms=None if drift_at is None else sum(fire.time < start for fire in fires),
        delay_seconds=found.time - start if found and is_delay_known else None,
        delay_rows=found.rows - rows_before if found and is_delay_known else None,
        auc_hours_lost=_auc_hours_lost(points, start=start, end=found.time if found else math.inf),
    )


def _point(judgement: DecisionPoint, settings: JudgingSettings) -> _Point:
    auc, gate = judgement.kpis.auc, judgement.memory["baselines"].get(str(judgement.version))
    return _Point(
        judgement.time + settings.judge.attribution_window_seconds,
        int(judgement.memory["matured_total"]),
        None if gate is None or auc is None else max(0.0, float(gate["auc"]) - auc),
    )


def _auc_hours_lost(points: list[_Point], *, start: float, end: float) -> float | None:
    losses = [
        point.auc_loss * (point.time - before.time) / 3600.0
        for before, point in zip(points, points[1:])
        if start <= point.time <= end and point.auc_loss is not None
    ]
    return sum(losses) if losses else None
