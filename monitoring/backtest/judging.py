"""The live judge over archived requests: the same code, fed in the order and at the points of the live monitor.

In: requests in order of event time. Out: decision points, whose lines are those that the monitor wrote over the same
records. They differ where the monitor got a record after its decision point had passed
(it judges it no more; the archive cannot tell), and where its settings, verdicts or training statistics were others.
What a fire would have done is left to `monitoring.backtest.run`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from components.contracts.reference_statistics import ReferenceStatistics
from monitoring.backtest.archived_requests import ArchivedRequest
from monitoring.backtest.settings import JudgingSettings
from monitoring.deciding.judging import Judge, no_baseline
from monitoring.deciding.policies import make_policies
from monitoring.deciding.policy import Baseline, DecisionPoint
from monitoring.drift.watch import DriftWatch
from monitoring.rows import MaturedRequest

EVERY_REQUESTS = 1000
"""Requests between two looks whether a decision point has passed; which changes no decision."""


def no_reference(version: int) -> ReferenceStatistics | None:
    """Knows no version's."""
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
