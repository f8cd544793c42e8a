"""Start, grow, release or abort a canary (1, 5, 25 % of the traffic, then all), and unload it.

A canary is prepared like a release. The version gets a number, a parity check and files. It is
rehearsed and announced in the journal. Two points differ from a release: the canary is loaded under
another name, and clients find the canary through the traffic plan instead of the configuration.

A step may run at any time and repeatedly, because all its state is in the journal, the traffic plan
and the evidence. The lock is not held while evidence is read or while clients drain, so a rollback
never waits for a canary. `watch` calls `step` until the canary has ended. `advance` and `abort` are
commands for people. A shadow canary is watched in the same way. A shadow canary serves traffic only
after it is started again with a share, or advanced.

The journal names the canary's version (`canary_at_work`), and the plan tells clients how to use it.
Every change writes in a fixed order, so the state after a crash shows which writes were done:

    start    intent, version's files, canary's files, servers, plan, CANARY
    grow     plan, CANARY (with its new share)
    promote  intent, switch, PROMOTE, plan, drained, unloaded, canary's files removed
    abort    plan, drained, unloaded, canary's files removed, CANARY_ENDED

If a plan names a canary that is not in the journal, the plan is reset. Files of a canary without a
plan are removed.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from controller.canary.evidence import (
    Fetch,
    counts_since,
    fetch,
    read_baseline,
    read_pairs,
    uncounted,
)
from controller.promote import promote_version
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import Promotion, canary_at_work
from evergreen.registry.recommenders import logged_recommender
from evergreen.registry.traffic_plan import DRAIN_SECONDS, Baseline, TrafficPlan
from evergreen.runtime.errors import PermanentError, TemporaryError
from controller.canary.start import (
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
from evergreen.serving.canary_policy import (
    ABORT,
    GROW,
    HOLD,
    CanaryDecision,
    CanaryPolicy,
    check_counts,
    evaluate,
)
from evergreen.serving.servers import addresses
from controller.site import Site, SiteSettings, opened, reset_plan
from evergreen.storage.objects import Objects

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CanarySettings:
    """Deployment target of a canary, its evidence and its rules."""

    site: SiteSettings
    evidence: tuple[Objects, ...] = ()
    """Matured rows: the monitor's archive, then the lake."""
    metrics: tuple[str, ...] = ()
    """Metrics ports of all servers, host:port or dns:///name:port. Without them the canary can be
    aborted by labels, but never grows."""
    policy: CanaryPolicy = field(default_factory=CanaryPolicy)
    drain_seconds: float = DRAIN_SECONDS
    fetch: Fetch = fetch


_CHANGED_MEANWHILE = Step(
    action=CHANGED, reason="the plan changed while its evidence was read", wait_seconds=0.0
)


def step(settings: CanarySettings) -> Step:
    """Evaluate the canary, repair what a crash left, and make one change.

    A bad canary is aborted even if some servers do not answer. Otherwise a server that is down
    would keep the bad canary in service on the other servers. Without a canary no server is
    contacted, because there may be no server before the first model.

    Raises:
        ContractError: the evidence or the repository is corrupt.
        TemporaryError: a server does not answer, or another deployment is running. Call again
            later.
        PermanentError: the live version could not be changed, and is still live.
    """
    site = settings.site
    if not promotion_journal.read_entries(site.store):
        return NO_CANARY
    repository = site.open_repository()
    plan, at_work = repository.read_plan(), canary_at_work(site.store)
    if (
        plan is None
        or plan.canary is None
        or at_work is None
        or at_work.version != plan.canary.version
    ):
        is_at_rest = at_work is None and (plan is None or plan.canary is None)
        if (
            is_at_rest
            and not repository.canary.whole()
            and not promotion_journal.interrupted(site.store)
        ):
            return NO_CANARY
        return _proceed(plan, settings, None)
    found, fresh = _evaluate(plan, settings)
    if found.action == ABORT:
        with repository.locked():
            if repository.read_plan() != plan:
                return _CHANGED_MEANWHILE
            reset_plan(site, repository, found.reason)
        return _aborted(settings, at_work.version, found.reason, decision=found)
    return _proceed(plan, settings, found, fresh=fresh)


def advance(settings: CanarySettings, reason: str) -> Step:
    """Give the canary its next share, or release it, because a person decided so.

    A person can use this command to continue an undecided canary, and to let a shadow canary serve.

    Raises:
        TemporaryError, PermanentError: as in `step`. The live version is unchanged.
    """
    plan = settings.site.open_repository().read_plan()
    return _proceed(plan, settings, CanaryDecision(action=GROW, reason=reason))


def abort(settings: CanarySettings, reason: str) -> Step:
    """Take all traffic from the canary at once, even if servers do not answer.

    `step` unloads it after the clients have read the plan.

    Raises:
        TemporaryError: another deployment is running.
    """
    repository = settings.site.open_repository()
    with repository.locked():
        at_work, plan = canary_at_work(settings.site.store), repository.read_plan()
        # If a start was killed before its journal entry, only the plan names the canary.
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
    """Call `step` until there is no canary, and return the last step. Temporary errors are retried.

    Raises:
        ContractError, PermanentError: as in `step`.
    """
    while True:
        try:
            done = step(settings)
        except TemporaryError as error:
            logger.warning("step deferred: %s", error)
            sleep(interval_seconds)
            continue
        report(done)
        if done.action in (NONE, ENDED):
            return done
        sleep(interval_seconds if done.wait_seconds is None else done.wait_seconds)


def status(settings: CanarySettings) -> Step:
    """Evaluate the canary without changing anything. The evaluation needs no lock and no server."""
    plan = settings.site.open_repository().read_plan()
    if plan is None or plan.canary is None:
        is_over = canary_at_work(settings.site.store) is None
        return Step(
            action=NONE if is_over else DRAINING, reason=plan.reason if plan else "there is no plan"
        )
    found, _ = _evaluate(plan, settings)
    return _held(plan, found)


def _proceed(
    plan: TrafficPlan | None,
    settings: CanarySettings,
    found: CanaryDecision | None,
    *,
    fresh: bool = False,
) -> Step:
    """Finish earlier changes, load the canary on servers that lack it, and apply a decision.

    Args:
        plan: Plan at the time when the evidence was read.
        settings: Deployment target and rules.
        found: Decision to hold or grow. None = there is no canary.
        fresh: Whether servers have counters without a baseline.
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
            # If a server rejects the canary or returns other scores for its golden rows, abort the
            # canary without further evidence.
            site.reset_plan(str(error))
            return _aborted(settings, at_work.version, str(error))
        if found.action == GROW:
            return _grow_or_release(site, at_work, plan, settings=settings, found=found)
        if fresh:
            # Read the counters again, because loading the canary has added warm-up requests.
            seen, _ = _read_counters(plan, settings)
            plan = plan.next(baseline={**plan.baseline, **uncounted(plan.baseline, seen or {})})
            site.repository.write_plan(plan)
            logger.info(
                "errors and latency of %s are counted from now on", ", ".join(plan.baseline)
            )
        return _held(plan, found)


def _finish_earlier(site: Site, settings: CanarySettings) -> Step | None:
    """Finish what a crash or an earlier step left.

    Returns None if a canary is running and the plan agrees with the journal.
    """
    plan, at_work = site.repository.read_plan(), canary_at_work(site.store)
    version = plan.canary.version if plan and plan.canary else None
    if version is not None and (at_work is None or at_work.version != version):
        site.reset_plan(f"version {version} is no longer a canary")
        site.checkpoint("plan reset")
        plan, version = site.repository.read_plan(), None
    if version is None:
        return unload(site, plan, at_work, drain_seconds=settings.drain_seconds)
    assert plan is not None
    assert at_work is not None
    if plan.canary_share != at_work.share:
        # A crash prevented the journal entry that follows the plan.
        site.append(
            replace(at_work, share=plan.canary_share, reason=plan.reason, who=site.settings.who)
        )
    return None


def _read_counters(plan: TrafficPlan, settings: CanarySettings) -> tuple[Baseline | None, str]:
    """Read every server's counters, or return None and a reason."""
    assert plan.canary is not None
    if not settings.metrics:
        return None, "--metrics-urls is empty"
    try:
        servers = addresses(settings.metrics, settings.site.resolve)
        return read_baseline(servers, plan.stable, plan.canary, fetch=settings.fetch), ""
    except TemporaryError as error:
        logger.warning("%s", error)
        return None, str(error)


def _evaluate(plan: TrafficPlan, settings: CanarySettings) -> tuple[CanaryDecision, bool]:
    """Evaluate the evidence, and return whether servers have counters without a baseline."""
    assert plan.canary is not None
    seen, unread = _read_counters(plan, settings)
    counts = None if seen is None else counts_since(plan.baseline, seen)
    # Test failures first, because failures can abort the canary even if the rows cannot be read.
    if (failing := check_counts(counts, settings.policy)).action == ABORT:
        return CanaryDecision.of(failing), False
    recommender = logged_recommender(settings.site.store)
    pairs = read_pairs(
        settings.evidence,
        stable=plan.stable.version,
        canary=plan.canary.version,
        since=_began(plan, settings.site.store),
        most=settings.policy.looks[-1],
        user=recommender.data.user if recommender else None,
    )
    found = evaluate(pairs, counts, settings.policy, unread=unread)
    if found.action == GROW and plan.canary_share == 0.0:
        reason = f"shadow traffic only; {found.reason}; start it again with a share to let it serve"
        found = replace(found, action=HOLD, reason=reason)
    return found, bool(uncounted(plan.baseline, seen or {}))


def _began(plan: TrafficPlan, store: Path) -> datetime:
    """Return when the canary was first recorded, or else when the plan was published.

    A start as a shadow canary is also such a record.
    """
    lines = [
        each
        for each in promotion_journal.read_entries(store)
        if each.action == promotion_journal.CANARY
    ]
    times = [
        each.time
        for each in lines
        if plan.canary is not None and each.version == plan.canary.version
    ]
    # Times in the journal never decrease. If the clock was ahead when an earlier line was written,
    # the time of the plan is the right one.
    return min(map(datetime.fromisoformat, [*times[:1], plan.published_at]))


def _grow_or_release(
    site: Site,
    at_work: Promotion,
    plan: TrafficPlan,
    *,
    settings: CanarySettings,
    found: CanaryDecision,
) -> Step:
    """Give the canary the next larger share, or release it after the last one."""
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
        decision=found,
    )


def _held(plan: TrafficPlan, found: CanaryDecision) -> Step:
    assert plan.canary is not None
    return Step(
        action=HELD,
        reason=found.reason,
        version=plan.canary.version,
        share=plan.canary_share,
        decision=found,
    )


def _aborted(
    settings: CanarySettings,
    version: int | None,
    reason: str,
    *,
    decision: CanaryDecision | None = None,
) -> Step:
    logger.error("canary %s is aborted: %s", version, reason)
    return Step(
        action=ABORTED,
        reason=reason,
        version=version,
        share=0.0,
        wait_seconds=settings.drain_seconds,
        decision=decision,
    )
