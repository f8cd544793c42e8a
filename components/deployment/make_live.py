"""The one way by which a version becomes the live one: announced, staged, rehearsed, switched to, recorded.

Used by `release`, `promote` and `rollback`. A version that left Triton's repository comes back from its copy in the
model store (`keep`), so how long the repository keeps versions decides nothing but how long a rollback takes.

The rehearsal (about 0.3 s with traffic beside it) is there because Triton gives requests without a version to the
highest one the moment it is loaded: whatever a load can reveal must be revealed before the real name is touched.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace

from components.contracts.manifests import Release
from components.contracts.serving import CANDIDATE_NAME
from components.deployment.canary.state import reset_plan
from components.deployment.graph.files import graph_sha256
from components.deployment.graph.parity import GoldenRows
from components.deployment.repository.files import GOLDEN_FILE
from components.deployment.repository.triton_config import ServingOptions
from components.deployment.servers import Server, bring_up
from components.deployment.site import Site, announced
from components.deployment.switch import switch
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.store.models import graph_folder
from components.store.promotion_journal import Promotion

logger = logging.getLogger(__name__)


def make_live(site: Site, target: Release, line: Promotion, *, options: ServingOptions) -> Promotion:
    """The journal's line that made `target` live on every server.

    Args:
        site: Where.
        target: The version; its graph and golden rows are in the store, or still in the repository.
        line: What the journal will say (`Site.entry`); announced as an intent first.
        options: How it is served.

    Raises:
        ContractError: its files are absent or damaged.
        TemporaryError: a server does not answer or get ready; what was live is live.
        PermanentError: a server refused or answered wrongly; what was live is live.
    """
    version, repository = target.version, site.repository
    was_there = version in repository.versions()
    if not was_there:
        # Before the intent, which keeps the configuration to go back to: it must not name what is being replaced.
        repository.leave_out(version)
    with announced(site, line):
        try:
            if was_there:
                check_graph(site, target)
            else:
                stage_version(site, target, options)
            written = switch(
                site,
                version,
                config=repository.config_for(version, [version], options),
                golden=repository.golden_rows(version),
                record=lambda: _recorded(site, line),
            )
        except BaseException:
            if not was_there:
                _withdraw_files(site, version)
            raise
    _settle_traffic(site, written)
    return written


def _withdraw_files(site: Site, version: int) -> None:
    try:
        site.repository.withdraw(version)
    except (ContractError, TemporaryError, PermanentError) as error:
        # What failed before says more; named by no configuration, they harm nobody.
        logger.error("files of version %d stay in the repository: %s", version, error)


def _settle_traffic(site: Site, line: Promotion) -> None:
    """Ends a canary's share, which was judged against a version that is no longer live; its next step tries again."""
    try:
        reset_plan(site.repository, site.store, line.reason, clock=site.settings.clock)
    except (ContractError, TemporaryError, PermanentError) as error:
        logger.warning("version %d is live, but the traffic plan could not be renewed: %s", line.version, error)


def _recorded(site: Site, line: Promotion) -> Promotion:
    written = site.append(replace(line, time=site.now()))
    site.checkpoint("journal written")
    return written


def check_graph(site: Site, target: Release) -> None:
    """Returns if the repository still holds the graph that was released.

    Raises:
        ContractError: it is damaged.
    """
    found = site.repository.graph_sha256(target.version)
    if found != target.sha256["graph"]:
        raise ContractError(f"graph of version {target.version} has sha256 {found}, expected {target.sha256['graph']}")


def stage_version(site: Site, target: Release, options: ServingOptions) -> None:
    """Leaves the version in the repository, named by no configuration, after every server answered rightly with it.

    Raises:
        ContractError, TemporaryError, PermanentError: as `make_live`; nothing is left of it.
    """
    version, folder = target.version, graph_folder(site.store, target.version)
    if not (folder / GOLDEN_FILE).exists():
        raise ContractError(f"version {version} left the repository, and {folder} holds no copy of it")
    if (found := graph_sha256(folder)) != target.sha256["graph"]:
        raise ContractError(f"graph in {folder} has sha256 {found}, expected {target.sha256['graph']}")
    golden = GoldenRows.load(folder / GOLDEN_FILE)
    try:
        site.repository.stage(version, folder, golden, options)
        site.checkpoint("staged")
        site.fleet.tell(lambda server: _rehearse(site, server, version, golden))
        site.checkpoint("rehearsed")
    except BaseException:
        site.repository.discard_candidate()
        raise
    site.repository.publish(version)
    site.checkpoint("folder published")


def _rehearse(site: Site, server: Server, version: int, golden: GoldenRows) -> None:
    """Returns if the server loads the candidate and answers rightly with it; unloads it either way."""
    try:
        bring_up(server, CANDIDATE_NAME, version, golden, site.patience)
    except (TemporaryError, PermanentError):
        with suppress(TemporaryError, PermanentError):
            server.unload(CANDIDATE_NAME)
        raise
    server.unload(CANDIDATE_NAME)
