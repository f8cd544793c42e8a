"""Simulated traffic under continuous retraining, as the reference for the monitor's decisions.

A model version is released every few seconds. A version was trained on the rows whose labels were
final at its training. The newest tenth of the training window is the gate's holdout. A drift lowers
the AUC of the versions that were trained only on older rows. A version that was trained on newer
rows has the same AUC as versions before the drift. The scores are binormal, see
`testing.click_streams`. Each request has one row.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from evergreen.config.features import MISSING_CATEGORY
from evergreen.config.monitor import EvaluationSettings, PolicySettings
from evergreen.config.release import BakingSettings
from evergreen.contracts.records import NO_POSITION
from monitoring.policies.evaluation import Evaluator, serving_ahead
from monitoring.policies.policies import make_policies
from monitoring.policies.policy import Baseline, DecisionPoint
from monitoring.rows import MaturedRequests

START = 1_767_225_600.0
"""Start time of the streams, a multiple of every `decide_seconds` in these tests."""


@dataclass(frozen=True, kw_only=True)
class Releases:
    """A recommender that is retrained and released continuously.

    Times are seconds from the stream's start.
    """

    every: float
    """Seconds between two releases."""
    seconds: float
    """Length of the stream."""
    window: float = 1800.0
    """Attribution window in seconds."""
    decide: float = 60.0
    rows_per_second: float = 20.0
    click_rate: float = 0.25
    auc: float = 0.79
    degraded_auc: float = 0.62
    changed_at: float | None = None
    """Time at which the drift begins. None = there is no drift."""
    changed_again_at: float | None = None
    """Time of the second drift."""
    can_recover: bool = True
    """Whether the AUC rises to `auc` again if a version was trained on rows after the drift."""
    recovers_after: float = 300.0
    """Minimum time in seconds from a drift to the newest training row of a version whose AUC is
    `auc` again."""
    gate_half_width: float = 0.0
    """Half the width of the gate's confidence interval. If the width is 0, the gate measured the
    exact AUC."""
    holdout_share: float = 0.1
    """Share of a run's newest rows, on which the run's model is evaluated. A run gets the rows
    between two releases."""

    def version_at(self, time: float) -> int:
        """Return the serving version, from 1."""
        return int(time // self.every) + 1

    def trained_until(self, version: int) -> float:
        """Return the event time of the newest training row of the version."""
        return (version - 1 - self.holdout_share) * self.every - self.window

    def recovers_from(self, version: int, changed_at: float | None = None) -> bool:
        """Return whether enough of the version's training rows are newer than a drift."""
        changed_at = self.changed_at if changed_at is None else changed_at
        if changed_at is None:
            return False
        return self.trained_until(version) >= changed_at + self.recovers_after

    def auc_of(self, version: int, time: float) -> float:
        """Return the AUC of the version at the time `time`."""
        changes = [
            each
            for each in (self.changed_at, self.changed_again_at)
            if each is not None and time >= each
        ]
        is_recovered = not changes or (
            self.can_recover and self.recovers_from(version, changes[-1])
        )
        return self.auc if is_recovered else self.degraded_auc

    def baseline(self, version: int) -> Baseline:
        """Return the gate's measurement: the version's mean AUC over its holdout rows."""
        end = (version - 1) * self.every - self.window
        times = np.linspace(self.trained_until(version), end, 101)[1:]
        auc = float(np.mean([self.auc_of(version, time) for time in times]))
        return Baseline(
            auc=auc,
            low=auc - self.gate_half_width,
            high=auc + self.gate_half_width,
            previous_version=version - 1 or None,
            trained_until=START + self.trained_until(version),
        )


def rows_between(
    random: Generator, releases: Releases, begin: float, end: float
) -> MaturedRequests:
    """Return requests that are spread evenly between `begin` and `end`."""
    num = round((end - begin) * releases.rows_per_second)
    offsets = begin + (np.arange(num) + 0.5) / releases.rows_per_second
    versions = np.array([releases.version_at(each) for each in offsets.tolist()], np.int32)
    labels = (random.random(num) < releases.click_rate).astype(np.uint8)
    pairs = {
        pair: _shift(releases.auc_of(*pair))
        for pair in {(int(versions[0]), begin), (int(versions[-1]), end - 1e-6)}
    }
    # The version and the drift may change only at the start of a decision span.
    assert len(set(pairs.values())) == 1, "releases and the change must be at decision points"
    scores = (
        random.standard_normal(num, np.float32) + np.float32(next(iter(pairs.values()))) * labels
    )
    return requests_of(START + offsets, versions, labels, scores)


def requests_of(
    times: NDArray[np.float64],
    versions: NDArray[np.int32],
    labels: NDArray[np.uint8],
    scores: NDArray[np.float32],
) -> MaturedRequests:
    """Return requests of one row each, from arrays [m]."""
    num = len(times)
    return MaturedRequests(
        ids=np.array(
            [f"{version}-{time:.6f}" for version, time in zip(versions.tolist(), times.tolist())],
            object,
        ),
        times=times,
        versions=versions,
        sizes=np.ones(num, np.int64),
        numbers=np.arange(num),
        # Map the scores to probabilities without a change of their order, because only the order is
        # used.
        scores=(1.0 / (1.0 + np.exp(-scores))).astype(np.float32),
        positions=np.full(num, NO_POSITION, np.int32),
        labels=labels,
        click_delays=np.full(num, np.nan, np.float32),
        users=np.full(num, MISSING_CATEGORY),
    )


def decisions(
    random: Generator,
    releases: Releases,
    policies: PolicySettings | None = None,
    *,
    baking: BakingSettings | None = None,
    window_rows: int = 400,
) -> Iterator[DecisionPoint]:
    """Yield the decisions that the monitor, with its shipped settings, makes on the stream."""
    settings = EvaluationSettings(
        window_rows=window_rows,
        attribution_window_seconds=releases.window,
        decide_seconds=releases.decide,
    )
    evaluate = Evaluator(
        settings, make_policies(policies or PolicySettings(), baking), baseline=releases.baseline
    )
    open_rows: deque[tuple[float, MaturedRequests]] = deque()
    ahead = serving_ahead(settings)
    for step in range(int(releases.seconds / releases.decide)):
        begin, end = step * releases.decide, (step + 1) * releases.decide
        made = rows_between(random, releases, begin, end)
        evaluate.record_predictions(made.times, made.versions, canary=np.zeros(len(made), np.bool_))
        open_rows.append((end, made))
        point = end - ahead
        while open_rows and open_rows[0][0] <= point:
            evaluate.observe(open_rows.popleft()[1])
        yield from evaluate.decide_up_to(START + point)


def _shift(auc: float) -> float:
    return float(np.sqrt(2.0) * NormalDist().inv_cdf(auc))


def without_change(releases: Releases) -> Releases:
    """Return the same releases without drift."""
    return replace(releases, changed_at=None)
