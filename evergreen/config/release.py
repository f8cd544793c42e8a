"""The section `release`: how a model is quantized, released, served and watched.

The deployment target and its server are configured per installation
(`evergreen.serving.repository.triton_config.ServingOptions`).
"""

from dataclasses import dataclass

from evergreen.config.spec import Recommender
from evergreen.runtime.errors import ContractError, expect

FLOAT32, _FLOAT16, INT8 = TABLE_TYPES = ("float32", "float16", "int8")
AUTO, FULL, CANARY, SHADOW, UNRELEASED = ROLLOUTS = ("auto", "full", "canary", "shadow", "none")
"""Ways in which an accepted model gets its traffic: all at once, a growing share, or none while its
scores are logged. With `auto`, a model is released in full after a pass, or if no version is live.
With `auto`, the model becomes a canary if the gate was inconclusive. With `none`, the model is
registered but not deployed."""
_MAX_INSTANCES = 64
_MAX_QUEUED = 1_000_000
QUEUED_REQUESTS, QUEUE_MICROSECONDS = 512, 5_000_000
"""Default limits of the queue, for servers that support queue limits."""


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Settings for serving a version. These settings are the same for both kinds of servers.

    Raises:
        ContractError: no server supports a value.
    """

    instances: int = 2
    """Number of copies of the model that run in parallel. With `gpu`, this is the number for each
    GPU."""
    response_cache: bool = False
    """Whether the server may answer an equal request from its cache. The server must have a cache
    (flag `--cache-config`). The cache key is a hash of the model's name, the version, and the names
    and bytes of the inputs. The key does not depend on the weights. A version number must therefore
    never be given to other weights. Deployment uses each version number only once."""
    warmup_rows: int = 4
    """Golden rows that the model must answer before it reports ready. 0 = none."""
    max_queued_requests: int | None = None
    """Maximum waiting requests. A request beyond this limit is rejected at once. 0 = no limit. The
    default is 512 for server `onnxruntime`. Server `python` has no limit by default, because the
    laptop's Triton 2.51 stalls if a queue has a limit
    ([more](../guides/serve.md#stalls-of-limited-queues))."""
    queue_timeout_microseconds: int | None = None
    """Maximum wait in the queue. Triton checks the queue every half second, so a rejection may come
    up to half a second later. 0 = no limit. If absent, 5,000,000 with server `onnxruntime` and no
    limit with `python`."""
    max_queue_delay_microseconds: int = 0
    """Maximum time that a batch waits for more requests. 0 = a batch does not wait, so a single
    request is not delayed."""

    def __post_init__(self) -> None:
        expect(
            self, f"1 to {_MAX_INSTANCES}", lambda value: 1 <= value <= _MAX_INSTANCES, "instances"
        )
        names = (
            "warmup_rows",
            "max_queued_requests",
            "queue_timeout_microseconds",
            "max_queue_delay_microseconds",
        )
        expect(self, "at least 0", lambda value: value is None or value >= 0, *names)
        expect(
            self,
            f"at most {_MAX_QUEUED:,}",
            lambda value: value is None or value <= _MAX_QUEUED,
            "max_queued_requests",
        )
        expect(self, "at most 1024", lambda value: value <= 1024, "warmup_rows")
        expect(
            self,
            "at most an hour, 3,600,000,000",
            lambda value: value is None or value <= 3_600_000_000,
            *names[2:],
        )


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """Number format of the served tables.

    Raises:
        ContractError: the number format is unknown.
    """

    tables: str = FLOAT32
    """Number format of the served tables: `float32` (as trained), `float16` (half the bytes), or
    `int8` (a quarter of the bytes, plus a 4-byte scale for each vector, whose largest value becomes
    127). The gate evaluates the quantized model."""

    def __post_init__(self) -> None:
        expect(
            self, f"one of {', '.join(TABLE_TYPES)}", lambda value: value in TABLE_TYPES, "tables"
        )


@dataclass(frozen=True, kw_only=True)
class BakingSettings:
    """Settings for watching a new version, and limits that cause a rollback.

    Raises:
        ContractError: a value is outside the range in `_BOUNDS`.
    """

    bake_seconds: float = 3600.0
    """Minimum baking time after a release or promotion, in seconds. If `bake_rows` and
    `bake_seconds` are both 0, versions do not bake."""
    bake_rows: int = 100_000
    """Number of matured rows after which baking ends if there is no evidence against the version. 0
    = only the servers' counters are evaluated, not live traffic."""
    bake_alpha: float = 0.01
    """Maximum probability that a good version is ever rolled back because of its outcomes or
    scores."""
    max_auc_loss: float = 0.02
    """Maximum AUC loss on live traffic, compared with a reference. The reference is the AUC at the
    gate or the predecessor's live AUC, whichever is lower. For each AUC, the lower end of the 95 %
    interval is used."""
    max_calibration_ratio: float = 1.5
    """Maximum ratio of observed to predicted clicks, and of predicted to observed clicks."""
    min_click_rate_ratio: float = 0.5
    """Minimum ratio of the version's click rate to the click rate of its predecessor."""
    max_unusable_scores: float = 0.001
    """Maximum share of rows whose score is not a number from 0 to 1. The check needs at least 100
    unusable rows from 50 requests over 30 s. The servers must also have counted at least 50
    requests."""
    max_failure_margin: float = 0.01
    """Maximum increase of the rate of failed requests, compared with the predecessor."""
    max_latency_ratio: float = 2.0
    """Maximum ratio of the mean inference time to the predecessor's mean time."""
    max_p99_ratio: float = 3.0
    """Maximum ratio of the inference time to the predecessor's time, both at the 99th
    percentile."""
    max_reloads: int = 2
    """Maximum number of reloads of the version. A server reloads a version if its answers are wrong
    or absent."""

    def __post_init__(self) -> None:
        for name, low, high in _BOUNDS:
            if not low <= (value := getattr(self, name)) <= high:
                raise ContractError(f"{name} is {value}, expected {low:g} to {high:g}")

    @property
    def bakes(self) -> bool:
        """Return whether new versions go through a baking period."""
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
    """Settings of the rollout, the serving and the baking of a model.

    Raises:
        ContractError: the rollout is unknown, or no server supports the value of a serving setting.
    """

    rollout: str = AUTO
    """Way in which an accepted model gets its traffic. `full` sends all traffic at once and
    requires that the gate passed. `canary` first sends a small share, which grows if the version is
    not worse than the live version. `shadow` scores live requests and logs the scores, but serves
    nothing. `none` only registers the model, which a person can promote later. `auto` means `full`
    if the gate passed or no version is live, and `canary` if the gate was inconclusive."""

    def __post_init__(self) -> None:
        for kind in (TableSettings, ServingSettings, BakingSettings):
            kind.__post_init__(self)
        expect(self, f"one of {', '.join(ROLLOUTS)}", lambda value: value in ROLLOUTS, "rollout")


def served_tables(recommender: Recommender) -> str:
    """Return the number format of the tables that a recommender serves.

    >>> from evergreen.config.features import Features
    >>> features = Features(numeric=("price",), categorical=("item",))
    >>> shop = Recommender(name="shop", features=features)
    >>> served_tables(shop), served_tables(shop.with_settings({"release.tables": "int8"}))
    ('float32', 'int8')
    """
    release = recommender.settings.get("release", {})
    return TableSettings(tables=release.get("tables", FLOAT32)).tables
