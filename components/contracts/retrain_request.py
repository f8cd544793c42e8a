"""The request for a retraining run: why, from which rows, on whose behalf.

Joins the monitor's trigger (and people) to the pipeline, whose parameters it fills.
"""

from dataclasses import dataclass
from typing import Any

from components.contracts.manifests import Manifest
from components.runtime.errors import ContractError

CURRENT = "current"
"""As parent or champion: whatever the promotion journal says is live; none where nothing is."""
NONE = "none"
"""As parent: train from scratch; as champion: judge by floor and calibration alone."""


@dataclass(frozen=True, kw_only=True)
class RetrainRequest(Manifest):
    """One asked-for run."""

    request_id: str
    """Names the run; the same id is never run twice at a time."""
    reason: str
    requested_at: str
    window_start: str
    """ISO 8601 UTC, inclusive; empty = after the last row that the parent learned; without a parent, the first row."""
    window_end: str
    """Exclusive; empty = to the last row."""
    parent: str = CURRENT
    champion: str = CURRENT
    observed: dict[str, float | None]
    """What the decision was based on, such as auc, threshold, rows, clicks."""

    def __post_init__(self) -> None:
        if not self.request_id or not self.reason:
            raise ContractError(f"retrain request {self.request_id!r} has reason {self.reason!r}, expected both")

    def pipeline_arguments(self) -> dict[str, Any]:
        """The pipeline parameters that this request decides."""
        return {
            "trigger_id": self.request_id,
            "trigger_reason": self.reason,
            "window_start": self.window_start,
            "window_end": self.window_end,
            "parent": self.parent,
            "champion": self.champion,
        }
