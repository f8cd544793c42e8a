"""How a run ended: decided from its steps' notes and KFP's state, and written beside the notes.

KFP's state alone does not show it: the hosted backend passes COMPLETE or FAILED without a message, the local one
SUCCEEDED or FAILED, and names the exit handler itself. The notes are `store.runs`'; people are notified by `notice`, or
by the monitor where it started the run.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime, timezone

from components.run_outcome.notice import notify
from components.storage.uris import local_path
from components.store.runs import RunOutcome, StepNote, read_notes, reports_of, write_outcome

logger = logging.getLogger(__name__)

FAILED_STATES = frozenset({"FAILED", "CANCELED", "CANCELLED", "ERROR"})
LAST_STEP = "deployment"


def record(*, run: str, store: str, trigger_id: str, trigger_reason: str, kfp_state: str, notify_url: str = "") -> str:
    """Writes the run's outcome to the store, notifies the webhook, and returns it as one sentence.

    Args:
        run: Name of the run.
        store: Folder of the model store.
        trigger_id: The monitor's request; empty for a run that a person or a schedule started.
        trigger_reason: Why it was started.
        kfp_state: The run's final state in KFP.
        notify_url: Webhook to notify, see `notice.notify`; empty = none.
    """
    folder = local_path(store)
    notes = read_notes(folder, run)
    outcome = decide(
        notes,
        run=run,
        trigger_id=trigger_id,
        kfp_state=kfp_state,
        ended_at=datetime.now(timezone.utc).isoformat(),
    )
    outcome = replace(outcome, reports=reports_of(folder, run))
    write_outcome(folder, outcome)
    sentence = f"{outcome.state} at {outcome.step}: {outcome.reason}"
    logger.info("run %s (%s) %s", run, trigger_reason or "started by hand", sentence)
    logger.info("notification: %s", notify(outcome, notes, notify_url))
    return sentence


def decide(notes: list[StepNote], *, run: str, trigger_id: str, kfp_state: str, ended_at: str) -> RunOutcome:
    """The outcome that the notes (in step order) and KFP's state together show.

    A step whose note is still `running` was killed.
    """
    last = notes[-1] if notes else StepNote(step="none", state="failed", reason="no step started")
    version = None
    if last.state == "refused":
        state, reason = "refused", last.reason
    elif last.state == "done" and last.step == LAST_STEP and kfp_state not in FAILED_STATES:
        state, reason = "released", last.reason
        version = int(last.facts["version"])
    elif last.state == "failed":
        state, reason = "failed", last.reason
    elif last.state == "preempted":
        state, reason = "failed", f"preempted, and no retry was left: {last.reason}"
    elif last.state == "running":
        state, reason = "failed", f"{last.step} ended without a note (killed, out of memory or out of time)"
    else:
        state, reason = "failed", f"nothing followed {last.step}, KFP says {kfp_state}"
    return RunOutcome(
        run=run,
        trigger_id=trigger_id,
        state=state,
        step=last.step,
        reason=reason,
        version=version,
        ended_at=ended_at,
    )
