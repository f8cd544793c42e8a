"""The section `release`: how a model is rounded, released, served and watched.

The installation sets the repository and the backend (`repository.triton_config.ServingOptions`).
"""

from dataclasses import dataclass

from evergreen.config.spec import Recommender
from evergreen.runtime.errors import ContractError, expect

FLOAT32, FLOAT16, INT8 = TABLE_TYPES = ("float32", "float16", "int8")
AUTO, FULL, CANARY, SHADOW, UNRELEASED = ROLLOUTS = ("auto", "full", "canary", "shadow", "none")
"""How an accepted model gets its traffic: all at once, a growing share, or none, its scores only logged. `auto` is
`full` after a pass and where nothing is live yet, and `canary` where the gate could not tell. With `none` it is kept,
and no server hears of it."""
MAX_INSTANCES = 64
MAX_QUEUED = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Settings of a served version that do not depend on the server.

    Raises:
        ContractError: a value is outside the range that servers accept.
    """

    instances: int = 2
    """Number of model instances that run in parallel, per GPU if `device` is `gpu`. With one
    instance and a limited queue, Triton 2.51 occasionally misses a wake-up, and that request waits
    half a second (measured: 99 of 16,200 requests, with two instances 0 of 33,500)."""
    response_cache: bool = False
    """Whether Triton may answer a repeated request from its response cache, which needs
    `--cache-config`. The cache key is a hash of the model's name and version and of the inputs'
    names and bytes. The key does not contain the weights. Deployment therefore never reuses a
    version number for other weights."""
    warmup_rows: int = 4
    """Number of golden rows that the model must score before it reports ready. 0 = no warm-up."""
    max_queued_requests: int = 512
    """Maximum number of queued requests. Further requests are rejected immediately."""
    queue_timeout_microseconds: int = 5_000_000
    """Longest time in the queue. Triton checks it every half second, so a rejection can come that
    much later."""
    max_queue_delay_microseconds: int = 0
    """Longest time that a request waits for others to form a batch. 0 = batch only what is already
    queued, which adds no latency to a single request."""

    def __post_init__(self) -> None:
        expect(self, f"1 to {MAX_INSTANCES}", lambda value: 1 <= value <= MAX_INSTANCES, "instances")
        names = ("warmup_rows", "max_queued_requests", "queue_timeout_microseconds", "max_queue_delay_microseconds")
        expect(self, "at least 0", lambda value: value >= 0, *names)
        expect(self, f"at most {MAX_QUEUED:,}", lambda value: value <= MAX_QUEUED, "max_queued_requests")
        expect(self, "at most 1024", lambda value: value <= 1024, "warmup_rows")
        expect(self, "at most an hour, 3,600,000,000", lambda value: value <= 3_600_000_000, *names[2:])


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """Number format of the served tables.

    Raises:
        ContractError: no such numbers.
    """

    tables: str = FLOAT32
    """Numbers of the served tables: `float32` (as learned), `float16` (half the bytes) or `int8` (a quarter of
    them, and 4 bytes for each vector, whose largest number becomes 127). The gate judges the rounded model."""

    def __post_init__(self) -> None:
        expect(self, f"one of {', '.join(TABLE_TYPES)}", lambda value: value in TABLE_TYPES, "tables")


@dataclass(frozen=True, kw_only=True)
class BakingSettings:
    """How long a new version is watched after its release, and what rolls it back.

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
        """Return whether versions bake at all."""
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
class RolloutSettings(TableSettings, ServingSettings, BakingSettings):
    """How a model is rolled out and served, and what rolls it back.

    Raises:
        ContractError: the rollout is unknown, or a value is outside the range that servers accept.
    """

    rollout: str = AUTO
    """`auto`, `full`, `canary`, `shadow` or `none`. `full` gives the version all traffic at once,
    and needs a pass. `canary` starts with a small share, which grows while the canary is not worse.
    `shadow` scores and logs requests beside the live model, and serves none. `none` evaluates and
    stores the model, which a person may promote later. `auto` is `full` after a pass or for the
    first version, and `canary` if the gate was inconclusive."""

    def __post_init__(self) -> None:
        for kind in (TableSettings, ServingSettings, BakingSettings):
            kind.__post_init__(self)
        expect(self, f"one of {', '.join(ROLLOUTS)}", lambda value: value in ROLLOUTS, "rollout")


def served_tables(recommender: Recommender) -> str:
    """Return the number format of the tables that a recommender serves.

    >>> from evergreen.config.features import Features
    >>> shop = Recommender(name="shop", features=Features(numeric=("price",), categorical=("item",)))
    >>> served_tables(shop), served_tables(shop.with_settings({"release.tables": "int8"}))
    ('float32', 'int8')
    """
    release = recommender.settings.get("release", {})
    return TableSettings(tables=release.get("tables", FLOAT32)).tables
