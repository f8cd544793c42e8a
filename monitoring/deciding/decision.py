"""What a policy answers. Acting on it is left to `monitoring.acting`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
