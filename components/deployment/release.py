"""The release protocol: an accepted model becomes the version that is served and recorded, or nothing changes.

In order: lock, and what a killed deployment left put right (`recovery`); servers answer; the verdict is about what is
live; graph built and parity proven; both kept in the model store under a new version number; from there on
`make_live`: announced in the journal, staged and read back, rehearsed on every server, published by one write of the
configuration, switched to, recorded. A version number that the journal ever named is never given again.

Only the new version is named to the servers. Triton loads it before it lets the previous one go, which answers what it
has begun; a previous version kept loaded would gain nothing, since Triton loads every named version anew whenever the
configuration changed. It stays in the repository and in the store, and a rollback loads it from there.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from components.contracts.manifests import Model, RawDataset, Release, ServingPlace, Verdict
from components.contracts.serving import MODEL_NAME
from components.deployment.discovery import Resolve, resolve
from components.deployment.make_live import make_live
from components.deployment.prepare import Stopwatch, forget, prepare_version
from components.deployment.recovery import opened
from components.deployment.release_checks import check_belonging, check_may_replace
from components.deployment.release_settings import ReleaseSettings
from components.deployment.servers import Connect, Server, probe
from components.deployment.site import Site
from components.deployment.triton_client import Triton
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.storage.uris import local_path
from components.store import promotion_journal
from components.store.models import release_path, write_serving_place
from components.store.promotion_journal import Promotion

logger = logging.getLogger(__name__)


def release(
    model: Model,
    verdict: Verdict,
    raw: RawDataset,
    settings: ReleaseSettings,
    *,
    override: str | None = None,
    connect: Connect = Triton,
    resolve: Resolve = resolve,
) -> Release:
    """The release that made `model` live; a model that is live already keeps its release.

    Args:
        model: The model.
        verdict: What evaluation said of it.
        raw: The rows that it was judged by.
        settings: Where and how.
        override: Why it goes live whatever the verdict decided or compared with (`promote`); None = the verdict counts.
        connect: Makes a connection from an address.
        resolve: Finds the addresses of a name.

    Raises:
        ContractError: the inputs do not belong together, parity fails, or it does not fit.
        Refused: another model went live since the verdict, or a canary is at work; what is live is live.
        TemporaryError: a server does not answer, or another deployment is at work; what was live is live.
        PermanentError: a server refused the version or answered wrongly; what was live is live.
    """
    check_belonging(model, verdict, override=override)
    with opened(settings.site, connect=connect, resolve=resolve) as site:
        live = site.live
        if live is not None and live.model_id == model.model_id and live.version in site.repository.versions():
            return _confirm(live, site, settings)
        check_may_replace(site, verdict, settings, override=override)
        watch = Stopwatch()
        target = prepare_version(site, model, verdict, raw, settings, watch=watch)
        with watch.time("go_live"):
            line = _make_live(site, target, verdict, settings, override)
        done = replace(target, extra={**target.extra, "seconds": dict(watch.seconds)})
        _note_seconds(site, done)
        tidy(site, settings, line)
        logger.info("version %d is live, model %s", done.version, model.model_id)
        return done


def _make_live(
    site: Site, target: Release, verdict: Verdict, settings: ReleaseSettings, override: str | None
) -> Promotion:
    line = site.entry(
        promotion_journal.PROMOTE if override else promotion_journal.RELEASE,
        target,
        reason=target.reason if override is None else f"{override}; the verdict was: {verdict.reason}",
        trigger_id=settings.trigger_id,
        decision=verdict.decision,
    )
    try:
        return make_live(site, target, line, options=settings.options)
    except BaseException:
        if not site.is_published and site.holds_lock():
            forget(site.store, target.version)
        raise


def _note_seconds(site: Site, done: Release) -> None:
    """Writes the manifest again, now with all seconds; the release stands whether or not this works."""
    try:
        done.write(release_path(site.store, done.version))
    except OSError as error:
        logger.warning("version %d is live, but its seconds could not be noted: %s", done.version, error)


def _confirm(live: Promotion, site: Site, settings: ReleaseSettings) -> Release:
    """The release of the model that is live already: a retried step must not release it twice, and tidies up."""
    golden = site.repository.golden_rows(live.version)

    def ask(server: Server) -> None:
        probe(server, MODEL_NAME, live.version, golden, named=False)

    site.fleet.tell(ask)
    tidy(site, settings, live)
    logger.info("model %s is live already as version %d", live.model_id, live.version)
    return Release.read(local_path(live.release_uri))


def tidy(site: Site, settings: ReleaseSettings, line: Promotion) -> None:
    """Removes versions that nobody needs, and notes where this release went; it stands whether or not this works."""
    try:
        kept = {line.version, line.previous_version or line.version, *site.repository.canary_versions()}
        removed = site.repository.prune(kept, num_kept=settings.num_kept)
        site.checkpoint("pruned")
        logger.info("removed versions %s", removed)
        place = ServingPlace(
            repository_uri=site.repository.uri, triton_urls=list(settings.triton_urls), server=settings.server
        )
        write_serving_place(site.store, place)
    except (ContractError, TemporaryError, PermanentError, OSError) as error:
        logger.warning("version %d is live, but tidying failed: %s", line.version, error)
