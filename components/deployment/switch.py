"""Changing which versions the running servers serve, or leaving everything as it was.

The one atomic write is the configuration: from then on a server that starts serves the new versions, and every running
one is told, one after another, waited for, and asked golden rows; servers that appear meanwhile too. Triton itself
drains: a version that leaves answers what it has begun. Any failure, of the record too, leads everyone back, and asks
whether the version before answers again. Who may change is `site`'s; why is `make_live`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from components.contracts.serving import MODEL_NAME
from components.deployment.graph.parity import GoldenRows
from components.deployment.servers import Patience, Server, bring_up, probe, wait_until_ready
from components.deployment.site import Site
from components.runtime.errors import ContractError, PermanentError, TemporaryError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Fallback(NamedTuple):
    """The version that must answer again where a change fails."""

    version: int
    golden: GoldenRows


def fallback_of(site: Site) -> Fallback | None:
    """What the journal says is live, if the repository holds it."""
    live = site.live
    if live is None or live.version not in site.repository.versions():
        return None
    return Fallback(live.version, site.repository.golden_rows(live.version))


def switch(site: Site, version: int, *, config: str, golden: GoldenRows, record: Callable[[], T]) -> T:
    """Makes every server serve as `config` says, `version` answering clients; then the answer of `record`.

    Raises:
        TemporaryError: a server failed to load or get ready in time; everything is as it was before.
        PermanentError: a server refused or answered wrongly; everything is as it was before.
            Either names what could not be led back, which `site.lost` holds too.
    """
    before, fallback = site.repository.read_config(), fallback_of(site)

    def serve(server: Server) -> None:
        bring_up(server, MODEL_NAME, version, golden, site.patience)
        probe(server, MODEL_NAME, version, golden, named=False)
        logger.info("triton %s serves version %d", server.url, version)
        site.checkpoint("loaded")

    try:
        site.is_published = True
        site.repository.write_config(config)
        site.checkpoint("config written")
        site.fleet.tell_all(serve)
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
    """Puts the configuration back and tells every server; answers what could not be led back."""
    lost = []
    if not site.holds_lock():
        # Whoever has the lock now has gone back already, and perhaps forth: its servers are not to be touched.
        site.needs_recovery = True
        return ["another deployment took over, and decides what is served"]
    try:
        if site.repository.read_config() != config:
            site.repository.write_config(config)
    except (TemporaryError, PermanentError, ContractError) as error:
        site.needs_recovery = True
        logger.error("the configuration could not be restored: %s", error)
        # Told now, a server would load what is being gone back from; those not told yet serve what was live.
        return [f"the configuration could not be restored: {error}"]
    for server in site.fleet.servers:
        if problem := go_back(server, config, fallback, site.patience):
            lost.append(problem)
    for problem in lost:
        logger.error("%s", problem)
    return lost


def go_back(server: Server, config: str | None, fallback: Fallback | None, patience: Patience) -> str | None:
    """Tells one server of the restored configuration and asks it; what is wrong, None if nothing is."""
    try:
        if config is None:
            server.unload(MODEL_NAME)
        else:
            server.load(MODEL_NAME)
        if config is not None and fallback is not None:
            wait_until_ready(server, MODEL_NAME, fallback.version, patience)
            probe(server, MODEL_NAME, fallback.version, fallback.golden, named=False)
    except (TemporaryError, PermanentError) as error:
        return f"triton {server.url} did not go back: {error}"
    return None
