"""The traffic plan: which model answers which share of requests, and which one answers in the shadow.

Joins deployment, which publishes it as one object of the model repository (`traffic_file`), to the inference client,
which chooses by it. Where there is no plan, everyone asks `ServedNames.model` and names no version.

Choosing is sticky: the same key (a user, else a request) meets the same arm as long as the plan keeps its `salt`, and a
canary whose share grows keeps everyone that it had.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from evergreen.contracts.manifests import Manifest
from evergreen.runtime.errors import ContractError, expect

PLAN_POLL_SECONDS = 1.0
"""A client that follows the plan reads it at least this often."""
DRAIN_SECONDS = 5 * PLAN_POLL_SECONDS
"""From a plan that takes a canary away to its unloading: the last client has read the plan, and what it had chosen by
the one before is answered. A client that meets an unloaded canary nevertheless asks the stable arm instead."""

Baseline = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Counters by source, then arm (`STABLE`, `CANARY`), then name."""
STABLE = "stable"
CANARY = "canary"


def traffic_file(model_name: str) -> str:
    """The object of the plan of the recommender that is served as `model_name`.

    >>> traffic_file("shop")
    'shop.traffic.json'
    """
    return f"{model_name}.traffic.json"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One model that may answer.

    Raises:
        ContractError: no name, or a version that is no positive integer.
    """

    model_name: str
    """Triton's name of the model: requests ask by it and name no version."""
    version: int
    """The version that is meant to answer there; the reply names the one that did."""

    def __post_init__(self) -> None:
        expect(self, "a name", lambda value: isinstance(value, str) and bool(value), "model_name")
        expect(self, "an integer from 1", lambda value: type(value) is int and value >= 1, "version")


@dataclass(frozen=True, kw_only=True)
class TrafficPlan(Manifest):
    """Who answers; see the module.

    Raises:
        ContractError: a number that is none, a share outside [0, 1], a share without a canary, or arms of one name.
    """

    sequence: int
    """One more than that of the plan it replaces; the first is 1."""
    stable: Arm
    canary: Arm | None
    """The new version under its own name; None = there is none."""
    canary_share: float
    """Share of keys whose requests the canary answers."""
    shadow_share: float
    """Share of the requests that the other arm scores too; those scores are logged and never served."""
    salt: str
    """Of the sticky hash; kept while a canary grows."""
    published_at: str
    """ISO 8601 UTC."""
    reason: str
    baseline: Baseline = field(default_factory=dict)
    """What the servers had counted when this plan was published, which its evidence subtracts; clients ignore it. It is
    here so that a stage and its beginning are one write."""

    def __post_init__(self) -> None:
        expect(self, "an integer from 1", lambda value: type(value) is int and value >= 1, "sequence")
        shares = ("canary_share", "shadow_share")
        expect(self, "a number in 0..1", lambda value: type(value) in (int, float) and 0.0 <= value <= 1.0, *shares)
        expect(self, "an ISO 8601 time with its offset", _is_utc_time, "published_at")
        if self.canary is None and (self.canary_share or self.shadow_share):
            raise ContractError(
                f"canary_share is {self.canary_share} and shadow_share {self.shadow_share} without a canary, expected 0"
            )
        if self.canary is not None and self.canary.model_name == self.stable.model_name:
            raise ContractError(f"both arms are named {self.stable.model_name!r}, expected two names")

    def next(self, **changes: Any) -> "TrafficPlan":
        """The plan that replaces this one: with `changes`, and the next sequence."""
        return replace(self, **{"sequence": self.sequence + 1, **changes})

    def without_canary(self, *, stable: Arm, published_at: str, reason: str) -> "TrafficPlan":
        """The plan that replaces this one when `stable` answers everything again."""
        return self.next(
            stable=stable,
            canary=None,
            canary_share=0.0,
            shadow_share=0.0,
            published_at=published_at,
            reason=reason,
            baseline={},
        )

    def arm_for(self, key: str) -> Arm:
        """Who answers requests of `key`."""
        if self.canary is not None and _fraction(self.salt, "arm", key) < self.canary_share:
            return self.canary
        return self.stable

    def shadow_for(self, key: str, request_id: str) -> Arm | None:
        """Who scores this request in the shadow beside `arm_for(key)`; None = nobody.

        Drawn by the request and not by the key, so that every user's requests are in the sample whichever arm answers.
        """
        if self.canary is None or _fraction(self.salt, "shadow", request_id) >= self.shadow_share:
            return None
        return self.stable if self.arm_for(key) == self.canary else self.canary


def _fraction(salt: str, purpose: str, key: str) -> float:
    """A number in [0, 1) that depends on nothing but the arguments, evenly spread over keys."""
    # A key may hold half a surrogate pair, which JSON can spell and UTF-8 cannot; no request may fail over it.
    digest = hashlib.blake2b(f"{salt}\0{purpose}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def _is_utc_time(text: object) -> bool:
    """Whether it is a time with an offset; `Z`, which Python 3.10 does not read, is not accepted."""
    try:
        return isinstance(text, str) and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
