"""A canary: a new version takes a growing share of the traffic under its own name, until it is live or aborted.

`start` (`canary.start`) loads it as `click_model_canary` on every server and publishes the traffic plan; each `step`
(`canary.step`) holds, grows it (1 -> 5 -> 25 % -> released to all) or aborts, by rules (`canary.policy`) over outcomes
(`canary.evidence`) and what the servers counted (`canary.metrics`); `watch` steps until it is over; `advance` and
`abort` are a person's. Writes and their order: `canary.state`. A canary in the shadow only is watched alike, and
answers once it is started again to do so, or advanced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from components.deployment.canary import state as canary_state
from components.deployment.canary.start import start
from components.deployment.canary.step import advance, judged, step
from components.deployment.canary.terms import DRAINING, ENDED, NONE, CanarySettings, Step, aborted, held
from components.deployment.repository.model_repository import ModelRepository
from components.runtime.errors import ContractError, TemporaryError
from components.storage.locations import open_objects

__all__ = ["CanarySettings", "Step", "abort", "advance", "start", "status", "step", "watch"]

logger = logging.getLogger(__name__)


def abort(settings: CanarySettings, reason: str) -> Step:
    """Takes the canary's traffic back at once, whether or not servers answer; `step` unloads it once clients know.

    Raises:
        ContractError: no reason is given.
        TemporaryError: another deployment is at work.
    """
    if not reason.strip():
        raise ContractError("the reason of an abort is empty, expected one for the journal")
    repository, store = ModelRepository(open_objects(settings.site.repository)), settings.site.store
    with repository.locked():
        at_work, plan = canary_state.active(store), repository.read_plan()
        # A start that was killed before its line is in the plan alone.
        if at_work is None and (plan is None or plan.canary is None):
            return Step(action=NONE, reason="no canary is at work")
        canary_state.reset_plan(repository, store, reason, clock=settings.site.clock)
    return aborted(settings, at_work.version if at_work else None, reason)


def watch(
    settings: CanarySettings,
    *,
    interval_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    tell: Callable[[Step], None] = lambda _: None,
) -> Step:
    """Steps until there is no canary any more; the last step. What fails for now is tried again.

    Raises:
        ContractError, PermanentError: as `step`.
    """
    while True:
        try:
            done = step(settings)
        except TemporaryError as error:
            logger.warning("step put off: %s", error)
            sleep(interval_seconds)
            continue
        tell(done)
        if done.action in (NONE, ENDED):
            return done
        sleep(interval_seconds if done.wait_seconds is None else done.wait_seconds)


def status(settings: CanarySettings) -> Step:
    """What the next step would find, without doing it; needs neither lock nor servers."""
    plan = ModelRepository(open_objects(settings.site.repository)).read_plan()
    at_work = canary_state.active(settings.site.store)
    if plan is None or plan.canary is None:
        return Step(action=NONE if at_work is None else DRAINING, reason=plan.reason if plan else "there is no plan")
    found = judged(plan, settings)
    return held(plan, found.reason, found)
