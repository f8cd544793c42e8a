"""The exit handler: record the outcome of a run, and send a notification.

The state that KFP passes does not show the outcome. The hosted backend passes COMPLETE or FAILED
without a message. The local backend passes SUCCEEDED or FAILED, and a message that concerns only
the exit handler. The outcome is therefore derived from the steps' notes
(`evergreen.registry.runs`).

A notification is sent for a run that a person or a schedule started. A run of the monitor has a
`trigger_id`, and the monitor announces it as part of the incident. A failed notification does not
fail the run. `evergreen.notifications` defines the message and sends it.
"""

import argparse
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

from evergreen.notifications.webhook import compose, post
from evergreen.registry.promotion_journal import moment_of
from evergreen.registry.runs import (
    RunOutcome,
    StepNote,
    conclude,
    first_start,
    kubeflow_name,
    read_notes,
    write_outcome,
)
from evergreen.runtime.durable import own_umask
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser
from evergreen.runtime.plain_text import log_as_text
from evergreen.storage.uris import local_path

logger = logging.getLogger(__name__)

ADDRESS_VARIABLE = "EVERGREEN_NOTIFY_URL"
"""Environment variable with the webhook's address, from an optional secret. If the variable is
empty or absent, no notification is sent. The address is not a flag or a parameter, because these
are visible to everyone on the machine or in the UI."""
PAUSES_SECONDS = (2.0, 10.0, 30.0)
"""Pauses between attempts. The sum of the pauses is far below the exit handler's time limit of 600
s."""


def record(*, run: str, store: str, trigger_id: str, trigger_reason: str, kfp_state: str) -> str:
    """Write the run's outcome to the registry, notify the webhook, and return a summary.

    The summary is one sentence. `trigger_id` is empty for a run that a person or a schedule
    started.
    """
    own_umask()
    folder = local_path(store)
    notes = read_notes(folder, run)
    outcome = conclude(
        folder,
        notes,
        run=run,
        trigger_id=trigger_id,
        kfp_state=kfp_state,
        ended_at=datetime.now(timezone.utc).isoformat(),
    )
    write_outcome(folder, outcome)
    sentence = f"{outcome.state} at {outcome.step}: {outcome.reason}"
    logger.info("run %s (%s) %s", run, trigger_reason or "started by hand", sentence)
    try:
        notify(outcome, notes, os.environ.get(ADDRESS_VARIABLE, ""))
    except Exception as error:  # noqa: BLE001 - the run has ended well or badly; this must not change it
        logger.warning("the run's end was not announced: %s", type(error).__name__)
    return sentence


def notify(
    outcome: RunOutcome,
    notes: Sequence[StepNote],
    url: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Send one message about the outcome, with retries if the webhook does not answer.

    Nothing is sent if `url` is empty. The monitor announces the outcome of its runs itself, but
    does not know the reports of the steps. Such a run is therefore announced here only if a step
    has something to report.
    """
    if not url.strip() or (outcome.trigger_id and not _reported_by_steps(notes)):
        return
    body = json.dumps(_message(outcome, notes)).encode()
    for pause in (*PAUSES_SECONDS, None):
        answer = post(url.strip(), body)
        if answer.state != "retry" or pause is None:
            break
        # If the webhook requires a longer wait than the longest pause, the message is dropped, so
        # that this task ends.
        sleep(min(max(pause, answer.retry_after or 0.0), max(PAUSES_SECONDS)))
    if answer.state != "delivered":
        logger.warning("the run's end was not announced: %s", answer.reason)


def _message(outcome: RunOutcome, notes: Sequence[StepNote]) -> dict[str, str]:
    """Return the message: outcome, deciding step, reason, live version and the steps' reports."""
    begun = first_start(notes) or moment_of(outcome.ended_at)
    if outcome.state == "released":
        title, done = f"Version {outcome.version} was released", f"{outcome.reason}" or "released"
    elif outcome.state == "canary":
        title, done = (f"Version {outcome.version} runs beside the live version"), outcome.reason
    elif outcome.state == "evaluated":
        title, done = "A new model was evaluated", outcome.reason
    elif outcome.state == "refused":
        title, done = (
            f"The new model was refused by {outcome.step}: {outcome.reason}",
            "the live version does not change",
        )
    else:
        title, done = (
            f"A retraining run failed at {outcome.step}: {outcome.reason}",
            "the live version does not change",
        )
    title = ". ".join([title, *_reported_by_steps(notes)])
    # Plain text, because chat clients do not open file:// links.
    done = "; ".join([done, *(f"report of {step}: {uri}" for step, uri in outcome.reports.items())])
    return compose(
        title,
        numbers={"request_id": kubeflow_name(outcome.run)[0]},
        since=begun.timestamp(),
        done=done,
        link="",
    )


def _reported_by_steps(notes: Sequence[StepNote]) -> list[str]:
    """Return the steps' sentences that are always reported.

    A step stores these sentences under `notify` in its facts.
    """
    return [
        f"{note.step}: {sentence}" for note in notes for sentence in note.facts.get("notify", [])
    ]


def build_parser() -> argparse.ArgumentParser:
    """Build the command's parser."""
    parser = CommandParser(
        prog="python -m components.run_outcome", description="The exit handler as a command."
    )
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--store", required=True, help="folder of the registry")
    parser.add_argument(
        "--trigger-id", default="", help="retrain request that the run answers; empty = none"
    )
    parser.add_argument("--trigger-reason", default="", help="why the run was started")
    parser.add_argument("--kfp-state", required=True, help="the run's final state in KFP")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Record and print the outcome, and notify the webhook that the environment variable names."""
    log_as_text("%(asctime)s %(name)s %(message)s")
    arguments = build_parser().parse_args(argv)
    print(record(**vars(arguments)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
