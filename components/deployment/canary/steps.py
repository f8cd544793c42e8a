"""A canary's life after its start: each step holds, grows it (1 -> 5 -> 25 % -> released to all) or aborts it.

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

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from components.deployment.canary.evidence import Fetch, counts_since, fetch, read_baseline, read_pairs, uncounted
from components.deployment.canary.policy import ABORT, GROW, CanaryJudgement, CanaryPolicy, judge
from components.deployment.canary.start import grow, load_everywhere
from components.deployment.promote import promote_version
from components.deployment.repository.model_repository import ModelRepository
from components.deployment.servers import addresses
from components.deployment.site import Site, SiteSettings, opened, reset_plan
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.storage.objects import Objects
from components.store import promotion_journal
from components.store.promotion_journal import Promotion, canary_at_work
from components.store.traffic_plan import DRAIN_SECONDS, Baseline, TrafficPlan

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
    evidence: tuple[Objects, ...] = ()
    """Where matured rows are: the monitor's archive, then the lake."""
    metrics: tuple[str, ...] = ()
    """Metrics ports of all servers, host:port or dns:///name:port; none = it can be aborted by outcomes, and never
    grows."""
    policy: CanaryPolicy = field(default_factory=CanaryPolicy)
    drain_seconds: float = DRAIN_SECONDS
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
    judgement: CanaryJudgement | None = None


_CHANGED_MEANWHILE = Step(action=CHANGED, reason="the plan changed while its evidence was read", wait_seconds=0.0)


def step(settings: CanarySettings) -> Step:
    """Repairs, evaluates and does one thing; see the module.

    Raises:
        ContractError: the evidence or the repository is damaged.
        TemporaryError: a server does not answer, or another deployment is at work; to be called again.
        PermanentError: the live version could not be changed; what was live is live.
    """
    try:
        plan = _open_stage(settings)
    except TemporaryError as error:
        if _is_at_rest(settings.site):
            # Before the first model, or scaled to zero: no reason for a failed step every few minutes.
            return Step(action=NONE, reason=f"no canary is at work; {error}")
        if (done := _abort_without_servers(settings)) is not None:
            logger.warning("%s", error)
            return done
        raise
    if isinstance(plan, Step):
        return plan
    seen, unread = _read_counters(plan, settings)
    if fresh := uncounted(plan.baseline, seen or {}):
        counted = plan.next(baseline={**plan.baseline, **fresh})
        if not _replace_plan(plan, counted, settings.site):
            return _CHANGED_MEANWHILE
        logger.info("errors and latency of %s are counted from now on", ", ".join(fresh))
        if not plan.baseline:
            return _held(counted, "counting errors and latency from now on")
        plan = counted
    found = _judge(plan, settings, seen=seen, unread=unread)
    if found.action not in (ABORT, GROW):
        return _held(plan, found.reason, found)
    if found.action == GROW and plan.canary_share == 0.0:
        return _held(plan, f"in the shadow only; {found.reason}; start it again to let it answer", found)
    return _carry_out(plan, settings, found)


def advance(settings: CanarySettings, reason: str) -> Step:
    """The next share, or all, on a person's word; an undecided canary waits for it, and a shadow may start by it.

    Raises:
        ContractError: no reason is given.
        TemporaryError, PermanentError: as `step`; what was live is live.
    """
    if not reason.strip():
        raise ContractError("the reason of an advance is empty, expected one for the journal")
    with opened(settings.site) as site:
        if (done := _finish_earlier(site, settings)) is not None:
            return done
        plan, at_work = _plan_and_line(site)
        load_everywhere(site, at_work.version, only_missing=True)
    return _carry_out(plan, settings, CanaryJudgement(action=GROW, reason=reason))


def abort(settings: CanarySettings, reason: str) -> Step:
    """Takes the canary's traffic back at once, whether or not servers answer; `step` unloads it once clients know.

    Raises:
        ContractError: no reason is given.
        TemporaryError: another deployment is at work.
    """
    if not reason.strip():
        raise ContractError("the reason of an abort is empty, expected one for the journal")
    repository = settings.site.open_repository()
    with repository.locked():
        at_work, plan = canary_at_work(settings.site.store), repository.read_plan()
        # A start that was killed before its line is in the plan alone.
        if at_work is None and (plan is None or plan.canary is None):
            return Step(action=NONE, reason="no canary is at work")
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
    found = _judge_plan(plan, settings)
    return _held(plan, found.reason, found)


def _open_stage(settings: CanarySettings) -> TrafficPlan | Step:
    """The plan of a canary that is loaded everywhere, to be judged; or what had to be done instead."""
    with opened(settings.site) as site:
        if (done := _finish_earlier(site, settings)) is not None:
            return done
        plan, at_work = _plan_and_line(site)
        try:
            load_everywhere(site, at_work.version, only_missing=True)
        except PermanentError as error:
            # A server refuses it, or it answers golden rows wrongly: no evidence is needed.
            site.reset_plan(str(error))
            return _aborted(settings, at_work.version, str(error))
        return plan


def _finish_earlier(site: Site, settings: CanarySettings) -> Step | None:
    """Finishes what a crash or an earlier step left; None where a canary is at work and plan and journal agree."""
    plan, at_work = site.repository.read_plan(), canary_at_work(site.store)
    version = plan.canary.version if plan and plan.canary else None
    if version is not None and (at_work is None or at_work.version != version):
        site.reset_plan(f"version {version} is no canary any more")
        site.checkpoint("plan reset")
        plan, version = site.repository.read_plan(), None
    if version is None:
        return _unload(site, plan, at_work, settings=settings)
    assert plan is not None
    assert at_work is not None
    if plan.canary_share != at_work.share:
        # The line that a crash kept from following its plan.
        site.append(replace(at_work, share=plan.canary_share, reason=plan.reason, who=site.settings.who))
    return None


def _unload(site: Site, plan: TrafficPlan | None, at_work: Promotion | None, *, settings: CanarySettings) -> Step:
    """Unloads what no plan names, once every client knows."""
    versions = site.repository.canary.whole()
    if at_work is None and not versions:
        return Step(action=NONE, reason="no canary is at work")
    reason = plan.reason if plan else "no plan names it"
    if plan is not None and (seconds := _drain_left(site, plan, settings)) > 0:
        return Step(action=DRAINING, reason=reason, wait_seconds=seconds)
    site.remove_canary()
    if at_work is not None:
        site.append(replace(at_work, action=promotion_journal.CANARY_ENDED, reason=reason, share=None))
    version = at_work.version if at_work else next(iter(versions), None)
    logger.info("canary %s is unloaded: %s", version, reason)
    return Step(action=ENDED, reason=reason, version=version)


def _drain_left(site: Site, plan: TrafficPlan, settings: CanarySettings) -> float:
    """Seconds until the last client has read the plan; begins anew where the clock was set back behind it."""
    passed = (site.settings.clock() - datetime.fromisoformat(plan.published_at)).total_seconds()
    if passed < 0:
        site.repository.write_plan(plan.next(published_at=site.now()))
        passed = 0.0
    return settings.drain_seconds - passed


def _is_at_rest(site: SiteSettings) -> bool:
    """Whether no step has anything to do: no canary planned, at work or left over, no deployment interrupted."""
    repository = site.open_repository()
    plan = repository.read_plan()
    return (
        (plan is None or plan.canary is None)
        and not promotion_journal.interrupted(site.store)
        and canary_at_work(site.store) is None
        and not repository.canary.whole()
    )


def _abort_without_servers(settings: CanarySettings) -> Step | None:
    """Takes the traffic back if the evidence demands it: a replica that is down must not keep a bad canary running."""
    repository = settings.site.open_repository()
    plan = repository.read_plan()
    if plan is None or _line_of(plan, settings.site) is None or (found := _judge_plan(plan, settings)).action != ABORT:
        return None
    with repository.locked():
        if repository.read_plan() != plan:
            return None
        reset_plan(settings.site, repository, found.reason)
    assert plan.canary is not None
    return _aborted(settings, plan.canary.version, found.reason, found)


def _plan_and_line(site: Site) -> tuple[TrafficPlan, Promotion]:
    plan, at_work = site.repository.read_plan(), canary_at_work(site.store)
    assert plan is not None
    assert at_work is not None
    return plan, at_work


def _line_of(plan: TrafficPlan, site: SiteSettings) -> Promotion | None:
    """The journal's line of the plan's canary; None where it has none, or another one is at work."""
    at_work = canary_at_work(site.store)
    return at_work if at_work and plan.canary and at_work.version == plan.canary.version else None


def _judge_plan(plan: TrafficPlan, settings: CanarySettings) -> CanaryJudgement:
    seen, unread = _read_counters(plan, settings)
    return _judge(plan, settings, seen=seen, unread=unread)


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


def _judge(plan: TrafficPlan, settings: CanarySettings, *, seen: Baseline | None, unread: str) -> CanaryJudgement:
    """What the rules make of the evidence of the plan's stage."""
    assert plan.canary is not None
    pairs = read_pairs(
        settings.evidence,
        stable=plan.stable.version,
        canary=plan.canary.version,
        since=datetime.fromisoformat(plan.published_at),
    )
    counts = None if seen is None else counts_since(plan.baseline, seen)
    return judge(pairs, counts, settings.policy, unread=unread)


def _replace_plan(plan: TrafficPlan, other: TrafficPlan, site: SiteSettings) -> bool:
    """Writes `other` if the plan is still `plan`."""
    repository: ModelRepository = site.open_repository()
    with repository.locked():
        if repository.read_plan() != plan:
            return False
        repository.write_plan(other)
    return True


def _carry_out(plan: TrafficPlan, settings: CanarySettings, found: CanaryJudgement) -> Step:
    """Does what was found, unless something changed while the evidence was read."""
    with opened(settings.site) as site:
        if site.repository.read_plan() != plan or (at_work := _line_of(plan, settings.site)) is None:
            return _CHANGED_MEANWHILE
        larger = [share for share in settings.policy.shares if share > plan.canary_share]
        if found.action == ABORT:
            action, share = ABORTED, 0.0
            site.reset_plan(found.reason)
            site.checkpoint("plan reset")
        elif larger:
            action, share = GROWN, larger[0]
            servers = addresses(settings.metrics, settings.site.resolve)
            grow(site, at_work, plan, share=share, reason=found.reason, servers=servers, fetch=settings.fetch)
        else:
            action, share = RELEASED, 1.0
            promote_version(site, at_work.version, reason=found.reason, decision=at_work.decision)
            site.checkpoint("promoted")
            site.reset_plan(f"version {at_work.version} is live")
            site.checkpoint("plan reset")
        logger.info("canary %d: %s, share %g: %s", at_work.version, action, share, found.reason)
        wait = None if action == GROWN else settings.drain_seconds
        return Step(
            action=action,
            reason=found.reason,
            version=at_work.version,
            share=share,
            wait_seconds=wait,
            judgement=found,
        )


def _held(plan: TrafficPlan, reason: str, judgement: CanaryJudgement | None = None) -> Step:
    assert plan.canary is not None
    return Step(action=HELD, reason=reason, version=plan.canary.version, share=plan.canary_share, judgement=judgement)


def _aborted(
    settings: CanarySettings, version: int | None, reason: str, judgement: CanaryJudgement | None = None
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
