"""What a crash or an earlier step of a canary left, finished: plan and journal agree, nothing stays loaded in vain.

Every step begins here; which state means what is said in `canary.state`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from components.deployment.canary import state as canary_state
from components.deployment.canary.terms import DRAINING, ENDED, NONE, CanarySettings, Step
from components.deployment.repository.model_repository import ModelRepository
from components.deployment.site import Site
from components.store import promotion_journal
from components.store.promotion_journal import Promotion
from components.store.traffic_plan import TrafficPlan

logger = logging.getLogger(__name__)


def settle(site: Site, settings: CanarySettings) -> Step | None:
    """Finishes what a crash or an earlier step left; None where a canary is at work and plan and journal agree."""
    plan, at_work = site.repository.read_plan(), canary_state.active(site.store)
    version = plan.canary.version if plan and plan.canary else None
    if version is not None and (at_work is None or at_work.version != version):
        canary_state.reset_plan(
            site.repository, site.store, f"version {version} is no canary any more", clock=site.settings.clock
        )
        site.checkpoint("plan reset")
        plan, version = site.repository.read_plan(), None
    if version is None:
        return _finish(site, plan, at_work, settings)
    assert plan is not None
    assert at_work is not None
    if plan.canary_share != at_work.share:
        site.append(_with_share(site, at_work, plan))
    return None


def at_rest(repository: ModelRepository, store: Path) -> bool:
    """Whether no step has anything to do: no canary planned, at work or left over, no deployment broken off."""
    plan = repository.read_plan()
    return (
        (plan is None or plan.canary is None)
        and not promotion_journal.interrupted(store)
        and canary_state.active(store) is None
        and not repository.canary_versions()
    )


def _with_share(site: Site, at_work: Promotion, plan: TrafficPlan) -> Promotion:
    """The line that a crash kept from following its plan."""
    return replace(at_work, time=site.now(), share=plan.canary_share, reason=plan.reason, who=site.settings.who)


def _finish(site: Site, plan: TrafficPlan | None, at_work: Promotion | None, settings: CanarySettings) -> Step:
    """Unloads what no plan names, once every client knows."""
    if at_work is None and not site.repository.canary_versions():
        return Step(action=NONE, reason="no canary is at work")
    reason = plan.reason if plan else "no plan names it"
    if plan is not None and (seconds := _drain_left(site, plan, settings)) > 0:
        return Step(action=DRAINING, reason=reason, wait_seconds=seconds)
    versions = site.repository.canary_versions()
    line = canary_state.end(site, reason)
    version = line.version if line else next(iter(versions), None)
    logger.info("canary %s is unloaded: %s", version, reason)
    return Step(action=ENDED, reason=reason, version=version)


def _drain_left(site: Site, plan: TrafficPlan, settings: CanarySettings) -> float:
    """Seconds until the last client has read the plan; begins anew where the clock was set back behind it."""
    passed = (site.settings.clock() - datetime.fromisoformat(plan.published_at)).total_seconds()
    if passed < 0:
        site.repository.write_plan(plan.next(published_at=site.now()))
        passed = 0.0
    return settings.drain_seconds - passed
