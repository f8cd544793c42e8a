"""When policies are asked, and what they are shown: the order of judgement as a function of records, not of turns.

In: predictions as they come in, requests as they mature, both in any order; how far maturing has come. Out: one
judgement per decision point at which rows of the serving version matured. So the monitor and a backtest over its
archive judge the same rows at the same points, whatever the sizes of their bites, and write equal lines. Keeping the
memory is left to `monitoring.memory.store`; restraint and acting, which look at the clock, to `monitoring.acting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from components.contracts.criteo import microseconds
from components.runtime.errors import ContractError
from monitoring.deciding.decision import Judgement, combine
from monitoring.deciding.evidence import Baseline, Evidence, FeatureDrift, MaturedRows, Policy
from monitoring.deciding.points import ServingTimeline, point_after
from monitoring.measures.kpis import measure
from monitoring.measures.window import MAX_VERSIONS, RowWindow
from monitoring.memory.rows import MaturedRequest

MAX_PASSED_OVER = 1000
"""Ids of requests passed over that are remembered, so that a restart passes them over too."""

MIN_DECIDE_SECONDS = 0.001


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """What rows are judged, and how often."""

    window_rows: int = 20_000
    """Newest matured rows of each model version that the KPIs are computed over."""
    attribution_window_seconds: float = 1800.0
    """How long after its prediction a click counts; the label is final when this has passed."""
    decide_seconds: float = 10.0
    """Event time between two decision points, which are its multiples."""
    drift_grace_seconds: float = 60.0
    """How long after its end a bucket of features waits for predictions that reach the log late."""

    def __post_init__(self) -> None:
        """Refuses settings that judge nothing or never."""
        if self.window_rows < 1:
            raise ContractError(f"window_rows is {self.window_rows}, expected at least 1")
        if not self.attribution_window_seconds >= 0:
            value = self.attribution_window_seconds
            raise ContractError(f"attribution_window_seconds is {value}, expected at least 0")
        if not self.decide_seconds >= MIN_DECIDE_SECONDS:
            raise ContractError(f"decide_seconds is {self.decide_seconds}, expected at least {MIN_DECIDE_SECONDS}")
        if not self.drift_grace_seconds >= 0:
            raise ContractError(f"drift_grace_seconds is {self.drift_grace_seconds}, expected at least 0")


def no_baseline(version: int) -> Baseline | None:
    """Knows no version's."""
    return None


class Judge:
    """Windows, policies and their memories."""

    def __init__(
        self,
        settings: JudgeSettings,
        policies: Sequence[Policy],
        *,
        baseline: Callable[[int], Baseline | None] = no_baseline,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes up where `memory` stopped.

        After it, `restore` what matured before and `note_prediction` what was predicted after
        `judged_until + attribution_window_seconds`.

        Args:
            settings: See `JudgeSettings`.
            policies: Asked in this order; at least one.
            baseline: What the gate measured of a version. Asked once per version and then remembered: a verdict that
                is replaced later must not change what a backtest decides.
            memory: What `memory()` gave; None or a document without `judged` = a new judge.
        """
        assert policies
        self._capacity, self._policies, self._baseline = settings.window_rows, tuple(policies), baseline
        self._span, self._grace = microseconds(settings.decide_seconds), microseconds(settings.drift_grace_seconds)
        self._timeline = ServingTimeline(self._span, microseconds(settings.attribution_window_seconds))
        self._windows: dict[int, RowWindow] = {}
        self._pending: list[MaturedRequest] = []
        known = memory if memory and "judged" in memory else {}
        self._judged: int | None = known.get("judged")
        self._timeline.version, self._timeline.since = known.get("serving") or (None, 0)
        self._timeline.reached = self._judged
        self._timeline.last = tuple(known["last_prediction"]) if known.get("last_prediction") else None
        self._matured_total = int(known.get("matured_total", 0))
        self._memories: dict[str, Any] = dict(known.get("policies", {}))
        self._baselines: dict[str, Any] = dict(known.get("baselines", {}))
        self._drift = [_drift(each) for each in known.get("drift", ())]
        self.num_passed_over = int(known.get("num_passed_over", 0))
        """Requests that came after their point was judged: in the archive, and in no judgement."""
        self._passed_over: list[str] = list(known.get("passed_over", ()))

    @property
    def judged_until(self) -> float | None:
        """The last decision point passed, event time in seconds; what is from before it is judged no more."""
        return None if self._judged is None else self._judged / 1e6

    @property
    def serving_version(self) -> int | None:
        """The version that serves at the last decision point; None before the first."""
        return self._timeline.version

    def memory(self) -> dict[str, Any]:
        """What a successor needs beside the rows, as JSON takes it."""
        return {
            **self._memory_at(self._judged),
            "judged_until": self.judged_until,
            "last_prediction": self._timeline.last,
            "drift": [asdict(each) for each in self._drift],
            "num_passed_over": self.num_passed_over,
            "passed_over": self._passed_over,
        }

    def _memory_at(self, point: int | None) -> dict[str, Any]:
        """The part of the memory that records up to `point` decide."""
        timeline = self._timeline
        return {
            "judged": point,
            "serving": None if timeline.version is None else [timeline.version, timeline.since],
            "matured_total": self._matured_total,
            "policies": dict(self._memories),
            "baselines": dict(self._baselines),
        }

    def note_prediction(self, time: float, version: int, *, is_canary: bool) -> None:
        """Takes in who answered at `time` (seconds since the epoch); repetitions change nothing."""
        if not is_canary:
            self._timeline.note(microseconds(time), version)

    def note_drift(self, drift: FeatureDrift) -> None:
        """Takes in a closed bucket, before any decision point that is shown it: see `_drift_until`."""
        if all((each.version, each.bucket_end) != (drift.version, drift.bucket_end) for each in self._drift):
            self._drift.append(drift)

    def observe(self, request: MaturedRequest) -> None:
        """Takes in a request whose labels are final, once."""
        if self._is_judged(request):
            self.num_passed_over += 1
            self._passed_over = [*self._passed_over, request.request_id][-MAX_PASSED_OVER:]
        else:
            self._pending.append(request)

    def restore(self, requests: Iterable[MaturedRequest]) -> None:
        """Takes in after a restart what matured before it: into the windows if it was judged, else to be judged."""
        passed_over = set(self._passed_over)
        judged: list[MaturedRequest] = []
        for request in requests:
            if not self._is_judged(request):
                self._pending.append(request)
            elif request.request_id not in passed_over:
                judged.append(request)
        for request in sorted(judged, key=_order):
            self._update_window(request)

    def decide_up_to(self, matured_until: float) -> list[Judgement]:
        """Judges at every decision point up to this event time, up to which all that was predicted has matured.

        A point without a new row of the version that serves has no judgement.
        """
        last = microseconds(matured_until) // self._span * self._span
        if self._judged is not None and last <= self._judged:
            return []
        due = sorted((r for r in self._pending if microseconds(r.time) <= last), key=_order)
        self._pending = [r for r in self._pending if microseconds(r.time) > last]
        judgements: list[Judgement] = []
        for point, requests in groupby(due, key=lambda request: point_after(microseconds(request.time), self._span)):
            self._timeline.advance(point)
            if rows := self._take_in(list(requests)):
                judgements.append(self._judge(point, rows))
        self._timeline.advance(last)
        self._judged = last
        return judgements

    def _is_judged(self, request: MaturedRequest) -> bool:
        return self._judged is not None and microseconds(request.time) <= self._judged

    def _take_in(self, requests: list[MaturedRequest]) -> list[MaturedRequest]:
        """Moves the requests of one point into the windows; those of the serving version."""
        for request in requests:
            self._update_window(request)
            self._matured_total += len(request.labels)
        return [request for request in requests if request.model_version == self._timeline.version]

    def _update_window(self, request: MaturedRequest) -> None:
        window = self._windows.pop(request.model_version, None) or RowWindow(self._capacity)
        self._windows[request.model_version] = window
        window.update(request.labels, request.scores)
        if len(self._windows) > MAX_VERSIONS:
            del self._windows[next(iter(self._windows))]

    def _judge(self, point: int, requests: list[MaturedRequest]) -> Judgement:
        version = requests[0].model_version
        window = self._windows[version]
        evidence = Evidence(
            time=point / 1e6,
            version=version,
            serving_since=self._timeline.since / 1e6,
            kpis=measure(version, window.labels, window.scores),
            rows=matured_rows(requests),
            matured_total=self._matured_total,
            baseline=self._baseline_of(version),
            drift=self._drift_until(point, version),
        )
        decisions = []
        for policy in self._policies:
            decision, memory = policy.decide(evidence, self._memories.get(policy.name, {}))
            self._memories[policy.name] = dict(memory)
            decisions.append(decision)
        return Judgement(
            time=evidence.time,
            version=version,
            decision=combine(tuple(decisions)),
            decisions=tuple(decisions),
            kpis=evidence.kpis,
            memory=self._memory_at(point),
        )

    def _baseline_of(self, version: int) -> Baseline | None:
        key = str(version)
        if key not in self._baselines:
            found = self._baseline(version)
            self._baselines[key] = asdict(found) if found else None
            if len(self._baselines) > MAX_VERSIONS:
                del self._baselines[next(iter(self._baselines))]
        return Baseline(**self._baselines[key]) if self._baselines[key] else None

    def _drift_until(self, point: int, version: int) -> tuple[FeatureDrift, ...]:
        """The buckets of `version` closed by now; lets go of them and of those that came before of other versions.

        When `point` is judged, all is read up to one attribution window later, and all but the grace of it is closed.
        """
        ahead = (point + self._timeline.window - self._grace) / 1e6
        closed = sorted((each for each in self._drift if each.bucket_end <= ahead), key=lambda each: each.bucket_end)
        self._drift = [each for each in self._drift if each.bucket_end > ahead]
        return tuple(each for each in closed if each.version == version)


def matured_rows(requests: Sequence[MaturedRequest]) -> MaturedRows:
    """The rows of `requests`, at least one, in their order."""
    sizes = [len(request.labels) for request in requests]
    return MaturedRows(
        labels=np.concatenate([request.labels for request in requests]),
        scores=np.concatenate([request.scores for request in requests]),
        groups=np.repeat(np.arange(len(requests), dtype=np.int64), sizes),
    )


def _order(request: MaturedRequest) -> tuple[int, str]:
    return microseconds(request.time), request.request_id


def _drift(document: Mapping[str, Any]) -> FeatureDrift:
    return FeatureDrift(**{**document, "drifted": tuple(document["drifted"])})
