"""A new version bakes: for how long it is watched after its release, what takes it back, and what was found of it.

Joins the recommender's file (section `release`), which sets the limits, the monitor, which judges live traffic by them,
and deployment's controller, which judges the servers' counters and may take a version back.
"""

from dataclasses import dataclass, field

from evergreen.runtime.errors import expect

BAKES, WELL, BAD = STATES = ("bakes", "well", "bad")
"""What the monitor says of a version: too early to say, as good as promised for as long as it bakes, or to be taken
back."""


MIN_UNUSABLE_ROWS = 100
"""Rows without a usable score below which they are no evidence, whatever their share."""
MIN_UNUSABLE_REQUESTS = 50
"""Distinct requests that these rows come from at least."""
MIN_UNUSABLE_SECONDS = 30.0
"""Time between the first and the last of these requests: a few kB that somebody publishes are over sooner."""
UNUSABLE_REQUESTS = "unusable_requests"
"""Number in the findings of such a version: requests that the servers must have counted too."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the monitor found of one version so far.

    Raises:
        ContractError: no such state.
    """

    version: int
    state: str
    """One of `STATES`."""
    reason: str
    """In one line, with the numbers."""
    found_at: str
    """ISO 8601 UTC."""
    rows: int = 0
    """Matured rows that were judged."""
    numbers: dict[str, float | None] = field(default_factory=dict)
    """What the reason rests on; a number that does not exist is None."""

    def __post_init__(self) -> None:
        expect(self, f"one of {', '.join(STATES)}", lambda value: value in STATES, "state")
