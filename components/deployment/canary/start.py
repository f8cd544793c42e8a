"""The start of a canary, and each larger share: prepared and rehearsed like a release, loaded beside the live version.

The version gets its number, proof and files as any release does and is announced in the journal; what differs is the
name that it is loaded under, and that the traffic plan instead of the configuration makes clients ask for it. When it
grows and when it ends is decided by `canary.steps`, where the order of writes is listed too.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from uuid import uuid4

from components.contracts.manifests import Model, RawDataset, Release, Verdict
from components.contracts.serving import CANARY_NAME, MODEL_NAME
from components.deployment.canary.evidence import Fetch, fetch, read_baseline
from components.deployment.graph.parity import GoldenRows
from components.deployment.release import ReleaseSettings, check_belonging, check_may_replace, forget, prepare_version
from components.deployment.repository.version_files import GOLDEN_FILE
from components.deployment.servers import RunningServer, addresses, bring_up
from components.deployment.site import Site, opened
from components.deployment.switch import stage_version
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.storage.uris import local_path
from components.store import promotion_journal
from components.store.models import graph_folder, release_path
from components.store.promotion_journal import Promotion, canary_at_work
from components.store.traffic_plan import Arm, TrafficPlan

logger = logging.getLogger(__name__)

FIRST_SHARE = 0.01
SHADOW_SHARE = 0.2
"""Share of the requests that both arms score, which is what outcomes are judged by."""


def start(
    model: Model,
    verdict: Verdict,
    raw: RawDataset,
    settings: ReleaseSettings,
    *,
    shadow_only: bool = False,
    first_share: float = FIRST_SHARE,
    shadow_share: float = SHADOW_SHARE,
    metrics: tuple[str, ...] = (),
    fetch: Fetch = fetch,
) -> Release:
    """The release manifest of the model that is now the canary; a model that is live or the canary keeps its own.

    A model that scores in the shadow only and is started again without `shadow_only` takes its first share.

    Args:
        model: The model.
        verdict: Evaluation's verdict on it.
        raw: The rows that it was judged by.
        settings: Where and how.
        shadow_only: Whether it answers nobody.
        first_share: Share of keys that it answers, in (0, 1).
        shadow_share: Share of requests that both arms score, in (0, 1].
        metrics: host:metrics_port or dns:///name:metrics_port of every server, for the baseline; none = the first step
            takes it.
        fetch: Reads a server's metrics.

    Raises:
        ContractError: nothing is live, or as a release's.
        Refused: another canary is at work, or as a release's.
        TemporaryError: a canary before this one is still draining, or as a release's; nothing changed.
        PermanentError: a server refused the version or answered wrongly; nothing changed.
    """
    check_belonging(model, verdict)
    if not 0 < first_share < 1 or not 0 < shadow_share <= 1:
        raise ContractError(
            f"first_share is {first_share} and shadow_share {shadow_share}, expected shares above 0, the first below 1"
        )
    share = 0.0 if shadow_only else first_share
    with opened(settings) as site:
        if (live := site.live) is None:
            raise ContractError(f"model store {site.store} has no live version, expected one beside a canary")
        if live.model_id == model.model_id:
            return Release.read(local_path(live.release_uri))
        servers, at_work = addresses(metrics, settings.resolve), canary_at_work(site.store)
        if at_work is not None and at_work.model_id == model.model_id:
            return _continue(site, at_work, share, servers=servers, fetch=fetch)
        check_may_replace(site, verdict, settings)
        if site.repository.canary.whole():
            raise TemporaryError("a canary before this one is not unloaded yet: run `canary step` until it is")
        # Live, previous and canary are in memory at once.
        done = prepare_version(site, model, verdict, raw, settings=settings, versions=3)
        line = _journal_line(site, done, verdict, trigger_id=settings.trigger_id, share=share)
        plan = _first_plan(site, live, done, share=share, shadow_share=shadow_share, reason=verdict.reason)
        _begin(site, done, line, plan=plan, settings=settings, servers=servers, fetch=fetch)
        logger.info("version %d is the canary, share %g, shadow %g", done.version, share, shadow_share)
        return done


def _journal_line(site: Site, done: Release, verdict: Verdict, *, trigger_id: str | None, share: float) -> Promotion:
    return site.entry(
        promotion_journal.CANARY,
        done,
        reason=verdict.reason,
        trigger_id=trigger_id,
        decision=verdict.decision,
        share=share,
    )


def _first_plan(
    site: Site, live: Promotion, done: Release, *, share: float, shadow_share: float, reason: str
) -> TrafficPlan:
    """The traffic plan that gives the new canary its first share beside the live version."""
    before = site.repository.read_plan()
    return TrafficPlan(
        sequence=before.sequence + 1 if before else 1,
        stable=Arm(model_name=MODEL_NAME, version=live.version),
        canary=Arm(model_name=CANARY_NAME, version=done.version),
        canary_share=share,
        shadow_share=shadow_share,
        # A salt of its own, so that not always the same users are the first.
        salt=uuid4().hex,
        published_at=site.now(),
        reason=reason,
    )


def _begin(
    site: Site,
    done: Release,
    line: Promotion,
    *,
    plan: TrafficPlan,
    settings: ReleaseSettings,
    servers: tuple[str, ...],
    fetch: Fetch,
) -> None:
    version, is_published = done.version, False
    with site.announced(line):
        try:
            stage_version(site, done, settings.options)
            site.repository.place_canary(version, settings.options)
            site.checkpoint("canary placed")
            load_everywhere(site, version)
            site.checkpoint("canary loaded")
            assert plan.canary is not None
            baseline = read_baseline(servers, plan.stable, plan.canary, fetch=fetch)
            is_published = True
            site.repository.write_plan(replace(plan, baseline=baseline, published_at=site.now()))
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


def _continue(site: Site, at_work: Promotion, share: float, *, servers: tuple[str, ...], fetch: Fetch) -> Release:
    """The same model again: it answers from now on if it was a shadow, otherwise nothing changes."""
    plan = site.repository.read_plan()
    if plan is not None and plan.canary is not None and plan.canary_share == 0.0 < share:
        reason = "the shadow takes its first share"
        grow(site, at_work, plan, share=share, reason=reason, servers=servers, fetch=fetch)
    return Release.read(release_path(site.store, at_work.version))


def grow(
    site: Site,
    at_work: Promotion,
    plan: TrafficPlan,
    *,
    share: float,
    reason: str,
    servers: tuple[str, ...],
    fetch: Fetch,
) -> None:
    """Publishes the plan by which the canary at work answers `share`, and records it: a new stage begins."""
    assert plan.canary is not None
    baseline = read_baseline(servers, plan.stable, plan.canary, fetch=fetch)
    grown = plan.next(canary_share=share, reason=reason, published_at=site.now(), baseline=baseline)
    site.repository.write_plan(grown)
    site.checkpoint("plan written")
    site.append(replace(at_work, share=share, reason=reason, who=site.settings.who))
    site.checkpoint("journal written")


def load_everywhere(site: Site, version: int, *, only_missing: bool = False) -> None:
    """Returns once every server answers golden rows correctly as the canary, those that appear meanwhile too.

    Args:
        site: Where.
        version: The canary.
        only_missing: Pass over servers that say they have it.
    """
    # The store's copy: an interrupted promotion removes the version's own folder.
    golden = GoldenRows.load(graph_folder(site.store, version) / GOLDEN_FILE)

    def load(server: RunningServer) -> None:
        if only_missing and server.is_ready(CANARY_NAME, version):
            return
        bring_up(server, CANARY_NAME, version=version, golden=golden, patience=site.patience)
        site.checkpoint("canary loaded on one")

    site.fleet.for_all(load)
