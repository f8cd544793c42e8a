"""Grow, release or abort a canary (1, 5, 25 % of the traffic, then all), and unload it.

A canary is prepared and announced like a release. A canary differs from a release in two points: it
is loaded under another name, and clients find it through the traffic plan instead of the
configuration.

The running controller calls `step` in each of its rounds. A step may run at any time and
repeatedly, because all its state is in the journal, the traffic plan and the evidence. The evidence
leads to a request (`advance` or `abort`), as a person's command does. A shadow canary serves no
traffic until it is advanced, or until it is started again with a share of the traffic.

The journal names the canary's version (`canary_at_work`), and clients read from the plan how to use
the canary. The order of the writes is in the table of the protocol (`controller.protocol`). If a
plan names a canary that is not in the journal, the plan is reset. If no plan names a canary, its
files are removed.
"""

import logging
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
from controller.deployment_target import CanaryStages, DeploymentTarget, TargetSettings
from controller.moves import load_canary
from controller.reconcile import carry_out, reconciled
from evergreen.contracts.requests import ABORT as ABORT_REQUEST
from evergreen.contracts.requests import ADVANCE, ServingRequest
from evergreen.registry import promotion_journal
from evergreen.registry.promotion_journal import canary_at_work
from evergreen.registry.recommenders import logged_recommender
from evergreen.registry.requests import new_request
from evergreen.registry.traffic_plan import DRAIN_SECONDS, Baseline, TrafficPlan
from evergreen.runtime.errors import PermanentError, Refused, TemporaryError
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
from evergreen.storage.objects import Objects

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
class Step:
    """Result of one step."""

    action: str
    """`none` (no canary), `held`, `grown`, `released`, `aborted`, `draining`, `ended` (unloaded
    everywhere) or `changed` (a request changed the canary first). After `released` and `aborted`,
    the plan names only the live version."""
    reason: str
    version: int | None = None
    share: float | None = None
    """Share of the traffic after the step."""
    wait_seconds: float | None = None
    """Seconds to wait until the next step is useful, or None if unknown."""
    decision: CanaryDecision | None = None


NO_CANARY = Step(action=NONE, reason="there is no canary")


@dataclass(frozen=True, kw_only=True)
class CanarySettings:
    """Deployment target of a canary, its evidence and its rules."""

    target: TargetSettings
    evidence: tuple[Objects, ...] = ()
    """Sources of matured rows, in this order: the monitor's archive, and the lake."""
    metrics: tuple[str, ...] = ()
    """Metrics ports of all servers, host:port or dns:///name:port. Without metrics ports, labels
    can abort the canary, but the canary never grows."""
    policy: CanaryPolicy = field(default_factory=CanaryPolicy)
    drain_seconds: float = DRAIN_SECONDS
    fetch: Fetch = fetch

    @property
    def staged_target(self) -> TargetSettings:
        """Deployment target with the stages in which a canary grows."""
        stages = CanaryStages(
            shares=self.policy.shares,
            drain_seconds=self.drain_seconds,
            read_baseline=lambda plan: _read_counters(plan, self)[0] or {},
        )
        return replace(self.target, stages=stages)


_CHANGED_MEANWHILE = Step(
    action=CHANGED, reason="the plan changed while its evidence was read", wait_seconds=0.0
)


def step(settings: CanarySettings) -> Step:
    """Evaluate the canary, repair the state that a crash left, and make one change.

    A bad canary is aborted even if some servers do not answer. Otherwise a server that is down
    would keep the bad canary in service on the other servers. Without a canary, no server is
    contacted, because there may be no server before the first model.

    Raises:
        ContractError: the evidence or the repository is corrupt.
        TemporaryError: a server does not answer, or another controller is at work. Call again
            later.
        PermanentError: the live version could not be changed, and is still live.
    """
    target = settings.target
    if not promotion_journal.read_entries(target.store):
        return NO_CANARY
    repository = target.open_repository()
    plan, at_work = repository.read_plan(), canary_at_work(target.store)
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
            and not promotion_journal.interrupted(target.store)
        ):
            return NO_CANARY
        return _settle(settings)
    found, fresh = _evaluate(plan, settings)
    try:
        if found.action == ABORT:
            return _abort(settings, found.reason, plan=plan.sequence, decision=found)
        return _proceed(plan, settings, found, fresh=fresh)
    except Refused as error:
        logger.info("%s", error)
        return _CHANGED_MEANWHILE


def advance(settings: CanarySettings, reason: str) -> Step:
    """Give the canary its next share, or release it, because a person decided so.

    A person can use this command to continue an undecided canary, and to let a shadow canary serve.

    Raises:
        TemporaryError, PermanentError: as in `step`. The live version is unchanged.
    """
    if canary_at_work(settings.target.store) is None:
        return NO_CANARY
    return _advance(settings, reason)


def abort(settings: CanarySettings, reason: str) -> Step:
    """Take all traffic from the canary, even if servers do not answer.

    The abort waits for the move in progress and for nothing else.

    Later, `step` unloads the canary after the clients have read the plan.

    Raises:
        TemporaryError: nobody carried out the request.
    """
    return _abort(settings, reason)


def canary_request(
    settings: CanarySettings, kind: str, reason: str, *, plan: int | None = None
) -> ServingRequest:
    """Return a request to `advance` or `abort` the canary."""
    target = settings.target
    request = new_request(
        kind,
        who=target.who,
        reason=reason,
        now=target.clock(),
        seconds=target.timeouts.deadline_seconds,
    )
    return replace(request, plan=plan)


def _advance(
    settings: CanarySettings,
    reason: str,
    *,
    plan: int | None = None,
    decision: CanaryDecision | None = None,
) -> Step:
    target = settings.target
    version = canary_at_work(target.store)
    request = canary_request(settings, ADVANCE, reason, plan=plan)
    carry_out(settings.staged_target, request)
    at_work = canary_at_work(target.store)
    action, share, wait = (
        (RELEASED, 1.0, settings.drain_seconds)
        if at_work is None
        else (GROWN, at_work.share or 0.0, None)
    )
    number = version.version if version else None
    logger.info("canary %s: %s, share %g: %s", number, action, share, reason)
    return Step(
        action=action,
        reason=reason,
        version=number,
        share=share,
        wait_seconds=wait,
        decision=decision,
    )


def _abort(
    settings: CanarySettings,
    reason: str,
    *,
    plan: int | None = None,
    decision: CanaryDecision | None = None,
) -> Step:
    target = settings.target
    # If the process was killed before it wrote the journal entry, only the plan names the canary.
    if (at_work := canary_at_work(target.store)) is None:
        found = target.open_repository().read_plan()
        if found is None or found.canary is None:
            return NO_CANARY
    request = canary_request(settings, ABORT_REQUEST, reason, plan=plan)
    carry_out(settings.staged_target, request)
    return Step(
        action=ABORTED,
        reason=reason,
        version=at_work.version if at_work else None,
        share=0.0,
        wait_seconds=settings.drain_seconds,
        decision=decision,
    )


def status(settings: CanarySettings) -> Step:
    """Evaluate the canary without changing anything. The evaluation needs no lock and no server."""
    plan = settings.target.open_repository().read_plan()
    if plan is None or plan.canary is None:
        is_over = canary_at_work(settings.target.store) is None
        return Step(
            action=NONE if is_over else DRAINING, reason=plan.reason if plan else "there is no plan"
        )
    found, _ = _evaluate(plan, settings)
    return _held(plan, found)


def _settle(settings: CanarySettings) -> Step:
    """Finish work that a crash or an earlier step left, and report what remains of the canary."""
    repository = settings.target.open_repository()
    at_work, versions = canary_at_work(settings.target.store), repository.canary.whole()
    version = at_work.version if at_work else next(iter(versions), None)
    with reconciled(settings.staged_target) as target:
        plan, is_over = target.repository.read_plan(), not target.repository.canary.whole()
        reason = plan.reason if plan else "no plan names it"
        if plan is not None and plan.canary is not None:
            return _CHANGED_MEANWHILE
        if is_over and canary_at_work(target.store) is None:
            action = ENDED if at_work or versions else NONE
            return Step(action=action, reason=reason, version=version)
    published = datetime.fromisoformat(plan.published_at) if plan else settings.target.clock()
    passed = (settings.target.clock() - published).total_seconds()
    return Step(action=DRAINING, reason=reason, wait_seconds=settings.drain_seconds - passed)


def _proceed(
    plan: TrafficPlan,
    settings: CanarySettings,
    found: CanaryDecision,
    *,
    fresh: bool,
) -> Step:
    """Load the canary on servers that lack it, and apply a decision to hold or grow.

    Args:
        plan: Plan at the time when the evidence was read.
        settings: Deployment target and rules.
        found: Evaluation with the decision to hold or grow.
        fresh: Whether some servers have no baseline for their counters yet.

    Raises:
        Refused: the plan changed since the evidence was read.
    """
    with reconciled(settings.staged_target) as target:
        if target.repository.read_plan() != plan:
            return _CHANGED_MEANWHILE
        at_work = canary_at_work(target.store)
        assert at_work is not None
        try:
            load_canary(target, at_work.version, only_missing=True)
        except PermanentError as error:
            # If a server rejects the canary or returns other scores for its golden rows, abort the
            # canary without further evidence.
            return _abort(replace(settings, target=target.settings), str(error), plan=plan.sequence)
        if found.action == GROW:
            return _advance(
                replace(settings, target=target.settings),
                found.reason,
                plan=plan.sequence,
                decision=found,
            )
        if fresh:
            plan = _record_baseline(target, plan, settings)
        return _held(plan, found)


def _record_baseline(
    target: DeploymentTarget, plan: TrafficPlan, settings: CanarySettings
) -> TrafficPlan:
    """Write and return the plan with a baseline for new and restarted servers."""
    # Read the counters again, because loading the canary has added warm-up requests.
    seen, _ = _read_counters(plan, settings)
    plan = plan.next(baseline={**plan.baseline, **uncounted(plan.baseline, seen or {})})
    target.repository.write_plan(plan)
    logger.info("errors and latency of %s are counted from now on", ", ".join(plan.baseline))
    return plan


def _read_counters(plan: TrafficPlan, settings: CanarySettings) -> tuple[Baseline | None, str]:
    """Read every server's counters, or return None and a reason."""
    assert plan.canary is not None
    if not settings.metrics:
        return None, "--metrics-urls is empty"
    try:
        servers = addresses(settings.metrics, settings.target.resolve)
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
    recommender = logged_recommender(settings.target.store)
    pairs = read_pairs(
        settings.evidence,
        stable=plan.stable.version,
        canary=plan.canary.version,
        since=_began(plan, settings.target.store),
        max_pairs=settings.policy.looks[-1],
        user=recommender.data.user if recommender else None,
    )
    found = evaluate(pairs, counts, settings.policy, unread=unread)
    if found.action == GROW and plan.canary_share == 0.0:
        reason = f"shadow traffic only; {found.reason}; start it again with a share to let it serve"
        found = replace(found, action=HOLD, reason=reason)
    return found, bool(uncounted(plan.baseline, seen or {}))


def _began(plan: TrafficPlan, store: Path) -> datetime:
    """Return when the canary was first recorded, or else when the plan was published.

    For a canary that begins with shadow traffic only, this is the start of the shadow traffic.
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
    # Times in the journal never decrease. If the clock was fast when an earlier entry was written,
    # use the time of the plan.
    return min(map(promotion_journal.moment_of, [*times[:1], plan.published_at]))


def _held(plan: TrafficPlan, found: CanaryDecision) -> Step:
    assert plan.canary is not None
    return Step(
        action=HELD,
        reason=found.reason,
        version=plan.canary.version,
        share=plan.canary_share,
        decision=found,
    )
