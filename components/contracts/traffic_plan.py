"""The traffic plan: which model answers which share of requests, and which one answers in the shadow.

Joins deployment, which publishes it as one object of the model repository (`TRAFFIC_FILE`), to the inference client,
which chooses by it. Where there is no plan, everyone asks `serving.MODEL_NAME` and names no version.

Choosing is sticky: the same key (a user, else a request) meets the same arm as long as the plan keeps its `salt`, and a
canary whose share grows keeps everyone that it had.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from components.contracts.errors import ContractError

TRAFFIC_FILE = "traffic.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One model that may answer."""

    model_name: str
    """Triton's name of the model: requests ask by it and name no version."""
    version: int
    """The version that is meant to answer there; the reply says which one did."""


@dataclass(frozen=True, kw_only=True)
class TrafficPlan:
    """Who answers; see the module.

    Raises:
        ContractError: a share outside [0, 1], or a share without a canary.
    """

    sequence: int
    """One more than that of the plan it replaces."""
    stable: Arm
    canary: Arm | None
    """The new version under its own name; None = there is none."""
    canary_share: float
    """Share of keys whose requests the canary answers."""
    shadow_share: float
    """Share of the remaining work that is scored by the other arm too; those scores are logged and never served."""
    salt: str
    """Of the sticky hash; kept while a canary grows."""
    published_at: str
    reason: str

    def __post_init__(self) -> None:
        """Refuses what no client could follow."""
        for name, share in (("canary_share", self.canary_share), ("shadow_share", self.shadow_share)):
            if not 0.0 <= share <= 1.0:
                raise ContractError(f"{name} is {share}, expected 0..1")
        if self.canary is None and (self.canary_share or self.shadow_share):
            raise ContractError(
                f"canary_share is {self.canary_share} and shadow_share {self.shadow_share} without a canary, expected 0"
            )

    def arm_for(self, key: str) -> Arm:
        """Who answers requests of `key`."""
        if self.canary is not None and _fraction(self.salt, "arm", key) < self.canary_share:
            return self.canary
        return self.stable

    def shadow_for(self, key: str, request_id: str) -> Arm | None:
        """Who scores this request in the shadow beside `arm_for(key)`; None = nobody."""
        if self.canary is None or _fraction(self.salt, "shadow", request_id) >= self.shadow_share:
            return None
        return self.stable if self.arm_for(key) == self.canary else self.canary

    def dumps(self) -> bytes:
        """The plan as JSON."""
        return (json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=2) + "\n").encode()

    @classmethod
    def loads(cls, content: bytes, *, source: str) -> TrafficPlan:
        """The plan in `content`; `source` is named in errors.

        Raises:
            ContractError: no JSON, another format version, or unknown, missing or malformed fields.
        """
        try:
            document: dict[str, Any] = json.loads(content)
            if (version := document.pop("format_version")) != FORMAT_VERSION:
                raise ContractError(f"{source} has format_version {version}, expected {FORMAT_VERSION}")
            document["stable"] = Arm(**document["stable"])
            document["canary"] = Arm(**document["canary"]) if document["canary"] is not None else None
            return cls(**document)
        except ContractError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ContractError(f"{source} is no traffic plan: {error!r}") from error


def _fraction(salt: str, purpose: str, key: str) -> float:
    """A number in [0, 1) that depends on nothing but the arguments, evenly spread over keys."""
    digest = hashlib.blake2b(f"{salt}\0{purpose}\0{key}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
