"""Requests to the controller: append one, wait for its answer, or withdraw it.

Requests and answers are lines of the promotion journal. The requester appends a `ServingRequest`
and waits for the answer. The controller accepts the request, carries it out, and appends the
result. If no controller accepts the request before its deadline, the requester withdraws the
request.

A withdrawal and an acceptance may be appended at the same time. In this case, only the earlier line
is valid. The requester and the controller therefore read the journal again after they have appended
their line.

A request that releases a model refers to a folder with its prepared version
(`evergreen.serving.prepare`).

If a step of the pipeline is retried, the step makes its request again. A request is a retry if an
earlier request has the same run and the same model. If the earlier request is done, or if a check
or a person refused it, the answer is final, and the retry gets the same answer. Otherwise, the
retry has the position of the first request in the journal. A rollback between the two requests
therefore also supersedes the retry.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from uuid import uuid4

from evergreen.contracts.requests import (
    ABORT,
    ACCEPTED,
    CANCELLED,
    DONE,
    REFUSED,
    ROLLBACK,
    ServingAnswer,
    ServingRequest,
)
from evergreen.registry.promotion_journal import (
    CANARY,
    INTENT,
    LIVE_ACTIONS,
    WITHDRAWN,
    Line,
    Promotion,
    append_entry,
    moment_of,
    read_lines,
)
from evergreen.runtime.errors import (
    ContractError,
    PermanentError,
    Refused,
    TemporaryError,
    UnreadableFile,
)

GRACE_SECONDS = 600.0
"""Maximum number of seconds to wait for the result of an accepted request after its deadline."""


@dataclass(frozen=True, kw_only=True)
class RequestState:
    """One request, and its state according to the journal."""

    request: ServingRequest
    accepted: ServingAnswer | None = None
    """First line that accepts the request. None if no line accepts it, or if a withdrawal comes
    first."""
    result: ServingAnswer | None = None
    """First `done` or `refused` entry, or the withdrawal. A withdrawal after an acceptance does not
    count."""
    live_then: int | None = None
    """Version that was live when the request was appended. None if no version was live."""
    intent_then: Promotion | None = None
    """Intent line of the change that was in progress when the request was appended. None if no
    change was in progress."""
    rollback_then: bool = False
    """Whether the change in progress was a rollback."""
    recorded: Promotion | None = None
    """Journal line of the change that was requested. None if the change was not made."""
    first: str = ""
    """Id of the first request of the same run for the same model. For a request that is not a
    retry, `first` equals `id`."""
    earlier: ServingAnswer | None = None
    """Final answer to an earlier request of the same run for the same model, or None."""

    @property
    def id(self) -> str:
        """Id of the request."""
        return self.request.request

    @property
    def is_open(self) -> bool:
        """Whether the request has no result."""
        return self.result is None

    def is_expired(self, now: datetime) -> bool:
        """Return whether the deadline has passed."""
        return now > moment_of(self.request.deadline)


def fold(lines: Sequence[Line]) -> list[RequestState]:
    """Return every request in the order of the lines, with its answers."""
    found: dict[str, RequestState] = {}
    live: int | None = None
    before: int | None = None
    last: Promotion | None = None
    for line in lines:
        if isinstance(line, ServingRequest):
            found.setdefault(
                line.request,
                RequestState(
                    request=line,
                    live_then=live,
                    intent_then=last if last is not None and last.action == INTENT else None,
                    rollback_then=last is not None
                    and last.request in found
                    and found[last.request].request.kind == ROLLBACK,
                ),
            )
        elif isinstance(line, ServingAnswer):
            if (state := found.get(line.request)) is not None:
                found[line.request] = _answered(state, line)
        else:
            if line.action in LIVE_ACTIONS:
                live, before = line.version, live
            elif (
                line.action == WITHDRAWN
                and last is not None
                and last.action in LIVE_ACTIONS
                and last.version == line.version
            ):
                live = before
            last = line
            if line.request in found and line.action != INTENT:
                recorded = None if line.action == WITHDRAWN else line
                found[line.request] = replace(found[line.request], recorded=recorded)
    return _with_retries(found.values())


def _with_retries(states: Iterable[RequestState]) -> list[RequestState]:
    """Return the requests in the same order, and set `first` and `earlier` of each request."""
    firsts: dict[tuple[str, str | None], str] = {}
    finals: dict[str, ServingAnswer] = {}
    found = []
    for state in states:
        first = state.id
        if (run := state.request.run) is not None:
            first = firsts.setdefault((run, state.request.model_id), state.id)
        found.append(replace(state, first=first, earlier=finals.get(first)))
        if state.result is not None and _is_final(state):
            finals.setdefault(first, state.result)
    return found


def _is_final(state: RequestState) -> bool:
    """Return whether a retry of the request gets the same answer."""
    result = state.result
    return result is not None and (
        result.action == DONE or (result.action, result.error) == (REFUSED, Refused.__name__)
    )


def last_abort(store: Path) -> ServingRequest | None:
    """Return the last abort that was done since the newest canary started, or None.

    "Since" refers to the order of the lines in the journal.

    Raises:
        ContractError: See `read_requests`.
    """
    aborts = {
        state.id: state.request
        for state in read_requests(store)
        if state.request.kind == ABORT and state.result is not None and state.result.action == DONE
    }
    found = version = None
    for line in read_lines(store):
        if isinstance(line, Promotion) and line.action == CANARY and line.version != version:
            found, version = None, line.version
        elif isinstance(line, ServingAnswer) and line.action == DONE and line.request in aborts:
            found = aborts[line.request]
    return found


def final_answer(store: Path, run: str, model_id: str) -> RequestState | None:
    """Return a run's first request for a model that has a final answer.

    Returns None if no request has a final answer.

    Raises:
        ContractError, TemporaryError: See `read_requests`.
    """
    for state in read_requests(store):
        if (state.request.run, state.request.model_id) == (run, model_id) and _is_final(state):
            return state
    return None


def _answered(state: RequestState, answer: ServingAnswer) -> RequestState:
    if state.result is not None:
        return state
    if answer.action == ACCEPTED:
        return replace(state, accepted=state.accepted or answer)
    if answer.action == CANCELLED and state.accepted is not None:
        return state
    return replace(state, result=answer)


def read_requests(store: Path) -> list[RequestState]:
    """Return every request of the journal, oldest first.

    Raises:
        ContractError: See `promotion_journal.read_lines`.
    """
    return fold(read_lines(store))


def open_requests(store: Path) -> list[RequestState]:
    """Return the requests without a result, oldest first. Raises the errors of `read_requests`."""
    return [state for state in read_requests(store) if state.is_open]


def read_request(store: Path, request_id: str) -> RequestState:
    """Return the request of this id.

    Raises:
        ContractError: the journal does not have the request, or a line of it is corrupt
            (`read_requests`).
    """
    for state in reversed(read_requests(store)):
        if state.id == request_id:
            return state
    raise ContractError(f"request {request_id} is not in the journal of {store}")


def new_request(
    kind: str, *, who: str, reason: str, now: datetime, seconds: float, request_id: str = ""
) -> ServingRequest:
    """Return a request that expires after `seconds`, with a new id unless one is given."""
    return ServingRequest(
        time=_text(now),
        request=request_id or new_id(),
        kind=kind,
        who=who,
        reason=reason,
        deadline=_text(now + timedelta(seconds=seconds)),
    )


def new_id() -> str:
    """Return a new id of a request."""
    return uuid4().hex


def append_request(store: Path, request: ServingRequest) -> ServingRequest:
    """Append the request to the journal and return it as written."""
    return append_entry(store, request)


def answer(
    store: Path,
    request_id: str,
    action: str,
    *,
    who: str,
    now: datetime,
    reason: str = "",
    version: int | None = None,
    error: str | None = None,
    lease: int | None = None,
) -> RequestState:
    """Append an answer, and return the new state of the request.

    The new state shows whether the answer is valid. For example, a withdrawal after an acceptance
    is not valid.
    """
    append_entry(
        store,
        ServingAnswer(
            time=_text(now),
            action=action,
            request=request_id,
            who=who,
            reason=reason,
            version=version,
            error=error,
            lease=lease,
        ),
    )
    return read_request(store, request_id)


def withdraw(store: Path, request_id: str, *, who: str, now: datetime, reason: str) -> RequestState:
    """Withdraw a request that no controller has accepted, and return its state."""
    return answer(store, request_id, CANCELLED, who=who, now=now, reason=reason)


def withdraw_after(
    store: Path, request: ServingRequest, error: BaseException, *, clock: Callable[[], datetime]
) -> RequestState:
    """Withdraw the requester's own request after an error, and return its state.

    A request with a result is left as it is. If the request was accepted, the withdrawal does not
    count.

    Raises:
        ContractError: see `read_request`.
    """
    state = read_request(store, request.request)
    if not state.is_open:
        return state
    reason = f"{type(error).__name__}: {error}"
    return withdraw(store, request.request, who=request.who, now=clock(), reason=reason)


def submit_request(
    store: Path,
    request: ServingRequest,
    *,
    clock: Callable[[], datetime],
    sleep: Callable[[float], None],
    report: Callable[[str], None] = lambda _: None,
) -> ServingAnswer:
    """Append the request, and wait for its result as `wait_for_result` does.

    If the waiting is interrupted, the request is withdrawn unless it is accepted already. Only the
    registry is read and written, so the caller needs no rights to the model repository.
    """
    try:
        # The append may have succeeded even if it raises an error.
        append_request(store, request)
        return wait_for_result(store, request, clock=clock, sleep=sleep, report=report)
    except BaseException as error:
        # If the journal cannot be accessed now, report the original error.
        with suppress(ContractError, OSError):
            withdraw_after(store, request, error, clock=clock)
        raise


def wait_for_result(
    store: Path,
    request: ServingRequest,
    *,
    clock: Callable[[], datetime],
    sleep: Callable[[float], None],
    poll_seconds: float = 0.1,
    report: Callable[[str], None] = lambda _: None,
) -> ServingAnswer:
    """Wait until the request has a result, and return it.

    Args:
        store: Folder of the model registry.
        request: Appended request.
        clock: Current time, with a time zone.
        sleep: Function that waits for a number of seconds.
        poll_seconds: Seconds between two reads of the journal.
        report: Function that is called with a sentence when the request is accepted.

    Raises:
        TemporaryError: no controller accepted the request before its deadline, so the request is
            withdrawn. The error is also raised if the controller that accepted the request has not
            answered for a long time, or if the journal has been unreadable for a long time.
        Refused, ContractError, PermanentError: the controller refused the request. The error
            contains the reason.
    """
    deadline, is_reported = moment_of(request.deadline), False
    end = deadline + timedelta(seconds=GRACE_SECONDS)
    while True:
        now = clock()
        try:
            state = read_request(store, request.request)
        except UnreadableFile as error:
            if now > end:
                raise TemporaryError(f"{error}, so the result is unknown") from error
            sleep(poll_seconds)
            continue
        if state.result is not None:
            return expect_done(state)
        if state.accepted is not None and not is_reported:
            is_reported = True
            report(f"{state.accepted.who} carries it out")
        if state.accepted is None and now > deadline:
            reason = f"no controller answered until {request.deadline}"
            state = withdraw(store, request.request, who=request.who, now=now, reason=reason)
            if state.result is not None:
                expect_done(state)
        elif now > end and state.accepted is not None:
            raise TemporaryError(
                f"request {request.request} was accepted by {state.accepted.who} at "
                f"{state.accepted.time} and has no result yet"
            )
        sleep(poll_seconds)


_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (Refused, ContractError, TemporaryError, PermanentError)
}


def expect_done(state: RequestState) -> ServingAnswer:
    """Return the result of a request that was carried out.

    Raises:
        TemporaryError: the request was withdrawn.
        Refused, ContractError, TemporaryError, PermanentError: the request was refused.
    """
    result = state.result
    assert result is not None
    if result.action == DONE:
        return result
    if result.action == REFUSED:
        raise _ERRORS.get(result.error or "", PermanentError)(result.reason)
    raise TemporaryError(f"{result.reason}; the request is withdrawn")


def _text(moment: datetime) -> str:
    return moment.astimezone(timezone.utc).isoformat()
