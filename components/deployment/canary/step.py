"""One evaluation of a canary: what a crash left is finished, then it holds, grows, is released or aborted.

Idempotent: it may be called at any time and any number of times, since all it knows is in the journal, the plan and the
evidence. The lock is not held while evidence is read, nor while clients drain: a rollback is never kept waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime

from components.deployment.canary import state as canary_state
from components.deployment.canary.evidence import read_pairs
from components.deployment.canary.metrics import read_baseline, since, uncounted
from components.deployment.canary.policy import ABORT, GROW, Judgement, judge
from components.deployment.canary.settle import at_rest, settle
from components.deployment.canary.start import grow, load_everywhere
from components.deployment.canary.terms import (
    ABORTED,
    CHANGED,
    GROWN,
    NONE,
    RELEASED,
    CanarySettings,
    Step,
    aborted,
    held,
)
from components.deployment.discovery import addresses
from components.deployment.promote import promote_version
from components.deployment.recovery import opened
from components.deployment.repository.model_repository import ModelRepository
from components.deployment.site import Site
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.storage.locations import open_objects
from components.store.promotion_journal import Promotion
from components.store.traffic_plan import Baseline, TrafficPlan

logger = logging.getLogger(__name__)

_CHANGED = "the plan changed while its evidence was read"


def step(settings: CanarySettings) -> Step:
    """Repairs, evaluates and does one thing; see the module.

    Raises:
        ContractError: the evidence or the repository is damaged.
        TemporaryError: a server does not answer, or another deployment is at work; to be called again.
        PermanentError: the live version could not be changed; what was live is live.
    """
    try:
        plan = _look(settings)
    except TemporaryError as error:
        if at_rest(ModelRepository(open_objects(settings.site.repository)), settings.site.store):
            # Before the first model, or scaled to zero: no reason for a failed step every few minutes.
            return Step(action=NONE, reason=f"no canary is at work; {error}")
        if (done := _abort_without_servers(settings)) is not None:
            logger.warning("%s", error)
            return done
        raise
    if isinstance(plan, Step):
        return plan
    seen, unread = _counters(plan, settings)
    if fresh := uncounted(plan.baseline, seen or {}):
        counted = plan.next(baseline={**plan.baseline, **fresh})
        if not _replace(plan, counted, settings):
            return Step(action=CHANGED, reason=_CHANGED, wait_seconds=0.0)
        logger.info("errors and latency of %s are counted from now on", ", ".join(fresh))
        if not plan.baseline:
            return held(counted, "counting errors and latency from now on")
        plan = counted
    found = _judge(plan, settings, seen, unread)
    if found.action == ABORT:
        return _act(plan, settings, found, lambda site, at_work: _take_back(site, found))
    if found.action != GROW:
        return held(plan, found.reason, found)
    if plan.canary_share == 0.0:
        return held(plan, f"in the shadow only; {found.reason}; start it again to let it answer", found)
    return _act(plan, settings, found, lambda site, at_work: _grow_or_release(site, plan, at_work, settings, found))


def _look(settings: CanarySettings) -> TrafficPlan | Step:
    """The plan of a canary that is loaded everywhere, to be judged; or what had to be done instead."""
    with _opened(settings) as site:
        if (done := settle(site, settings)) is not None:
            return done
        plan, at_work = _at_work(site)
        try:
            load_everywhere(site, at_work.version, only_missing=True)
        except PermanentError as error:
            # A server refuses it, or it answers golden rows wrongly: no evidence is needed.
            canary_state.reset_plan(site.repository, site.store, str(error), clock=site.settings.clock)
            return aborted(settings, at_work.version, str(error))
        return plan


def _abort_without_servers(settings: CanarySettings) -> Step | None:
    """Takes the traffic back if the evidence says so: a replica that is down must not keep a bad canary going."""
    repository, store = ModelRepository(open_objects(settings.site.repository)), settings.site.store
    plan, at_work = repository.read_plan(), canary_state.active(store)
    if plan is None or plan.canary is None or at_work is None or at_work.version != plan.canary.version:
        return None
    found = judged(plan, settings)
    if found.action != ABORT:
        return None
    with repository.locked():
        if repository.read_plan() != plan:
            return None
        canary_state.reset_plan(repository, store, found.reason, clock=settings.site.clock)
    return aborted(settings, at_work.version, found.reason, found)


def advance(settings: CanarySettings, reason: str) -> Step:
    """The next share, or all, on a person's word; an undecided canary waits for it, and a shadow may start by it.

    Raises:
        ContractError: no reason is given.
        TemporaryError, PermanentError: as `step`; what was live is live.
    """
    if not reason.strip():
        raise ContractError("the reason of an advance is empty, expected one for the journal")
    with _opened(settings) as site:
        if (done := settle(site, settings)) is not None:
            return done
        plan, at_work = _at_work(site)
        load_everywhere(site, at_work.version, only_missing=True)
    found = Judgement(action=GROW, reason=reason)
    return _act(plan, settings, found, lambda site, at_work: _grow_or_release(site, plan, at_work, settings, found))


def _opened(settings: CanarySettings) -> AbstractContextManager[Site]:
    return opened(settings.site, connect=settings.connect, resolve=settings.resolve)


def _at_work(site: Site) -> tuple[TrafficPlan, Promotion]:
    plan, at_work = site.repository.read_plan(), canary_state.active(site.store)
    assert plan is not None
    assert at_work is not None
    return plan, at_work


def judged(plan: TrafficPlan, settings: CanarySettings) -> Judgement:
    """What the rules make of the evidence of the plan's stage.

    Raises:
        ContractError: the evidence is damaged.
    """
    return _judge(plan, settings, *_counters(plan, settings))


def _counters(plan: TrafficPlan, settings: CanarySettings) -> tuple[Baseline | None, str]:
    """What every server has counted so far; or None, and why."""
    assert plan.canary is not None
    if not settings.metrics:
        return None, "no metrics address is named"
    try:
        servers = addresses(settings.metrics, settings.resolve)
        return read_baseline(servers, plan.stable, plan.canary, fetch=settings.fetch), ""
    except TemporaryError as error:
        logger.warning("%s", error)
        return None, str(error)


def _judge(plan: TrafficPlan, settings: CanarySettings, seen: Baseline | None, unread: str) -> Judgement:
    assert plan.canary is not None
    pairs = read_pairs(
        settings.evidence,
        stable=plan.stable.version,
        canary=plan.canary.version,
        since=datetime.fromisoformat(plan.published_at),
    )
    counts = None if seen is None else since(plan.baseline, seen)
    return judge(pairs, counts, settings.policy, unread=unread)


def _replace(plan: TrafficPlan, other: TrafficPlan, settings: CanarySettings) -> bool:
    """Writes `other` if the plan is still `plan`."""
    repository = ModelRepository(open_objects(settings.site.repository))
    with repository.locked():
        if repository.read_plan() != plan:
            return False
        repository.write_plan(other)
    return True


def _act(
    plan: TrafficPlan,
    settings: CanarySettings,
    found: Judgement,
    act: Callable[[Site, Promotion], tuple[str, float]],
) -> Step:
    """Does `act`, unless something changed while the evidence was read."""
    with _opened(settings) as site:
        now, at_work = site.repository.read_plan(), canary_state.active(site.store)
        if now != plan or at_work is None or plan.canary is None or at_work.version != plan.canary.version:
            return Step(action=CHANGED, reason=_CHANGED, wait_seconds=0.0)
        action, share = act(site, at_work)
        logger.info("canary %d: %s, share %g: %s", at_work.version, action, share, found.reason)
        wait = settings.drain_seconds if action in (RELEASED, ABORTED) else None
        return Step(
            action=action,
            reason=found.reason,
            version=at_work.version,
            share=share,
            wait_seconds=wait,
            judgement=found,
        )


def _take_back(site: Site, found: Judgement) -> tuple[str, float]:
    canary_state.reset_plan(site.repository, site.store, found.reason, clock=site.settings.clock)
    site.checkpoint("plan reset")
    return ABORTED, 0.0


def _grow_or_release(
    site: Site, plan: TrafficPlan, at_work: Promotion, settings: CanarySettings, found: Judgement
) -> tuple[str, float]:
    larger = [share for share in settings.policy.shares if share > plan.canary_share]
    if larger:
        servers = addresses(settings.metrics, settings.resolve)
        grow(site, plan, at_work, larger[0], reason=found.reason, metrics=servers, fetch=settings.fetch)
        return GROWN, larger[0]
    promote_version(site, at_work.version, reason=found.reason, decision=at_work.decision)
    site.checkpoint("promoted")
    reason = f"version {at_work.version} is live"
    canary_state.reset_plan(site.repository, site.store, reason, clock=site.settings.clock)
    site.checkpoint("plan reset")
    return RELEASED, 1.0
