"""From a decision to the end of its run, one step at a time, over restarts.

decided -> archive flushed -> uploads awaited -> submitted -> running -> ended. In: the policy's decision, the time.
Out: at most one run at any moment; events; the restraint's memory after the run. Every transition is kept in
`monitoring.memory.store` before the next begins, and each step can be repeated: the request's id comes from the
decision, so a trigger recognises it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from components.contracts.errors import ContractError, PermanentError, TemporaryError
from components.contracts.retrain_request import RetrainRequest
from monitoring.acting import restraint, trigger
from monitoring.acting.restraint import RestraintMemory, RestraintSettings
from monitoring.acting.trigger import Trigger
from monitoring.deciding.decision import Decision
from monitoring.journal import Journal
from monitoring.memory.archive import Archive, no_checkpoint
from monitoring.memory.store import Store

IDLE, DECIDED, UPLOADING, SUBMITTING, RUNNING = "idle", "decided", "uploading", "submitting", "running"
RETRY_SECONDS = 15.0
"""Pause before a busy or unreachable trigger is asked again."""
UNKNOWN_SECONDS = 60.0
"""How long a submitted run may be unknown to its trigger before it counts as failed."""
OBSERVED_NUMBERS = ("auc", "auc_low", "auc_high", "threshold", "rows", "clicks", "version", "rows_since_breach")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the request under way stands; kept as JSON."""

    phase: str = IDLE
    request: dict[str, Any] | None = None
    """The `RetrainRequest`'s fields; None when idle."""
    decided_at: float = 0.0
    upload_deadline: float = 0.0
    next_try_at: float = 0.0
    awaited: tuple[str, ...] = ()
    """Files sealed when the archive was flushed; those that follow belong to the next run."""
    told: str = ""
    """The obstacle told of last: `busy` or `unreachable`; each is told once."""
    started_at: float = 0.0


class Retraining:
    """The one request that may be under way."""

    def __init__(
        self,
        *,
        store: Store,
        archive: Archive,
        trigger: Trigger | None,
        journal: Journal,
        settings: RestraintSettings,
        upload_wait_seconds: float,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Takes up where a predecessor stopped.

        Args:
            store: Where progress and the restraint's memory are kept.
            archive: Flushed before a run is asked for.
            trigger: Runs the pipeline; None = only notify.
            journal: Told of every transition.
            settings: Cool-down and back-off.
            upload_wait_seconds: Longest wait for the uploader; 0 = none.
            checkpoint: Called with the name of each step that a crash may follow.
        """
        self._store, self._archive, self._trigger, self._journal = store, archive, trigger, journal
        self._settings, self._upload_wait_seconds, self._checkpoint = settings, upload_wait_seconds, checkpoint
        progress = store.read_document("retraining") or {}
        self.progress = Progress(**{**progress, "awaited": tuple(progress.get("awaited", ()))})
        memory = store.read_document("restraint") or {}
        self.memory = RestraintMemory(**{**memory, "requested_at": tuple(memory.get("requested_at", ()))})
        """What restrains the next request."""

    def begin(self, decision: Decision, *, now: float) -> None:
        """Makes a request of a decision to retrain; only when idle."""
        assert self.progress.phase == IDLE
        version = decision.numbers["version"]
        request = RetrainRequest(
            request_id=f"drift-{_utc(now).strftime('%Y%m%dT%H%M%SZ')}-v{version}",
            reason=decision.reason,
            requested_at=_utc(now).isoformat(),
            window_start="",
            window_end=_utc(now).isoformat(),
            observed={name: decision.numbers[name] for name in OBSERVED_NUMBERS},
        )
        self._journal.tell("decision", decision.reason, request_id=request.request_id, **decision.numbers)
        self.memory = restraint.requested(self.memory, now=now)
        if self._trigger is None:
            self._end(trigger.RunState("notified", "no trigger is configured"), request.request_id, now)
            return
        self._keep(Progress(phase=DECIDED, request=dataclasses.asdict(request), decided_at=now))
        self._checkpoint("retraining.decided")

    def step(self, now: float) -> None:
        """Moves the request under way on, as far as it goes without waiting."""
        if self.progress.phase == DECIDED:
            self._flush(now)
        if self.progress.phase == UPLOADING:
            self._await_uploads(now)
        if self.progress.phase == SUBMITTING and now >= self.progress.next_try_at:
            self._submit(now)
        elif self.progress.phase == RUNNING and now >= self.progress.next_try_at:
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
            self._end(trigger.RunState(trigger.FAILED, reason), self._request().request_id, now)

    def _submit(self, now: float) -> None:
        assert self._trigger is not None
        request = self._request()
        try:
            answer = self._trigger.submit(request)
        except TemporaryError as error:
            self._wait_for("unreachable", str(error), now)
            return
        except (PermanentError, ContractError, OSError) as error:
            self._end(trigger.RunState(trigger.FAILED, str(error)), request.request_id, now)
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
        name = self._request().request_id
        try:
            run = self._trigger.state(name)
        except TemporaryError as error:
            self._wait_for("unreachable", str(error), now)
            return
        except (PermanentError, ContractError, OSError) as error:
            # Asking again is useless, and to end the monitor over a lost run would stop the archive too.
            run = trigger.RunState(trigger.FAILED, str(error))
        if run.state == trigger.UNKNOWN and now < self.progress.started_at + UNKNOWN_SECONDS:
            return
        if run.state == trigger.UNKNOWN:
            run = trigger.RunState(trigger.FAILED, run.reason)
        if run.state != trigger.RUNNING:
            self._end(run, name, now)
        elif self._trigger.poll_seconds:
            self._move(RUNNING, next_try_at=now + self._trigger.poll_seconds, told="")

    def _wait_for(self, obstacle: str, text: str, now: float) -> None:
        """Stays in this phase for a while; tells of an obstacle when it is new."""
        if obstacle != self.progress.told:
            self._journal.tell(obstacle, text, request_id=self._request().request_id)
        self._move(self.progress.phase, next_try_at=now + RETRY_SECONDS, told=obstacle)

    def _end(self, run: trigger.RunState, name: str, now: float) -> None:
        self.memory = restraint.ended(self.memory, run.state, self._settings, now=now)
        self._journal.tell(
            "run_ended",
            f"run {name} {run.state}{run.reason and f': {run.reason}'}; "
            f"no request for {self.memory.blocked_until - now:.0f} s",
            request_id=name,
            outcome=run.state,
            version=run.version,
            seconds=round(now - self.progress.started_at, 3) if self.progress.started_at else None,
        )
        self._keep(Progress(), {f"request_{run.state}": 1})
        self._checkpoint("retraining.ended")

    def _move(self, phase: str, counts: dict[str, float] | None = None, **changes: Any) -> None:
        self._keep(dataclasses.replace(self.progress, phase=phase, **changes), counts)

    def _keep(self, progress: Progress, counts: dict[str, float] | None = None) -> None:
        self.progress = progress
        documents = {"retraining": dataclasses.asdict(progress), "restraint": dataclasses.asdict(self.memory)}
        self._store.write_documents(documents, counts)


def _utc(time: float) -> datetime:
    return datetime.fromtimestamp(time, timezone.utc)
