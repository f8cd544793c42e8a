"""The baking of a new version: how long it is watched, what rolls it back, and the findings.

The limits are in the recommender's file (section `release`). The monitor evaluates live traffic by
them. Deployment's controller evaluates the servers' counters, and can roll a version back.
"""

from dataclasses import dataclass, field

from evergreen.runtime.errors import expect

BAKES, WELL, BAD = STATES = ("bakes", "well", "bad")
"""States in the monitor's findings: too early to decide (`bakes`), within the limits so far
(`well`), to be rolled back (`bad`)."""


MIN_UNUSABLE_ROWS = 100
"""Minimum rows without a usable score. Fewer rows are not evidence, whatever their share."""
MIN_UNUSABLE_REQUESTS = 50
"""Minimum distinct requests of these rows."""
MIN_UNUSABLE_SECONDS = 30.0
"""Minimum time between the first and the last of these requests. A few forged messages span less
time."""
UNUSABLE_REQUESTS = "unusable_requests"
"""Key in `Findings.numbers` of the number of requests that the servers must have counted too."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Findings of the monitor about one version so far.

    Raises:
        ContractError: the state is unknown.
    """

    version: int
    state: str
    """One of `STATES`."""
    reason: str
    """Reason in one line, with the numbers."""
    found_at: str
    """Time of the findings, ISO 8601 UTC."""
    rows: int = 0
    """Matured rows that were evaluated."""
    numbers: dict[str, float | None] = field(default_factory=dict)
    """Numbers behind the reason. A number that does not exist is None."""

    def __post_init__(self) -> None:
        expect(self, f"one of {', '.join(STATES)}", lambda value: value in STATES, "state")
