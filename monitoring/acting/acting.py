"""What follows a decision: the action that its policy is given, restrained, one at a time; and who is told.

In: decisions, turns of the loop. Out: the decision as it was acted on; a run of the pipeline, a rollback, a shadow, or
a word to people. The parts are modules of their own: which action (`kinds`), when it must wait (`restraint`), a run
(`retraining`), a command (`correction`), messages (`notifications`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from components.notices.webhook import post_to_file
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from monitoring.acting import kinds, restraint
from monitoring.acting.correction import Correction
from monitoring.acting.kinds import NOTIFY, RETRAIN, ROLLBACK
from monitoring.acting.ledger import Ledger
from monitoring.acting.notifications import DRIFT, LOG, Notifier
from monitoring.acting.outbox import Outbox
from monitoring.acting.progress import IDLE, Documents, read_memory
from monitoring.acting.restraint import RestraintMemory, restrain
from monitoring.acting.retraining import Guard, Retraining
from monitoring.acting.telling import LogWatch, ToldDrift
from monitoring.acting.trigger import Trigger
from monitoring.deciding.decision import Action, Decision
from monitoring.journal import Journal
from monitoring.memory.archive import Archive, no_checkpoint
from monitoring.settings import MonitorSettings


class Acting:
    """Acts on decisions; one action at a time."""

    def __init__(
        self,
        settings: MonitorSettings,
        *,
        store: Documents,
        ledger: Ledger | None = None,
        archive: Archive,
        trigger: Trigger | None,
        journal: Journal,
        clock: Callable[[], float],
        guard: Guard = lambda: None,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Takes up where a predecessor stopped; listens to the journal from now on.

        Args:
            settings: See the class.
            store: This replica's memory, for messages and incidents.
            ledger: What all replicas must see of requests and rests; None = there is no lease, `store` keeps it.
            archive: Flushed before a run is asked for.
            trigger: Runs the pipeline; None = only notify.
            journal: Told of every transition.
            clock: Seconds since the epoch.
            guard: Called before anything is started; raises where this replica may not act.
            checkpoint: Called with the name of each step that a crash may follow.
        """
        self._settings, self._documents, self._journal, self._clock = settings, ledger or store, journal, clock
        self._kinds = kinds.parse_actions(settings.actions)
        self.retraining = Retraining(
            store=self._documents,
            archive=archive,
            trigger=trigger,
            journal=journal,
            settings=settings,
            upload_wait_seconds=settings.upload_wait_seconds,
            fence=ledger.term if ledger else 0,
            guard=guard,
            checkpoint=checkpoint,
        )
        self.correction = Correction(
            self._documents,
            state=settings.state,
            store=settings.store,
            journal=journal,
            settings=settings,
            guard=guard,
            checkpoint=checkpoint,
        )
        url_file = Path(settings.webhook_file)
        outbox = Outbox(store, partial(post_to_file, url_file)) if settings.webhook_file else None
        self.notifier = Notifier(store, outbox, settings, clock)
        journal.listener = self.notifier.hear
        self._told = ToldDrift(self._documents, journal)
        if not self._told.is_open and self.is_idle:
            self.notifier.forget(DRIFT)
        self._log = LogWatch(journal, is_told=lambda: LOG in self.notifier.open)

    def consider(
        self,
        decision: Decision,
        decisions: Sequence[Decision] = (),
        *,
        now: float,
        data_until: float | None = None,
    ) -> Decision:
        """Does what is to be done about a decision; answers it as it was acted on, HELD where it must wait.

        Args:
            decision: What the policies together decided.
            decisions: What each of them decided, where they are several: each has its own action.
            now: Seconds since the epoch.
            data_until: Event time up to which every row is matured; None = now.
        """
        confirmed = [each for each in decisions or (decision,) if each.action is Action.RETRAIN]
        answers = [self._act(each, now, data_until) for each in confirmed]
        if answers and all(each.action is Action.HELD for each in answers):
            decision = dataclasses.replace(decision, action=Action.HELD, reason=answers[0].reason)
        self._told.tell(decision)
        return decision

    def step(self, now: float, *, log_problem: str | None = None) -> None:
        """Moves what is under way on, as far as it goes without waiting.

        Args:
            now: Seconds since the epoch.
            log_problem: Why nothing can arrive from the record log; None = nothing is wrong.
        """
        self._log.look(log_problem, now)
        self.notifier.step(now)
        kind = self.correction.memory.kind
        if outcome := self.correction.step(now):
            self._rest(kind, "released" if outcome == "done" else "failed", now)
        self.retraining.step(now)

    def shown(self, now: float) -> dict[str, Any]:
        """For people: last action, budget left, incidents, messages that wait. As JSON takes it."""
        memory, outbox = self.retraining.memory, self.notifier.outbox
        spent = sum(abs(t - now) < restraint.DAY_SECONDS for t in memory.requested_at)
        drift = self.notifier.open.get(DRIFT)
        return {
            "daily_budget": self._settings.daily_budget,
            "budget_left": max(0, self._settings.daily_budget - spent),
            "blocked_until": memory.blocked_until if memory.blocked_until > now else None,
            "blocked_by": memory.blocked_by if memory.blocked_until > now else None,
            "incident_since": drift.since if drift else None,
            "last_action": drift.text if drift else None,
            "messages_waiting": len(outbox) if outbox is not None else None,
            "correction": self.correction.memory.name or None,
        }

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self.retraining.progress.phase == IDLE and self.correction.memory.phase == IDLE

    def _act(self, decision: Decision, now: float, data_until: float | None) -> Decision:
        kind, note, previous = self._kind_of(decision, now)
        held = restrain(decision, self._memory(kind), self._settings, now=now)
        if held.action is not Action.RETRAIN or (kind != NOTIFY and not self.is_idle):
            # Who was told already is not told that telling is held.
            return decision if kind == NOTIFY else held
        if kind == RETRAIN:
            self.retraining.begin(decision, now=now, data_until=data_until, note=note)
            return decision
        self._spend(kind, now)
        if kind == NOTIFY:
            self._journal.tell("decision", decision.reason, policy=decision.policy, **decision.numbers)
            self._rest(kind, "released", now, {"request_notified": 1})
        else:
            self.correction.begin(kind, _version_of(decision), previous, decision.reason, now=now)
        return decision

    def _kind_of(self, decision: Decision, now: float) -> tuple[str, str, int]:
        """The action, why it is not the one that the settings name, and the version before the decision's."""
        kind = self._kinds.get(decision.policy, RETRAIN)
        if kind in (RETRAIN, NOTIFY):
            return kind, "", 0
        version, store = _version_of(decision), self._settings.store
        try:
            if self.correction.was_done(kind, version):
                return RETRAIN, f"no {kind}: version {version} had one", 0
            known = kinds.predecessor(store, version)
            if known is None:
                return RETRAIN, f"no {kind}: version {version} has no predecessor", 0
            auc = decision.numbers.get("auc")
            why = None
            if kind == ROLLBACK:
                why = kinds.against_rollback(store, version, auc=auc, settings=self._settings, now=now)
        except (ContractError, PermanentError, TemporaryError) as error:
            return RETRAIN, f"no {kind}: {error}", 0
        return (RETRAIN, f"no {kind}: {why}", 0) if why else (kind, "", known.version)

    def _memory(self, kind: str) -> RestraintMemory:
        if kind == RETRAIN:
            return self.retraining.memory
        return read_memory(self._documents, f"restraint.{kind}", RestraintMemory)

    def _spend(self, kind: str, now: float) -> None:
        memory = restraint.requested(self._memory(kind), now=now)
        self._documents.write_documents({f"restraint.{kind}": dataclasses.asdict(memory)})

    def _rest(self, kind: str, outcome: str, now: float, counts: dict[str, float] | None = None) -> None:
        deed = f"a {'notice' if kind == NOTIFY else kind}"
        memory = restraint.ended(self._memory(kind), outcome, self._settings, now=now, deed=deed)
        self._documents.write_documents({f"restraint.{kind}": dataclasses.asdict(memory)}, counts)


def _version_of(decision: Decision) -> int:
    version = decision.numbers["version"]
    assert version is not None
    return int(version)
