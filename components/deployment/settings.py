"""What a recommender's file decides of deployment: its section `release`.

Where a version goes and what runs it there is the installation's (`repository.triton_config.ServingOptions`).
"""

from dataclasses import dataclass

from components.contracts.baking import BakingSettings
from components.contracts.serving import AUTO, ROLLOUTS
from components.models.rounding import TableSettings
from components.runtime.errors import expect

MAX_INSTANCES = 64
MAX_QUEUED = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """How a version is served, whatever serves it.

    Raises:
        ContractError: a value that no server takes.
    """

    instances: int = 2
    """Copies of the model that work side by side (per GPU, on `gpu`). With one, and a limited queue, Triton 2.51 loses
    a wake-up now and then, and that request waits out a tick of half a second (measured: 99 of 16,200; with two 0 of
    33,500)."""
    response_cache: bool = False
    """Whether the server may answer a request as it answered an equal one; it needs a cache to do so
    (flag `--cache-config`). The cache's key is one hash of the model's name, version and the inputs' names and bytes;
    no weights. So a version's number must never be given to other weights, and deployment gives no number twice."""
    warmup_rows: int = 4
    """Golden rows that the model must answer before it reports that it is ready; 0 = none."""
    max_queued_requests: int = 512
    """Requests that may wait; the next one is refused at once."""
    queue_timeout_microseconds: int = 5_000_000
    """Longest wait; Triton looks every half second, so a refusal may come that much later."""
    max_queue_delay_microseconds: int = 0
    """How long a batch may wait for company; 0 = it takes what is there, which costs a lone request nothing."""

    def __post_init__(self) -> None:
        expect(self, f"1 to {MAX_INSTANCES}", lambda value: 1 <= value <= MAX_INSTANCES, "instances")
        names = ("warmup_rows", "max_queued_requests", "queue_timeout_microseconds", "max_queue_delay_microseconds")
        expect(self, "at least 0", lambda value: value >= 0, *names)
        expect(self, f"at most {MAX_QUEUED:,}", lambda value: value <= MAX_QUEUED, "max_queued_requests")
        expect(self, "at most 1024", lambda value: value <= 1024, "warmup_rows")
        expect(self, "at most an hour, 3,600,000,000", lambda value: value <= 3_600_000_000, *names[2:])


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(TableSettings, ServingSettings, BakingSettings):
    """How an accepted model becomes the one that is served, how it is served then, and what takes it back.

    Raises:
        ContractError: no such rollout, or a value that no server takes.
    """

    rollout: str = AUTO
    """`auto` (`full` after a pass or as the first version, `canary` where the gate could not tell), `full` (all traffic
    at once; needs a pass), `canary` (a small share first, grown while it does no worse), `shadow` (scored beside the
    live model and logged, not served) or `none` (judged and kept; a person promotes it, or nobody does)."""

    def __post_init__(self) -> None:
        for kind in (TableSettings, ServingSettings, BakingSettings):
            kind.__post_init__(self)
        expect(self, f"one of {', '.join(ROLLOUTS)}", lambda value: value in ROLLOUTS, "rollout")
