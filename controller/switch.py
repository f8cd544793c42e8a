"""Make a version live on every server: intent, staging, rehearsal, switch, journal entry.

`release`, `promote` and `rollback` all use this module. A version that is no longer in Triton's
repository is restored from its copy in the model registry. How long the repository keeps versions
therefore affects only the duration of a rollback.

The rehearsal takes about 0.3 s under traffic. Triton sends requests without a version to the
highest version as soon as it is loaded. Any error that a load can show must therefore appear before
the served name is changed.

The configuration is one atomic write. From then on every starting server serves the new version.
Running servers are processed one after another, including servers that appear meanwhile. Each is
notified, waited for, and probed with golden rows. Triton itself drains a version that it unloads.
After any failure, including a failed write of the journal entry, every server is restored to the
previous version and probed.
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
from controller.site import Fallback, Site, restore_server

logger = logging.getLogger(__name__)

T = TypeVar("T")


def make_live(
    site: Site, target: Release, line: Promotion, *, options: ServingOptions
) -> Promotion:
    """Make `target` live on every server, and return its journal entry.

    The graph and the golden rows of `target` must be in the registry or still in the repository.

    Args:
        site: Opened deployment target.
        target: Release to serve.
        line: Journal entry (`Site.entry`) to write. An intent with the same content is written
            first.
        options: Serving options of the version.

    Raises:
        ContractError: a file is absent, or no intact copy of it is left.
        TemporaryError: a server does not answer or become ready. The previous version is still
            live.
        PermanentError: a server rejected the version or answered wrongly. The previous version is
            still live.
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
        # End the share of a canary, because the canary was compared with a version that is no
        # longer live. If this fails, the next canary step retries it.
        site.reset_plan(written.reason)
    except (ContractError, TemporaryError, PermanentError) as error:
        logger.warning(
            "version %d is live, but the traffic plan could not be reset: %s",
            written.version,
            error,
        )
    return written


def _withdraw_files(site: Site, version: int) -> None:
    try:
        site.repository.withdraw(version)
    except (ContractError, TemporaryError, PermanentError) as error:
        # Report only the earlier failure. Files that no configuration names do no harm.
        logger.error("files of version %d stay in the repository: %s", version, error)


def stage_version(site: Site, target: Release, options: ServingOptions) -> None:
    """Rehearse the version on every server, then publish its folder to the repository.

    The configuration does not name it yet.

    Raises:
        ContractError, TemporaryError, PermanentError: as in `make_live`. All files of the version
        were removed.
    """
    version, folder = target.version, graph_folder(site.store, target.version)
    if not (folder / GOLDEN_FILE).exists():
        raise ContractError(
            f"version {version} is no longer in the repository, and {folder} contains no copy of it"
        )
    check_kept(site.store, target)
    golden = GoldenRows.load(folder / GOLDEN_FILE)

    def rehearse(server: Triton) -> None:
        try:
            bring_up(
                server, site.names.candidate, version=version, golden=golden, patience=site.patience
            )
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


def switch(
    site: Site, version: int, *, config: str, golden: GoldenRows, record: Callable[[], T]
) -> T:
    """Switch every server to `config`, probe `version`, and return the result of `record`.

    Args:
        site: Opened deployment target.
        version: Version that must answer clients.
        config: Triton configuration that serves it.
        golden: Golden rows of the version.
        record: Called after all servers serve the version. If it fails, the switch is undone.

    Raises:
        TemporaryError: a server failed to load or to become ready in time. The previous state was
            restored.
        PermanentError: a server rejected the version or answered wrongly. The previous state was
            restored. The message of either error, and `site.lost`, list what could not be restored.
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
        logger.error("version %d is not served, rolling back: %s", version, error)
        site.lost += _restore(site, before, fallback)
        if site.lost and isinstance(error, (TemporaryError, PermanentError)):
            kind = TemporaryError if isinstance(error, TemporaryError) else PermanentError
            raise kind("; ".join([str(error), *site.lost])) from error
        raise


def _restore(site: Site, config: str | None, fallback: Fallback | None) -> list[str]:
    """Restore the configuration, notify every server, and return messages about what failed."""
    site.needs_recovery = True  # stays True if the restore fails or is interrupted
    if not site.holds_lock():
        # The new lock holder has already rolled back, and may have switched to another version. Do
        # not touch its servers.
        return ["another deployment holds the lock now, so nothing was restored"]
    try:
        if site.repository.read_config() != config:
            site.repository.write_config(config)
    except (TemporaryError, PermanentError, ContractError) as error:
        logger.error("the configuration could not be restored: %s", error)
        # Do not notify the servers, because they would load the version that is being rolled back.
        # Servers that were not notified yet still serve the previous version.
        return [f"the configuration could not be restored: {error}"]
    problems = [
        problem
        for server in site.fleet.servers
        if (problem := restore_server(site, server, config, fallback=fallback))
    ]
    for problem in problems:
        logger.error("%s", problem)
    site.needs_recovery = False
    return problems
