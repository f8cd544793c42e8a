"""Start and unload a canary beside the live version.

The deployment step starts a canary. `controller.canary.steps` decides when it grows and when it
ends, and describes the order of the writes.
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
from evergreen.serving.canary_policy import CanaryDecision
from evergreen.serving.intact import golden_rows
from evergreen.serving.release import (
    ReleaseSettings,
    check_belonging,
    check_may_replace,
    forget,
    prepare_version,
)
from evergreen.serving.servers import Triton, bring_up
from evergreen.serving.site import Site, opened
from evergreen.serving.switch import stage_version

logger = logging.getLogger(__name__)
FIRST_SHARE = 0.01


SHADOW_SHARE = 1.0
"""Share of the requests that both arms score. These requests provide the pairs, and decisions come
soonest if all requests are used. Clients drop shadow requests that would delay served requests
(`inference_client.routing`)."""


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
    everywhere) or `changed` (another deployment made a change first). After `released` and
    `aborted` the plan names only the live version."""
    reason: str
    version: int | None = None
    share: float | None = None
    """Share of the traffic after the step."""
    wait_seconds: float | None = None
    """Seconds until the next step is useful, if known."""
    decision: CanaryDecision | None = None


NO_CANARY = Step(action=NONE, reason="there is no canary")


def start(
    model: Model,
    verdict: Verdict,
    raw: RawDataset,
    *,
    settings: ReleaseSettings,
    share: float = FIRST_SHARE,
) -> Release:
    """Start a canary and return its release.

    If the model is already live or already the canary, its existing release is returned. A shadow
    canary that is started again with a share begins to serve.

    Args:
        model: Model to serve.
        verdict: Verdict about it.
        raw: Data with the holdout rows of the verdict.
        settings: Deployment target and serving options.
        share: Share of the traffic. 0 = score shadow traffic only.

    Raises:
        ContractError: nothing is live, or as in a release.
        Refused: another canary is running, or as in a release.
        TemporaryError: a previous canary is still draining, or as in a release. Nothing changed.
        PermanentError: a server rejected the version or answered wrongly. Nothing changed.
    """
    check_belonging(model, verdict)
    if verdict.decision == FAIL:
        raise ContractError(
            f"verdict on model {model.model_id} is {FAIL!r}, expected a pass or an inconclusive "
            "one for a canary"
        )
    settings = settings.serving(model)
    with opened(settings) as site:
        if (live := site.live) is None:
            raise ContractError(
                f"model registry {site.store} has no live version, expected one beside a canary"
            )
        if live.model_id == model.model_id:
            return read_release(site.store, live.version)
        at_work, before = canary_at_work(site.store), site.repository.read_plan()
        if at_work is not None and at_work.model_id == model.model_id:
            # A retried start changes nothing, except that a shadow canary begins to serve.
            if (
                before is not None
                and before.canary is not None
                and before.canary_share == 0.0 < share
            ):
                grow(
                    site,
                    at_work,
                    before,
                    share=share,
                    reason="the shadow canary gets its first share",
                    baseline={},
                )
            return read_release(site.store, at_work.version)
        if at_work is not None:
            raise Refused(
                f"version {at_work.version} is a canary, expected its release or end before "
                "another starts"
            )
        check_may_replace(site, verdict, settings)
        # If an earlier change failed to reset the plan, the plan may still send clients to the
        # previous canary.
        if site.reset_plan("there is no canary"):
            before = site.repository.read_plan()
        if site.repository.canary.whole() and unload(site, before, None).action == DRAINING:
            raise TemporaryError(
                "clients may still call the previous canary, try again in some seconds"
            )
        done = prepare_version(site, model, verdict, raw=raw, settings=settings)
        plan = TrafficPlan(
            sequence=before.sequence + 1 if before else 1,
            stable=Arm(model_name=site.names.model, version=live.version),
            canary=Arm(model_name=site.names.canary, version=done.version),
            canary_share=share,
            shadow_share=SHADOW_SHARE,
            # Use a fresh salt, so that different users see each canary first.
            salt=uuid4().hex,
            published_at=site.now(),
            reason=verdict.reason,
        )
        _publish_canary(site, done, plan, decision=verdict.decision, settings=settings)
        logger.info(
            "version %d is the canary, share %g, shadow %g", done.version, share, SHADOW_SHARE
        )
        return done


def _publish_canary(
    site: Site, done: Release, plan: TrafficPlan, *, decision: str, settings: ReleaseSettings
) -> None:
    """Load the prepared version as the canary on all servers, then publish its traffic plan."""
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
                # Changes that cannot be undone now are undone by the next step.
                logger.error("canary %d could not be undone after %s: %s", version, error, left)
                site.lost.append(str(left))
            if not is_published:
                site.repository.withdraw(version)
                forget(site.store, version)
            raise


def grow(
    site: Site,
    at_work: Promotion,
    plan: TrafficPlan,
    *,
    share: float,
    reason: str,
    baseline: Baseline,
) -> None:
    """Start a new stage: publish a plan with the new share, and record it in the journal."""
    site.repository.write_plan(
        plan.next(canary_share=share, reason=reason, published_at=site.now(), baseline=baseline)
    )
    site.checkpoint("plan written")
    site.append(replace(at_work, share=share, reason=reason, who=site.settings.who))
    site.checkpoint("journal written")


def load_everywhere(site: Site, version: int, *, only_missing: bool = False) -> None:
    """Load the canary on every server, including new ones, and probe it with golden rows.

    `only_missing` skips servers that report it as ready.
    """
    golden = golden_rows(site.repository, site.store, version)

    def load(server: Triton) -> None:
        if only_missing and server.is_ready(site.names.canary, version):
            return
        bring_up(server, site.names.canary, version=version, golden=golden, patience=site.patience)
        site.checkpoint("canary loaded on one")

    site.fleet.for_all(load)


def unload(
    site: Site,
    plan: TrafficPlan | None,
    at_work: Promotion | None,
    *,
    drain_seconds: float = DRAIN_SECONDS,
) -> Step:
    """Unload a canary that no plan names, after the clients have read the plan."""
    versions = site.repository.canary.whole()
    if at_work is None and not versions:
        return NO_CANARY
    reason = plan.reason if plan else "no plan names it"
    if plan is not None:
        passed = (site.settings.clock() - datetime.fromisoformat(plan.published_at)).total_seconds()
        if passed < 0:
            # The clock was set back to before the plan's time, so the drain time starts again.
            site.repository.write_plan(plan.next(published_at=site.now()))
            passed = 0.0
        if passed < drain_seconds:
            return Step(action=DRAINING, reason=reason, wait_seconds=drain_seconds - passed)
    site.remove_canary()
    if at_work is not None:
        site.append(
            replace(at_work, action=promotion_journal.CANARY_ENDED, reason=reason, share=None)
        )
    version = at_work.version if at_work else next(iter(versions), None)
    logger.info("canary %s is unloaded: %s", version, reason)
    return Step(action=ENDED, reason=reason, version=version)
