"""The beginning of a canary: prepared and rehearsed like a release, loaded beside the live version, then asked.

The version gets its number, proof and files as any release does and is announced in the journal; what differs is the
name that it is loaded under, and that the traffic plan instead of the configuration makes clients ask for it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from uuid import uuid4

from components.contracts.manifests import Model, RawDataset, Release, Verdict
from components.contracts.serving import CANARY_NAME, MODEL_NAME
from components.deployment.canary import state as canary_state
from components.deployment.canary.metrics import Fetch, fetch, read_baseline
from components.deployment.discovery import Resolve, addresses, resolve
from components.deployment.graph.parity import GoldenRows
from components.deployment.make_live import stage_version
from components.deployment.prepare import forget, prepare_version
from components.deployment.recovery import opened
from components.deployment.release_checks import check_belonging, check_may_replace
from components.deployment.release_settings import ReleaseSettings
from components.deployment.repository.files import GOLDEN_FILE
from components.deployment.servers import Connect, Server, bring_up
from components.deployment.site import Site, announced
from components.deployment.triton_client import Triton
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.storage.uris import local_path
from components.store import promotion_journal
from components.store.models import graph_folder, release_path
from components.store.promotion_journal import Promotion
from components.store.traffic_plan import Arm, Baseline, TrafficPlan

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
    connect: Connect = Triton,
    resolve: Resolve = resolve,
    fetch: Fetch = fetch,
) -> Release:
    """The release manifest of the model that is now the canary; a model that is live or the canary keeps its own.

    A model that scores in the shadow only and is started again without `shadow_only` takes its first share.

    Args:
        model: The model.
        verdict: What evaluation said of it.
        raw: The rows that it was judged by.
        settings: Where and how.
        shadow_only: Whether it answers nobody.
        first_share: Share of keys that it answers, in (0, 1).
        shadow_share: Share of requests that both arms score, in (0, 1].
        metrics: host:metrics_port or dns:///name:metrics_port of every server, for the baseline; none = the first step
            takes it.
        connect: Makes a connection from an address.
        resolve: Finds the addresses of a name.
        fetch: Reads a server's metrics.

    Raises:
        ContractError: nothing is live, or as a release's.
        Refused: another canary is at work, or as a release's.
        TemporaryError: a canary before this one is still draining, or as a release's; nothing changed.
        PermanentError: a server refused the version or answered wrongly; nothing changed.
    """
    check_belonging(model, verdict)
    _check_shares(first_share, shadow_share)
    share = 0.0 if shadow_only else first_share
    with opened(settings.site, connect=connect, resolve=resolve) as site:
        if (live := site.live) is None:
            raise ContractError(f"model store {site.store} has no live version, expected one beside a canary")
        if live.model_id == model.model_id:
            return Release.read(local_path(live.release_uri))
        servers, at_work = addresses(metrics, resolve), canary_state.active(site.store)
        if at_work is not None and at_work.model_id == model.model_id:
            return _go_on(site, at_work, share, servers, fetch)
        check_may_replace(site, verdict, settings)
        if site.repository.canary_versions():
            raise TemporaryError("a canary before this one is not unloaded yet: run `canary step` until it is")
        # Live, previous and canary are in memory at once.
        done = prepare_version(site, model, verdict, raw, settings, versions=3)
        plan = next_plan(site, live, done.version, share=share, shadow_share=shadow_share, reason=verdict.reason)
        _begin(site, done, _line(site, done, verdict, settings, share), plan, settings, servers, fetch)
        logger.info("version %d is the canary, share %g, shadow %g", done.version, share, shadow_share)
        return done


def _check_shares(first_share: float, shadow_share: float) -> None:
    if not 0 < first_share < 1 or not 0 < shadow_share <= 1:
        raise ContractError(
            f"first_share is {first_share} and shadow_share {shadow_share}, expected shares above 0, the first below 1"
        )


def _line(site: Site, done: Release, verdict: Verdict, settings: ReleaseSettings, share: float) -> Promotion:
    return site.entry(
        promotion_journal.CANARY,
        done,
        reason=verdict.reason,
        trigger_id=settings.trigger_id,
        decision=verdict.decision,
        share=share,
    )


def _begin(
    site: Site,
    done: Release,
    line: Promotion,
    plan: TrafficPlan,
    settings: ReleaseSettings,
    metrics: tuple[str, ...],
    fetch: Fetch,
) -> None:
    version = done.version
    is_published = False
    with announced(site, line):
        try:
            stage_version(site, done, settings.options)
            site.repository.place_canary(version, settings.options)
            site.checkpoint("canary placed")
            load_everywhere(site, version)
            site.checkpoint("canary loaded")
            assert plan.canary is not None
            baseline: Baseline = read_baseline(metrics, plan.stable, plan.canary, fetch=fetch)
            is_published = True
            site.repository.write_plan(replace(plan, baseline=baseline, published_at=site.now()))
            site.checkpoint("plan written")
            site.append(replace(line, time=site.now()))
            site.checkpoint("journal written")
        except BaseException as error:
            _undo(site, line, error)
            if not is_published:
                site.repository.withdraw(version)
                forget(site.store, version)
            raise


def _undo(site: Site, line: Promotion, cause: BaseException) -> None:
    """Leads the start back as far as that works; what does not is the next step's to do."""
    try:
        canary_state.undo_start(site, line)
    except (ContractError, TemporaryError, PermanentError, OSError) as error:
        logger.error("canary %d could not be led back after %s: %s", line.version, cause, error)
        site.lost.append(str(error))


def _go_on(site: Site, at_work: Promotion, share: float, metrics: tuple[str, ...], fetch: Fetch) -> Release:
    """The same model again: it answers from now on if it was a shadow, otherwise nothing changes."""
    plan = site.repository.read_plan()
    if plan is not None and plan.canary is not None and plan.canary_share == 0.0 < share:
        grow(site, plan, at_work, share, reason="the shadow takes its first share", metrics=metrics, fetch=fetch)
    return Release.read(release_path(site.store, at_work.version))


def grow(
    site: Site,
    plan: TrafficPlan,
    at_work: Promotion,
    share: float,
    *,
    reason: str,
    metrics: tuple[str, ...],
    fetch: Fetch,
) -> TrafficPlan:
    """The plan by which the canary at work answers `share`, published and in the journal: a new stage begins."""
    assert plan.canary is not None
    baseline = read_baseline(metrics, plan.stable, plan.canary, fetch=fetch)
    grown = plan.next(canary_share=share, reason=reason, published_at=site.now(), baseline=baseline)
    site.repository.write_plan(grown)
    site.checkpoint("plan written")
    site.append(replace(at_work, time=site.now(), share=share, reason=reason, who=site.settings.who))
    site.checkpoint("journal written")
    return grown


def next_plan(
    site: Site, live: Promotion, version: int, *, share: float, shadow_share: float, reason: str
) -> TrafficPlan:
    """The plan that begins a canary; a salt of its own, so that not always the same users are the first."""
    before = site.repository.read_plan()
    return TrafficPlan(
        sequence=before.sequence + 1 if before else 1,
        stable=Arm(model_name=MODEL_NAME, version=live.version),
        canary=Arm(model_name=CANARY_NAME, version=version),
        canary_share=share,
        shadow_share=shadow_share,
        salt=uuid4().hex,
        published_at=site.now(),
        reason=reason,
    )


def load_everywhere(site: Site, version: int, *, only_missing: bool = False) -> None:
    """Returns once every server answers golden rows rightly as the canary, those that appear meanwhile too.

    Args:
        site: Where.
        version: The canary.
        only_missing: Pass over servers that say they have it.
    """
    # The store's copy: an interrupted promotion takes the version's own folder away.
    golden = GoldenRows.load(graph_folder(site.store, version) / GOLDEN_FILE)

    def load(server: Server) -> None:
        if only_missing and server.is_ready(CANARY_NAME, version):
            return
        bring_up(server, CANARY_NAME, version, golden, site.patience)
        site.checkpoint("canary loaded on one")

    site.fleet.tell_all(load)
