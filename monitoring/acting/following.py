"""One look at a run that was asked for: it goes on, or this is how it ended.

In: the trigger, what is remembered of the run, the time. Out: what is to be remembered, and the end once there is one.
A run of which the trigger knows nothing any more is waited for a while: its list may lag, or an experiment may be
restored; then it counts as failed. A paused run is not over, and somebody has to resume it.
"""

from __future__ import annotations

from dataclasses import replace

from components.runtime.errors import ContractError, PermanentError
from monitoring.acting import trigger
from monitoring.acting.progress import Progress
from monitoring.acting.trigger import RunState, Trigger

UNKNOWN_SECONDS = 60.0
"""How long a submitted run may be unknown to its trigger before it counts as failed."""
OVERDUE_SECONDS = 6 * 3600.0
"""A run that takes longer is told of, once; it is followed to its end all the same."""


def follow(runner: Trigger, progress: Progress, name: str, now: float) -> tuple[Progress, RunState | None]:
    """The progress to be kept, and how the run `name` ended; None while it has not.

    Args:
        runner: That was asked for the run.
        progress: Of the request, whose phase is `running`.
        name: Of the request.
        now: Seconds since the epoch.

    Raises:
        TemporaryError: the trigger is not reachable now.
    """
    try:
        run = runner.state(name)
    except (PermanentError, ContractError, OSError) as error:
        # Asking again is useless, and to end the monitor over a lost run would stop the archive too.
        return progress, RunState(trigger.FAILED, str(error))
    if run.state == trigger.UNKNOWN:
        since = progress.unknown_since or now
        is_lost = now >= since + UNKNOWN_SECONDS
        return replace(progress, unknown_since=since), RunState(trigger.FAILED, run.reason) if is_lost else None
    if run.state != trigger.RUNNING:
        return progress, run
    overdue = progress.is_overdue or now - progress.started_at >= OVERDUE_SECONDS
    next_try_at = now + runner.poll_seconds if runner.poll_seconds else progress.next_try_at
    return replace(progress, unknown_since=0.0, told="", is_overdue=overdue, next_try_at=next_try_at), None
