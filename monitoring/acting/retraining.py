"""From a decision to the end of its run, one step at a time, over restarts.

decided -> archive flushed -> uploads awaited -> submitted -> running -> ended. In: the policy's decision, the time.
Out: at most one run at any moment; events; the restraint's memory after the run. Every transition is kept
before the next begins (`monitoring.acting.ledger`, where replicas share it), and each step can be repeated: the
request's id comes from the version of the data (`monitoring.acting.request`), so a trigger recognises it. What a look
at a run means is `monitoring.acting.following`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from components.contracts.retrain_request import RetrainRequest
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from monitoring.acting import recipe, restraint, trigger
from monitoring.acting.following import follow
from monitoring.acting.progress import (
    DECIDED,
    IDLE,
    PROGRESS,
    RECIPE,
    RESTRAINT,
    RUNNING,
    SUBMITTING,
    UPLOADING,
    Documents,
    Progress,
    read_all,
)
from monitoring.acting.recipe import RecipeMemory
from monitoring.acting.request import make_request
from monitoring.acting.restraint import RestraintMemory
from monitoring.acting.settings import RetrainingSettings
from monitoring.acting.trigger import Trigger
from monitoring.deciding.decision import Decision
from monitoring.journal import Journal
from monitoring.memory.archive import Archive, no_checkpoint

RETRY_SECONDS = 15.0
"""Pause before a busy or unreachable trigger is asked again."""


class Guard(Protocol):
    """Returns if this replica may act."""

    def __call__(self) -> None:
        """See the class.

        Raises:
            TemporaryError: it may not, or nobody knows.
        """


class Retraining:
    """The one request that may be under way."""

    def __init__(
        self,
        *,
        store: Documents,
        archive: Archive,
        trigger: Trigger | None,
        journal: Journal,
        settings: RetrainingSettings,
        upload_wait_seconds: float,
        fence: int = 0,
        guard: Guard = lambda: None,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Takes up where a predecessor stopped.

        Args:
            store: Where progress and the restraint's memory are kept.
            archive: Flushed before a run is asked for.
            trigger: Runs the pipeline; None = only notify.
            journal: Told of every transition.
            settings: Cool-down and back-off, incremental or full.
            upload_wait_seconds: Longest wait for the uploader; 0 = none.
            fence: Term of the lease that this replica holds; 0 = there is no lease.
            guard: Called before the trigger is asked for a run.
            checkpoint: Called with the name of each step that a crash may follow.
        """
        self._store, self._archive, self._trigger, self._journal = store, archive, trigger, journal
        self._settings, self._upload_wait_seconds, self._checkpoint = settings, upload_wait_seconds, checkpoint
        self._fence, self._guard = fence, guard
        self._poll_seconds = trigger.poll_seconds if trigger else 0.0
        self.progress, self.memory, self._past = read_all(store)

    def begin(self, decision: Decision, *, now: float, data_until: float | None = None, note: str = "") -> None:
        """Makes a request of a decision to retrain; only when idle.

        Args:
            decision: Confirmed, and not restrained.
            now: Seconds since the epoch.
            data_until: Event time up to which every row is matured; None = now.
            note: Why it is a run, where another action was meant.
        """
        assert self.progress.phase == IDLE
        past = recipe.looked(self._past, now=now)
        parent, why = recipe.choose(past, self._settings, decision.numbers, now=now)
        until = now if data_until is None else data_until
        why = f"{note}; {why}" if note else why
        request = make_request(decision, parent=parent, recipe=why, data_until=until, now=now, fence=self._fence)
        self._journal.tell(
            "decision", request.reason, request_id=request.request_id, policy=decision.policy, **decision.numbers
        )
        memory = restraint.requested(self.memory, now=now)
        if self._trigger is None:
            self.memory = memory
            self._end(trigger.RunState("notified", "no trigger is configured"), request, now)
            return
        progress = Progress(phase=DECIDED, request=dataclasses.asdict(request), decided_at=now)
        self._keep(progress, memory=memory, past=past)
        self._checkpoint("retraining.decided")

    def step(self, now: float) -> None:
        """Moves the request under way on, as far as it goes without waiting."""
        if self.progress.phase == DECIDED:
            self._flush(now)
        if self.progress.phase == UPLOADING:
            self._await_uploads(now)
        # No pause is longer: one that seems so was noted by a clock that has since been set back.
        is_time = not 0 < self.progress.next_try_at - now <= max(RETRY_SECONDS, self._poll_seconds)
        if self.progress.phase == SUBMITTING and is_time:
            self._submit(now)
        elif self.progress.phase == RUNNING and is_time:
            self._watch(now)

    def _request(self) -> RetrainRequest:
        assert self.progress.request is not None
        return RetrainRequest(**self.progress.request)

    def _flush(self, now: float) -> None:
        files = self._archive.flush()
        rows = sum(num_rows for _, num_rows in files)
        self._journal.tell("archived", f"flushed {rows} rows for the run", rows=rows, files=[name for name, _ in files])
        awaited = tuple(self._archive.waiting_for_upload()) if self._upload_wait_seconds > 0 else ()
        self._move(UPLOADING, upload_deadline=now + self._upload_wait_seconds, awaited=awaited)

    def _await_uploads(self, now: float) -> None:
        still = set(self._archive.waiting_for_upload()) if self.progress.awaited else set()
        waiting = [name for name in self.progress.awaited if name in still]
        if not waiting:
            if self._upload_wait_seconds > 0:
                seconds = round(now - self.progress.decided_at, 3)
                self._journal.tell("uploaded", "every sealed file is in the lake", seconds=seconds)
            self._move(SUBMITTING)
        elif now >= self.progress.upload_deadline:
            reason = f"{len(waiting)} files not uploaded within {self._upload_wait_seconds:g} s, first {waiting[0]}"
            self._end(trigger.RunState(trigger.FAILED, reason), self._request(), now)

    def _submit(self, now: float) -> None:
        assert self._trigger is not None
        request = self._request()
        self._guard()
        try:
            answer = self._trigger.submit(request)
        except TemporaryError as error:
            self._wait_for("unreachable", str(error), now)
            return
        except (PermanentError, ContractError, OSError) as error:
            self._end(trigger.RunState(trigger.FAILED, str(error)), request, now)
            return
        self._checkpoint("retraining.submitted")
        if answer == trigger.BUSY:
            self._wait_for("busy", "another run is active", now)
            return
        self._journal.tell("requested", request.reason, request_id=request.request_id, answer=answer)
        self._journal.tell("run_started", f"run {request.request_id} {answer}", request_id=request.request_id)
        self._move(RUNNING, {"request_started": 1}, started_at=now, next_try_at=0.0, told="")
        self._checkpoint("retraining.running")

    def _watch(self, now: float) -> None:
        assert self._trigger is not None
        try:
            progress, end = follow(self._trigger, self.progress, self._request().request_id, now)
        except TemporaryError as error:
            self._wait_for("unreachable", str(error), now)
            return
        if end is not None:
            self._end(end, self._request(), now)
            return
        if progress.is_overdue and not self.progress.is_overdue:
            seconds, name = now - progress.started_at, self._request().request_id
            text = f"run {name} has been at work for {seconds / 3600:.1f} h"
            self._journal.tell("overdue", text, request_id=name, seconds=round(seconds, 3))
        if progress != self.progress:
            self._keep(progress)

    def _wait_for(self, obstacle: str, text: str, now: float) -> None:
        """Stays in this phase for a while; tells of an obstacle when it is new."""
        if obstacle != self.progress.told:
            self._journal.tell(obstacle, text, request_id=self._request().request_id)
        self._move(self.progress.phase, next_try_at=now + RETRY_SECONDS, told=obstacle)

    def _end(self, run: trigger.RunState, request: RetrainRequest, now: float) -> None:
        memory = restraint.ended(self.memory, run.state, self._settings, now=now)
        past = recipe.ended(self._past, run.state, request.parent, now=now)
        self._journal.tell(
            "run_ended",
            f"run {request.request_id} {run.state}{run.reason and f': {run.reason}'}; "
            f"no request for {memory.blocked_until - now:.0f} s",
            request_id=request.request_id,
            outcome=run.state,
            version=run.version,
            seconds=round(now - self.progress.started_at, 3) if self.progress.started_at else None,
        )
        self._keep(Progress(), {f"request_{run.state}": 1}, memory=memory, past=past)
        self._checkpoint("retraining.ended")

    def _move(self, phase: str, counts: dict[str, float] | None = None, **changes: Any) -> None:
        self._keep(dataclasses.replace(self.progress, phase=phase, **changes), counts)

    def _keep(
        self,
        progress: Progress,
        counts: dict[str, float] | None = None,
        *,
        memory: RestraintMemory | None = None,
        past: RecipeMemory | None = None,
    ) -> None:
        memory, past = memory or self.memory, past or self._past
        documents = {
            PROGRESS: dataclasses.asdict(progress),
            RESTRAINT: dataclasses.asdict(memory),
            RECIPE: dataclasses.asdict(past),
        }
        self._store.write_documents(documents, counts)
        # Only now: a write that failed is a step that was not made, and the next turn makes it.
        self.progress, self.memory, self._past = progress, memory, past
