"""What a canary's steps are told and what they answer."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from components.deployment.canary.metrics import Fetch, fetch
from components.deployment.canary.policy import CanaryPolicy, Judgement
from components.deployment.discovery import Resolve, resolve
from components.deployment.servers import Connect
from components.deployment.site import SiteSettings
from components.deployment.triton_client import Triton
from components.storage.objects import Objects
from components.store.traffic_plan import DRAIN_SECONDS, TrafficPlan

logger = logging.getLogger(__name__)

NONE = "none"
DRAINING = "draining"
ENDED = "ended"
HELD = "held"
GROWN = "grown"
RELEASED = "released"
ABORTED = "aborted"
CHANGED = "changed"


@dataclass(frozen=True, kw_only=True)
class CanarySettings:
    """Where a canary is, and how it is judged."""

    site: SiteSettings
    evidence: tuple[Path | Objects, ...] = ()
    """Where matured rows are: the monitor's archive, then the lake."""
    metrics: tuple[str, ...] = ()
    """Metrics ports of all servers, host:port or dns:///name:port; none = it can be aborted by outcomes, and never
    grows."""
    policy: CanaryPolicy = field(default_factory=CanaryPolicy)
    drain_seconds: float = DRAIN_SECONDS
    connect: Connect = Triton
    resolve: Resolve = resolve
    fetch: Fetch = fetch


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step did."""

    action: str
    """`none` (there is no canary), `held`, `grown`, `released`, `aborted` (both: the plan names the live version alone
    from now on), `draining`, `ended` (unloaded everywhere), `changed` (someone else was faster)."""
    reason: str
    version: int | None = None
    share: float | None = None
    """Share of the traffic after the step."""
    wait_seconds: float | None = None
    """When to come again, where that is known."""
    judgement: Judgement | None = None


def held(plan: TrafficPlan, reason: str, judgement: Judgement | None = None) -> Step:
    """Nothing done."""
    assert plan.canary is not None
    return Step(action=HELD, reason=reason, version=plan.canary.version, share=plan.canary_share, judgement=judgement)


def aborted(settings: CanarySettings, version: int | None, reason: str, judgement: Judgement | None = None) -> Step:
    """The plan names the live version alone from now on; unloading is for later steps."""
    logger.error("canary %s is aborted: %s", version, reason)
    return Step(
        action=ABORTED,
        reason=reason,
        version=version,
        share=0.0,
        wait_seconds=settings.drain_seconds,
        judgement=judgement,
    )
