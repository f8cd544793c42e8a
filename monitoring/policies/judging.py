"""When policies decide, and on what evidence: judgement as a function of records, not of the loop's turns.

In: predictions as they arrive and requests as they mature, both in any order; how far maturing has come. Out: one
`DecisionPoint` per point of event time at which rows of the serving version's line matured. So the monitor and a
backtest over its archive judge the same rows at the same points, whatever the sizes of their batches, and write equal
lines. Keeping the memory is left to `monitoring.state.store`; restraint and acting, which depend on the clock, to
`monitoring.retraining`.

Rows mature for a whole attribution window after their version was replaced. They are evidence about the version that
serves then, because the world that they come from is the world that it meets. Which rows count against which version
is left to the policies.

Decision points are the multiples of `decide_seconds`. Times are whole microseconds (`contracts.raw_rows.microseconds`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evergreen.config.monitor import JudgeSettings
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

MAX_PASSED_OVER = 1000
"""Ids of requests passed over that are remembered, so that a restart passes them over too."""


def no_baseline(version: int) -> Baseline | None:
    """Knows no version's baseline."""
    return None


def serving_ahead(settings: JudgeSettings) -> float:
    """Seconds after a decision point up to which predictions tell which version serves at it.

    At the watermark the last ones may still be on their way, so the grace period is left out of the window.
    """
    return max(settings.attribution_window_seconds - settings.drift_grace_seconds, 0.0)


class Judge:
    """The windows, the policies and their memories."""

    def __init__(
        self,
        settings: JudgeSettings,
        policies: Sequence[Policy],
        *,
        baseline: Callable[[int], Baseline | None] = no_baseline,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        """Continues where `memory` stopped, which `memory()` or a `DecisionPoint` holds; None = a new judge.

        After it, `restore` what matured before and `note_predictions` what was predicted after
        `judged_until + serving_ahead(settings)`. `baseline`, what the gate measured of a version, is called once per
        version and remembered: a verdict that is replaced later must not change what a backtest decides.
        """
        known = memory or {}
        self._policies = tuple(policies)
        self._baseline_of = baseline
        self._span = microseconds(settings.decide_seconds)
        self._drift_ahead = microseconds(settings.attribution_window_seconds - settings.drift_grace_seconds)
        self._timeline = ServingTimeline(self._span, microseconds(serving_ahead(settings)))
        self._windows = VersionWindows(settings.window_rows, keep_lists=False)
        self._pending: list[MaturedRequests] = []
        self._judged: int | None = known.get("judged")
        self._timeline.line = [(version, since) for version, since in known.get("line", ())]
        self._timeline.reached = self._judged
        self._timeline.last = tuple(known["last_prediction"]) if known.get("last_prediction") else None
        self._matured_total = int(known.get("matured_total", 0))
        self._memories: dict[str, dict[str, Any]] = dict(known.get("policies", {}))
        self._baselines: dict[str, dict[str, Any] | None] = dict(known.get("baselines", {}))
        self._predecessors: dict[str, dict[str, float | None] | None] = dict(known.get("predecessors", {}))
        self._drift = [
            FeatureDrift(**{**each, "drifted": tuple(each["drifted"])})  # JSON has no tuples
            for each in known.get("drift", ())
        ]
        self.num_passed_over = int(known.get("num_passed_over", 0))
        """Requests that arrived after their point was judged: in the archive, and in no decision."""
        self._passed_over: list[str] = list(known.get("passed_over", ()))

    @property
    def judged_until(self) -> float | None:
        """The last decision point passed, event time in seconds; rows from before it are judged no more."""
        return None if self._judged is None else self._judged / 1e6

    @property
    def serving_version(self) -> int | None:
        """The version that serves at the last decision point; None before the first."""
        return self._timeline.version

    def memory(self) -> dict[str, Any]:
        """What a successor needs beside the rows, a JSON object."""
        return {
            **self._memory_at(self._judged),
            "judged_until": self.judged_until,
            "last_prediction": self._timeline.last,
            "drift": [asdict(each) for each in self._drift],
            "num_passed_over": self.num_passed_over,
            "passed_over": self._passed_over,
        }

    def _memory_at(self, point: int | None) -> dict[str, Any]:
        """The part of the memory that follows from the records up to `point`."""
        return {
            "judged": point,
            "line": [list(each) for each in self._timeline.line],
            "matured_total": self._matured_total,
            "policies": dict(self._memories),
            "baselines": dict(self._baselines),
            "predecessors": dict(self._predecessors),
        }

    def note_predictions(
        self, times: NDArray[np.float64], versions: NDArray[np.int32], *, canary: NDArray[np.bool_]
    ) -> None:
        """Notes which versions answered at these times, arrays [m], where no canary did; repetitions change nothing."""
        serving = ~canary
        self._timeline.note(micros_of(times[serving]), versions[serving])

    def note_drift(self, drift: FeatureDrift) -> None:
        """Notes a closed bucket, before any decision point that uses it: see `_drift_until`."""
        if all((each.version, each.bucket_end) != (drift.version, drift.bucket_end) for each in self._drift):
            self._drift.append(drift)

    def observe(self, requests: MaturedRequests) -> None:
        """Takes in requests whose labels are final, each once."""
        is_judged = self._is_judged(requests)
        if is_judged.any():
            passed_over = requests.ids[is_judged].tolist()
            self.num_passed_over += len(passed_over)
            self._passed_over = [*self._passed_over, *passed_over][-MAX_PASSED_OVER:]
            requests = requests.select(~is_judged)
        if len(requests):
            self._pending.append(requests)

    def restore(self, requests: MaturedRequests) -> None:
        """Takes in after a restart what matured before it: into the windows if it was judged, else to be judged."""
        is_judged = self._is_judged(requests)
        if not is_judged.all():
            self._pending.append(requests.select(~is_judged))
        passed_over = set(self._passed_over)
        is_passed = np.array([each in passed_over for each in requests.ids.tolist()], np.bool_)
        judged = requests.select(is_judged & ~is_passed)
        self._windows.update(judged.ordered(judged.micros))

    def decide_up_to(self, matured_until: float) -> list[DecisionPoint]:
        """Decides at every point up to this event time, up to which everything that was predicted has matured.

        A point without a new row of the serving version or of one before it in its line has no decision.
        """
        last = microseconds(matured_until) // self._span * self._span
        if self._judged is not None and 0 <= self._judged - last <= microseconds(CLOCK_AHEAD_SECONDS):
            return []
        points: list[DecisionPoint] = []
        for point, requests in self._take_due(last):
            self._timeline.advance(point)
            self._windows.update(requests)
            self._matured_total += requests.num_rows
            line = [version for version, _ in self._timeline.line]
            of_line = requests.select(np.isin(requests.versions, line))
            if len(of_line):
                points.append(self._decide_at(point, of_line))
        self._timeline.advance(last)
        self._judged = last
        return points

    def _take_due(self, last: int) -> Iterator[tuple[int, MaturedRequests]]:
        """What is pending up to the point `last`, as each point's requests, by time and id; the rest stays."""
        if not self._pending:
            return
        pending = MaturedRequests.joined(self._pending)
        is_due = pending.micros <= last
        self._pending = [] if is_due.all() else [pending.select(~is_due)]
        due = pending.select(is_due).ordered(pending.micros[is_due])
        points = point_after(due.micros, self._span)
        firsts = np.flatnonzero(np.diff(points, prepend=-1)).tolist()
        for start, stop in zip(firsts, [*firsts[1:], len(due)]):
            yield int(points[start]), due.between(start, stop)

    def _is_judged(self, requests: MaturedRequests) -> NDArray[np.bool_]:
        if self._judged is None:
            return np.zeros(len(requests), np.bool_)
        return np.asarray(requests.micros <= self._judged)

    def _decide_at(self, point: int, requests: MaturedRequests) -> DecisionPoint:
        """Decides on new requests of the versions of the line, in order."""
        version, since = self._timeline.line[-1]
        of_line = dict(requests.by_version())
        shown = version if version in self._windows.versions else int(requests.versions[-1])
        judged = {version, shown, *of_line.keys()}
        self._remember_baselines(judged)
        evidence = Evidence(
            time=point / 1e6,
            version=version,
            serving_since=since / 1e6,
            seen_until=self._timeline.seen_until(point) / 1e6,
            kpis=measure(shown, self._windows[shown]),
            rows_of={each: _rows_of(of_line[each]) for each in sorted(of_line)},
            line=tuple(each for each, _ in self._timeline.line),
            matured_total=self._matured_total,
            baselines={each: baseline for each in judged if (baseline := self._baseline(each)) is not None},
            predecessor=self._remembered_predecessor(version) if version in of_line else None,
            drift=self._drift_until(point, version),
        )
        decisions = []
        for policy in self._policies:
            decision, memory = policy.decide(evidence, self._memories.get(policy.name, {}))
            self._memories[policy.name] = dict(memory)
            decisions.append(decision)
        return DecisionPoint(
            time=evidence.time,
            version=version,
            decision=combine(tuple(decisions)),
            decisions=tuple(decisions),
            kpis=evidence.kpis,
            memory=self._memory_at(point),
        )

    def _remember_baselines(self, versions: set[int]) -> None:
        """Look up the baselines that are not known yet, and drop those of versions whose rows have all matured."""
        for version in sorted(versions):
            if (key := str(version)) not in self._baselines:
                found = self._baseline_of(version)
                self._baselines[key] = asdict(found) if found else None
        needed = versions | {version for version, _ in self._timeline.line}
        self._baselines = without_oldest(self._baselines, needed=needed)

    def _baseline(self, version: int) -> Baseline | None:
        known = self._baselines[str(version)]
        return Baseline(**known) if known else None

    def _remembered_predecessor(self, version: int) -> Predecessor | None:
        """What was measured of the version before, once: its last rows mature before the first of `version`."""
        key = str(version)
        if key not in self._predecessors:
            baseline = self._baseline(version)
            before = baseline.previous_version if baseline else None
            found = None
            if before is not None and before in self._windows.versions:
                kpis = measure(before, self._windows[before])
                found = {"auc_low": kpis.auc_low, "click_rate": kpis.ctr}
            self._predecessors = without_oldest({**self._predecessors, key: found}, needed=[version])
        known = self._predecessors[key]
        return Predecessor(**known) if known else None

    def _drift_until(self, point: int, version: int) -> tuple[FeatureDrift, ...]:
        """Takes the buckets closed by now, and returns those of `version`.

        When `point` is judged, everything up to one attribution window later has been read, and everything but the
        grace period of it is closed.
        """
        ahead = (point + self._drift_ahead) / 1e6
        closed = sorted((each for each in self._drift if each.bucket_end <= ahead), key=lambda each: each.bucket_end)
        self._drift = [each for each in self._drift if each.bucket_end > ahead]
        return tuple(each for each in closed if each.version == version)


def _rows_of(requests: MaturedRequests) -> MaturedRows:
    return MaturedRows(
        labels=requests.labels,
        scores=requests.scores,
        groups=np.repeat(np.arange(len(requests), dtype=np.int64), requests.sizes),
    )


MAX_LINE = 64
"""Versions of a line that are remembered, the newest: as many as serve within one attribution window, and some more."""


class ServingTimeline:
    """The version that serves at each point, and the line of versions that led to it.

    The serving version is that of the newest prediction by no canary, `ahead` after the point; see `serving_ahead`. It
    is not the highest number, because a rollback serves an older one. Of predictions at one time the higher version
    counts as the newer one. A version that is replaced by an earlier one leaves the line: it was rolled back.
    """

    def __init__(self, span: int, ahead: int) -> None:
        self._span, self._ahead = span, ahead
        # Per point still to come and version: first and last prediction since the point before. A few entries,
        # whatever the traffic.
        self._notes: dict[int, dict[int, tuple[int, int]]] = {}
        self.line: list[tuple[int, int]] = []
        """The serving version at the end and those before it, in ascending order; each with its first prediction since
        it serves, within the span in which it took over. Empty before the first prediction."""
        self.reached: int | None = None
        """The last point passed; None before the first."""
        self.last: tuple[int, int] | None = None
        """Time and version of the newest prediction known at a point passed; None where that is not known."""

    @property
    def version(self) -> int | None:
        """The version that serves at the point reached; None before the first prediction."""
        return self.line[-1][0] if self.line else None

    def seen_until(self, point: int) -> int:
        """Time up to which predictions are known when `point` is judged."""
        return point + self._ahead

    def note(self, times: NDArray[np.int64], versions: NDArray[np.int32]) -> None:
        """Notes predictions that no canary made, [m] times and versions, in any order.

        One whose point `advance` has passed counts at the next one if it is newer than what was known: clients publish
        a little after the event. An older one says nothing about who serves now, and is ignored.
        """
        points = point_after(times - self._ahead, self._span)
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
            noted = self._notes.setdefault(point, {})
            first, last = noted.get(version, (oldest, newest))
            noted[version] = (min(first, oldest), max(last, newest))

    def advance(self, point: int) -> None:
        """Advances to `point`; every prediction up to `ahead` after it must have been noted."""
        if self.reached is not None and point < self.reached:
            # A clock was ahead and is set right: what it said of later times has not happened.
            self.last = None
            self.line = [(version, min(since, self.seen_until(point))) for version, since in self.line]
        for due in sorted(each for each in self._notes if each <= point):
            of_point = self._notes.pop(due)
            in_order = sorted(of_point, key=lambda version: (of_point[version][1], version))
            for version in in_order:
                self._take_over(version, of_point[version][0])
            last = (of_point[in_order[-1]][1], in_order[-1])
            self.last = last if self.last is None else max(self.last, last)
        self.reached = point
        self._shorten(point)

    def _take_over(self, version: int, since: int) -> None:
        if version != self.version:
            before = [each for each in self.line if each[0] < version]
            self.line = [*before, (version, since)][-MAX_LINE:]

    def _shorten(self, point: int) -> None:
        """Drops versions that no later row can come from, but for the newest ones."""
        is_served = [since <= point for _, since in self.line]
        self.line = self.line[max(sum(is_served) - MAX_VERSIONS, 0) :]


def point_after(times: NDArray[np.int64], span: int) -> NDArray[np.int64]:
    """The first multiple of `span` that is not before each of the times.

    >>> point_after(np.array([10, 11]), 10).tolist()
    [10, 20]
    """
    return -(-times // span) * span
