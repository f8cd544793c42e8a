"""Baking, which is the monitoring of a new version for some time after its release.

The limits are in the recommender's file (section `release`). The monitor compares live traffic with
these limits. The release controller compares the servers' counters with the limits, and can roll a
version back.
"""

from dataclasses import dataclass, field

from evergreen.runtime.errors import expect

BAKES, WELL, BAD = STATES = ("bakes", "well", "bad")
"""States of a version in the monitor's findings. `bakes`: it is too early to decide. `well`: the
version has been within the limits so far. `bad`: the version must be rolled back."""


MIN_UNUSABLE_ROWS = 100
"""A rollback requires at least this number of rows without a usable score. A smaller number is no
evidence, even if it is a large share of all rows."""
MIN_UNUSABLE_REQUESTS = 50
"""Minimum number of distinct requests that have rows without a usable score."""
MIN_UNUSABLE_SECONDS = 30.0
"""Minimum time in seconds between the first and the last request with unusable scores. A few forged
messages usually span a shorter time."""
UNUSABLE_REQUESTS = "unusable_requests"
"""Key of `Findings.numbers`. The value is the number of requests without a usable score. The
servers must have counted at least this number of requests."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Conclusions that the monitor has drawn about one version until now.

    Raises:
        ContractError: the state is unknown.
    """

    version: int
    state: str
    """One of `STATES`."""
    reason: str
    """Reason for the state in one line, with the numbers."""
    found_at: str
    """Time of the findings, ISO 8601 UTC."""
    rows: int = 0
    """Number of matured rows that were evaluated."""
    numbers: dict[str, float | None] = field(default_factory=dict)
    """Measured values on which the reason is based. An undefined number is None."""

    def __post_init__(self) -> None:
        expect(self, f"one of {', '.join(STATES)}", lambda value: value in STATES, "state")
