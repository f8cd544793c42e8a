"""Notifies people of the end of a run that a person or a schedule started.

A run that the monitor started has a `trigger_id` and is announced by the monitor, as part of its incident; a message
from here would be a duplicate. Nothing here fails a run: it has ended, and its outcome is in the store. The
message's form and the sending are `components.notices`'.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence

from components.notices.message import compose
from components.notices.webhook import TIMEOUT_SECONDS, post
from components.store.promotion_journal import moment_of
from components.store.runs import RunOutcome, StepNote, begun_at

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "EVERGREEN_NOTIFY_URL"
"""Environment variable with the webhook's address, from an optional secret; empty or absent = nobody is notified."""
PAUSES_SECONDS = (2.0, 10.0, 30.0)
"""Between tries; all of them end long before the exit handler's own time limit (600 s)."""


def notify(
    outcome: RunOutcome,
    notes: Sequence[StepNote],
    url: str,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Sends one message about the outcome and raises nothing.

    Args:
        outcome: How the run ended.
        notes: Of its steps, for the time when it began.
        url: The webhook's address; empty = nobody is notified.
        timeout_seconds: To connect and for each read, of each try.
        sleep: Waits between tries.

    Returns:
        `delivered`; `nobody` where there is no address; `left` where the monitor announces it, which knows the outcome
        but not what a step wants reported; `lost` where the webhook refused it or never answered.
    """
    if outcome.trigger_id and not reported_by_steps(notes):
        return "left"
    if not url.strip():
        return "nobody"
    try:
        return _send(json.dumps(message(outcome, notes)).encode(), url.strip(), timeout_seconds, sleep=sleep)
    except Exception as error:  # noqa: BLE001 - the run has ended well or badly; this must not change it
        logger.warning("the run's end was not announced: %s", type(error).__name__)
        return "lost"


def message(outcome: RunOutcome, notes: Sequence[StepNote]) -> dict[str, str]:
    """The message: how the run ended, which step decided it and why, what serves now, and what steps want reported."""
    begun = begun_at(notes) or moment_of(outcome.ended_at)
    if outcome.state == "released":
        title, done = f"Version {outcome.version} was released", f"{outcome.reason}" or "released"
    elif outcome.state == "refused":
        title, done = f"The new model was refused by {outcome.step}: {outcome.reason}", "what was live stays live"
    else:
        title, done = f"A retraining run failed at {outcome.step}: {outcome.reason}", "what was live stays live"
    title = ". ".join([title, *reported_by_steps(notes)])
    # As text: a file's address is no link that a chat would follow.
    done = "; ".join([done, *(f"report of {step}: {uri}" for step, uri in outcome.reports.items())])
    return compose(title, numbers={"request_id": outcome.run}, since=begun.timestamp(), done=done, link="")


def reported_by_steps(notes: Sequence[StepNote]) -> list[str]:
    """What steps want reported whatever the outcome is: sentences under `notify` among their notes' facts."""
    return [f"{note.step}: {sentence}" for note in notes for sentence in note.facts.get("notify", [])]


def _send(body: bytes, url: str, timeout_seconds: float, *, sleep: Callable[[float], None]) -> str:
    for pause in (*PAUSES_SECONDS, None):
        answer = post(url, body, timeout_seconds=timeout_seconds)
        if answer.state == "delivered":
            return "delivered"
        if answer.state == "refused" or pause is None:
            break
        # A webhook that asks for a longer wait than the longest pause loses the message: this task should end.
        sleep(min(max(pause, answer.retry_after or 0.0), max(PAUSES_SECONDS)))
    logger.warning("the run's end was not announced: %s", answer.reason)
    return "lost"
