"""A canary's beginning and end: it is started beside the live version, grows by the plan, and is unloaded.

The deployment step starts one. When it grows, and when it ends, is decided by `controller.canary.steps`, which also
tells the order of the writes.
"""

import logging
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import uuid4

from evergreen.contracts.checks import FAIL
from evergreen.contracts.manifests import Model, RawDataset, Release, Verdict
from evergreen.registry import promotion_journal
from evergreen.registry.models import read_release
from evergreen.registry.promotion_journal import Promotion, canary_at_work
from evergreen.registry.traffic_plan import DRAIN_SECONDS, Arm, Baseline, TrafficPlan
from evergreen.runtime.errors import ContractError, PermanentError, Refused, TemporaryError
from evergreen.serving.canary_policy import CanaryJudgement
from evergreen.serving.intact import golden_rows
from evergreen.serving.release import ReleaseSettings, check_belonging, check_may_replace, forget, prepare_version
from evergreen.serving.servers import Triton, bring_up
from evergreen.serving.site import Site, opened
from evergreen.serving.switch import stage_version

logger = logging.getLogger(__name__)
FIRST_SHARE = 0.01


SHADOW_SHARE = 1.0
"""Share of the requests that both arms score, which is what outcomes are judged by. With all of them a decision comes
soonest; clients drop shadow requests where served ones would have to wait (`inference_client.routing`)."""


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


NO_CANARY = Step(action=NONE, reason="no canary is at work")


def start(
    model: Model, verdict: Verdict, raw: RawDataset, *, settings: ReleaseSettings, share: float = FIRST_SHARE
) -> Release:
    """The release manifest of the model that is now the canary; a model that is live or the canary keeps its own.

    A model that scores in the shadow only and is started again with a share begins to answer. `raw` are the rows that
    it was judged by; with `share` 0 it scores in the shadow and answers nobody.

    Raises:
        ContractError: nothing is live, or as a release's.
        Refused: another canary is at work, or as a release's.
        TemporaryError: a canary before this one is still draining, or as a release's; nothing changed.
        PermanentError: a server refused the version or answered wrongly; nothing changed.
    """
    check_belonging(model, verdict)
    if verdict.decision == FAIL:
        raise ContractError(f"verdict on model {model.model_id} is {FAIL!r}, expected another one for a canary")
    settings = settings.serving(model)
    with opened(settings) as site:
        if (live := site.live) is None:
            raise ContractError(f"model store {site.store} has no live version, expected one beside a canary")
        if live.model_id == model.model_id:
            return read_release(site.store, live.version)
        at_work, before = canary_at_work(site.store), site.repository.read_plan()
        if at_work is not None and at_work.model_id == model.model_id:
            # A retried step changes nothing, but a shadow begins to answer.
            if before is not None and before.canary is not None and before.canary_share == 0.0 < share:
                grow(site, at_work, before, share=share, reason="the shadow takes its first share", baseline={})
            return read_release(site.store, at_work.version)
        if at_work is not None:
            raise Refused(f"version {at_work.version} is a canary, expected it released or ended before another")
        check_may_replace(site, verdict, settings)
        # A plan that could not be renewed may still lead clients to the canary before this one.
        if site.reset_plan("no canary is at work"):
            before = site.repository.read_plan()
        if site.repository.canary.whole() and unload(site, before, None).action == DRAINING:
            raise TemporaryError("clients may still ask the canary before this one, try again in some seconds")
        done = prepare_version(site, model, verdict, raw=raw, settings=settings)
        plan = TrafficPlan(
            sequence=before.sequence + 1 if before else 1,
            stable=Arm(model_name=site.names.model, version=live.version),
            canary=Arm(model_name=site.names.canary, version=done.version),
            canary_share=share,
            shadow_share=SHADOW_SHARE,
            # A salt of its own, so that not always the same users are the first.
            salt=uuid4().hex,
            published_at=site.now(),
            reason=verdict.reason,
        )
        _publish_canary(site, done, plan, decision=verdict.decision, settings=settings)
        logger.info("version %d is the canary, share %g, shadow %g", done.version, share, SHADOW_SHARE)
        return done


def _publish_canary(site: Site, done: Release, plan: TrafficPlan, *, decision: str, settings: ReleaseSettings) -> None:
    """Loads the prepared version as the canary everywhere, then publishes the plan that leads clients to it."""
    version, is_published = done.version, False
    line = site.entry(
        promotion_journal.CANARY,
        done,
        reason=plan.reason,
        trigger_id=settings.trigger_id,
        decision=decision,
        share=plan.canary_share,
    )
    with site.announced(line):
        try:
            stage_version(site, done, settings.options)
            site.repository.place_canary(version, settings.options)
            site.checkpoint("canary placed")
            load_everywhere(site, version)
            site.checkpoint("canary loaded")
            is_published = True
            site.repository.write_plan(replace(plan, published_at=site.now()))
            site.checkpoint("plan written")
            site.append(line)
            site.checkpoint("journal written")
        except BaseException as error:
            try:
                site.undo_canary_start(line)
            except (ContractError, TemporaryError, PermanentError, OSError) as left:
                # What cannot be undone now is the next step's to do.
                logger.error("canary %d could not be taken back after %s: %s", version, error, left)
                site.lost.append(str(left))
            if not is_published:
                site.repository.withdraw(version)
                forget(site.store, version)
            raise


def grow(site: Site, at_work: Promotion, plan: TrafficPlan, *, share: float, reason: str, baseline: Baseline) -> None:
    """Publishes the plan by which the canary at work answers `share`, and records it: a new stage begins."""
    site.repository.write_plan(plan.next(canary_share=share, reason=reason, published_at=site.now(), baseline=baseline))
    site.checkpoint("plan written")
    site.append(replace(at_work, share=share, reason=reason, who=site.settings.who))
    site.checkpoint("journal written")


def load_everywhere(site: Site, version: int, *, only_missing: bool = False) -> None:
    """Returns once every server answers golden rows correctly as the canary, those that appear meanwhile too.

    `only_missing` passes over servers that say they have it.
    """
    golden = golden_rows(site.repository, site.store, version)

    def load(server: Triton) -> None:
        if only_missing and server.is_ready(site.names.canary, version):
            return
        bring_up(server, site.names.canary, version=version, golden=golden, patience=site.patience)
        site.checkpoint("canary loaded on one")

    site.fleet.for_all(load)


def unload(
    site: Site, plan: TrafficPlan | None, at_work: Promotion | None, *, drain_seconds: float = DRAIN_SECONDS
) -> Step:
    """Unloads what no plan names, once every client knows."""
    versions = site.repository.canary.whole()
    if at_work is None and not versions:
        return NO_CANARY
    reason = plan.reason if plan else "no plan names it"
    if plan is not None:
        passed = (site.settings.clock() - datetime.fromisoformat(plan.published_at)).total_seconds()
        if passed < 0:
            # The clock was set back behind the plan: clients are given the time anew.
            site.repository.write_plan(plan.next(published_at=site.now()))
            passed = 0.0
        if passed < drain_seconds:
            return Step(action=DRAINING, reason=reason, wait_seconds=drain_seconds - passed)
    site.remove_canary()
    if at_work is not None:
        site.append(replace(at_work, action=promotion_journal.CANARY_ENDED, reason=reason, share=None))
    version = at_work.version if at_work else next(iter(versions), None)
    logger.info("canary %s is unloaded: %s", version, reason)
    return Step(action=ENDED, reason=reason, version=version)
