"""A new version bakes: for how long it is watched after its release, what takes it back, and what was found of it.

Joins the recommender's file (section `release`), which sets the limits, the monitor, which judges live traffic by them,
and deployment's controller, which judges the servers' counters and may take a version back.
"""

from dataclasses import dataclass, field

from components.runtime.errors import ContractError, expect

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
class BakingSettings:
    """How long a new version is watched after its release, and what takes it back.

    Raises:
        ContractError: a limit that no version, or every version, would pass.
    """

    bake_seconds: float = 3600.0
    """How long a version bakes at least after it was released or promoted; with `bake_rows` 0 too, none ever does."""
    bake_rows: int = 100_000
    """Matured rows after which baking ends, unless there is evidence against the version; 0 = live traffic is not
    judged, only the servers' counters."""
    bake_alpha: float = 0.01
    """Highest probability of ever taking back, by its outcomes or scores, a version that is within the limits."""
    max_auc_loss: float = 0.02
    """AUC that the version may lose on live traffic against what the gate measured, or against its predecessor's live
    AUC where that was lower: each by the lower end of its 95 % interval."""
    max_calibration_ratio: float = 1.5
    """How many times more, or fewer, clicks than predicted are tolerated."""
    min_click_rate_ratio: float = 0.5
    """Lowest click rate that is tolerated, as a share of its predecessor's."""
    max_unusable_scores: float = 0.001
    """Highest share of rows whose score is no number from 0 to 1. Judged from 100 such rows of 50 requests over 30 s
    on, and as far as the servers counted as many requests."""
    max_failure_margin: float = 0.01
    """Rate of failed requests beyond the predecessor's that is tolerated."""
    max_latency_ratio: float = 2.0
    """Highest mean time in the model, as a multiple of the predecessor's."""
    max_p99_ratio: float = 3.0
    """Highest p99 of the time in the model, as a multiple of the predecessor's."""
    max_reloads: int = 2
    """How often a server may have to reload the version because it answers wrongly or not at all."""

    def __post_init__(self) -> None:
        for name, low, high in _BOUNDS:
            if not low <= (value := getattr(self, name)) <= high:
                raise ContractError(f"{name} is {value}, expected {low:g} to {high:g}")

    @property
    def bakes(self) -> bool:
        """Whether versions bake at all."""
        return self.bake_seconds > 0 or self.bake_rows > 0


_BOUNDS = (
    ("bake_seconds", 0.0, 90 * 86_400.0),
    ("bake_rows", 0, 10**9),
    ("bake_alpha", 1e-9, 0.5),
    ("max_auc_loss", 0.0, 0.5),
    ("max_calibration_ratio", 1.01, 100.0),
    ("min_click_rate_ratio", 0.0, 0.99),
    ("max_unusable_scores", 0.0, 0.5),
    ("max_failure_margin", 0.0, 0.5),
    ("max_latency_ratio", 1.01, 1000.0),
    ("max_p99_ratio", 1.01, 1000.0),
    ("max_reloads", 0, 1000),
)


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
