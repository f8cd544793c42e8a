"""Opening a site, which puts right what a killed deployment left: a last line of the journal that is an intent.

Whoever opens the site next goes back, never forth: the configuration that the intent found is written again, every
server is told of it and asked, then the intent is withdrawn. A killed release thus costs its version number, and the
step that is retried releases the same model under the next one. Killed itself, a recovery begins anew.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from components.contracts.serving import CANDIDATE_NAME
from components.deployment.canary.state import undo_start
from components.deployment.discovery import Fleet, Resolve, resolve
from components.deployment.older_store import keep_older_graphs
from components.deployment.repository.model_repository import ModelRepository
from components.deployment.servers import Connect, Patience, Server
from components.deployment.site import Site, SiteSettings, withdraw
from components.deployment.switch import fallback_of, go_back
from components.deployment.triton_client import Triton
from components.runtime.errors import TemporaryError
from components.storage.locations import open_objects
from components.store import promotion_journal
from components.store.promotion_journal import Promotion

logger = logging.getLogger(__name__)


@contextmanager
def opened(settings: SiteSettings, *, connect: Connect = Triton, resolve: Resolve = resolve) -> Iterator[Site]:
    """Yields the site, with the lock held, every server answering, and what a killed deployment left put right.

    Raises:
        ContractError: the repository cannot be written.
        TemporaryError: another deployment is at work for longer than `patience.lock_seconds`, a server does not answer,
            or cannot be led back yet.
    """
    holder = f"{settings.who}, process {os.getpid()} on {socket.gethostname()}"
    repository = ModelRepository(open_objects(settings.repository), holder=holder)
    with ExitStack() as stack:
        _lock(stack, repository, settings.patience)
        keep_older_graphs(settings.store)
        interrupted = promotion_journal.interrupted(settings.store)
        if interrupted:
            # Before the servers are asked: one that starts meanwhile must find what the journal calls live.
            repair_repository(repository, interrupted)
        fleet = Fleet(settings.triton_urls, connect, patience=settings.patience, resolve=resolve)
        stack.enter_context(closing(fleet))
        site = Site(settings=settings, repository=repository, fleet=fleet, recovered=interrupted)
        if interrupted:
            finish_recovery(site, interrupted)
        yield site


def _lock(stack: ExitStack, repository: ModelRepository, patience: Patience) -> None:
    """Takes the lock, which `stack` gives back; waits a little for whoever has it."""
    deadline = patience.clock() + patience.lock_seconds
    while True:
        try:
            return stack.enter_context(repository.locked())
        except TemporaryError:
            if patience.clock() >= deadline:
                raise
        patience.sleep(patience.poll_seconds)


def repair_repository(repository: ModelRepository, intent: Promotion) -> None:
    """Writes the configuration that `intent` found, so that servers which start read it; needs the lock."""
    logger.warning("the deployment of version %d by %s was interrupted, going back", intent.version, intent.who)
    if repository.read_config() != intent.config:
        repository.write_config(intent.config)
    repository.discard_candidate()


def finish_recovery(site: Site, intent: Promotion) -> None:
    """Tells every server, removes the version that never went live, and withdraws the intent.

    Raises:
        TemporaryError: a server cannot be led back now; the intent stays, and the next deployment tries again.
    """
    fallback = fallback_of(site)
    problems: list[str] = []

    def lead_back(server: Server) -> None:
        server.unload(CANDIDATE_NAME)
        if problem := go_back(server, intent.config, fallback, site.patience):
            problems.append(problem)

    site.fleet.tell(lead_back)
    if problems:
        raise TemporaryError(
            f"the interrupted deployment of version {intent.version} cannot be put right: {'; '.join(problems)}"
        )
    if intent.share is not None:
        undo_start(site, intent)
    if intent.version not in {entry.version for entry in promotion_journal.read_journal(site.store)}:
        site.repository.withdraw(intent.version)
    withdraw(site, intent, f"the deployment by {intent.who} was interrupted")
    live = f"version {fallback.version} is live" if fallback else "nothing is live"
    logger.warning("the interrupted deployment of version %d is withdrawn, %s", intent.version, live)
