"""Observe a target, choose the next move from the protocol's table, make it, and begin again.

All changes of the served version are made by this loop. A running controller calls the loop in each
round, before it probes the servers. If no controller is running, a command calls the loop in its
own process (`carry_out`). If the journal ends with an intent that this process did not write, a
controller was killed. The loop then undoes the intent as it undoes a failed change: it restores the
earlier configuration, restores the servers, and withdraws the intent. If the controller is killed
during the undo, the next controller continues the undo.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from controller import announce as announcing
from controller.deployment_target import (
    Attempt,
    DeploymentTarget,
    TargetSettings,
    live_version,
    opened,
)
from controller.moves import BODIES
from controller.protocol import (
    ACCEPT,
    ANNOUNCE,
    ANSWER,
    FAILED,
    GROW,
    NONE,
    RECORD_SHARE,
    REFUSE,
    RESET_PLAN,
    RUNNING,
    STAND_DOWN,
    SUPERSEDED_KINDS,
    UNKNOWN,
    URGENT_KINDS,
    WITHDRAW,
    Desired,
    Intent,
    Observed,
    OpenRequest,
    ProtocolRule,
    Server,
    ShownPlan,
    next_rule,
)
from evergreen.contracts.requests import (
    ABORT,
    ACCEPTED,
    ADVANCE,
    CANARY,
    CANCELLED,
    DONE,
    REFUSED,
    RELEASE,
    ROLLBACK,
    ServingRequest,
)
from evergreen.registry import promotion_journal, requests
from evergreen.registry.promotion_journal import Promotion, canary_at_work
from evergreen.registry.requests import RequestState
from evergreen.runtime.errors import (
    ContractError,
    PermanentError,
    Refused,
    TemporaryError,
    UnreadableFile,
)
from evergreen.serving.prepare import remove_prepared
from evergreen.serving.repository.model_repository import ModelRepository, NotWritable

logger = logging.getLogger(__name__)

HANDLED = (ContractError, TemporaryError, PermanentError, Refused, OSError)
"""Errors of a move that become the answer to its request. Any other exception ends the process."""
_SUPERSEDED = "a later rollback or abort supersedes the request"
_NAMES = ("Refused", "ContractError", "TemporaryError", "PermanentError")


def chosen(states: list[RequestState]) -> RequestState | None:
    """Return the request that is handled next, or None."""
    found = [state for state in states if state.is_open]
    urgent = [state for kind in URGENT_KINDS for state in found if state.request.kind == kind]
    return next(iter([*urgent, *found]), None)


def is_superseded(state: RequestState, states: list[RequestState]) -> bool:
    """Return whether a later rollback or abort supersedes the request.

    A retry has the same position in the journal as the first request.
    """
    later = states[[each.id for each in states].index(state.first) + 1 :]
    is_done = state.recorded is not None or state.earlier is not None
    return not is_done and any(
        state.request.kind in SUPERSEDED_KINDS.get(each.request.kind, ())
        for each in later
        if each.result is None
        or each.result.action == DONE
        # After a person's request for a rollback, no release may follow, even if no version can be
        # restored.
        or (each.result.action == REFUSED and each.request.replaces is None)
    )


def observe(target: DeploymentTarget) -> tuple[Desired, Observed, RequestState | None]:
    """Read journal, repository and plan, and return them with the request that is handled next."""
    states = requests.read_requests(target.store)
    _supersede(target, states)
    state, live, at_work = chosen(states), target.live, canary_at_work(target.store)
    repository, plan, intent = target.repository, target.repository.read_plan(), target.intent
    desired = Desired(
        live=live.version if live else None,
        canary=at_work.version if at_work else None,
        share=(at_work.share or 0.0) if at_work else 0.0,
        intent=None if intent is None else _intent(target, intent),
        request=None if state is None else _open_request(target, state, states),
        is_baked=target.baked is not None
        and promotion_journal.baking(target.store) == target.baked[0],
    )
    versions = set(repository.versions())
    if intent is not None and target.attempt.state != RUNNING:
        # If the copy of the intent's version was interrupted, its partial files must be removed
        # too.
        versions |= {intent.version} & set(repository.taken_numbers())
    attempt = target.attempt
    is_own = state is not None and attempt.request == state.id
    config = live_version(repository.read_config())
    is_lost = config not in (*repository.taken_numbers(), UNKNOWN)
    if intent is None and is_lost and desired.live not in versions:
        # A repository that was emptied is filled by the next release.
        config = desired.live
    ahead = None
    if plan is not None:
        published = datetime.fromisoformat(plan.published_at)
        ahead = (published - target.settings.clock()).total_seconds()
    placed = _only(repository.canary.sizes(), repository.canary.whole())
    observed = Observed(
        lease=repository.lease,
        fence=repository.newest_lease(),
        attempt=attempt.state if intent is not None or is_own else NONE,
        is_blocked=attempt.is_blocked and is_own,
        is_rehearsed=attempt.is_rehearsed,
        config=config,
        staged=_only(repository.staged.sizes(), repository.staged.whole()),
        versions=frozenset(versions),
        placed=placed,
        plan=None
        if plan is None
        else ShownPlan(
            stable=plan.stable.version,
            canary=plan.canary.version if plan.canary else None,
            share=plan.canary_share,
        ),
        is_drained=ahead is None or -ahead >= target.settings.stages.drain_seconds,
        is_plan_ahead=ahead is not None and ahead > 0,
        servers=(_servers(target, desired, placed),) if target.settings.triton_urls else (),
    )
    return desired, observed, state


def _only(files: object, whole: list[int]) -> int | None:
    """Return the complete version, `UNKNOWN` if the copy is incomplete, or None without files."""
    return whole[-1] if whole else UNKNOWN if files else None


def _servers(target: DeploymentTarget, desired: Desired, placed: int | None) -> Server:
    """Return what every server has loaded, according to the last answers to this process."""
    if target.known is not None:
        return target.known
    if desired.intent is not None:
        return Server(serves=UNKNOWN, canary=UNKNOWN, candidate=UNKNOWN)
    # The watchdog probes the servers and corrects them. Files of a canary are removed only after
    # every server has unloaded it.
    return Server(serves=desired.live, canary=None if placed is None else desired.canary or UNKNOWN)


def _intent(target: DeploymentTarget, intent: Promotion) -> Intent:
    entries = promotion_journal.read_entries(target.store)
    positions = [
        at
        for at, entry in enumerate(entries)
        if entry.action == promotion_journal.INTENT and entry.version == intent.version
    ]
    served = (*promotion_journal.LIVE_ACTIONS, promotion_journal.CANARY)
    return Intent(
        version=intent.version,
        before=live_version(intent.config),
        is_canary=intent.share is not None,
        was_known=any(
            entry.version == intent.version and entry.action in served
            for entry in entries[: positions[-1] if positions else 0]
        ),
        lease=intent.lease,
    )


def _open_request(
    target: DeploymentTarget, state: RequestState, states: list[RequestState]
) -> OpenRequest:
    return OpenRequest(
        kind=_kind(target, state.request),
        is_accepted=state.accepted is not None,
        is_expired=state.is_expired(target.settings.clock()),
        is_recorded=state.accepted is not None and announcing.satisfied(target, state) is not None,
        is_superseded=is_superseded(state, states),
        has_failed=state.request.kind == ABORT and state.id in target.errors,
    )


def _kind(target: DeploymentTarget, request: ServingRequest) -> str:
    """Return the kind of the moves that the request needs."""
    if request.kind == CANARY and announcing.gives_first_share(target, request):
        return ADVANCE
    if request.kind == ADVANCE and _next_share(target, request) is None:
        return RELEASE
    return request.kind


def _next_share(target: DeploymentTarget, request: ServingRequest) -> float | None:
    """Return the canary's share at its next stage, or None after the last stage."""
    if request.kind == CANARY:
        return request.share
    plan = target.repository.read_plan()
    now = plan.canary_share if plan is not None else 0.0
    return next((share for share in target.settings.stages.shares if share > now), None)


def _is_attempt_superseded(target: DeploymentTarget, states: list[RequestState]) -> bool:
    """Return whether a later request supersedes the request of the attempt.

    A request for a rollback is never superseded while it is attempted.
    """
    return any(
        state.id == target.attempt.request
        and state.request.kind != ROLLBACK
        and is_superseded(state, states)
        for state in states
    )


def _supersede(target: DeploymentTarget, states: list[RequestState]) -> None:
    """Fail the running attempt if a later request supersedes the request of this attempt."""
    if target.attempt.state == RUNNING and _is_attempt_superseded(target, states):
        target.fail(Refused(_SUPERSEDED))


def _check_wanted(target: DeploymentTarget) -> None:
    """Raise an error if a later request supersedes the request of the attempt.

    Raises:
        Refused: a later rollback or abort supersedes the request.
    """
    if _is_attempt_superseded(target, requests.read_requests(target.store)):
        raise Refused(_SUPERSEDED)


def drive(target: DeploymentTarget, *, stop: Callable[[], bool] = lambda: False) -> None:
    """Make moves until nothing is to be done, or until `stop` returns True between two changes.

    Raises:
        ContractError, TemporaryError, PermanentError, OSError: a move that belongs to no request
        failed, or a failed change could not be undone. The next call tries again.
    """
    before: tuple[Desired, Observed, str | None] | None = None
    target.proceed = partial(_check_wanted, target)
    while True:
        desired, observed, state = observe(target)
        if desired.intent is None and stop():
            return
        rule = next_rule(desired, observed)
        if rule is None:
            return
        # The next request may lead to the same desired and observed state, so compare its id too.
        seen = desired, observed, None if state is None else state.id
        if seen == before:
            raise PermanentError(f"the move {rule.move!r} changed nothing: {rule.condition}")
        before = seen
        target.settings.trace(rule, desired, observed)
        if rule.move == STAND_DOWN:
            target.repository.check_held()
        _perform(target, rule, state)


def _perform(target: DeploymentTarget, rule: ProtocolRule, state: RequestState | None) -> None:
    attempt, is_undoing = target.attempt, rule.state in ("undoing", "undone")
    is_abort = rule.state in ("abort accepted", "abort done")
    is_of_request = not is_abort and (rule.state == "accepted" or rule.move == ANSWER)
    if is_of_request and state is not None:
        attempt = target.attempt = Attempt(request=state.id)
    try:
        _move(target, rule, state)
    except BaseException as error:
        if is_abort and state is not None:
            # The change that the abort interrupted continues.
            logger.error("%s failed: %s", rule.move, error)
            target.errors[state.id] = error
            if not isinstance(error, HANDLED):
                raise
            return
        if is_undoing:
            was_blocked, attempt.is_blocked = attempt.is_blocked, True
            attempt.lost.append(str(error))
            is_own = state is not None and attempt.request == state.id
            if was_blocked or not is_own or not isinstance(error, HANDLED):
                raise
            return
        is_about_abort = state is not None and state.request.kind == ABORT
        is_recorded = rule.move == ANSWER and state is not None and state.recorded is not None
        if is_about_abort or is_recorded or (not is_of_request and attempt.state != RUNNING):
            # The interrupted change goes on, and a recorded change is answered in the next round.
            raise
        logger.error("%s failed: %s", rule.move, error)
        target.fail(error)
        if not isinstance(error, HANDLED):
            with suppress(BaseException):
                drive(target, stop=lambda: target.attempt.state != FAILED)
            raise


def _move(target: DeploymentTarget, rule: ProtocolRule, state: RequestState | None) -> None:
    """Carry out the move that the rule names. `state` contains the request that is handled next."""
    if rule.move in BODIES:
        BODIES[rule.move](target)
    elif rule.move == RESET_PLAN:
        _reset_plan(target, rule, state)
    elif rule.move == RECORD_SHARE:
        _record_share(target, state)
    elif state is not None:
        _REQUEST_BODIES[rule.move](target, state)


def _accept(target: DeploymentTarget, state: RequestState) -> None:
    _answer(target, state, ACCEPTED)


def _withdraw(target: DeploymentTarget, state: RequestState) -> None:
    reason = f"its deadline {state.request.deadline} passed before it was accepted"
    who, now = target.settings.who, target.settings.clock()
    target.repository.check_held()
    after = requests.withdraw(target.store, state.id, who=who, now=now, reason=reason)
    if after.accepted is None:
        remove_prepared(target.store, state.id)


def _result(target: DeploymentTarget, state: RequestState) -> None:
    request = state.request
    found = announcing.satisfied(target, state)
    if request.kind == ABORT:
        at_work = canary_at_work(target.store)
        version = at_work.version if at_work else None
        reason = "no client is sent to the canary" if at_work else "there is no canary"
    else:
        assert found is not None
        version, live = found.version, target.live
        if state.earlier is not None:
            reason = f"request {state.first} of run {request.run} was done before"
        elif live is not None and live.version == version:
            if request.kind == RELEASE:
                if state.recorded is None:
                    announcing.confirm(target, version)
                announcing.tidy(target, live)
            reason = f"version {version} is live"
        else:
            reason = f"version {version} is the canary"
    _end(target, state, DONE, reason=reason, version=version)


def _refuse(target: DeploymentTarget, state: RequestState) -> None:
    attempt, is_own = target.attempt, target.attempt.request == state.id
    error: BaseException
    if is_own and attempt.error is not None:
        error = attempt.error
        if attempt.lost and isinstance(error, (TemporaryError, PermanentError)):
            kind = TemporaryError if isinstance(error, TemporaryError) else PermanentError
            error = kind("; ".join([str(error), *attempt.lost]))
            error.__cause__ = attempt.error
    elif state.id in target.errors:
        error = target.errors[state.id]
    elif is_superseded(state, requests.read_requests(target.store)):
        # After a temporary error, a retried step would release what a person rolled back.
        error = Refused(_SUPERSEDED)
    else:
        error = TemporaryError(f"its deadline {state.request.deadline} passed before it was done")
    if isinstance(error, UnreadableFile):  # no input is wrong, the read itself failed
        error = TemporaryError(str(error))
    target.errors[state.id] = error
    if is_own and target.intent is None:
        target.attempt = Attempt()
    name = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _NAMES), None)
    reason = str(error) or type(error).__name__
    _end(target, state, REFUSED, reason=reason, error=name or "PermanentError")


def _end(
    target: DeploymentTarget, state: RequestState, action: str, *, reason: str, **more: Any
) -> None:
    """Append the result, and remove the prepared version unless the result is ignored.

    The journal's readers ignore the result if another controller took the lock meanwhile. That
    controller still needs the prepared version.
    """
    if not _answer(target, state, action, reason=reason, **more).is_open:
        remove_prepared(target.store, state.id)


def _answer(
    target: DeploymentTarget,
    state: RequestState,
    action: str,
    *,
    reason: str = "",
    version: int | None = None,
    error: str | None = None,
) -> RequestState:
    target.repository.check_held()
    return requests.answer(
        target.store,
        state.id,
        action,
        who=target.settings.who,
        now=target.settings.clock(),
        reason=reason,
        version=version,
        error=error,
        lease=target.repository.lease,
    )


def _grow(target: DeploymentTarget, state: RequestState) -> None:
    request, plan = state.request, target.repository.read_plan()
    announcing.check_plan(target, request)
    if plan is None or plan.canary is None:
        raise Refused("there is no canary, expected a canary whose share can grow")
    share = _next_share(target, request)
    is_first = request.kind == CANARY
    baseline = {} if is_first else target.settings.stages.read_baseline(plan)
    reason = "the shadow canary gets its first share" if is_first else request.reason
    target.repository.write_plan(
        plan.next(canary_share=share, reason=reason, published_at=target.now(), baseline=baseline)
    )
    target.checkpoint("plan written")


def _record_share(target: DeploymentTarget, state: RequestState | None) -> None:
    at_work, plan = canary_at_work(target.store), target.repository.read_plan()
    assert at_work is not None
    assert plan is not None
    line = replace(at_work, share=plan.canary_share, reason=plan.reason, who=target.settings.who)
    if state is not None and state.accepted is not None and state.request.kind in (ADVANCE, CANARY):
        line = replace(line, request=state.id, who=state.request.who)
    target.append(line)
    target.checkpoint("journal written")


def _reset_plan(target: DeploymentTarget, rule: ProtocolRule, state: RequestState | None) -> None:
    plan, live, intent = target.repository.read_plan(), target.live, target.intent
    assert plan is not None
    if rule.state == "abort accepted" and state is not None:
        announcing.check_plan(target, state.request)
        reason = state.request.reason
        logger.error("the canary is aborted: %s", reason)
    elif intent is not None:
        reason = f"start of version {intent.version} was withdrawn"
    elif rule.state == "draining":
        # The clock was set back to before the plan's time, so the drain period starts again.
        target.repository.write_plan(plan.next(published_at=target.now()))
        return
    elif live is not None and plan.stable.version != live.version:
        reason = live.reason
    else:
        reason = f"version {plan.canary.version if plan.canary else None} is no longer a canary"
    target.reset_plan(reason)
    target.checkpoint("plan reset")


_REQUEST_BODIES: dict[str, Callable[[DeploymentTarget, RequestState], None]] = {
    ACCEPT: _accept,
    WITHDRAW: _withdraw,
    ANNOUNCE: announcing.announce,
    GROW: _grow,
    ANSWER: _result,
    REFUSE: _refuse,
}


@contextmanager
def reconciled(settings: TargetSettings) -> Iterator[DeploymentTarget]:
    """Open the target, finish its outstanding requests, and yield the target.

    Raises:
        ContractError, TemporaryError, PermanentError: as in `opened` and `drive`.
    """
    with opened(settings) as target:
        drive(target)
        yield target


def carry_out(
    settings: TargetSettings,
    request: ServingRequest,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> RequestState:
    """Append the request, and return its state after it was done.

    If a controller is running, it carries the request out. Otherwise this process takes the lock
    and carries the request out. A process without write access to the model repository waits for a
    running controller. Such a process needs access to the model registry only.

    Args:
        settings: Deployment target.
        request: Request that has not been appended to the journal yet.
        report: Function that is called with progress messages.

    Raises:
        Refused, ContractError, PermanentError: the request was refused. The live version is
            unchanged.
        TemporaryError: a server does not answer, or nobody accepted the request, which is then
            withdrawn. The live version is unchanged.
    """
    store, repository = settings.store, None
    problem: Exception | None = None
    try:
        repository = settings.open_repository()
    except (PermanentError, TemporaryError) as error:
        problem = error
    request = requests.append_request(store, request)
    with ExitStack() as stack:
        if repository is not None:
            try:
                _lock_or_result(settings, request, repository, stack=stack, report=report)
            except (NotWritable, PermanentError) as error:
                problem = error
            else:
                if repository.is_locked:
                    held = replace(settings, held=repository)
                    _drive_for(
                        DeploymentTarget(settings=held, repository=repository, stack=stack), request
                    )
        if problem is not None:
            _wait(settings, request, report, problem=problem)
    state = requests.read_request(store, request.request)
    requests.expect_done(state)
    return state


def _lock_or_result(
    settings: TargetSettings,
    request: ServingRequest,
    repository: ModelRepository,
    *,
    stack: ExitStack,
    report: Callable[[str], None],
) -> None:
    """Wait until this process has the lock, or until a running controller has done the request.

    Raises:
        NotWritable, PermanentError: this process has no rights to write the repository. The request
            stays open.
        ContractError, TemporaryError: as in `carry_out`. The request is withdrawn.
    """
    store, timeouts, is_reported = settings.store, settings.timeouts, False

    def lock_or_result() -> None:
        nonlocal is_reported
        try:
            state = requests.read_request(store, request.request)
        except UnreadableFile as error:
            raise TemporaryError(str(error)) from error
        if state.is_open:
            try:
                stack.enter_context(repository.locked())
            except TemporaryError as error:
                if not is_reported:
                    report(f"{error}; waiting for its answer")
                is_reported = True
                raise

    try:
        timeouts.until_done(lock_or_result, timeouts.lock_seconds)
    except (NotWritable, PermanentError):
        raise
    except BaseException as error:
        state = _withdraw_own(settings, request, error)
        is_withdrawn = state.result is not None and state.accepted is None
        if is_withdrawn or not isinstance(error, Exception):  # Ctrl-C ends the waiting
            raise
        requests.wait_for_result(
            store, request, clock=settings.clock, sleep=timeouts.sleep, report=report
        )


def _wait(
    settings: TargetSettings,
    request: ServingRequest,
    report: Callable[[str], None],
    *,
    problem: Exception,
) -> None:
    """Wait for a running controller, because this process cannot write the model repository.

    Raises:
        The errors of `requests.wait_for_result`. If no controller accepts the request, the message
        contains `problem`.
    """
    report(f"{problem}; waiting for a running controller")
    try:
        requests.wait_for_result(
            settings.store,
            request,
            clock=settings.clock,
            sleep=settings.timeouts.sleep,
            report=report,
        )
    except BaseException as error:
        state = _withdraw_own(settings, request, error)
        is_withdrawn = state.result is not None and state.result.action == CANCELLED
        if is_withdrawn and isinstance(error, Exception):
            raise TemporaryError(f"{error}; this process cannot do it: {problem}") from problem
        raise


def _drive_for(target: DeploymentTarget, request: ServingRequest) -> None:
    """Make moves in this process until nothing is to be done.

    Raises:
        The error of the request.
    """
    settings = target.settings
    try:
        drive(target)
    except HANDLED as error:
        own = target.errors.get(request.request)
        state = requests.read_request(target.store, request.request)
        if state.result is None and state.accepted is None:
            _withdraw_own(settings, request, error)
        if own is None and (state.result is None or state.result.action != DONE):
            raise
        if own is None:
            logger.warning("%s is done, but what follows failed: %s", request.kind, error)
    if (failure := target.errors.get(request.request)) is not None:
        raise failure


def _withdraw_own(
    settings: TargetSettings, request: ServingRequest, error: BaseException
) -> RequestState:
    """Withdraw a request that nobody has accepted, and return its state.

    Raises:
        TemporaryError: the journal cannot be read, so the request stays open until its deadline.
    """
    try:
        state = requests.withdraw_after(settings.store, request, error, clock=settings.clock)
    except UnreadableFile as unreadable:
        raise TemporaryError(
            f"{unreadable}, so request {request.request} stays open until {request.deadline}"
        ) from unreadable
    if state.accepted is None:
        remove_prepared(settings.store, request.request)
    return state
