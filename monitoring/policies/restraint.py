"""When a confirmed drift must wait, and the request that follows where it need not.

A cool-down follows a release, a back-off failures, and there is a daily budget of runs: a decision, the memory of past
runs and the time give the decision as it may be acted on, and the new memory. Storing that is left to
`monitoring.retraining.retraining`.

A `RetrainRequest` is named by its data. An incremental run takes minutes and keeps what the model has learned; a full
one takes hours and forgets what no longer holds, such as the ids of categories that are gone. Which it is follows from
past runs; both rules for full runs are off by default. Submitting is left to `monitoring.retraining`.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

from evergreen.config.monitor import RecipeSettings, RestraintSettings
from evergreen.contracts.manifests import CURRENT, NONE, RetrainRequest
from monitoring.policies.policy import Action, Decision

DAY_SECONDS = 86_400.0
TAKEN_BACK = "taken_back"
"""A new version turned out to be bad, and the one before it is live again."""
_ENDED_WELL = {
    "released": "a release",
    "canary": "a canary's start",
    "judged": "a model that is kept",
    "notified": "a notification",
    TAKEN_BACK: "a new version was taken back",
}


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """What is remembered of past runs."""

    blocked_until: float = 0.0
    """No request before this time."""
    blocked_by: str = ""
    failures: int = 0
    """Runs in a row that released nothing."""
    failed: int = 0
    """The newest of them in a row that failed, where others were refused."""
    requested_at: tuple[float, ...] = ()
    """Times of the requests of the last day."""
    releases_since_full: int = 0
    """Releases since the last one that came from a full run."""
    refusals: int = 0
    """Incremental runs refused in a row."""

    def num_requests_today(self, now: float) -> int:
        """Requests of the last 24 hours; a clock that was set back counts those that seem to be in the future too."""
        return sum(abs(time - now) < DAY_SECONDS for time in self.requested_at)


def restrain(decision: Decision, memory: RunMemory, settings: RestraintSettings, *, now: float) -> Decision:
    """The decision as it may be acted on: RETRAIN becomes HELD while a pause or the budget forbids a run."""
    if decision.action is not Action.RETRAIN or not (cause := _why_not_now(memory, settings, now)):
        return decision
    return replace(decision, action=Action.HELD, reason=f"{decision.reason}; {cause}")


def _why_not_now(memory: RunMemory, settings: RestraintSettings, now: float) -> str:
    pause = memory.blocked_until - now
    # No pause is longer: one that seems so was written under a clock that has since been set back.
    if 0 < pause <= max(DAY_SECONDS, settings.cooldown_seconds):
        return f"held {pause:.0f} s more: {memory.blocked_by}"
    spent = memory.num_requests_today(now)
    if spent >= settings.daily_budget:
        return f"held: {spent} requests in 24 hours, the daily budget is {settings.daily_budget}"
    return ""


def requested(memory: RunMemory, *, now: float) -> RunMemory:
    """The memory after a request was made."""
    recent = tuple(time for time in memory.requested_at if abs(time - now) < DAY_SECONDS)
    return replace(memory, requested_at=(*recent, now))


def ended(
    memory: RunMemory, outcome: str, settings: RestraintSettings, *, now: float, parent: str = CURRENT
) -> RunMemory:
    """The memory after a run with this `parent` ended as `released`, `canary`, `judged`, `refused` or `failed`.

    Also after people were `notified` in place of a run, or a version was `TAKEN_BACK`. These and a release are followed
    by the cool-down, anything else by a back-off, longer each time. A canary counts as a release: the gate did not
    refuse the model, and what becomes of it is for the canary to decide.

    >>> settings = RestraintSettings(cooldown_seconds=0.0)
    >>> once = ended(RunMemory(), "failed", settings, now=0.0)
    >>> once.blocked_until, ended(once, "refused", settings, now=0.0).blocked_until
    (900.0, 1800.0)
    """
    if outcome in _ENDED_WELL:
        is_release = outcome not in ("judged", TAKEN_BACK)
        return replace(
            memory,
            blocked_until=now + settings.cooldown_seconds,
            blocked_by=f"cool-down after {_ENDED_WELL[outcome]}",
            failures=0,
            failed=0,
            releases_since_full=0 if parent == NONE else memory.releases_since_full + is_release,
            refusals=0,
        )
    refusals = memory.refusals
    if outcome == "refused":
        # After a refused full run the next may be incremental again, or full runs would follow each other.
        refusals = 0 if parent == NONE else refusals + 1
    failures = memory.failures + 1
    backoff = min(settings.failure_backoff_seconds * 2.0 ** min(failures - 1, 30), DAY_SECONDS)
    return replace(
        memory,
        blocked_until=now + max(backoff, settings.cooldown_seconds),
        blocked_by=f"back-off after {failures} run{'s' if failures > 1 else ''} without a release",
        failures=failures,
        failed=memory.failed + 1 if outcome == "failed" else 0,
        refusals=refusals,
    )


OBSERVED_NUMBERS = (
    *("auc", "auc_low", "auc_high", "threshold", "rows", "clicks", "version", "window_version", "rows_since_breach"),
)
"""Numbers of a decision that its request reports."""


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
