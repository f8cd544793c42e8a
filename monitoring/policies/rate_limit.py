"""Rate limits of retraining runs: the retrain cooldown, back-off and daily budget.

A cooldown follows a release, a growing back-off follows failures, and a daily budget limits the
number of runs. The functions are pure. Each function computes its result from a decision, the state
of past runs and the time. `monitoring.retraining.retraining` stores the state of past runs.

The name of a `RetrainRequest` is derived from its data. An incremental run takes minutes and
continues from the current model. A full run takes hours and starts from scratch. A model from a
full run has no outdated knowledge, such as the ids of deleted categories. Whether the next run is
full depends on past runs. The two settings for full runs, `full_every_releases` and
`full_after_refusals`, are off by default. `monitoring.retraining` submits the request.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

from evergreen.config.monitor import RateLimitSettings, RecipeSettings
from evergreen.contracts.manifests import CURRENT, NONE, RetrainRequest
from monitoring.policies.policy import Action, Decision

DAY_SECONDS = 86_400.0
ROLLED_BACK = "rolled_back"
"""Outcome of a new version that was bad and was rolled back."""
_ENDED_WELL = {
    "released": "a release",
    "canary": "a canary's start",
    "evaluated": "a model that is stored",
    "notified": "a notification",
    ROLLED_BACK: "a new version was rolled back",
}


@dataclass(frozen=True, kw_only=True)
class PastRuns:
    """Facts about past runs from which the rate limits are computed."""

    blocked_until: float = 0.0
    """Time before which no run may be requested, in seconds since the epoch."""
    blocked_by: str = ""
    failures: int = 0
    """Number of consecutive runs without a release."""
    failed: int = 0
    """Number of consecutive failed runs, counted back from the newest run. A run that was refused
    does not count as failed."""
    requested_at: tuple[float, ...] = ()
    """Times of the requests of the last day."""
    releases_since_full: int = 0
    """Number of releases since the last full run was released."""
    refusals: int = 0
    """Number of consecutive incremental runs that were refused."""

    def num_requests_today(self, now: float) -> int:
        """Count the requests of the last 24 hours.

        If the clock was set back, requests with a time in the future are counted too.
        """
        return sum(abs(time - now) < DAY_SECONDS for time in self.requested_at)


def apply_limits(
    decision: Decision, past_runs: PastRuns, settings: RateLimitSettings, *, now: float
) -> Decision:
    """Apply the rate limits: RETRAIN becomes HELD while a pause or the budget forbids a run."""
    if decision.action is not Action.RETRAIN or not (
        cause := _why_not_now(past_runs, settings, now)
    ):
        return decision
    return replace(decision, action=Action.HELD, reason=f"{decision.reason}; {cause}")


def _why_not_now(past_runs: PastRuns, settings: RateLimitSettings, now: float) -> str:
    pause = past_runs.blocked_until - now
    # Ignore a pause that is longer than any setting, because it was computed before the clock was
    # set back.
    if 0 < pause <= max(DAY_SECONDS, settings.cooldown_seconds):
        return f"held {pause:.0f} s more: {past_runs.blocked_by}"
    spent = past_runs.num_requests_today(now)
    if spent >= settings.daily_budget:
        return f"held: {spent} requests in 24 hours, the daily budget is {settings.daily_budget}"
    return ""


def requested(past_runs: PastRuns, *, now: float) -> PastRuns:
    """Return the new state when a run has been requested."""
    recent = tuple(time for time in past_runs.requested_at if abs(time - now) < DAY_SECONDS)
    return replace(past_runs, requested_at=(*recent, now))


def ended(
    past_runs: PastRuns,
    outcome: str,
    settings: RateLimitSettings,
    *,
    now: float,
    parent: str = CURRENT,
) -> PastRuns:
    """Return the new state when a run has ended.

    After a good outcome, a cooldown begins. After `refused` or `failed`, a back-off begins, which
    doubles each time. A canary counts as a release, because the gate accepted the model.

    Args:
        past_runs: State before the run ended.
        outcome: `released`, `canary`, `evaluated`, `refused` or `failed`. `notified` means that no
            run was started, because people were notified instead. `ROLLED_BACK` means that another
            program rolled a version back.
        settings: Rate limits.
        now: Seconds since the epoch.
        parent: `none` for a full run, `current` for an incremental run.

    >>> settings = RateLimitSettings(cooldown_seconds=0.0)
    >>> once = ended(PastRuns(), "failed", settings, now=0.0)
    >>> once.blocked_until, ended(once, "refused", settings, now=0.0).blocked_until
    (900.0, 1800.0)
    """
    if outcome in _ENDED_WELL:
        is_release = outcome not in ("evaluated", ROLLED_BACK)
        return replace(
            past_runs,
            blocked_until=now + settings.cooldown_seconds,
            blocked_by=f"cooldown after {_ENDED_WELL[outcome]}",
            failures=0,
            failed=0,
            releases_since_full=0 if parent == NONE else past_runs.releases_since_full + is_release,
            refusals=0,
        )
    refusals = past_runs.refusals
    if outcome == "refused":
        # Reset the count of refusals after a refused full run, so that the next run is incremental.
        # Otherwise, full runs would follow each other.
        refusals = 0 if parent == NONE else refusals + 1
    failures = past_runs.failures + 1
    backoff = min(settings.failure_backoff_seconds * 2.0 ** min(failures - 1, 30), DAY_SECONDS)
    return replace(
        past_runs,
        blocked_until=now + max(backoff, settings.cooldown_seconds),
        blocked_by=f"back-off after {failures} run{'s' if failures > 1 else ''} without a release",
        failures=failures,
        failed=past_runs.failed + 1 if outcome == "failed" else 0,
        refusals=refusals,
    )


OBSERVED_NUMBERS = (
    *(
        "auc",
        "auc_low",
        "auc_high",
        "threshold",
        "rows",
        "clicks",
        "version",
        "window_version",
        "rows_since_breach",
    ),
)
"""Names of the decision's numbers that are copied to its retrain request."""


def choose_parent(past_runs: PastRuns, settings: RecipeSettings) -> tuple[str, str]:
    """Return the parent of the next run, `none` or `current`, and the reason.

    >>> rules = RecipeSettings(full_after_refusals=2)
    >>> choose_parent(PastRuns(refusals=1), rules)
    ('current', 'incremental run')
    >>> choose_parent(PastRuns(refusals=2), rules)
    ('none', 'full run: 2 incremental runs in a row were refused')
    """
    if settings.full_after_refusals and past_runs.refusals >= settings.full_after_refusals:
        return NONE, f"full run: {past_runs.refusals} incremental runs in a row were refused"
    if (
        settings.full_every_releases
        and past_runs.releases_since_full + 1 >= settings.full_every_releases
    ):
        return NONE, f"full run: {past_runs.releases_since_full} releases since the last full run"
    return CURRENT, "incremental run"


def make_request(
    decision: Decision, *, parent: str, why: str, data_until: float, now: float
) -> RetrainRequest:
    """Return the request for a run over the rows up to `data_until`.

    The name consists of the end of the rows, the serving model and the kind of the run (full or
    incremental). The name is independent of clocks and of the monitor's identity. If two monitors
    have read the same rows, they therefore request the same run, and every trigger starts that run
    once. The window ends one microsecond after `data_until`, because its end is exclusive.

    Args:
        decision: The decision to retrain.
        parent: `none` or `current`.
        why: Reason for the parent.
        data_until: Event time in seconds since the epoch, inclusive. Every row up to this time has
            matured.
        now: Seconds since the epoch.
    """
    end = datetime.fromtimestamp(data_until, timezone.utc)
    # Two decision points within one second must not share a name.
    fraction = f"{end.microsecond:06d}" if end.microsecond else ""
    version = decision.numbers["version"]
    kind = "-full" if parent == NONE else ""
    name = f"drift-{end.strftime('%Y%m%dT%H%M%S')}{fraction}Z-v{version}{kind}"
    return RetrainRequest(
        request_id=name,
        reason=f"{decision.reason} ({why})",
        requested_at=datetime.fromtimestamp(now, timezone.utc).isoformat(),
        window_start="",
        window_end=(end + timedelta(microseconds=1)).isoformat(),
        parent=parent,
        observed={name: decision.numbers.get(name) for name in OBSERVED_NUMBERS},
    )
