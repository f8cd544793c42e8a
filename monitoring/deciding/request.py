"""The request that follows a decision: named by its data, incremental or full by a rule over past runs.

In: a confirmed decision, the memory of past runs. Out: a `RetrainRequest`. An incremental run takes minutes
and keeps what the model has learned; a full one takes hours and forgets what no longer holds, such as the ids of
categories that are gone. Both rules for full runs are off by default. Submitting is left to `monitoring.acting`.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from components.contracts.retrain_request import CURRENT, NONE, RetrainRequest
from components.runtime.errors import expect
from monitoring.deciding.policy import Decision
from monitoring.deciding.restraint import RunMemory

OBSERVED_NUMBERS = ("auc", "auc_low", "auc_high", "threshold", "rows", "clicks", "version", "rows_since_breach")
"""Numbers of a decision that its request reports."""


@dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """When a run starts from scratch."""

    full_every_releases: int = 0
    """Every how many releases one comes from a full run; 0 = this rule is off."""
    full_after_refusals: int = 0
    """Incremental runs refused in a row after which the next run is full; 0 = this rule is off."""

    def __post_init__(self) -> None:
        expect(self, "at least 0", lambda value: value >= 0, "full_every_releases", "full_after_refusals")


def choose_parent(memory: RunMemory, settings: RecipeSettings) -> tuple[str, str]:
    """The parent of the next run, `none` or `current`, and the reason.

    >>> rules = RecipeSettings(full_after_refusals=2)
    >>> choose_parent(RunMemory(refusals=1), rules)
    ('current', 'incremental run')
    >>> choose_parent(RunMemory(refusals=2), rules)
    ('none', 'full run: 2 incremental runs in a row were refused')
    """
    if settings.full_after_refusals and memory.refusals >= settings.full_after_refusals:
        return NONE, f"full run: {memory.refusals} incremental runs in a row were refused"
    if settings.full_every_releases and memory.releases_since_full + 1 >= settings.full_every_releases:
        return NONE, f"full run: {memory.releases_since_full} releases since the last full run"
    return CURRENT, "incremental run"


def make_request(decision: Decision, *, parent: str, why: str, data_until: float, now: float) -> RetrainRequest:
    """The request for a run over the rows up to `data_until`.

    Its name follows from the version of the data: the end of its rows, the model that serves, and whether the run
    starts from scratch. Neither the clock nor the monitor that asks is part of it: two monitors that saw the same rows
    request the same run, which every trigger starts once. `parent` is `none` or `current`, for the reason `why`. Every
    row up to `data_until`, inclusive, is matured; the window's end is exclusive and the archive counts microseconds, so
    it lies one later.
    """
    end = datetime.fromtimestamp(data_until, timezone.utc)
    # Two decision points of one second must not share a name.
    fraction = f"{end.microsecond:06d}" if end.microsecond else ""
    version = decision.numbers["version"]
    name = f"drift-{end.strftime('%Y%m%dT%H%M%S')}{fraction}Z-v{version}{'-full' if parent == NONE else ''}"
    return RetrainRequest(
        request_id=name,
        reason=f"{decision.reason} ({why})",
        requested_at=datetime.fromtimestamp(now, timezone.utc).isoformat(),
        window_start="",
        window_end=(end + timedelta(microseconds=1)).isoformat(),
        parent=parent,
        observed={name: decision.numbers.get(name) for name in OBSERVED_NUMBERS},
    )
