"""Carry out single moves of the release protocol on files, servers, plan and journal.

`controller.protocol` decides which move comes next, and `controller.reconcile` calls it. A version
that is no longer in Triton's repository is restored from its copy in the model registry. How long
the repository keeps versions therefore affects only the duration of a rollback.

The rehearsal takes about 0.3 s under traffic. Triton sends requests without a version to the
highest version as soon as it is loaded. Any error that a load can show must therefore appear before
the served name is changed.

The longest moves copy and hash files, or load a version on one server after another. Between two
files and two servers they check whether a later rollback supersedes the change (`Site.proceed`).

The configuration is one atomic write. After this write, every server that starts serves the new
version. Running servers load the version one after another. Servers that appear in the meantime are
included. Each server is notified, and is probed with golden rows after it has loaded the version.
Triton itself drains a version that it unloads.

The configuration names only the new version. Triton loads the new version before it unloads the
previous version, which first finishes its requests. Keeping the previous version loaded would have
no benefit, because Triton reloads every named version when the configuration changes. The previous
version stays in the repository and in the registry, and a rollback loads it from there.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from controller.protocol import (
    ADOPT,
    CONFIGURE,
    DISCARD,
    END_BAKING,
    END_CANARY,
    LOAD_CANARY,
    PLACE_CANARY,
    PUBLISH,
    RECORD,
    REHEARSE,
    REMOVE_FILES,
    RESTORE_CONFIG,
    RESTORE_SERVERS,
    SERVE,
    SHOW_CANARY,
    STAGE,
    UNKNOWN,
    UNLOAD_CANARY,
    WITHDRAW_INTENT,
    Server,
)
from controller.site import Attempt, Fallback, Site, live_version
from evergreen.registry import promotion_journal
from evergreen.registry.models import graph_folder, read_release, release_path
from evergreen.registry.promotion_journal import Promotion, canary_at_work
from evergreen.registry.requests import last_abort
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.intact import check_kept, golden_rows, heal
from evergreen.serving.parity import GoldenRows
from evergreen.serving.repository.model_repository import GOLDEN_FILE
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton, addresses, bring_up, probe, wait_until_ready

logger = logging.getLogger(__name__)


def forget(store: Path, version: int) -> None:
    """Remove the registry's files of a version that was never served."""
    release_path(store, version).unlink(missing_ok=True)
    shutil.rmtree(graph_folder(store, version), ignore_errors=True)


def load_canary(site: Site, version: int, *, only_missing: bool) -> None:
    """Load the canary on every server, including new ones, and probe it with golden rows.

    If `only_missing` is set, servers that already report the canary as ready are skipped.
    """
    golden = golden_rows(site.repository, site.store, version)

    def load(server: Triton) -> None:
        site.proceed()
        if only_missing and server.is_ready(site.names.canary, version):
            return
        bring_up(server, site.names.canary, version=version, golden=golden, patience=site.patience)
        site.checkpoint("canary loaded on one")

    site.fleet.for_all(load)
    if site.known is not None:
        _know(site, canary=version)
    site.checkpoint("canary loaded")


def _running(site: Site) -> tuple[Promotion, ServingOptions]:
    attempt = site.attempt
    assert attempt.line is not None
    assert attempt.options is not None
    return attempt.line, attempt.options


def _intent(site: Site) -> Promotion:
    intent = site.intent
    assert intent is not None
    return intent


def _know(site: Site, **changes: int | None) -> None:
    site.known = replace(site.known or Server(), **changes)


def _stage(site: Site) -> None:
    line, options = _running(site)
    version, folder = line.version, graph_folder(site.store, line.version)
    if not (folder / GOLDEN_FILE).exists():
        raise ContractError(
            f"version {version} is no longer in the repository, and {folder} contains no copy of it"
        )
    check_kept(site.store, read_release(site.store, version))
    site.repository.stage(version, folder, options, proceed=site.proceed)
    site.checkpoint("staged")


def _rehearse(site: Site) -> None:
    version = _running(site)[0].version
    golden = GoldenRows.load(graph_folder(site.store, version) / GOLDEN_FILE)

    def rehearse(server: Triton) -> None:
        site.proceed()
        bring_up(
            server, site.names.candidate, version=version, golden=golden, patience=site.patience
        )
        server.unload(site.names.candidate)

    _know(site, candidate=UNKNOWN)
    site.fleet.for_each(rehearse)
    _know(site, candidate=None)
    site.attempt.is_rehearsed = True
    site.checkpoint("rehearsed")


def _publish(site: Site) -> None:
    site.repository.publish(_running(site)[0].version)
    site.checkpoint("folder published")


def _configure(site: Site) -> None:
    (line, options), repository = _running(site), site.repository
    if not site.attempt.is_rehearsed:  # no rehearsal: the version was in the repository before
        heal(repository.published, site.store, line.version, options=options)
    config = repository.config_for(line.version, options)
    golden_rows(repository, site.store, line.version)  # raises an error before anything is changed
    site.attempt.is_published = True
    repository.write_config(config)
    _know(site, serves=UNKNOWN)
    site.checkpoint("config written")


def _serve(site: Site) -> None:
    version, name = _running(site)[0].version, site.names.model
    golden = golden_rows(site.repository, site.store, version)

    def serve(server: Triton) -> None:
        site.proceed()
        bring_up(server, name, version=version, golden=golden, patience=site.patience)
        probe(server, name, version=version, golden=golden, named=False)
        logger.info("triton %s serves version %d", server.url, version)
        site.checkpoint("loaded")

    site.fleet.for_all(serve)
    _know(site, serves=version)


def _place_canary(site: Site) -> None:
    line, options = _running(site)
    site.repository.place_canary(line.version, options)
    site.checkpoint("canary placed")


def _load_canary(site: Site) -> None:
    if site.attempt.line is not None:
        load_canary(site, site.attempt.line.version, only_missing=False)
    elif (at_work := canary_at_work(site.store)) is not None:
        if not site.repository.canary.whole():  # somebody removed the files
            options = site.repository.options_for(at_work.version)
            site.repository.place_canary(at_work.version, options)
        load_canary(site, at_work.version, only_missing=True)


def _show_canary(site: Site) -> None:
    plan = site.attempt.plan
    assert plan is not None
    site.attempt.is_shown = True
    site.repository.write_plan(replace(plan, published_at=site.now()))
    site.checkpoint("plan written")


def _record(site: Site) -> None:
    line = _running(site)[0]
    if line.action != promotion_journal.CANARY:
        site.checkpoint("probed")
    site.append(replace(line, config=None))
    site.attempt, site.known = Attempt(), None
    site.checkpoint("journal written")


def _check_lock(site: Site) -> None:
    # Another controller may already have rolled back, and may have switched to another version. The
    # servers then belong to that controller and must not be changed.
    if not site.holds_lock():
        raise TemporaryError("another controller holds the lock now, so nothing was restored")


def _restore_config(site: Site) -> None:
    _check_lock(site)
    intent, live = site.intent, site.live
    if intent is not None:
        try:
            site.repository.write_config(intent.config)
        except (TemporaryError, PermanentError, ContractError) as error:
            # Do not notify the servers here, because this would make them load the version that is
            # being rolled back. Servers that were not notified yet still serve the previous
            # version.
            raise TemporaryError(f"the configuration could not be restored: {error}") from error
    elif live is not None:
        options = site.repository.options_for(live.version)
        site.repository.write_config(site.repository.config_for(live.version, options))
        logger.error("the configuration did not name version %d, and was rewritten", live.version)


def _restore_servers(site: Site) -> None:
    """Make every server serve the version that was configured before the intent.

    A server that cannot be restored is left to the watchdog, because the configuration is restored.
    """
    _check_lock(site)
    intent, known = _intent(site), site.known or Server(serves=UNKNOWN, candidate=UNKNOWN)
    before = live_version(intent.config)
    fallback = _fallback(site, before)

    def restore(server: Triton) -> None:
        try:
            if known.candidate is not None:
                server.unload(site.names.candidate)
            if known.serves != before:
                _restore_server(site, server, intent.config, fallback=fallback)
        except (TemporaryError, PermanentError) as error:
            problem = f"triton {server.url} could not be restored: {error}"
            logger.error("%s", problem)
            site.attempt.lost.append(problem)

    try:
        fleet = site.fleet
    except TemporaryError:
        # The intent stays until every server responds, but clients of the others get the version
        # from before at once.
        for address in addresses(site.settings.triton_urls, site.settings.resolve):
            with closing(site.settings.connect(address)) as server:
                restore(server)
        raise
    fleet.for_each(restore)
    _know(site, serves=before, candidate=None)


def _fallback(site: Site, version: int | None) -> Fallback | None:
    """Return the version with its golden rows.

    Returns None if the version is not in the repository, or if no copy of its golden rows is
    intact. The servers are then restored without a probe.
    """
    if version is None or version not in site.repository.versions():
        return None
    try:
        return Fallback(version, golden_rows(site.repository, site.store, version))
    except ContractError as error:
        logger.error("version %d is restored without a probe: %s", version, error)
        return None


def _restore_server(
    site: Site, server: Triton, config: str | None, *, fallback: Fallback | None
) -> None:
    name = site.names.model
    if config is None:
        server.unload(name)
        return
    server.load(name)
    if fallback is not None:
        wait_until_ready(server, name, fallback.version, patience=site.patience)
        probe(server, name, version=fallback.version, golden=fallback.golden, named=False)


def _discard(site: Site) -> None:
    site.repository.discard_candidate()


def _remove_files(site: Site) -> None:
    site.repository.withdraw(_intent(site).version)


def _adopt(site: Site) -> None:
    site.append(_intent(site))
    site.checkpoint("intent adopted")


def _withdraw_intent(site: Site) -> None:
    intent, attempt = _intent(site), site.attempt
    error = attempt.error
    why = (
        f"the change by {intent.who} was interrupted"
        if error is None
        else f"{type(error).__name__}: {error}"
    )
    reason = "; ".join([why, *attempt.lost])
    site.append(replace(intent, action=promotion_journal.WITHDRAWN, reason=reason, config=None))
    if error is None:
        site.recovered = intent
        logger.warning("the interrupted change to version %d is withdrawn", intent.version)
    forget_unserved(site)
    attempt.line, site.known = None, None


def forget_unserved(site: Site) -> None:
    """Remove the registry's files of a version that never served clients."""
    attempt = site.attempt
    if attempt.new_version is not None and not (attempt.is_published or attempt.is_shown):
        forget(site.store, attempt.new_version)
    attempt.new_version = None


def _unload_canary(site: Site) -> None:
    site.remove_canary()
    logger.info("the canary is unloaded")


def _end_canary(site: Site) -> None:
    at_work, plan = canary_at_work(site.store), site.repository.read_plan()
    assert at_work is not None
    abort = last_abort(site.store)
    ended = replace(
        at_work,
        action=promotion_journal.CANARY_ENDED,
        reason=abort.reason if abort else plan.reason if plan else "no plan names it",
        who=abort.who if abort else site.settings.who,
        request=abort.request if abort else None,
        share=None,
    )
    site.append(ended)


def _end_baking(site: Site) -> None:
    assert site.baked is not None
    line, reason = site.baked
    site.append(line.baked(site.now(), site.settings.who, reason))
    site.baked = None


BODIES: Mapping[str, Callable[[Site], None]] = {
    STAGE: _stage,
    REHEARSE: _rehearse,
    PUBLISH: _publish,
    CONFIGURE: _configure,
    SERVE: _serve,
    PLACE_CANARY: _place_canary,
    LOAD_CANARY: _load_canary,
    SHOW_CANARY: _show_canary,
    RECORD: _record,
    RESTORE_CONFIG: _restore_config,
    RESTORE_SERVERS: _restore_servers,
    DISCARD: _discard,
    REMOVE_FILES: _remove_files,
    WITHDRAW_INTENT: _withdraw_intent,
    ADOPT: _adopt,
    UNLOAD_CANARY: _unload_canary,
    END_CANARY: _end_canary,
    END_BAKING: _end_baking,
}
"""Functions that carry out the moves that need no request, by move."""
