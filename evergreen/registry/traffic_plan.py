"""The traffic plan: the models that answer requests, their shares, and the shadow model.

Deployment publishes the traffic plan as one object in the model repository (`traffic_file`). The
inference client reads the plan and chooses a model for each request. Without a plan, clients
request `ServedNames.model` and name no version.

Requests with the same key always go to the same arm, as long as the plan has the same `salt`. The
key is the user, or the request id if there is no user. When the share of a canary grows, the canary
keeps its keys and gets additional keys.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from evergreen.contracts.manifests import Manifest
from evergreen.runtime.errors import ContractError, expect

PLAN_POLL_SECONDS = 1.0
"""Maximum number of seconds between two reads of the plan by a client."""
DRAIN_SECONDS = 5 * PLAN_POLL_SECONDS
"""Seconds between the plan that ends a canary and the unloading of its version. In this time, every
client reads the new plan, and the requests under the old plan are answered. If a client still
requests the unloaded canary, the client repeats the request on the stable arm."""

Baseline = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Counters by source, then by arm (`STABLE`, `CANARY`), then by name."""
STABLE = "stable"
CANARY = "canary"


def traffic_file(model_name: str) -> str:
    """Return the name of the object that contains the plan for a served model.

    >>> traffic_file("shop")
    'shop.traffic.json'
    """
    return f"{model_name}.traffic.json"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A model that answers requests, or scores them as shadow traffic.

    Raises:
        ContractError: the name is empty, or the version is not a whole number above 0.
    """

    model_name: str
    """Triton's name of the model. Requests contain this name and no version."""
    version: int
    """Version that is expected to answer the requests for this name. The reply contains the version
    that answered."""

    def __post_init__(self) -> None:
        expect(self, "a name", lambda value: isinstance(value, str) and bool(value), "model_name")
        expect(
            self, "an integer from 1", lambda value: type(value) is int and value >= 1, "version"
        )


@dataclass(frozen=True, kw_only=True)
class TrafficPlan(Manifest):
    """Plan of the traffic: the models that answer requests, and their shares (see the module).

    Raises:
        ContractError: a field has the wrong type, a share is outside [0, 1], a share is set without
            a canary, or both arms have the same name.
    """

    sequence: int
    """Number of the plan. The first plan has the number 1, and each later plan has the next
    number."""
    stable: Arm
    canary: Arm | None
    """Model and version of the canary. The canary has its own model name. None if there is no
    canary."""
    canary_share: float
    """Share of the keys whose requests the canary answers."""
    shadow_share: float
    """Share of the requests that both arms score. The scores of the arm that does not answer are
    logged and never served."""
    salt: str
    """Salt of the sticky hash. The salt stays the same while a canary grows."""
    published_at: str
    """ISO 8601 UTC."""
    reason: str
    lease: int = 0
    """Lease number of the controller that wrote the plan. 0 in plans of older releases."""
    baseline: Baseline = field(default_factory=dict)
    """Counters of the servers at the time when the plan was published. The controller subtracts
    these values from later values of the counters. Clients ignore the baseline. The counters are
    part of the plan, so that a stage and its initial counters are written atomically."""

    def __post_init__(self) -> None:
        expect(
            self, "an integer from 1", lambda value: type(value) is int and value >= 1, "sequence"
        )
        shares = ("canary_share", "shadow_share")
        expect(
            self,
            "a number in 0..1",
            lambda value: type(value) in (int, float) and 0.0 <= value <= 1.0,
            *shares,
        )
        expect(self, "an ISO 8601 time with its offset", _is_utc_time, "published_at")
        if self.canary is None and (self.canary_share or self.shadow_share):
            raise ContractError(
                f"canary_share is {self.canary_share} and shadow_share {self.shadow_share} without "
                "a canary, expected 0"
            )
        if self.canary is not None and self.canary.model_name == self.stable.model_name:
            raise ContractError(
                f"both arms are named {self.stable.model_name!r}, expected two names"
            )

    def next(self, **changes: Any) -> "TrafficPlan":
        """Return a copy of this plan with `changes` and with the next sequence number."""
        return replace(self, **{"sequence": self.sequence + 1, **changes})

    def without_canary(self, *, stable: Arm, published_at: str, reason: str) -> "TrafficPlan":
        """Return the next plan, in which `stable` answers all requests."""
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
        """Return the arm that answers the requests with this key."""
        if self.canary is not None and _fraction(self.salt, "arm", key) < self.canary_share:
            return self.canary
        return self.stable

    def shadow_for(self, key: str, request_id: str) -> Arm | None:
        """Return the arm that scores this request as shadow traffic, or None.

        The random draw depends on the request id and not on the key. Requests of every user can
        therefore be shadow traffic.
        """
        if self.canary is None or _fraction(self.salt, "shadow", request_id) >= self.shadow_share:
            return None
        return self.stable if self.arm_for(key) == self.canary else self.canary


def _fraction(salt: str, purpose: str, key: str) -> float:
    """Return a pseudorandom number in [0, 1) that is always the same for equal arguments."""
    # A key may contain a lone surrogate, which is valid in JSON but not in UTF-8. The key is
    # therefore encoded with `surrogatepass`, which accepts a lone surrogate.
    digest = hashlib.blake2b(
        f"{salt}\0{purpose}\0{key}".encode(errors="surrogatepass"), digest_size=8
    ).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def _is_utc_time(text: object) -> bool:
    """Return whether `text` is an ISO 8601 time with an offset.

    The suffix `Z` is not accepted, because Python 3.10 does not parse it.
    """
    try:
        return isinstance(text, str) and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False
