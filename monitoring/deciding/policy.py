"""What a policy is: the evidence that it is shown at a decision point, and the decision that it returns.

Evidence comes from records alone (event times, no wall clock), so that a backtest over the archive shows a policy what
the running monitor showed it. The policies are in `monitoring.deciding.policies`; gathering evidence is left to
`monitoring.deciding.judging`, acting on decisions to `monitoring.acting`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from monitoring.measures.window import Kpis


@dataclass(frozen=True, kw_only=True, eq=False)
class MaturedRows:
    """Rows of the serving version that matured since the last decision point, ordered by (time, request id, row)."""

    labels: NDArray[np.uint8]
    """0 or 1, shape [n]."""
    scores: NDArray[np.float32]
    """Probabilities, shape [n]."""
    groups: NDArray[np.int64]
    """The request of each row, numbered from 0, shape [n]: rows of one request belong to the same user."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The AUC that the gate measured of a version before it served."""

    auc: float
    low: float
    """Lower end of the 95 % interval."""
    high: float
    """Upper end of the 95 % interval."""
    previous_version: int | None = None
    """The version that it replaced; None where it was the first."""


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
    kpis: Kpis
    """Of the serving version's window."""
    rows: MaturedRows
    matured_total: int
    """Rows judged so far, of all versions; never decreases."""
    baseline: Baseline | None
    """None where the model store holds no verdict on the version, or the gate measured no AUC."""
    predecessor: Predecessor | None = None
    """None where the version replaced none, or no row of the one before is known."""
    drift: tuple[FeatureDrift, ...]
    """The closed buckets of the serving version that no decision has seen yet, oldest first."""

    def window_numbers(self) -> dict[str, float | None]:
        """The window's numbers, as every decision reports them."""
        kpis = self.kpis
        return {
            "auc": kpis.auc,
            "auc_low": kpis.auc_low,
            "auc_high": kpis.auc_high,
            "rows": kpis.rows,
            "clicks": kpis.clicks,
            "version": self.version,
        }


class Action(str, Enum):
    """What a decision calls for."""

    OK = "ok"
    """There is no sign of a drift."""
    UNDECIDABLE = "undecidable"
    """The evidence does not suffice; the reason says what is missing."""
    BREACH = "breach"
    """A drift is suspected and not confirmed yet."""
    HELD = "held"
    """Confirmed, but `deciding.restraint` forbids a run now; no policy returns this."""
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
    """Always with `version` and `deciding.restraint.OBSERVED_NUMBERS`; a number that does not exist is None."""

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
    """The serving version, which was judged."""
    decision: Decision
    """The decision that counts: see `combine`."""
    decisions: tuple[Decision, ...]
    """Every policy's own decision, in the order of the settings."""
    kpis: Kpis
    """Of the serving version's window."""
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
