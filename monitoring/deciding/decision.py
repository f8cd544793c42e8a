"""What a policy answers, and what all of them answer together; acting on it is left to `monitoring.acting`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from monitoring.measures.kpis import Kpis


class Action(str, Enum):
    """What a decision says."""

    OK = "ok"
    """Nothing speaks for a drift."""
    UNDECIDABLE = "undecidable"
    """The evidence cannot tell; the reason says what is missing."""
    BREACH = "breach"
    """A drift is suspected, not confirmed yet."""
    HELD = "held"
    """Confirmed, but `acting.restraint` forbids a run now; no policy says this."""
    RETRAIN = "retrain"
    """Confirmed: something has to be done, by default a run of the pipeline."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action, its reason in one line, and the numbers behind it."""

    policy: str
    """Name of the policy that decided, such as `threshold`."""
    action: Action
    reason: str
    numbers: dict[str, float | None]
    """Always with `version`, and what `contracts.retrain_request` should be told that was observed."""

    def document(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"policy": self.policy, "action": self.action.value, "reason": self.reason, "numbers": self.numbers}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """All policies' decisions at one decision point."""

    time: float
    """The decision point: event time, seconds since the epoch."""
    version: int
    """The serving version, which was judged."""
    decision: Decision
    """What counts: see `combine`."""
    decisions: tuple[Decision, ...]
    """Every policy's own, in the order of the settings."""
    kpis: Kpis
    """Of the serving version's window."""
    memory: dict[str, Any]
    """The judge's memory after it, so that an incident can start here."""


def combine(decisions: tuple[Decision, ...]) -> Decision:
    """The decision that counts: the first that says RETRAIN, else the first that says BREACH, else the first.

    >>> one = Decision(policy="a", action=Action.UNDECIDABLE, reason="few rows", numbers={"version": 1})
    >>> two = Decision(policy="b", action=Action.RETRAIN, reason="old", numbers={"version": 1})
    >>> combine((one, two)).policy
    'b'
    """
    for action in (Action.RETRAIN, Action.BREACH):
        for decision in decisions:
            if decision.action is action:
                return decision
    return decisions[0]


def decision_line(judgement: Judgement) -> str:
    """The judgement as one line of canonical JSON: keys sorted, no spaces, floats as Python's shortest repr.

    Equal judgements give equal bytes; it holds nothing but what came from records and settings, so the line that a
    backtest writes is the line that the monitor wrote.
    """
    line = {
        "time": judgement.time,
        "version": judgement.version,
        "action": judgement.decision.action.value,
        "policy": judgement.decision.policy,
        "reason": judgement.decision.reason,
        "decisions": [each.document() for each in judgement.decisions],
        "memory": judgement.memory,
    }
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False)
