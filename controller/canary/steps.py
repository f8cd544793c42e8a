"""A canary's life: started, grown step by step (1 -> 5 -> 25 % -> released to all) or aborted, and unloaded.

It is prepared and rehearsed like a release: the version gets its number, proof and files as any release does, and is
announced in the journal. What differs is the name that it is loaded under, and that the traffic plan instead of the
configuration makes clients ask for it.

A step may run at any time and any number of times, since all it knows is in the journal, the traffic plan and the
evidence. The lock is not held while evidence is read, nor while clients drain: a rollback is never kept waiting.
`watch` steps until it is over; `advance` and `abort` are a person's. A canary in the shadow only is watched alike, and
answers once it is started again to do so, or advanced.

The journal names the canary's version (`canary_at_work`), and the plan tells clients how to use it. Every change is a
fixed order of writes, so that what a crash left shows how far it came:

    start    intent, version's files, canary's files, servers, plan, CANARY
    grow     plan, CANARY (with its new share)
    promote  intent, switch, PROMOTE, plan, drained, unloaded, canary's files removed
    abort    plan, drained, unloaded, canary's files removed, CANARY_ENDED

A plan with a canary that the journal does not name is taken back; a canary's files without a plan are to be removed.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from controller.canary.evidence import Fetch, counts_since, fetch, read_baseline, read_pairs, uncounted
from controller.promote import promote_version
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import Promotion, canary_at_work
from evergreen.registry.recommenders import logged_recommender
from evergreen.registry.traffic_plan import DRAIN_SECONDS, Baseline, TrafficPlan
from evergreen.runtime.errors import PermanentError, TemporaryError
from evergreen.serving.canary import (
    ABORTED,
    CHANGED,
    DRAINING,
    ENDED,
    GROWN,
    HELD,
    NO_CANARY,
    NONE,
    RELEASED,
    Step,
    grow,
    load_everywhere,
    unload,
)
from evergreen.serving.canary_policy import ABORT, GROW, HOLD, CanaryJudgement, CanaryPolicy, judge, judge_counts
from evergreen.serving.servers import addresses
from evergreen.serving.site import Site, SiteSettings, opened, reset_plan
from evergreen.storage.objects import Objects

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CanarySettings:
    """Where a canary is, and how it is judged."""

    site: SiteSettings
    evidence: tuple[Objects, ...] = ()
    """Where matured rows are: the monitor's archive, then the lake."""
    metrics: tuple[str, ...] = ()
    """Metrics ports of all servers, host:port or dns:///name:port; none = it can be aborted by outcomes, and never
    grows."""
    policy: CanaryPolicy = field(default_factory=CanaryPolicy)
    drain_seconds: float = DRAIN_SECONDS
    fetch: Fetch = fetch


_CHANGED_MEANWHILE = Step(action=CHANGED, reason="the plan changed while its evidence was read", wait_seconds=0.0)


def step(settings: CanarySettings) -> Step:
    """Evaluates, repairs and does one thing; see the module.

    A bad canary is aborted and a place without one left alone whether or not servers answer: one that is down must not
    keep the other's share going, and before the first model no server may be there at all.

    Raises:
        ContractError: the evidence or the repository is damaged.
        TemporaryError: a server does not answer, or another deployment is at work; to be called again.
        PermanentError: the live version could not be changed; what was live is live.
    """
    site = settings.site
    if not promotion_journal.read_entries(site.store):
        return NO_CANARY
    repository = site.open_repository()
    plan, at_work = repository.read_plan(), canary_at_work(site.store)
    if plan is None or plan.canary is None or at_work is None or at_work.version != plan.canary.version:
        is_at_rest = at_work is None and (plan is None or plan.canary is None)
        if is_at_rest and not repository.canary.whole() and not promotion_journal.interrupted(site.store):
            return NO_CANARY
        return _proceed(plan, settings, None)
    found, fresh = _judge(plan, settings)
    if found.action == ABORT:
        with repository.locked():
            if repository.read_plan() != plan:
                return _CHANGED_MEANWHILE
            reset_plan(site, repository, found.reason)
        return _aborted(settings, at_work.version, found.reason, judgement=found)
    return _proceed(plan, settings, found, fresh=fresh)


def advance(settings: CanarySettings, reason: str) -> Step:
    """The next share, or all, on a person's word; an undecided canary waits for it, and a shadow may start by it.

    Raises:
        TemporaryError, PermanentError: as `step`; what was live is live.
    """
    plan = settings.site.open_repository().read_plan()
    return _proceed(plan, settings, CanaryJudgement(action=GROW, reason=reason))


def abort(settings: CanarySettings, reason: str) -> Step:
    """Takes the canary's traffic back at once, whether or not servers answer; `step` unloads it once clients know.

    Raises:
        TemporaryError: another deployment is at work.
    """
    repository = settings.site.open_repository()
    with repository.locked():
        at_work, plan = canary_at_work(settings.site.store), repository.read_plan()
        # A start that was killed before its line is in the plan alone.
        if at_work is None and (plan is None or plan.canary is None):
            return NO_CANARY
        reset_plan(settings.site, repository, reason)
    return _aborted(settings, at_work.version if at_work else None, reason)


def watch(
    settings: CanarySettings,
    *,
    interval_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    report: Callable[[Step], None] = lambda _: None,
) -> Step:
    """Steps until there is no canary any more; the last step. What fails for now is tried again.

    Raises:
        ContractError, PermanentError: as `step`.
    """
    while True:
        try:
            done = step(settings)
        except TemporaryError as error:
            logger.warning("step put off: %s", error)
            sleep(interval_seconds)
            continue
        report(done)
        if done.action in (NONE, ENDED):
            return done
        sleep(interval_seconds if done.wait_seconds is None else done.wait_seconds)


def status(settings: CanarySettings) -> Step:
    """What the next step would find, without doing it; needs neither lock nor servers."""
    plan = settings.site.open_repository().read_plan()
    if plan is None or plan.canary is None:
        is_over = canary_at_work(settings.site.store) is None
        return Step(action=NONE if is_over else DRAINING, reason=plan.reason if plan else "there is no plan")
    found, _ = _judge(plan, settings)
    return _held(plan, found)


def _proceed(
    plan: TrafficPlan | None, settings: CanarySettings, found: CanaryJudgement | None, *, fresh: bool = False
) -> Step:
    """Finishes what was left, loads the canary where it is missing, and does what was found.

    `plan` is as it was when the evidence was read; `found` says what to do with the canary, but for aborting it, None
    where none is at work; `fresh`: servers have counted without a baseline.
    """
    with opened(settings.site) as site:
        if site.repository.read_plan() != plan:
            return _CHANGED_MEANWHILE
        if (done := _finish_earlier(site, settings)) is not None:
            return done
        at_work = canary_at_work(site.store)
        if plan is None or at_work is None or found is None:
            return _CHANGED_MEANWHILE
        try:
            load_everywhere(site, at_work.version, only_missing=True)
        except PermanentError as error:
            # A server refuses it, or it answers golden rows wrongly: no evidence is needed.
            site.reset_plan(str(error))
            return _aborted(settings, at_work.version, str(error))
        if found.action == GROW:
            return _grow_or_release(site, at_work, plan, settings=settings, found=found)
        if fresh:
            # Read again: what a server counted while it loaded the canary is no client's.
            seen, _ = _read_counters(plan, settings)
            plan = plan.next(baseline={**plan.baseline, **uncounted(plan.baseline, seen or {})})
            site.repository.write_plan(plan)
            logger.info("errors and latency of %s are counted from now on", ", ".join(plan.baseline))
        return _held(plan, found)


def _finish_earlier(site: Site, settings: CanarySettings) -> Step | None:
    """Finishes what a crash or an earlier step left; None where a canary is at work and plan and journal agree."""
    plan, at_work = site.repository.read_plan(), canary_at_work(site.store)
    version = plan.canary.version if plan and plan.canary else None
    if version is not None and (at_work is None or at_work.version != version):
        site.reset_plan(f"version {version} is no canary any more")
        site.checkpoint("plan reset")
        plan, version = site.repository.read_plan(), None
    if version is None:
        return unload(site, plan, at_work, drain_seconds=settings.drain_seconds)
    assert plan is not None
    assert at_work is not None
    if plan.canary_share != at_work.share:
        # The line that a crash kept from following its plan.
        site.append(replace(at_work, share=plan.canary_share, reason=plan.reason, who=site.settings.who))
    return None


def _read_counters(plan: TrafficPlan, settings: CanarySettings) -> tuple[Baseline | None, str]:
    """What every server has counted so far; or None, and why."""
    assert plan.canary is not None
    if not settings.metrics:
        return None, "no metrics address is named"
    try:
        servers = addresses(settings.metrics, settings.site.resolve)
        return read_baseline(servers, plan.stable, plan.canary, fetch=settings.fetch), ""
    except TemporaryError as error:
        logger.warning("%s", error)
        return None, str(error)


def _judge(plan: TrafficPlan, settings: CanarySettings) -> tuple[CanaryJudgement, bool]:
    """What the rules make of the canary's evidence so far, and whether servers have counted without a baseline."""
    assert plan.canary is not None
    seen, unread = _read_counters(plan, settings)
    counts = None if seen is None else counts_since(plan.baseline, seen)
    # Failures count also where the evidence cannot be read.
    if (failing := judge_counts(counts, settings.policy)).action == ABORT:
        return CanaryJudgement(action=ABORT, reason=failing.reason, by_counts=failing), False
    recommender = logged_recommender(settings.site.store)
    pairs = read_pairs(
        settings.evidence,
        stable=plan.stable.version,
        canary=plan.canary.version,
        since=_began(plan, settings.site.store),
        most=settings.policy.looks[-1],
        user=recommender.data.user if recommender else None,
    )
    found = judge(pairs, counts, settings.policy, unread=unread)
    if found.action == GROW and plan.canary_share == 0.0:
        reason = f"in the shadow only; {found.reason}; start it again to let it answer"
        found = replace(found, action=HOLD, reason=reason)
    return found, bool(uncounted(plan.baseline, seen or {}))


def _began(plan: TrafficPlan, store: Path) -> datetime:
    """When the plan's canary, or the shadow that it was before, was recorded; else when the plan was published."""
    lines = [each for each in promotion_journal.read_entries(store) if each.action == promotion_journal.CANARY]
    times = [each.time for each in lines if plan.canary is not None and each.version == plan.canary.version]
    # The journal's times never go back: after a clock was ahead, the plan's own is right.
    return min(map(datetime.fromisoformat, [*times[:1], plan.published_at]))


def _grow_or_release(
    site: Site, at_work: Promotion, plan: TrafficPlan, *, settings: CanarySettings, found: CanaryJudgement
) -> Step:
    """Gives the canary its next share; after the last one, all."""
    larger = [share for share in settings.policy.shares if share > plan.canary_share]
    if larger:
        action, share, wait = GROWN, larger[0], None
        baseline = _read_counters(plan, settings)[0] or {}
        grow(site, at_work, plan, share=share, reason=found.reason, baseline=baseline)
    else:
        action, share, wait = RELEASED, 1.0, settings.drain_seconds
        promote_version(site, at_work.version, reason=found.reason, decision=at_work.decision)
        site.checkpoint("promoted")
    logger.info("canary %d: %s, share %g: %s", at_work.version, action, share, found.reason)
    return Step(
        action=action,
        reason=found.reason,
        version=at_work.version,
        share=share,
        wait_seconds=wait,
        judgement=found,
    )


def _held(plan: TrafficPlan, found: CanaryJudgement) -> Step:
    assert plan.canary is not None
    return Step(action=HELD, reason=found.reason, version=plan.canary.version, share=plan.canary_share, judgement=found)


def _aborted(
    settings: CanarySettings, version: int | None, reason: str, *, judgement: CanaryJudgement | None = None
) -> Step:
    logger.error("canary %s is aborted: %s", version, reason)
    return Step(
        action=ABORTED,
        reason=reason,
        version=version,
        share=0.0,
        wait_seconds=settings.drain_seconds,
        judgement=judgement,
    )
