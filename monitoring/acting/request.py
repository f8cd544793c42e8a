"""What a decision asks the pipeline for: a request named by its data, so that asking twice is asking once."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from components.contracts.retrain_request import NONE, RetrainRequest
from monitoring.deciding.decision import Decision

OBSERVED_NUMBERS = ("auc", "auc_low", "auc_high", "threshold", "rows", "clicks", "version", "rows_since_breach")


def make_request(
    decision: Decision, *, parent: str, recipe: str, data_until: float, now: float, fence: int = 0
) -> RetrainRequest:
    """The request for a run over the rows up to `data_until`.

    Its name follows from the version of the data: the end of its rows, the model that serves, and whether the run
    starts from nothing. The clock and the replica that asks do not enter: two replicas that saw the same rows ask for
    the same run, which every trigger starts once.

    Args:
        decision: Confirmed.
        parent: `none` or `current`.
        recipe: Why this parent.
        data_until: Event time (seconds since the epoch) up to which, inclusive, every row is matured. The window's end
            is exclusive and the archive counts microseconds, so it lies one later.
        now: Seconds since the epoch.
        fence: Term of the lease under which it is asked for; 0 = there is no lease.
    """
    end = utc(data_until)
    version = decision.numbers["version"]
    name = f"drift-{end.strftime('%Y%m%dT%H%M%S')}{_fraction(end)}Z-v{version}{'-full' if parent == NONE else ''}"
    asked = f", term {fence}" if fence else ""
    return RetrainRequest(
        request_id=name,
        reason=f"{decision.reason} ({recipe}{asked})",
        requested_at=utc(now).isoformat(),
        window_start="",
        window_end=(end + timedelta(microseconds=1)).isoformat(),
        parent=parent,
        observed={name: decision.numbers.get(name) for name in OBSERVED_NUMBERS},
        fence=fence,
    )


def utc(time: float) -> datetime:
    """`time`, seconds since the epoch, with its zone."""
    return datetime.fromtimestamp(time, timezone.utc)


def _fraction(moment: datetime) -> str:
    """Two decision points of one second must not share a name."""
    return f"{moment.microsecond:06d}" if moment.microsecond else ""
