"""Advance a retrain request from the decision to the end of its run, across restarts.

The phases are: decided, archive flushed, uploading, submitting, running, ended. There is at most
one run at any time. Every transition is stored before the next transition begins, and each step can
be repeated. The name of the request is derived from its data (`monitoring.policies.rate_limit`), so
that triggers recognize a repeated request.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from evergreen.config.monitor import RateLimitSettings, RecipeSettings
from evergreen.contracts.manifests import RetrainRequest
from evergreen.runtime.durable import no_checkpoint
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from monitoring.journal import Journal
from monitoring.policies import rate_limit
from monitoring.policies.policy import Decision
from monitoring.policies.rate_limit import PastRuns, choose_parent, make_request
from monitoring.retraining.triggers import BUSY, FAILED, UNKNOWN, RunState, Trigger
from monitoring.retraining.triggers import RUNNING as RUN_IS_ACTIVE
from monitoring.state.database import Database, read_dataclass

if TYPE_CHECKING:
    from monitoring.state.archive import Archive

IDLE = "idle"
_DECIDED = "decided"
_UPLOADING = "uploading"
_SUBMITTING = "submitting"
RUNNING = "running"
PROGRESS = "retraining"
RATE_LIMITS = "rate_limits"
"""Names of documents in the monitor's state."""
_RETRY_SECONDS = 15.0
"""Seconds before a busy or unreachable trigger is called again."""
_UNKNOWN_SECONDS = 60.0
"""If the trigger cannot find a submitted run for this number of seconds, the run is treated as
failed. For this time, the trigger's list of runs may be out of date."""
_OVERDUE_SECONDS = 6 * 3600.0
"""A run that is active for this number of seconds is reported once. The monitor still follows the
run to its end."""


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """State of the request in progress, stored as JSON."""

    phase: str = IDLE
    request: dict[str, Any] | None = None
    """Fields of the `RetrainRequest`, or None when idle."""
    decided_at: float = 0.0
    upload_deadline: float = 0.0
    next_try_at: float = 0.0
    awaited: tuple[str, ...] = ()
    """Files that were sealed when the archive was flushed. Files that are sealed later belong to
    the next run."""
    obstacle: str = ""
    """The last reported obstacle, `busy` or `unreachable`. Each obstacle is reported once."""
    started_at: float = 0.0
    unknown_since: float = 0.0
    """Time since which the trigger reports the run as unknown, or 0 if the run is known."""
    is_overdue: bool = False
    """Whether the long duration of the run was already reported."""

    @property
    def request_id(self) -> str:
        """Name of the request. Empty when idle."""
        return str(self.request["request_id"]) if self.request else ""


class Retraining:
    """The retrain request in progress, at most one."""

    def __init__(
        self,
        *,
        documents: Database,
        archive: "Archive",
        trigger: Trigger | None,
        journal: Journal,
        rate_limit: RateLimitSettings,
        recipe: RecipeSettings,
        upload_wait_seconds: float,
        checkpoint: Callable[[str], None] = no_checkpoint,
    ) -> None:
        """Continue where a predecessor stopped. Without a trigger, `begin` must not be called."""
        self._documents = documents
        self._archive = archive
        self._trigger = trigger
        self._journal = journal
        self._limits, self._recipe = rate_limit, recipe
        self._upload_wait_seconds, self._checkpoint = upload_wait_seconds, checkpoint
        self._poll_seconds = trigger.poll_seconds if trigger else 0.0
        self.progress = read_dataclass(documents, PROGRESS, RunProgress)
        self.past_runs = read_dataclass(documents, RATE_LIMITS, PastRuns)

    def begin(self, decision: Decision, *, now: float, data_until: float) -> None:
        """Create a request from a confirmed decision, for rows up to the event time `data_until`.

        No other request may be in progress.
        """
        assert self.progress.phase == IDLE
        assert self._trigger is not None
        parent, why = choose_parent(self.past_runs, self._recipe)
        request = make_request(decision, parent=parent, why=why, data_until=data_until, now=now)
        self._journal.emit(
            "decision",
            request.reason,
            request_id=request.request_id,
            policy=decision.policy,
            **decision.numbers,
        )
        progress = RunProgress(phase=_DECIDED, request=asdict(request), decided_at=now)
        self._store(progress, past_runs=rate_limit.requested(self.past_runs, now=now))
        self._checkpoint("retraining.decided")

    def step(self, now: float) -> None:
        """Advance the request in progress as far as possible without waiting."""
        if self._trigger is None:
            return  # A request of an earlier process waits until a monitor with a trigger starts.
        if self.progress.phase == _DECIDED:
            self._flush_archive(now)
        if self.progress.phase == _UPLOADING:
            self._await_uploads(now)
        # Ignore a longer pause, because it was computed before the clock was set back.
        is_time = not 0 < self.progress.next_try_at - now <= max(_RETRY_SECONDS, self._poll_seconds)
        if self.progress.phase == _SUBMITTING and is_time:
            self._submit(self._trigger, now)
        elif self.progress.phase == RUNNING and is_time:
            self._follow_run(self._trigger, now)

    def begin_cooldown(self, outcome: str, now: float) -> None:
        """Begin the cooldown after an event that this class does not handle, such as a rollback."""
        self._store(
            self.progress,
            past_runs=rate_limit.ended(self.past_runs, outcome, self._limits, now=now),
        )

    def _request(self) -> RetrainRequest:
        assert self.progress.request is not None
        return RetrainRequest(**self.progress.request)

    def _flush_archive(self, now: float) -> None:
        files = self._archive.flush()
        rows = sum(num_rows for _, num_rows in files)
        self._journal.emit(
            "archived",
            f"flushed {rows} rows for the run",
            rows=rows,
            files=[name for name, _ in files],
        )
        awaited = tuple(self._archive.waiting_for_upload()) if self._upload_wait_seconds > 0 else ()
        self._enter(_UPLOADING, upload_deadline=now + self._upload_wait_seconds, awaited=awaited)

    def _await_uploads(self, now: float) -> None:
        still = set(self._archive.waiting_for_upload()) if self.progress.awaited else set()
        waiting = [name for name in self.progress.awaited if name in still]
        if not waiting:
            if self._upload_wait_seconds > 0:
                seconds = round(now - self.progress.decided_at, 3)
                self._journal.emit("uploaded", "every sealed file is in the lake", seconds=seconds)
            self._enter(_SUBMITTING)
        elif now >= self.progress.upload_deadline:
            reason = (
                f"{len(waiting)} files not uploaded within {self._upload_wait_seconds:g} s, "
                f"first {waiting[0]}"
            )
            self._end(RunState(FAILED, reason), now)

    def _submit(self, trigger: Trigger, now: float) -> None:
        request = self._request()
        try:
            answer = trigger.submit(request)
        except TemporaryError as error:
            self._retry_later("unreachable", str(error), now)
            return
        except (PermanentError, ContractError, OSError) as error:
            self._end(RunState(FAILED, str(error)), now)
            return
        self._checkpoint("retraining.submitted")
        if answer == BUSY:
            self._retry_later("busy", "another run is active", now)
            return
        self._journal.emit(
            "requested", request.reason, request_id=request.request_id, answer=answer
        )
        self._journal.emit(
            "run_started", f"run {request.request_id} {answer}", request_id=request.request_id
        )
        self._enter(RUNNING, {"request_started": 1}, started_at=now, next_try_at=0.0, obstacle="")
        self._checkpoint("retraining.running")

    def _follow_run(self, trigger: Trigger, now: float) -> None:
        try:
            run = trigger.state(self.progress.request_id)
        except TemporaryError as error:
            self._retry_later("unreachable", str(error), now)
            return
        except (PermanentError, ContractError, OSError) as error:
            # Reading the run's state again would not help. Ending the monitor because of a lost run
            # would also stop the archive.
            run = RunState(FAILED, str(error))
        if run.state == UNKNOWN:
            since = self.progress.unknown_since or now
            if now >= since + _UNKNOWN_SECONDS:
                self._end(RunState(FAILED, run.reason), now)
            elif not self.progress.unknown_since:
                self._enter(RUNNING, unknown_since=since)
        elif run.state == RUN_IS_ACTIVE:
            self._follow_active(now)
        else:
            self._end(run, now)

    def _follow_active(self, now: float) -> None:
        """Store the time of the next call to the trigger, and report a run that takes long.

        A paused run counts as active.
        """
        progress = self.progress
        is_overdue = progress.is_overdue or now - progress.started_at >= _OVERDUE_SECONDS
        if is_overdue and not progress.is_overdue:
            seconds = now - progress.started_at
            text = f"run {progress.request_id} has been active for {seconds / 3600:.1f} h"
            self._journal.emit(
                "overdue", text, request_id=progress.request_id, seconds=round(seconds, 3)
            )
        next_try_at = now + self._poll_seconds if self._poll_seconds else progress.next_try_at
        changed = replace(
            progress, unknown_since=0.0, obstacle="", is_overdue=is_overdue, next_try_at=next_try_at
        )
        if changed != progress:
            self._store(changed)

    def _retry_later(self, obstacle: str, text: str, now: float) -> None:
        """Delay the next attempt of this phase, and report a new obstacle."""
        if obstacle != self.progress.obstacle:
            self._journal.emit(obstacle, text, request_id=self.progress.request_id)
        self._enter(self.progress.phase, next_try_at=now + _RETRY_SECONDS, obstacle=obstacle)

    def _end(self, run: RunState, now: float) -> None:
        request, started_at = self._request(), self.progress.started_at
        past_runs = rate_limit.ended(
            self.past_runs, run.state, self._limits, now=now, parent=request.parent
        )
        self._journal.emit(
            "run_ended",
            f"run {request.request_id} {run.state}{run.reason and f': {run.reason}'}; "
            f"no request for {past_runs.blocked_until - now:.0f} s",
            request_id=request.request_id,
            outcome=run.state,
            version=run.version,
            seconds=round(now - started_at, 3) if started_at else None,
        )
        self._store(RunProgress(), {f"request_{run.state}": 1}, past_runs=past_runs)
        self._checkpoint("retraining.ended")

    def _enter(self, phase: str, counts: dict[str, float] | None = None, **changes: Any) -> None:
        self._store(replace(self.progress, phase=phase, **changes), counts)

    def _store(
        self,
        progress: RunProgress,
        counts: dict[str, float] | None = None,
        *,
        past_runs: PastRuns | None = None,
    ) -> None:
        past_runs = past_runs or self.past_runs
        self._documents.write_documents(
            {PROGRESS: asdict(progress), RATE_LIMITS: asdict(past_runs)}, counts
        )
        # Change the attributes only after the write succeeded. After a failed write, the next
        # iteration repeats the step.
        self.progress = progress
        self.past_runs = past_runs
