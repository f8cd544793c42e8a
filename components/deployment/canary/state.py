"""Which canary is at work, and the way back from one; its state is the journal and the traffic plan, nothing else.

The journal says which version is the canary (`active`), the plan what clients do about it. Every change is a fixed
order of writes, so that what a crash left tells how far it came:

    start    intent, version's files, canary's files, servers, plan, CANARY
    grow     plan, CANARY (with its new share)
    promote  intent, switch, PROMOTE, plan, drained, unloaded, canary's files removed
    abort    plan, drained, unloaded, canary's files removed, CANARY_ENDED

A plan with a canary that the journal does not name is led back; canary's files without a plan are on their way out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from components.contracts.serving import CANARY_NAME, MODEL_NAME
from components.deployment.repository.model_repository import ModelRepository
from components.deployment.site import Site, utc_now
from components.store import promotion_journal
from components.store.promotion_journal import CANARY, CANARY_ENDED, LIVE_ACTIONS, WITHDRAWN, Promotion
from components.store.traffic_plan import Arm

logger = logging.getLogger(__name__)


def active(store: Path) -> Promotion | None:
    """The line of the canary that is at work, with its share; None where there is none.

    A canary ends by its own line or by any that changes who is live. One whose line was being written when its start
    failed is taken back by the `withdrawn` line right after it.
    """
    found: Promotion | None = None
    before: Promotion | None = None
    for entry in promotion_journal.read_entries(store):
        if entry.action == CANARY:
            found = entry
        elif entry.action in (CANARY_ENDED, *LIVE_ACTIONS) or (
            entry.action == WITHDRAWN and before is not None and before is found and before.version == entry.version
        ):
            found = None
        before = entry
    return found


def reset_plan(
    repository: ModelRepository, store: Path, reason: str, *, clock: Callable[[], datetime] = utc_now
) -> bool:
    """Writes a plan by which what the journal calls live answers everything; needs the lock. Whether that was news.

    Without a plan there is nothing to do: everyone asks the served model by its name anyway.
    """
    plan, live = repository.read_plan(), promotion_journal.current(store)
    if plan is None or live is None:
        return False
    stable = Arm(model_name=MODEL_NAME, version=live.version)
    if plan.canary is None and plan.stable == stable:
        return False
    published_at = clock().isoformat()
    if plan.canary is None:
        # Only the number is out of date: no client has to be waited for, so the plan keeps its time.
        published_at = plan.published_at
    repository.write_plan(plan.without_canary(stable=stable, published_at=published_at, reason=reason))
    logger.info("the traffic plan names version %d alone: %s", live.version, reason)
    return True


def undo_start(site: Site, intent: Promotion) -> None:
    """Leads back a start that failed or was killed: nobody asks the canary any more, and no server holds it.

    Where clients may have been told of it already, its unloading waits for the next step, when they have been told
    otherwise.
    """
    if not reset_plan(
        site.repository, site.store, f"start of version {intent.version} was withdrawn", clock=site.settings.clock
    ):
        remove(site)


def remove(site: Site) -> None:
    """Unloads the canary on every server, then removes its files: as long as they are there, this is to be done.

    Raises:
        TemporaryError: a server cannot be told now; the files stay.
    """
    site.fleet.tell(lambda server: server.unload(CANARY_NAME))
    site.checkpoint("canary unloaded")
    site.repository.remove_canary()
    site.checkpoint("canary removed")


def end(site: Site, reason: str) -> Promotion | None:
    """Removes the canary; the journal's line that says so, None where a line that changed who is live said it."""
    remove(site)
    line = active(site.store)
    if line is None:
        return None
    return site.append(replace(line, action=CANARY_ENDED, time=site.now(), reason=reason, share=None))
