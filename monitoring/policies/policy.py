"""Interface of a policy: the evidence at a decision point, and the decision.

Evidence comes from records and event times only, so that a backtest over the archive gives a policy
the same evidence as the running monitor. `monitoring.policies.policies` has the policies,
`monitoring.policies.evaluation` collects the evidence, and `monitoring.retraining` acts on
decisions.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from monitoring.metrics.window import MAX_VERSIONS, Kpis

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class MaturedRows:
    """Rows of one model version that matured since the last decision point.

    The rows are ordered by (time, request id, row).
    """

    labels: NDArray[np.uint8]
    """Label of each row, 0 or 1, shape [n]."""
    scores: NDArray[np.float32]
    """Score of each row, a probability, shape [n]."""
    groups: NDArray[np.int64]
    """Index of the request of each row, from 0, shape [n]. Rows of one request belong to the same
    user."""


NO_ROWS = MaturedRows(
    labels=np.zeros(0, np.uint8), scores=np.zeros(0, np.float32), groups=np.zeros(0, np.int64)
)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """AUC of a version in the gate, and the end of the version's training data.

    Both come from the registry.
    """

    auc: float | None = None
    """AUC over the holdout rows. If the gate measured no AUC, `auc`, `low` and `high` are None."""
    low: float | None = None
    """Lower end of the 95 % interval."""
    high: float | None = None
    """Upper end of the 95 % interval."""
    previous_version: int | None = None
    """Version that served before this version, or None for the first version."""
    trained_until: float | None = None
    """Event time of the model's newest training row, in seconds since the epoch. None if
    unknown."""


@dataclass(frozen=True, kw_only=True)
class Predecessor:
    """Measurements of the previous version, made when the new version began to serve."""

    auc_low: float | None
    """Lower end of the 95 % interval of the AUC over the predecessor's last window. None if there
    is no interval."""
    click_rate: float | None
    """Clicks per row in the predecessor's last window."""


@dataclass(frozen=True, kw_only=True)
class FeatureDrift:
    """Drift report on one closed bucket of predictions, as evidence for a policy."""

    bucket_end: float
    """Event time in seconds since the epoch."""
    version: int
    rows: int
    drifted: tuple[str, ...]
    """Columns that drifted according to the tests, worst first. The tests are corrected for
    multiple testing."""
    distances: Mapping[str, float]
    """Distance of each compared column."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """All information that a policy may use."""

    time: float
    """Decision point: event time up to which every row matured, in seconds since the epoch."""
    version: int
    """The serving version."""
    serving_since: float
    """Approximate event time of the first prediction after this version began to serve, with an
    error of at most one `decide_seconds`."""
    seen_until: float
    """Event time up to which all predictions are known. The predictions determine the serving
    version. The value is at least `serving_since`."""
    kpis: Kpis
    """KPIs of the serving version's window. If no row of the serving version has matured yet, the
    KPIs are computed from the window of the version with the newest row."""
    rows_of: Mapping[int, MaturedRows]
    """New rows of the serving version and its predecessors in the lineage, by ascending version."""
    lineage: tuple[int, ...]
    """The serving version and its predecessors, ascending, without versions that were rolled back.
    Rows of rolled-back versions are not evidence about other versions."""
    matured_total: int
    """Number of rows of all versions so far. The number never decreases."""
    baselines: Mapping[int, Baseline]
    """Known baselines of the serving version, of the window's version, and of the versions in
    `rows_of`."""
    predecessor: Predecessor | None = None
    """Measurements of the previous version. None if the version replaced no other version, if the
    previous version has no known row, or if this version has no matured row."""
    drift: tuple[FeatureDrift, ...]
    """Closed buckets of the serving version since the last decision, oldest first."""

    @property
    def rows(self) -> MaturedRows:
        """New rows of the serving version, possibly none."""
        return self.rows_of.get(self.version, NO_ROWS)

    @property
    def baseline(self) -> Baseline | None:
        """Baseline of the serving version."""
        return self.baselines.get(self.version)

    def trained_until(self, version: int | None = None) -> float | None:
        """Return the time of a version's newest training row, or None if unknown.

        By default, `version` is the serving version.
        """
        known = self.baselines.get(self.version if version is None else version)
        return known.trained_until if known else None

    def window_numbers(self) -> dict[str, float | None]:
        """Return the window's numbers that every decision reports.

        `window_version` is the version that scored its rows.
        """
        kpis = self.kpis
        return {
            "auc": kpis.auc,
            "auc_low": kpis.auc_low,
            "auc_high": kpis.auc_high,
            "rows": kpis.rows,
            "clicks": kpis.clicks,
            "version": self.version,
            "window_version": kpis.version,
        }


def without_oldest(of_versions: Mapping[str, T], *, needed: Collection[int]) -> dict[str, T]:
    """Keep at most `MAX_VERSIONS` versions, and drop those with the lowest numbers.

    Versions are compared by number, because JSON with sorted keys does not preserve the order of
    insertion.

    Args:
        of_versions: Value of each version. The keys are version numbers as text, as in JSON.
        needed: Versions that must not be dropped.

    >>> known = {str(version): version for version in range(1, 10)}
    >>> without_oldest(known, needed=[1]).keys() >= {"1", "3", "9"}
    True
    """
    surplus = max(len(of_versions) - MAX_VERSIONS, 0)
    unneeded = sorted((version for version in of_versions if int(version) not in needed), key=int)
    dropped = unneeded[:surplus]
    return {version: value for version, value in of_versions.items() if version not in dropped}


def named(versions: Collection[int]) -> str:
    """Format model versions as English text.

    >>> named([5]), named([2, 4]), named([1, 2, 3, 4, 7])
    ('version 5', 'versions 2 and 4', 'versions 1 to 4 and 7')
    """
    runs: list[list[int]] = []
    for version in sorted(versions):
        if runs and version == runs[-1][-1] + 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    parts = [
        text
        for run in runs
        for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    ]
    text = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"version{'s' if len(versions) > 1 else ''} {text}"


class Action(str, Enum):
    """Result of a decision."""

    OK = "ok"
    """No sign of a drift."""
    UNDECIDABLE = "undecidable"
    """Not enough evidence. The decision's reason names the missing evidence."""
    BREACH = "breach"
    """A drift is suspected but not confirmed."""
    HELD = "held"
    """A drift is confirmed, but `policies.rate_limit` forbids a run now. The rate limit sets this
    action, and no policy returns it."""
    RETRAIN = "retrain"
    """A drift is confirmed. By default, a run of the pipeline follows."""
    ROLLBACK = "rollback"
    """A recently released version is bad and must be rolled back."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action, its reason in one line, and its numbers."""

    policy: str
    """Name of the policy that decided, such as `threshold`."""
    action: Action
    reason: str
    numbers: Mapping[str, float | None]
    """Contains at least `version` and `policies.rate_limit.OBSERVED_NUMBERS`. An undefined number
    is None."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Decision":
        """Convert a JSON object from `document` back to a decision."""
        return cls(**{**document, "action": Action(document["action"])})

    def document(self) -> dict[str, Any]:
        """Return the decision as a JSON object."""
        return {
            "policy": self.policy,
            "action": self.action.value,
            "reason": self.reason,
            "numbers": dict(self.numbers),
        }


PolicyState = Mapping[str, Any]
"""State of a policy, a JSON object. Empty before the first decision."""


class Policy(Protocol):
    """A pure function: the same evidence and state give the same decision and state."""

    @property
    def name(self) -> str:
        """Name of the policy in settings, decisions and metrics."""

    def decide(self, evidence: Evidence, state: PolicyState) -> tuple[Decision, PolicyState]:
        """Decide at one decision point, and return the decision and the next state."""


@dataclass(frozen=True, kw_only=True)
class DecisionPoint:
    """Decisions of all policies at one point of event time."""

    time: float
    """Event time in seconds since the epoch."""
    version: int
    """The serving version, which the decisions are about."""
    decision: Decision
    """Combined decision of all policies, see `combine`."""
    decisions: tuple[Decision, ...]
    """Decision of each policy, in the order of the settings."""
    kpis: Kpis
    """KPIs of the serving version's window, see `Evidence.kpis`."""
    state: dict[str, Any]
    """State of the evaluator after this point. A replay of an incident starts from it."""

    def line(self) -> str:
        """Return this point as one line of canonical JSON.

        Keys are sorted, there are no spaces, and floats are Python's shortest repr, so equal
        decisions give equal bytes. The line depends only on records and settings, so a backtest
        writes the same line as the monitor.
        """
        line = {
            "time": self.time,
            "version": self.version,
            "action": self.decision.action.value,
            "policy": self.decision.policy,
            "reason": self.decision.reason,
            "decisions": [each.document() for each in self.decisions],
            "state": self.state,
        }
        return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False)


def combine(decisions: tuple[Decision, ...]) -> Decision:
    """Return the first decision with the most severe action.

    A ROLLBACK is more severe than a RETRAIN, and a RETRAIN more severe than a BREACH. If no
    decision is a ROLLBACK, a RETRAIN or a BREACH, the first decision is returned.

    >>> one = Decision(policy="a", action=Action.UNDECIDABLE, reason="few rows", numbers={})
    >>> two = Decision(policy="b", action=Action.RETRAIN, reason="old", numbers={})
    >>> combine((one, two)).policy
    'b'
    """
    for action in (Action.ROLLBACK, Action.RETRAIN, Action.BREACH):
        for decision in decisions:
            if decision.action is action:
                return decision
    return decisions[0]
