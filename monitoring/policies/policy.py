"""What a policy is: the evidence that it is shown at a decision point, and the decision that it returns.

Evidence comes from records alone (event times, no wall clock), so that a backtest over the archive shows a policy what
the running monitor showed it. The policies are in `monitoring.policies.policies`; gathering evidence is left to
`monitoring.policies.judging`, acting on decisions to `monitoring.retraining`.
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
    """Rows of one model version that matured since the last decision point, ordered by (time, request id, row)."""

    labels: NDArray[np.uint8]
    """0 or 1, shape [n]."""
    scores: NDArray[np.float32]
    """Probabilities, shape [n]."""
    groups: NDArray[np.int64]
    """The request of each row, numbered from 0, shape [n]: rows of one request belong to the same user."""


NO_ROWS = MaturedRows(labels=np.zeros(0, np.uint8), scores=np.zeros(0, np.float32), groups=np.zeros(0, np.int64))


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the model store knows of a version: what the gate measured before it served, and what it has learned."""

    auc: float | None = None
    """AUC over the rows held out; None if the gate measured none, as are the next two."""
    low: float | None = None
    """Lower end of the 95 % interval."""
    high: float | None = None
    """Upper end of the 95 % interval."""
    previous_version: int | None = None
    """The version that it replaced; None where it was the first."""
    learned_until: float | None = None
    """Event time of the newest row that its model has learned, seconds since the epoch; None if that is not known."""


@dataclass(frozen=True, kw_only=True)
class Predecessor:
    """What was measured of the version before, when the new one began to serve."""

    auc_low: float | None
    """Lower end of the 95 % interval of the AUC over its last window; None where that does not exist."""
    click_rate: float | None
    """Clicks per row of that window."""


@dataclass(frozen=True, kw_only=True)
class FeatureDrift:
    """The result of `monitoring.drift` for one closed bucket of predictions; every number exists."""

    bucket_end: float
    """Event time, seconds since the epoch."""
    version: int
    rows: int
    drifted: tuple[str, ...]
    """Columns that drifted after the correction for multiple tests, the worst first."""
    distances: Mapping[str, float]
    """Distance of each judged column."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Everything that a policy may use."""

    time: float
    """The decision point: event time up to which every row is matured, seconds since the epoch."""
    version: int
    """The serving version."""
    serving_since: float
    """Event time of the first prediction since this version serves, to within one decision span."""
    seen_until: float
    """Event time up to which predictions are known, and with them the serving version; not before `serving_since`."""
    kpis: Kpis
    """KPIs of the serving version's window. Before any of its rows has matured, of the version of the newest row."""
    rows_of: Mapping[int, MaturedRows]
    """New rows of the serving version and of those before it in its line, in ascending order of versions."""
    line: tuple[int, ...]
    """The serving version and those that served before it, in ascending order. A version that was rolled back is not
    among them: its rows say nothing about others."""
    matured_total: int
    """Rows judged so far, of all versions; never decreases."""
    baselines: Mapping[int, Baseline]
    """Baseline of each version of `rows_of`, of the serving version and of the window's, where the store knows it."""
    predecessor: Predecessor | None = None
    """None where the version replaced none, or no row of the one before is known, or none of its own has matured."""
    drift: tuple[FeatureDrift, ...]
    """The closed buckets of the serving version that no decision has seen yet, oldest first."""

    @property
    def rows(self) -> MaturedRows:
        """The new rows of the serving version; there may be none."""
        return self.rows_of.get(self.version, NO_ROWS)

    @property
    def baseline(self) -> Baseline | None:
        """The serving version's baseline."""
        return self.baselines.get(self.version)

    def learned_until(self, version: int | None = None) -> float | None:
        """Return the time of the newest row that a version has learned, or None if that is not known.

        `version` is the serving one by default.
        """
        known = self.baselines.get(self.version if version is None else version)
        return known.learned_until if known else None

    def window_numbers(self) -> dict[str, float | None]:
        """The window's numbers, as every decision reports them; `window_version` scored its rows."""
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
    """Return what is known by version without the lowest versions beyond `MAX_VERSIONS`.

    The order of insertion does not matter, because it is lost where memory is written with sorted keys.

    Args:
        of_versions: Values by version number, as the keys of a JSON object.
        needed: Versions that stay in any case.

    >>> without_oldest({str(version): version for version in range(1, 10)}, needed=[1]).keys() >= {"1", "3", "9"}
    True
    """
    surplus = max(len(of_versions) - MAX_VERSIONS, 0)
    unneeded = sorted((version for version in of_versions if int(version) not in needed), key=int)
    dropped = unneeded[:surplus]
    return {version: value for version, value in of_versions.items() if version not in dropped}


def named(versions: Collection[int]) -> str:
    """Name model versions in a sentence.

    >>> named([5]), named([2, 4]), named([1, 2, 3, 4, 7])
    ('version 5', 'versions 2 and 4', 'versions 1 to 4 and 7')
    """
    runs: list[list[int]] = []
    for version in sorted(versions):
        if runs and version == runs[-1][-1] + 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    parts = [text for run in runs for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    text = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"version{'s' if len(versions) > 1 else ''} {text}"


class Action(str, Enum):
    """What a decision calls for."""

    OK = "ok"
    """There is no sign of a drift."""
    UNDECIDABLE = "undecidable"
    """The evidence does not suffice; the reason says what is missing."""
    BREACH = "breach"
    """A drift is suspected and not confirmed yet."""
    HELD = "held"
    """Confirmed, but `policies.restraint` forbids a run now; no policy returns this."""
    RETRAIN = "retrain"
    """Confirmed: something has to be done, by default a run of the pipeline."""
    ROLLBACK = "rollback"
    """A version that was released lately is bad, and has to be taken back."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action, its reason in one line, and the numbers behind it."""

    policy: str
    """Name of the policy that decided, such as `threshold`."""
    action: Action
    reason: str
    numbers: Mapping[str, float | None]
    """Always with `version` and `policies.restraint.OBSERVED_NUMBERS`; a number that does not exist is None."""

    def document(self) -> dict[str, Any]:
        """The decision as a JSON object."""
        return {
            "policy": self.policy,
            "action": self.action.value,
            "reason": self.reason,
            "numbers": dict(self.numbers),
        }


PolicyMemory = Mapping[str, Any]
"""A policy's own memory, a JSON object; empty before the first decision."""


class Policy(Protocol):
    """Decides as a pure function: the same evidence and memory give the same decision and memory."""

    @property
    def name(self) -> str:
        """The policy's name in settings, decisions and metrics."""

    def decide(self, evidence: Evidence, memory: PolicyMemory) -> tuple[Decision, PolicyMemory]:
        """Judges one decision point; the second value is the memory for the next one."""


@dataclass(frozen=True, kw_only=True)
class DecisionPoint:
    """What all policies decided at one point of event time."""

    time: float
    """Event time, seconds since the epoch."""
    version: int
    """The serving version, about which was decided."""
    decision: Decision
    """The decision that counts: see `combine`."""
    decisions: tuple[Decision, ...]
    """Every policy's own decision, in the order of the settings."""
    kpis: Kpis
    """See `Evidence.kpis`."""
    memory: dict[str, Any]
    """The judge's memory after this point, from which an incident can be replayed."""

    def line(self) -> str:
        """This point as one line of canonical JSON: keys sorted, no spaces, floats as Python's shortest repr.

        Equal decisions give equal bytes. The line holds only what follows from records and settings, so the line that a
        backtest writes is the line that the monitor wrote.
        """
        line = {
            "time": self.time,
            "version": self.version,
            "action": self.decision.action.value,
            "policy": self.decision.policy,
            "reason": self.decision.reason,
            "decisions": [each.document() for each in self.decisions],
            "memory": self.memory,
        }
        return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False)


def combine(decisions: tuple[Decision, ...]) -> Decision:
    """The decision that counts: ROLLBACK before RETRAIN before BREACH, else the first.

    >>> one = Decision(policy="a", action=Action.UNDECIDABLE, reason="few rows", numbers={"version": 1})
    >>> two = Decision(policy="b", action=Action.RETRAIN, reason="old", numbers={"version": 1})
    >>> combine((one, two)).policy
    'b'
    """
    for action in (Action.ROLLBACK, Action.RETRAIN, Action.BREACH):
        for decision in decisions:
            if decision.action is action:
                return decision
    return decisions[0]
