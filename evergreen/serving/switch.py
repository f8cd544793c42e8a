"""The one way by which a version becomes the live one: announced, staged, rehearsed, switched to, recorded.

Used by `release`, `promote` and `rollback`. A version that left Triton's repository comes back from its copy in the
model store, so how long the repository keeps versions decides only how long a rollback takes.

The rehearsal (about 0.3 s with traffic beside it) is there because Triton gives requests without a version to the
highest one the moment it is loaded: whatever a load can reveal must be revealed before the real name is touched.

The one atomic write is the configuration: from then on a server that starts serves the new version, and every running
one is notified, one after another, waited for, and probed with golden rows; servers that appear meanwhile too. Triton
itself drains: a version that leaves answers what it has begun. After any failure, that of the record too, every server
is led back, and probed for the version before.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from evergreen.contracts.manifests import Release
from evergreen.registry.models import graph_folder
from evergreen.registry.promotion_journal import Promotion
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.serving.intact import check_kept, golden_rows, heal
from evergreen.serving.parity import GoldenRows
from evergreen.serving.repository.model_repository import GOLDEN_FILE
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton, bring_up, probe
from evergreen.serving.site import Fallback, Site, restore_server

logger = logging.getLogger(__name__)

T = TypeVar("T")


def make_live(site: Site, target: Release, line: Promotion, *, options: ServingOptions) -> Promotion:
    """The journal's line that made `target` live on every server.

    Graph and golden rows of `target` are in the store, or still in the repository; `line` is what the journal will say
    (`Site.entry`), announced as an intent first.

    Raises:
        ContractError: its files are absent, or no intact copy of one is left.
        TemporaryError: a server does not answer or get ready; what was live is live.
        PermanentError: a server refused or answered wrongly; what was live is live.
    """
    version, repository = target.version, site.repository
    was_there = version in repository.versions()

    def record() -> Promotion:
        written = site.append(line)
        site.checkpoint("journal written")
        return written

    with site.announced(line):
        try:
            if was_there:
                heal(repository.published, site.store, version, options=options)
            else:
                stage_version(site, target, options)
            config = repository.config_for(version, options)
            golden = golden_rows(repository, site.store, version)
            written = switch(site, version, config=config, golden=golden, record=record)
        except BaseException:
            if not was_there:
                _withdraw_files(site, version)
            raise
    try:
        # Ends a canary's share, which was judged against a version that is no longer live; its next step tries again.
        site.reset_plan(written.reason)
    except (ContractError, TemporaryError, PermanentError) as error:
        logger.warning("version %d is live, but the traffic plan could not be renewed: %s", written.version, error)
    return written


def _withdraw_files(site: Site, version: int) -> None:
    try:
        site.repository.withdraw(version)
    except (ContractError, TemporaryError, PermanentError) as error:
        # The earlier failure is the one to report; files that no configuration names do no harm.
        logger.error("files of version %d stay in the repository: %s", version, error)


def stage_version(site: Site, target: Release, options: ServingOptions) -> None:
    """Leaves the version in the repository, named by no configuration, after every server answered correctly with it.

    Raises:
        ContractError, TemporaryError, PermanentError: as `make_live`; nothing is left of it.
    """
    version, folder = target.version, graph_folder(site.store, target.version)
    if not (folder / GOLDEN_FILE).exists():
        raise ContractError(f"version {version} left the repository, and {folder} holds no copy of it")
    check_kept(site.store, target)
    golden = GoldenRows.load(folder / GOLDEN_FILE)

    def rehearse(server: Triton) -> None:
        try:
            bring_up(server, site.names.candidate, version=version, golden=golden, patience=site.patience)
        except (TemporaryError, PermanentError):
            with suppress(TemporaryError, PermanentError):
                server.unload(site.names.candidate)
            raise
        server.unload(site.names.candidate)

    try:
        site.repository.stage(version, folder, options)
        site.checkpoint("staged")
        site.fleet.for_each(rehearse)
        site.checkpoint("rehearsed")
    except BaseException:
        site.repository.discard_candidate()
        raise
    site.repository.publish(version)
    site.checkpoint("folder published")


def switch(site: Site, version: int, *, config: str, golden: GoldenRows, record: Callable[[], T]) -> T:
    """Makes every server serve by `config`, with `version` answering clients; returns the result of `record`.

    Raises:
        TemporaryError: a server failed to load or get ready in time; everything is as it was before.
        PermanentError: a server refused or answered wrongly; everything is as it was before.
            Either names what could not be restored, which `site.lost` holds too.
    """
    before, fallback = site.repository.read_config(), site.fallback()

    def serve(server: Triton) -> None:
        bring_up(server, site.names.model, version=version, golden=golden, patience=site.patience)
        probe(server, site.names.model, version=version, golden=golden, named=False)
        logger.info("triton %s serves version %d", server.url, version)
        site.checkpoint("loaded")

    try:
        site.is_published = True
        site.repository.write_config(config)
        site.checkpoint("config written")
        site.fleet.for_all(serve)
        site.checkpoint("probed")
        return record()
    except BaseException as error:
        logger.error("version %d is not served, going back: %s", version, error)
        site.lost += _restore(site, before, fallback)
        if site.lost and isinstance(error, (TemporaryError, PermanentError)):
            kind = TemporaryError if isinstance(error, TemporaryError) else PermanentError
            raise kind("; ".join([str(error), *site.lost])) from error
        raise


def _restore(site: Site, config: str | None, fallback: Fallback | None) -> list[str]:
    """Restores the configuration and notifies every server; answers what could not be restored."""
    site.needs_recovery = True  # until all of it is done, also where it is interrupted
    if not site.holds_lock():
        # Whoever holds the lock now has gone back already, and may have moved on: its servers are not to be touched.
        return ["another deployment took over, and decides what is served"]
    try:
        if site.repository.read_config() != config:
            site.repository.write_config(config)
    except (TemporaryError, PermanentError, ContractError) as error:
        logger.error("the configuration could not be restored: %s", error)
        # If the servers were notified now, they would load the version we are rolling back from; those that were not
        # notified yet still serve what was live.
        return [f"the configuration could not be restored: {error}"]
    problems = [
        problem for server in site.fleet.servers if (problem := restore_server(site, server, config, fallback=fallback))
    ]
    for problem in problems:
        logger.error("%s", problem)
    site.needs_recovery = False
    return problems
