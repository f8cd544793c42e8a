"""Make decisions at fixed points of event time. A decision depends only on the records.

The input is predictions and matured requests in any order. The caller also passes the event time up
to which all predictions have matured. The output is one `DecisionPoint` for each point with new
matured rows of the serving version or its predecessors. The result does not depend on batch sizes
or on the loop, so the monitor and a backtest over its archive write equal lines.
`monitoring.state.store` stores the state. Cooldowns and actions depend on the clock and belong to
`monitoring.retraining`.

Rows of a version mature for a whole attribution window after the version was replaced. The last
rows of a version are evidence about its successor too, because both versions see the same traffic.
The policies choose the rows that are evidence against a version.

Decision points are the multiples of `decide_seconds`. Times are whole microseconds
(`contracts.raw_rows.microseconds`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergreen.config.monitor import EvaluationSettings
from evergreen.contracts.raw_rows import CLOCK_AHEAD_SECONDS, microseconds
from evergreen.contracts.records import micros_of
from monitoring.metrics.window import MAX_VERSIONS, VersionWindows, measure
from monitoring.policies.policy import (
    Baseline,
    DecisionPoint,
    Evidence,
    FeatureDrift,
    MaturedRows,
    Policy,
    Predecessor,
    combine,
    without_oldest,
)
from monitoring.rows import MaturedRequests

_MAX_PASSED_OVER = 1000
"""Maximum number of remembered request ids. Requests with these ids came too late for their
decision point, and must stay excluded after a restart."""


def no_baseline(version: int) -> Baseline | None:
    """Return no baseline for any version."""
    return None


def serving_ahead(settings: EvaluationSettings) -> float:
    """Return how long after a decision point a prediction can affect the decision, in seconds.

    Predictions after a decision point show which version served at the point. The result is the
    attribution window minus the grace period, because the last predictions before the watermark may
    arrive late.
    """
    return max(settings.attribution_window_seconds - settings.drift_grace_seconds, 0.0)


class Evaluator:
    """Windows, policies and the policies' states."""

    def __init__(
        self,
        settings: EvaluationSettings,
        policies: Sequence[Policy],
        *,
        baseline: Callable[[int], Baseline | None] = no_baseline,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue from `state`, or start anew.

        The caller must then call `restore` with the requests that have matured so far. The caller
        must also call `record_predictions` with the predictions after `decided_until +
        serving_ahead(settings)`.

        Args:
            settings: Length of the windows, and the times of decisions.
            policies: Policies in order.
            baseline: Returns a version's baseline. The function is called once per version, so that
                a later verdict does not change the decisions of a backtest.
            state: State that `state_dict()` returned or that a `DecisionPoint` contains, or None.
        """
        known = state or {}
        self._policies = tuple(policies)
        self._baseline_of = baseline
        self._span = microseconds(settings.decide_seconds)
        self._drift_ahead = microseconds(
            settings.attribution_window_seconds - settings.drift_grace_seconds
        )
        self._timeline = _ServingTimeline(self._span, microseconds(serving_ahead(settings)))
        self._windows = VersionWindows(settings.window_rows, keep_lists=False)
        self._pending: list[MaturedRequests] = []
        self._decided: int | None = known.get("decided")
        self._timeline.lineage = [(version, since) for version, since in known.get("lineage", ())]
        self._timeline.reached = self._decided
        self._timeline.last = (
            tuple(known["last_prediction"]) if known.get("last_prediction") else None
        )
        self._matured_total = int(known.get("matured_total", 0))
        self._policy_states: dict[str, dict[str, Any]] = dict(known.get("policies", {}))
        self._baselines: dict[str, dict[str, Any] | None] = dict(known.get("baselines", {}))
        self._predecessors: dict[str, dict[str, float | None] | None] = dict(
            known.get("predecessors", {})
        )
        self._drift = [
            FeatureDrift(
                **{**each, "drifted": tuple(each["drifted"])}
            )  # convert a list to a tuple, because JSON has no tuples
            for each in known.get("drift", ())
        ]
        self.num_passed_over = int(known.get("num_passed_over", 0))
        """Number of requests that matured too late for their decision point. Late requests are
        archived but used in no decision."""
        self._passed_over: list[str] = list(known.get("passed_over", ()))

    @property
    def decided_until(self) -> float | None:
        """The last decision point in seconds of event time, or None.

        Rows up to this decision point are not used in later decisions.
        """
        return None if self._decided is None else self._decided / 1e6

    @property
    def serving_version(self) -> int | None:
        """Version that serves at the last decision point. None before the first decision point."""
        return self._timeline.version

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a successor process as a JSON object, without the rows."""
        return {
            **self._state_at(self._decided),
            "decided_until": self.decided_until,
            "last_prediction": self._timeline.last,
            "drift": [asdict(each) for each in self._drift],
            "num_passed_over": self.num_passed_over,
            "passed_over": self._passed_over,
        }

    def _state_at(self, point: int | None) -> dict[str, Any]:
        """Return the part of the state that depends only on the records up to `point`."""
        return {
            "decided": point,
            "lineage": [list(each) for each in self._timeline.lineage],
            "matured_total": self._matured_total,
            "policies": dict(self._policy_states),
            "baselines": dict(self._baselines),
            "predecessors": dict(self._predecessors),
        }

    def record_predictions(
        self, times: NDArray[np.float64], versions: NDArray[np.int32], *, canary: NDArray[np.bool_]
    ) -> None:
        """Record the versions and times of predictions. Canaries are ignored.

        If the same predictions are recorded again, nothing changes.

        All arrays have shape [m].
        """
        serving = ~canary
        self._timeline.record(micros_of(times[serving]), versions[serving])

    def record_drift(self, drift: FeatureDrift) -> None:
        """Record a closed bucket.

        The caller must record a bucket before any decision point that uses the bucket. See
        `_drift_until`.
        """
        if all(
            (each.version, each.bucket_end) != (drift.version, drift.bucket_end)
            for each in self._drift
        ):
            self._drift.append(drift)

    def observe(self, requests: MaturedRequests) -> None:
        """Add requests whose labels are final. Each request must be added only once."""
        is_decided = self._is_decided(requests)
        if is_decided.any():
            passed_over = requests.ids[is_decided].tolist()
            self.num_passed_over += len(passed_over)
            self._passed_over = [*self._passed_over, *passed_over][-_MAX_PASSED_OVER:]
            requests = requests.select(~is_decided)
        if len(requests):
            self._pending.append(requests)

    def restore(self, requests: MaturedRequests) -> None:
        """Add requests that matured before a restart.

        The windows are filled with the requests up to the last decision point. Decisions are made
        only for later requests.
        """
        is_decided = self._is_decided(requests)
        if not is_decided.all():
            self._pending.append(requests.select(~is_decided))
        passed_over = set(self._passed_over)
        is_passed = np.array([each in passed_over for each in requests.ids.tolist()], np.bool_)
        restored = requests.select(is_decided & ~is_passed)
        self._windows.update(restored.ordered(restored.micros))

    def decide_up_to(self, matured_until: float) -> list[DecisionPoint]:
        """Decide at every decision point up to an event time.

        All predictions up to the event time must have matured. No decision is made at a point if no
        row of the serving version's lineage has matured.
        """
        last = microseconds(matured_until) // self._span * self._span
        if self._decided is not None and 0 <= self._decided - last <= microseconds(
            CLOCK_AHEAD_SECONDS
        ):
            return []
        points: list[DecisionPoint] = []
        for point, requests in self._take_due(last):
            self._timeline.advance(point)
            self._windows.update(requests)
            self._matured_total += requests.num_rows
            line = [version for version, _ in self._timeline.lineage]
            of_lineage = requests.select(np.isin(requests.versions, line))
            if len(of_lineage):
                points.append(self._decide_at(point, of_lineage))
        self._timeline.advance(last)
        self._decided = last
        return points

    def _take_due(self, last: int) -> Iterator[tuple[int, MaturedRequests]]:
        """Yield the pending requests of each point up to `last`, ordered by time and id.

        Later requests stay pending.
        """
        if not self._pending:
            return
        pending = MaturedRequests.joined(self._pending)
        is_due = pending.micros <= last
        self._pending = [] if is_due.all() else [pending.select(~is_due)]
        due = pending.select(is_due).ordered(pending.micros[is_due])
        points = _point_after(due.micros, self._span)
        firsts = np.flatnonzero(np.diff(points, prepend=-1)).tolist()
        for start, stop in zip(firsts, [*firsts[1:], len(due)]):
            yield int(points[start]), due.between(start, stop)

    def _is_decided(self, requests: MaturedRequests) -> NDArray[np.bool_]:
        if self._decided is None:
            return np.zeros(len(requests), np.bool_)
        return np.asarray(requests.micros <= self._decided)

    def _decide_at(self, point: int, requests: MaturedRequests) -> DecisionPoint:
        """Decide on new requests in order. All requests were scored by versions of the lineage."""
        version, since = self._timeline.lineage[-1]
        of_lineage = dict(requests.by_version())
        shown = version if version in self._windows.versions else int(requests.versions[-1])
        versions = {version, shown, *of_lineage.keys()}
        self._remember_baselines(versions)
        evidence = Evidence(
            time=point / 1e6,
            version=version,
            serving_since=since / 1e6,
            seen_until=self._timeline.seen_until(point) / 1e6,
            kpis=measure(shown, self._windows[shown]),
            rows_of={each: _rows_of(of_lineage[each]) for each in sorted(of_lineage)},
            lineage=tuple(each for each, _ in self._timeline.lineage),
            matured_total=self._matured_total,
            baselines={
                each: baseline
                for each in versions
                if (baseline := self._baseline(each)) is not None
            },
            predecessor=self._remembered_predecessor(version) if version in of_lineage else None,
            drift=self._drift_until(point, version),
        )
        decisions = []
        for policy in self._policies:
            decision, state = policy.decide(evidence, self._policy_states.get(policy.name, {}))
            self._policy_states[policy.name] = dict(state)
            decisions.append(decision)
        return DecisionPoint(
            time=evidence.time,
            version=version,
            decision=combine(tuple(decisions)),
            decisions=tuple(decisions),
            kpis=evidence.kpis,
            state=self._state_at(point),
        )

    def _remember_baselines(self, versions: set[int]) -> None:
        """Look up unknown baselines. Drop the baselines of versions whose rows have all matured."""
        for version in sorted(versions):
            if (key := str(version)) not in self._baselines:
                found = self._baseline_of(version)
                self._baselines[key] = asdict(found) if found else None
        needed = versions | {version for version, _ in self._timeline.lineage}
        self._baselines = without_oldest(self._baselines, needed=needed)

    def _baseline(self, version: int) -> Baseline | None:
        known = self._baselines[str(version)]
        return Baseline(**known) if known else None

    def _remembered_predecessor(self, version: int) -> Predecessor | None:
        """Measure the previous version once, before the first row of `version` matures."""
        key = str(version)
        if key not in self._predecessors:
            baseline = self._baseline(version)
            before = baseline.previous_version if baseline else None
            found = None
            if before is not None and before in self._windows.versions:
                kpis = measure(before, self._windows[before])
                found = {"auc_low": kpis.auc_low, "click_rate": kpis.ctr}
            self._predecessors = without_oldest(
                {**self._predecessors, key: found}, needed=[version]
            )
        known = self._predecessors[key]
        return Predecessor(**known) if known else None

    def _drift_until(self, point: int, version: int) -> tuple[FeatureDrift, ...]:
        """Remove all buckets that have closed, and return the removed buckets of `version`.

        When a decision is made about `point`, the log was read up to one attribution window after
        `point`. A bucket has closed if its end plus the grace period is at most one attribution
        window after `point`.
        """
        ahead = (point + self._drift_ahead) / 1e6
        closed = sorted(
            (each for each in self._drift if each.bucket_end <= ahead),
            key=lambda each: each.bucket_end,
        )
        self._drift = [each for each in self._drift if each.bucket_end > ahead]
        return tuple(each for each in closed if each.version == version)


def _rows_of(requests: MaturedRequests) -> MaturedRows:
    return MaturedRows(
        labels=requests.labels,
        scores=requests.scores,
        groups=np.repeat(np.arange(len(requests), dtype=np.int64), requests.sizes),
    )


MAX_LINEAGE = 64
"""Maximum number of versions of a lineage that are remembered, newest first. The limit is larger
than the number of versions that serve within one attribution window."""


class _ServingTimeline:
    """The version that serves at each point, and its lineage.

    The newest non-canary prediction determines the serving version. A decision point also uses
    predictions that are at most `ahead` microseconds later than the point (see `serving_ahead`).
    The highest version number would be wrong, because a rollback serves an older version. If two
    predictions have the same time, the prediction of the higher version counts as newer. A version
    that is replaced by an earlier version was rolled back and leaves the lineage.
    """

    def __init__(self, span: int, ahead: int) -> None:
        self._span, self._ahead = span, ahead
        # Versions with predictions between the previous decision point and each future decision
        # point, with the times of first and last prediction. The number of entries does not grow
        # with the traffic.
        self._seen: dict[int, dict[int, tuple[int, int]]] = {}
        self.lineage: list[tuple[int, int]] = []
        """The last serving version and its predecessors, ascending. Each version has the
        approximate time of its first prediction, with an error of at most one `decide_seconds`.
        Empty before the first prediction."""
        self.reached: int | None = None
        """Time of the last decision point that was passed, or None before the first decision
        point."""
        self.last: tuple[int, int] | None = None
        """Time and version of the newest prediction that a passed decision point used, or None if
        unknown."""

    @property
    def version(self) -> int | None:
        """Version that serves at the newest decision point, or None before the first prediction."""
        return self.lineage[-1][0] if self.lineage else None

    def seen_until(self, point: int) -> int:
        """Return the event time up to which a decision about `point` uses predictions."""
        return point + self._ahead

    def record(self, times: NDArray[np.int64], versions: NDArray[np.int32]) -> None:
        """Record non-canary predictions, in any order.

        Clients publish a prediction a little after its event time, so its decision point may have
        passed. A prediction that is newer than all known predictions is then used at the next
        decision point. A late prediction that is not newer is ignored.

        Args:
            times: Microseconds, shape [m].
            versions: Shape [m].
        """
        points = _point_after(times - self._ahead, self._span)
        if self.reached is not None and self.last is not None:
            time, version = self.last
            is_newer = (times > time) | ((times == time) & (versions > version))
            counts = (points > self.reached) | is_newer
            points, times, versions = points[counts], times[counts], versions[counts]
        if not len(points):
            return
        order = np.lexsort((times, versions, points))
        points, times, versions = points[order], times[order], versions[order]
        firsts = np.flatnonzero(np.r_[True, (np.diff(points) != 0) | (np.diff(versions) != 0)])
        lasts = np.append(firsts[1:], len(points)) - 1
        found = (points[firsts], versions[firsts], times[firsts], times[lasts])
        for point, version, oldest, newest in zip(*(each.tolist() for each in found)):
            seen = self._seen.setdefault(point, {})
            first, last = seen.get(version, (oldest, newest))
            seen[version] = (min(first, oldest), max(last, newest))

    def advance(self, point: int) -> None:
        """Advance to `point`.

        Before the call, all predictions up to `ahead` microseconds after `point` must be recorded.
        """
        if self.reached is not None and point < self.reached:
            # A clock was ahead, and was then corrected. The predictions with later times have wrong
            # times.
            self.last = None
            self.lineage = [
                (version, min(since, self.seen_until(point))) for version, since in self.lineage
            ]
        for due in sorted(each for each in self._seen if each <= point):
            of_point = self._seen.pop(due)
            in_order = sorted(of_point, key=lambda version: (of_point[version][1], version))
            for version in in_order:
                self._replace_serving(version, of_point[version][0])
            last = (of_point[in_order[-1]][1], in_order[-1])
            self.last = last if self.last is None else max(self.last, last)
        self.reached = point
        self._shorten(point)

    def _replace_serving(self, version: int, since: int) -> None:
        if version != self.version:
            before = [each for each in self.lineage if each[0] < version]
            self.lineage = [*before, (version, since)][-MAX_LINEAGE:]

    def _shorten(self, point: int) -> None:
        """Drop the versions whose rows have all matured, but keep the newest versions."""
        is_served = [since <= point for _, since in self.lineage]
        self.lineage = self.lineage[max(sum(is_served) - MAX_VERSIONS, 0) :]


def _point_after(times: NDArray[np.int64], span: int) -> NDArray[np.int64]:
    """Round each time up to a multiple of `span`.

    >>> _point_after(np.array([10, 11]), 10).tolist()
    [10, 20]
    """
    return -(-times // span) * span
