"""Act on decisions: start a run or notify people, within the rate limits.

The input is the decisions of the policies. `DecisionHandler.consider` applies the rate limits
(`monitoring.policies.rate_limit`) to a decision, and starts a run or notifies people. The loop also
calls `DecisionHandler.step` in every iteration. `step` advances the run in progress
(`monitoring.retraining.retraining`) and sends messages (`monitoring.retraining.notifications`). At
most one run is in progress.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from evergreen.config.monitor import RateLimitSettings, RecipeSettings, split_names
from evergreen.notifications.webhook import post_to_file
from evergreen.runtime.durable import no_checkpoint
from evergreen.runtime.errors import ContractError, expect
from monitoring.journal import Journal
from monitoring.policies import rate_limit
from monitoring.policies.baking import BAKING
from monitoring.policies.policy import Action, Decision
from monitoring.policies.rate_limit import PastRuns, apply_limits
from monitoring.retraining.new_versions import NewVersions
from monitoring.retraining.notifications import (
    DRIFT,
    LOG,
    NotificationSettings,
    Notifier,
    OpenIncident,
    Outbox,
)
from monitoring.retraining.retraining import IDLE, RUNNING, Retraining, RunProgress
from monitoring.retraining.triggers import KubeflowSettings, KubeflowTrigger, LocalTrigger, Trigger
from monitoring.state.database import Database, read_dataclass

if TYPE_CHECKING:
    from monitoring.state.archive import Archive

_TRIGGERS = ("none", "local", "kubeflow")
_NOTIFY_LIMITS = "rate_limits.notify"
"""Name of a document with rate limits. The document's limits apply to notifications that replace a
run."""
_REPORTED = "reported"
"""Name of the document that contains the last reported action of the drift. The document is empty
after the drift ended."""
_LOG_DOWN_SECONDS = 60.0
"""Seconds without the event log before the outage is reported. A broker restarts within this
time."""


@dataclass(frozen=True, kw_only=True)
class ActionSettings:
    """Settings of the actions after a confirmed drift."""

    trigger: str = "none"
    """How the pipeline is started: `local` (a process), `kubeflow`, or `none` (only notify)."""
    run_command: str = ""
    """Local trigger: command line that runs the pipeline. `--request <file>` is appended."""
    upload_wait_seconds: float = 600.0
    """Maximum wait for the uploader before a run is requested, in seconds. 0 = the archive is the
    lake, and there is no uploader."""
    kubeflow: KubeflowSettings = KubeflowSettings()
    notifications: NotificationSettings = NotificationSettings()

    def __post_init__(self) -> None:
        expect(self, f"one of {', '.join(_TRIGGERS)}", lambda value: value in _TRIGGERS, "trigger")
        expect(self, "at least 0", lambda value: value >= 0, "upload_wait_seconds")
        if self.trigger == "local" and not self.run_command.strip():
            raise ContractError(
                "run_command is empty, expected a command line for the local trigger"
            )
        if self.trigger == "kubeflow":
            self.kubeflow.expect_complete()


def make_trigger(
    settings: ActionSettings, *, state: Path, store: Path, umask: int = -1
) -> Trigger | None:
    """Create the trigger that the settings name. None means only notifications.

    Args:
        settings: Settings of the trigger.
        state: State folder of the monitor.
        store: Model registry.
        umask: Umask of local runs. -1 keeps the monitor's own.
    """
    if settings.trigger == "local":
        return LocalTrigger(state, store, settings.run_command, umask=umask)
    if settings.trigger == "kubeflow":
        return KubeflowTrigger(settings.kubeflow, store=store)
    return None


@dataclass(frozen=True, kw_only=True)
class ActionStatus:
    """The retrain request in progress and the current rate limits, for the pages."""

    phase: str = IDLE
    """Phase of the request in progress, see `monitoring.retraining.retraining`."""
    request_id: str | None = None
    started_at: float | None = None
    """Start of the active run, in seconds since the epoch, or None."""
    daily_budget: int | None = None
    budget_left: int | None = None
    blocked_until: float | None = None
    """Time before which no run may be requested, in seconds since the epoch. None if requests are
    allowed now."""
    blocked_by: str | None = None
    failures: int | None = None
    """Number of consecutive runs without a release."""
    failed: int | None = None
    """Number of consecutive failed runs, counted back from the newest run."""
    incident_since: float | None = None
    last_action: str | None = None
    messages_waiting: int | None = None
    """Number of unsent messages. None if there is no webhook."""


def describe_actions(
    progress: RunProgress,
    past_runs: PastRuns,
    incident: OpenIncident | None,
    *,
    daily_budget: int,
    messages_waiting: int | None,
    now: float,
) -> ActionStatus:
    """Return the status of a monitor's actions.

    Args:
        progress: The request in progress.
        past_runs: Facts about past runs, for the rate limits.
        incident: The open incident of a drift, or None.
        daily_budget: Maximum number of requests in 24 hours.
        messages_waiting: Number of unsent messages. None if there is no webhook.
        now: Seconds since the epoch.
    """
    is_blocked = past_runs.blocked_until > now
    return ActionStatus(
        phase=progress.phase,
        request_id=progress.request_id or None,
        started_at=progress.started_at if progress.phase == RUNNING else None,
        daily_budget=daily_budget,
        budget_left=max(0, daily_budget - past_runs.num_requests_today(now)),
        blocked_until=past_runs.blocked_until if is_blocked else None,
        blocked_by=past_runs.blocked_by if is_blocked else None,
        failures=past_runs.failures,
        failed=past_runs.failed,
        incident_since=incident.since if incident else None,
        last_action=incident.text if incident else None,
        messages_waiting=messages_waiting,
    )


class DecisionHandler:
    """Starts runs and notifications from decisions. At most one run is active at a time."""

    def __init__(
        self,
        settings: ActionSettings,
        rate_limit: RateLimitSettings,
        *,
        recipe: RecipeSettings,
        notify_only: str,
        recommender: str,
        new_versions: NewVersions,
        documents: Database,
        archive: "Archive",
        trigger: Trigger | None,
        journal: Journal,
        clock: Callable[[], float],
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Continue where a predecessor stopped, and listen for events of the journal.

        The archive is flushed before a run is requested. If there is no trigger, or if the policy
        is in `notify_only`, people are notified and no run starts.
        """
        self._limits = rate_limit
        self._documents = documents
        self._journal = journal
        self._notify_only = split_names(notify_only)
        self._has_trigger = trigger is not None
        self.new_versions = new_versions
        self.retraining = Retraining(
            documents=documents,
            archive=archive,
            trigger=trigger,
            journal=journal,
            rate_limit=rate_limit,
            recipe=recipe,
            upload_wait_seconds=settings.upload_wait_seconds,
            checkpoint=checkpoint,
        )
        url_file = Path(settings.notifications.webhook_file)
        outbox = (
            Outbox(documents, partial(post_to_file, url_file))
            if settings.notifications.webhook_file
            else None
        )
        self.notifier = Notifier(
            documents, outbox, settings.notifications, recommender=recommender, clock=clock
        )
        journal.listener = self.notifier.on_event
        self._reported = str((documents.read_document(_REPORTED) or {"action": ""})["action"])
        self._log_down_since: float | None = None
        if not self._reported and self._is_idle:
            # If a predecessor was killed between the event and its record, nothing else would close
            # the incident.
            self.notifier.close_silently(DRIFT)

    def consider(
        self, decision: Decision, decisions: Sequence[Decision], *, now: float, data_until: float
    ) -> Decision:
        """Apply the rate limits to a decision, and start a run or notify people.

        Args:
            decision: The combined decision.
            decisions: Decision of each policy. Some policies start a run, other policies only
                notify people.
            now: Seconds since the epoch.
            data_until: Event time up to which every row matured, in seconds since the epoch.

        Returns:
            The decision. The action is HELD if the run must wait.
        """
        for each in decisions:
            if each.policy == BAKING:
                self.new_versions.consider(each, now=now)
        if decision.action is Action.ROLLBACK:
            # No run starts before the rollback. After the rollback, the rows of the restored
            # version show whether a new model is needed.
            return decision
        confirmed = [each for each in decisions if each.action is Action.RETRAIN]
        acted = [self._act(each, now, data_until) for each in confirmed]
        if acted and all(each.action is Action.HELD for each in acted):
            decision = dataclasses.replace(decision, action=Action.HELD, reason=acted[0].reason)
        self._report_drift(decision)
        return decision

    def step(self, now: float, *, log_problem: str | None = None) -> None:
        """Advance the retraining and the notifications without waiting.

        `log_problem` is the reason why no record can arrive from the event log, or None.
        """
        self._report_log(log_problem, now)
        if self.new_versions.step(now):
            self.retraining.begin_cooldown(rate_limit.ROLLED_BACK, now)
        self.notifier.step(now)
        self.retraining.step(now)

    def status(self, now: float) -> ActionStatus:
        """Return the status for the page and the metrics."""
        outbox = self.notifier.outbox
        return describe_actions(
            self.retraining.progress,
            self.retraining.past_runs,
            self.notifier.open.get(DRIFT),
            daily_budget=self._limits.daily_budget,
            messages_waiting=None if outbox is None else len(outbox),
            now=now,
        )

    @property
    def _is_idle(self) -> bool:
        return self.retraining.progress.phase == IDLE

    def _act(self, decision: Decision, now: float, data_until: float) -> Decision:
        if decision.policy in self._notify_only or not self._has_trigger:
            self._notify(decision, now)
            return decision
        acted = apply_limits(decision, self.retraining.past_runs, self._limits, now=now)
        if acted.action is Action.RETRAIN and self._is_idle:
            self.retraining.begin(decision, now=now, data_until=data_until)
        return acted

    def _notify(self, decision: Decision, now: float) -> None:
        """Notify people instead of starting a run, within the rate limits of runs."""
        past_runs = read_dataclass(self._documents, _NOTIFY_LIMITS, PastRuns)
        if apply_limits(decision, past_runs, self._limits, now=now).action is Action.HELD:
            return
        self._journal.emit("decision", decision.reason, policy=decision.policy, **decision.numbers)
        past_runs = rate_limit.requested(past_runs, now=now)
        past_runs = rate_limit.ended(past_runs, "notified", self._limits, now=now)
        self._documents.write_documents(
            {_NOTIFY_LIMITS: dataclasses.asdict(past_runs)}, {"request_notified": 1}
        )

    def _report_drift(self, decision: Decision) -> None:
        """Emit events when a drift is suspected or ends, and when the rate limits defer a run.

        The events are not repeated after a restart. Retrain requests have their own events.
        """
        action, reported = decision.action, self._reported
        if action is Action.RETRAIN:
            reported = Action.BREACH.value
        elif action is Action.HELD or (action is Action.BREACH and not reported):
            if action.value != reported:
                self._journal.emit(
                    action.value, decision.reason, policy=decision.policy, **decision.numbers
                )
            reported = action.value
        elif action is Action.OK and reported:
            self._journal.emit(
                "recovered", decision.reason, policy=decision.policy, **decision.numbers
            )
            reported = ""
        if reported != self._reported:
            self._documents.write_documents({_REPORTED: {"action": reported}})
            self._reported = reported

    def _report_log(self, problem: str | None, now: float) -> None:
        """Emit an event when the log is down for a while, and when it is back."""
        is_reported = LOG in self.notifier.open  # by this process or an earlier process
        if problem is None:
            if is_reported:
                self._journal.emit("log_up", "messages can arrive again")
            self._log_down_since = None
        elif self._log_down_since is None:
            self._log_down_since = now
        # If the clock was set back, an early report is better than no report.
        elif abs(now - self._log_down_since) >= _LOG_DOWN_SECONDS and not is_reported:
            self._journal.emit("log_down", problem)
