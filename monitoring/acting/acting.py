"""What follows a decision: a run of the pipeline or a notification, restrained, and events when something changes.

In: decisions, turns of the loop. Out: the decision as it was acted on; at most one run at a time
(`monitoring.acting.retraining`); messages (`monitoring.acting.notifications`). When a run must wait is
`monitoring.deciding.restraint`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from components.notices.webhook import post_to_file
from components.runtime.durable import no_checkpoint
from components.runtime.errors import ContractError
from monitoring.acting.kubeflow_trigger import KubeflowSettings, KubeflowTrigger
from monitoring.acting.local_trigger import LocalTrigger
from monitoring.acting.notifications import DRIFT, LOG, NotificationSettings, Notifier, Outbox
from monitoring.acting.retraining import IDLE, RUNNING, Retraining
from monitoring.acting.trigger import Trigger
from monitoring.deciding import restraint
from monitoring.deciding.policy import Action, Decision
from monitoring.deciding.request import RecipeSettings
from monitoring.deciding.restraint import RestraintMemory, RestraintSettings, restrain
from monitoring.documents import Documents, as_document, read_memory
from monitoring.flags import expect
from monitoring.journal import Journal

if TYPE_CHECKING:
    from monitoring.memory.archive import Archive

TRIGGERS = ("none", "local", "kubeflow")
RETRAIN, NOTIFY = "retrain", "notify"
NOTIFY_RESTRAINT = "restraint.notify"
"""Document with the restraint of notifications that take the place of a run."""
REPORTED = "reported"
"""Document with the action of the drift that was reported last; empty after its end."""
LOG_DOWN_SECONDS = 60.0
"""A log that is down for less is a broker that restarts, and no reason to wake anybody."""


@dataclass(frozen=True, kw_only=True)
class ActingSettings:
    """What is done about a drift, and by whom."""

    trigger: str = "none"
    """Who runs the pipeline: `local` (a process), `kubeflow`, or `none` (only notify)."""
    run_command: str = ""
    """Local trigger: command line that runs the pipeline; `--request <file>` is appended."""
    upload_wait_seconds: float = 600.0
    """Longest wait for the uploader before a run is requested; 0 = the archive is the lake, do not wait."""
    actions: str = ""
    """Action of each policy, `retrain` or `notify`, such as `threshold=retrain,data_drift=notify`. A policy that is
    not named retrains."""
    recipe: RecipeSettings = RecipeSettings()
    kubeflow: KubeflowSettings = KubeflowSettings()
    notifications: NotificationSettings = NotificationSettings()

    def __post_init__(self) -> None:
        """Refuses a trigger that cannot start a run."""
        parse_actions(self.actions)
        expect(self, f"one of {', '.join(TRIGGERS)}", lambda value: value in TRIGGERS, "trigger")
        expect(self, "at least 0", lambda value: value >= 0, "upload_wait_seconds")
        if self.trigger == "local" and not self.run_command.strip():
            raise ContractError("run_command is empty, expected a command line for the local trigger")
        if self.trigger == "kubeflow":
            self.kubeflow.expect_complete()


def parse_actions(text: str) -> dict[str, str]:
    """The action of each policy.

    Raises:
        ContractError: an item is no `policy=action`, or names a policy twice.

    >>> parse_actions("threshold=retrain, data_drift=notify")
    {'threshold': 'retrain', 'data_drift': 'notify'}
    """
    actions: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        policy, _, action = (part.strip() for part in item.partition("="))
        if not policy or action not in (RETRAIN, NOTIFY):
            raise ContractError(f"actions has {item!r}, expected policy={RETRAIN} or policy={NOTIFY}")
        if policy in actions:
            raise ContractError(f"actions names {policy!r} twice, expected one action for each policy")
        actions[policy] = action
    return actions


def make_trigger(settings: ActingSettings, *, state: Path, store: Path) -> Trigger | None:
    """The trigger that the settings name; None where the monitor only notifies.

    Args:
        settings: See `ActingSettings`.
        state: The monitor's state folder.
        store: The model store, where runs leave their outcome.
    """
    if settings.trigger == "local":
        return LocalTrigger(state, store, settings.run_command)
    if settings.trigger == "kubeflow":
        return KubeflowTrigger(settings.kubeflow, store=store)
    return None


@dataclass(frozen=True, kw_only=True)
class ActingStatus:
    """What is being done, and what restrains the next run; a number that does not exist is None."""

    phase: str = IDLE
    """Of the request under way; see `monitoring.acting.retraining`."""
    request_id: str | None = None
    started_at: float | None = None
    """When the active run was started."""
    daily_budget: int | None = None
    budget_left: int | None = None
    requests_today: int = 0
    blocked_until: float | None = None
    """No request before this time; None while nothing forbids one."""
    blocked_by: str | None = None
    failures: int | None = None
    """Runs in a row that released nothing."""
    failed: int | None = None
    """The newest of them in a row that failed."""
    incident_since: float | None = None
    last_action: str | None = None
    messages_waiting: int | None = None
    """None without a webhook."""


class Acting:
    """Acts on decisions; at most one run at a time."""

    def __init__(
        self,
        settings: ActingSettings,
        restraint: RestraintSettings,
        *,
        documents: Documents,
        archive: Archive,
        trigger: Trigger | None,
        journal: Journal,
        clock: Callable[[], float],
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Continues where a predecessor stopped; listens to the journal from now on.

        Args:
            settings: See `ActingSettings`.
            restraint: How often a run may be requested.
            documents: The monitor's memory.
            archive: Flushed before a run is requested.
            trigger: Runs the pipeline; None = only notify.
            journal: Gets an event of every transition.
            clock: Seconds since the epoch.
            checkpoint: Called with the name of each step that a crash may follow.
        """
        self._restraint, self._documents, self._journal = restraint, documents, journal
        self._actions = parse_actions(settings.actions)
        self._has_trigger = trigger is not None
        self.retraining = Retraining(
            documents=documents,
            archive=archive,
            trigger=trigger,
            journal=journal,
            restraint=restraint,
            recipe=settings.recipe,
            upload_wait_seconds=settings.upload_wait_seconds,
            checkpoint=checkpoint,
        )
        url_file = Path(settings.notifications.webhook_file)
        outbox = Outbox(documents, partial(post_to_file, url_file)) if settings.notifications.webhook_file else None
        self.notifier = Notifier(documents, outbox, settings.notifications, clock=clock)
        journal.listener = self.notifier.on_event
        self._drift = DriftReporter(documents, journal)
        if not self._drift.is_open and self.is_idle:
            # A predecessor was killed between the event and its note; nothing would ever close the incident.
            self.notifier.close_silently(DRIFT)
        self._log = LogReporter(journal, is_reported=lambda: LOG in self.notifier.open)

    def consider(
        self,
        decision: Decision,
        decisions: Sequence[Decision] = (),
        *,
        now: float,
        data_until: float | None = None,
    ) -> Decision:
        """Does what a decision asks for; returns it as it was acted on, HELD where it must wait.

        Args:
            decision: What the policies together decided.
            decisions: What each of them decided, where there are several: each has its own action.
            now: Seconds since the epoch.
            data_until: Event time up to which every row is matured; None = now.
        """
        confirmed = [each for each in decisions or (decision,) if each.action is Action.RETRAIN]
        acted = [self._act(each, now, data_until) for each in confirmed]
        if acted and all(each.action is Action.HELD for each in acted):
            decision = dataclasses.replace(decision, action=Action.HELD, reason=acted[0].reason)
        self._drift.report(decision)
        return decision

    def step(self, now: float, *, log_problem: str | None = None) -> None:
        """Advances what is under way as far as possible without waiting.

        Args:
            now: Seconds since the epoch.
            log_problem: Why nothing can arrive from the record log; None = nothing is wrong.
        """
        self._log.report(log_problem, now)
        self.notifier.step(now)
        self.retraining.step(now)

    def status(self, now: float) -> ActingStatus:
        """For the page and the metrics."""
        progress, memory, outbox = self.retraining.progress, self.retraining.memory, self.notifier.outbox
        incident = self.notifier.open.get(DRIFT)
        requests, budget = memory.num_requests_today(now), self._restraint.daily_budget
        is_blocked = memory.blocked_until > now
        return ActingStatus(
            phase=progress.phase,
            request_id=progress.request_id or None,
            started_at=progress.started_at if progress.phase == RUNNING else None,
            daily_budget=budget,
            budget_left=max(0, budget - requests),
            requests_today=requests,
            blocked_until=memory.blocked_until if is_blocked else None,
            blocked_by=memory.blocked_by if is_blocked else None,
            failures=memory.failures,
            failed=memory.failed,
            incident_since=incident.since if incident else None,
            last_action=incident.text if incident else None,
            messages_waiting=None if outbox is None else len(outbox),
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.retraining.progress.phase == IDLE

    def _act(self, decision: Decision, now: float, data_until: float | None) -> Decision:
        action = self._actions.get(decision.policy, RETRAIN) if self._has_trigger else NOTIFY
        if action == NOTIFY:
            self._notify(decision, now)
            return decision
        acted = restrain(decision, self.retraining.memory, self._restraint, now=now)
        if acted.action is Action.RETRAIN and self.is_idle:
            self.retraining.begin(decision, now=now, data_until=data_until)
        return acted

    def _notify(self, decision: Decision, now: float) -> None:
        """Notifies people in place of a run, as often as a run might be requested."""
        memory = read_memory(self._documents, NOTIFY_RESTRAINT, RestraintMemory)
        if restrain(decision, memory, self._restraint, now=now).action is Action.HELD:
            return
        self._journal.emit("decision", decision.reason, policy=decision.policy, **decision.numbers)
        memory = restraint.requested(memory, now=now)
        memory = restraint.ended(memory, "notified", self._restraint, now=now)
        self._documents.write_documents({NOTIFY_RESTRAINT: as_document(memory)}, {"request_notified": 1})


class DriftReporter:
    """Emits an event for a drift's first breach, its hold and its end, each once, also over a restart."""

    def __init__(self, documents: Documents, journal: Journal) -> None:
        """Continues with what a predecessor reported."""
        self._documents, self._journal = documents, journal
        self._action = str((documents.read_document(REPORTED) or {"action": ""})["action"])

    @property
    def is_open(self) -> bool:
        """Whether a drift was reported that has not ended."""
        return bool(self._action)

    def report(self, decision: Decision) -> None:
        """Emits what is new; a request has events of its own."""
        action, reported = decision.action, self._action
        if action is Action.RETRAIN:
            self._remember(Action.BREACH.value)
        elif action is Action.HELD or (action is Action.BREACH and not reported):
            if action.value != reported:
                self._emit(action.value, decision)
            self._remember(action.value)
        elif action is Action.OK and reported:
            self._emit("recovered", decision)
            self._remember("")

    def _emit(self, kind: str, decision: Decision) -> None:
        self._journal.emit(kind, decision.reason, policy=decision.policy, **decision.numbers)

    def _remember(self, action: str) -> None:
        if action != self._action:
            self._documents.write_documents({REPORTED: {"action": action}})
            self._action = action


class LogReporter:
    """Emits an event when nothing could arrive from the log for a while, and when messages can arrive again."""

    def __init__(self, journal: Journal, *, is_reported: Callable[[], bool]) -> None:
        """Nothing is wrong yet; `is_reported` tells whether people know of a log that is down, also after a restart."""
        self._journal, self._is_reported = journal, is_reported
        self._since: float | None = None

    def report(self, problem: str | None, now: float) -> None:
        """Emits a `problem` that lasts, and its end.

        Args:
            problem: Why nothing can arrive; None = nothing is wrong.
            now: Seconds since the epoch.
        """
        if problem is None:
            if self._is_reported():
                self._journal.emit("log_up", "messages can arrive again")
            self._since = None
        elif self._since is None:
            self._since = now
        # A clock that was set back reports too early rather than never.
        elif abs(now - self._since) >= LOG_DOWN_SECONDS and not self._is_reported():
            self._journal.emit("log_down", problem)
