"""Decide the next move of the release protocol from the desired and the observed state.

This module neither reads nor writes. A `Desired` is computed from the journal of promotions and
requests. An `Observed` is read from the model repository, the traffic plan and the servers. `TABLE`
contains the complete protocol. The first rule with a true condition names the next move. The
controller makes that move, observes again, and asks for the next move (`controller.reconcile`).
After a crash, the controller makes the same observation, so recovery needs no code of its own.

Each move is one durable write, or one idempotent action on the servers:

- Entries of the journal: `ACCEPT`, `WITHDRAW`, `ANNOUNCE`, `ADOPT`, `RECORD`, `WITHDRAW_INTENT`,
  `ANSWER`, `REFUSE`, `RECORD_SHARE`, `END_CANARY` and `END_BAKING`.
- Writes of the repository: `STAGE`, `PUBLISH`, `DISCARD`, `REMOVE_FILES`, `PLACE_CANARY`,
  `CONFIGURE` and `RESTORE_CONFIG`.
- Writes of the traffic plan: `SHOW_CANARY`, `GROW` and `RESET_PLAN`.
- Actions on every server, one server after another: `REHEARSE`, `SERVE`, `RESTORE_SERVERS`,
  `LOAD_CANARY`, `UNLOAD_CANARY` and `HEAL`. `UNLOAD_CANARY` also removes the canary's files.

A move that fails sets `Observed.attempt` to `FAILED`. The attempt is in the memory of the
controller that announced the intent. After a restart, the attempt is `NONE`, and the intent is
undone like a failed intent. After a crash, the request of the interrupted intent is still open. The
controller announces such a request again until the request's deadline. A release then gets a new
version number.

Requests are handled in the order of their entries, except that `ABORT` comes first and `ROLLBACK`
second. A later rollback supersedes every request that is not recorded yet, and a later abort
supersedes requests about canaries. A superseded attempt counts as failed. A rollback is the
exception: a superseded rollback is finished. If a step sends its request again, the retry keeps the
position of the step's first request. A final answer to the first request is also the answer to the
retry (`evergreen.registry.requests`).

An abort waits only for the move in progress. The abort is carried out between two moves of another
change, and this change then continues. If the abort fails, only the abort is refused.

An entry of a person and an entry of the controller can be appended at the same time. The order of
the entries then decides which of the two is valid. A request is accepted only if no withdrawal of
the request precedes the acceptance. The request is withdrawn only if no acceptance precedes the
withdrawal.

Each controller gets a lease with a higher number than all leases before. The repository contains
the highest lease number. Before each write, the controller compares this number with the number of
its own lease. If the repository's number is higher, the write is refused. An append to the journal
cannot be conditional. Readers of the journal therefore ignore an entry if an earlier entry has a
newer lease. If a controller finds an intent with an older lease, it announces the intent again
under its own lease, and then undoes the change. The controller with the older lease can then no
longer record the change.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from evergreen.contracts.requests import ABORT, ADVANCE, CANARY, KINDS, RELEASE, ROLLBACK

NONE, RUNNING, FAILED = "none", "running", "failed"
"""Values of `Observed.attempt`."""
UNKNOWN = -1
"""Placeholder for the version of a server that returns wrong scores or has not been probed yet."""

ANNOUNCED_KINDS = (RELEASE, ROLLBACK, CANARY)
"""Kinds of requests that need an intent, because servers load a version for them."""
URGENT_KINDS = (ABORT, ROLLBACK)
"""Kinds of requests that are handled before all others, in this order."""
SUPERSEDED_KINDS = {
    ROLLBACK: (RELEASE, ROLLBACK, CANARY, ADVANCE),
    ABORT: (CANARY, ADVANCE),
}
"""For each kind of request, the kinds of earlier requests that it supersedes."""


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """The open request that is handled next."""

    kind: str
    """One of `KINDS`. An `ADVANCE` beyond the last share counts as a `RELEASE`. A `CANARY` that
    gives a shadow canary its first share counts as an `ADVANCE`."""
    is_accepted: bool = False
    is_expired: bool = False
    """Whether the request's deadline has passed."""
    is_recorded: bool = False
    """Whether the requested change is complete. A change is complete once the journal contains it.
    An `ABORT` is complete once the plan has no canary."""
    is_superseded: bool = False
    """Whether a later rollback or abort supersedes the request."""
    has_failed: bool = False
    """Whether a move of an `ABORT` failed. For other kinds, see `Observed.attempt`."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


@dataclass(frozen=True, kw_only=True)
class Intent:
    """The last promotion in the journal, if it is only an intent.

    If the recording of a change failed, the change counts as an intent until it is withdrawn.
    """

    version: int
    before: int | None
    """Version that the configuration named before the intent. None = the repository had no
    configuration."""
    is_canary: bool = False
    was_known: bool = False
    """Whether the version was live or a canary before. The files of such a version are not
    removed."""
    lease: int | None = None
    """Lease number of the controller that announced the intent last. None in journal entries of
    older releases."""


@dataclass(frozen=True, kw_only=True)
class Desired:
    """State that the journal describes."""

    live: int | None = None
    canary: int | None = None
    share: float = 0.0
    """The canary's traffic share, as recorded in the journal."""
    intent: Intent | None = None
    request: OpenRequest | None = None
    is_baked: bool = False
    """Whether the evidence allows the live version to end its baking."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Observation of one server that answers. A server that does not answer is left out."""

    serves: int | None = None
    """Version that answers under the served name, with the expected scores for the golden rows.
    None = the name is not loaded."""
    canary: int | None = None
    """Version that answers under the canary's name."""
    candidate: int | None = None
    """Version that is loaded under the candidate's name."""


@dataclass(frozen=True, kw_only=True)
class ShownPlan:
    """Observed state of the traffic plan."""

    stable: int
    canary: int | None = None
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Observed state of the repository and of the servers, and this controller's own state."""

    lease: int = 1
    """Number of this controller's lease."""
    fence: int = 1
    """Highest lease number in the repository."""
    attempt: str = NONE
    """State of this controller's current attempt.

    An attempt is the work on one intent. If a request needs no intent, the attempt is the work on
    the request. The work on an `ABORT` does not count as an attempt.
    """
    is_blocked: bool = False
    """Whether a move that undoes the intent failed in this attempt."""
    is_rehearsed: bool = False
    """Whether every server has rehearsed the staged version in this attempt."""
    config: int | None = None
    """Version in Triton's configuration. `UNKNOWN` = the configuration is corrupt."""
    staged: int | None = None
    """Version whose files are under the candidate's name."""
    versions: frozenset[int] = frozenset()
    """Complete versions under the served name."""
    placed: int | None = None
    """Version whose files are under the canary's name."""
    plan: ShownPlan | None = None
    is_drained: bool = True
    """Whether all clients have read the traffic plan. True if the plan is old enough or does not
    exist."""
    is_plan_ahead: bool = False
    """Whether the plan's time is in the future, for example because the clock was set back."""
    servers: tuple[Server, ...] = field(default_factory=tuple)


STAND_DOWN = "stand down"
ACCEPT = "accept request"
WITHDRAW = "withdraw request"
ANNOUNCE = "announce intent"
STAGE = "stage files"
ADOPT = "announce intent again"
REHEARSE = "rehearse on servers"
PUBLISH = "publish files"
CONFIGURE = "write configuration"
SERVE = "load on servers"
PLACE_CANARY = "place canary's files"
LOAD_CANARY = "load canary on servers"
SHOW_CANARY = "write plan with canary"
RECORD = "record change"
RESET_PLAN = "write plan without canary"
RESTORE_CONFIG = "restore configuration"
RESTORE_SERVERS = "restore servers"
DISCARD = "discard staged files"
REMOVE_FILES = "remove version's files"
WITHDRAW_INTENT = "withdraw intent"
ANSWER = "answer request"
REFUSE = "refuse request"
RECORD_SHARE = "record share"
UNLOAD_CANARY = "unload canary"
END_CANARY = "record canary's end"
HEAL = "reload on servers"
GROW = "write plan with next share"
END_BAKING = "record end of baking"
MOVES = (
    STAND_DOWN,
    *(ACCEPT, WITHDRAW, ANNOUNCE, STAGE, REHEARSE, PUBLISH, CONFIGURE, SERVE, PLACE_CANARY),
    *(LOAD_CANARY, SHOW_CANARY, RECORD, RESET_PLAN, RESTORE_CONFIG, RESTORE_SERVERS, DISCARD),
    *(REMOVE_FILES, WITHDRAW_INTENT, ANSWER, REFUSE, RECORD_SHARE, UNLOAD_CANARY, END_CANARY),
    *(HEAL, GROW, END_BAKING, ADOPT),
)

Condition = Callable[[Desired, Observed], bool]


@dataclass(frozen=True, kw_only=True)
class ProtocolRule:
    """One row of the protocol's table."""

    state: str
    """State in which the rule applies."""
    condition: str
    """The condition as text, for the documentation."""
    holds: Condition
    """Function that evaluates the condition, including `state`."""
    move: str
    """One of `MOVES`."""
    then: tuple[str, ...]
    """Possible states after this move, if the move succeeds and nothing else changes."""


def _forward(desired: Desired, observed: Observed) -> bool:
    return desired.intent is not None and observed.attempt == RUNNING


def _undo(desired: Desired, observed: Observed) -> bool:
    return desired.intent is not None and observed.attempt != RUNNING


def _version(desired: Desired) -> int:
    return desired.intent.version if desired.intent else UNKNOWN


def _before(desired: Desired) -> int | None:
    return desired.intent.before if desired.intent else None


def _is_new(desired: Desired, observed: Observed) -> bool:
    """Return whether the intent's version still has to be published under the served name."""
    return _forward(desired, observed) and _version(desired) not in observed.versions


def _goes_live(desired: Desired, observed: Observed) -> bool:
    intent = desired.intent
    return (
        _forward(desired, observed)
        and not _is_new(desired, observed)
        and intent is not None
        and not intent.is_canary
    )


def _becomes_canary(desired: Desired, observed: Observed) -> bool:
    intent = desired.intent
    return (
        _forward(desired, observed)
        and not _is_new(desired, observed)
        and intent is not None
        and intent.is_canary
    )


def _plan_canary(observed: Observed) -> int | None:
    return observed.plan.canary if observed.plan else None


def _settled(desired: Desired) -> bool:
    return desired.intent is None


def _is_plan_wrong(desired: Desired, observed: Observed) -> bool:
    """Return whether the plan and the journal name different versions."""
    if observed.plan is None or desired.live is None:
        return False
    shown = observed.plan.canary
    return observed.plan.stable != desired.live or (shown is not None and shown != desired.canary)


def _open(desired: Desired) -> bool:
    request = desired.request
    return request is not None and not request.is_accepted


def _accepted(desired: Desired) -> bool:
    request = desired.request
    return request is not None and request.is_accepted


def _asks(desired: Desired, kinds: Iterable[str]) -> bool:
    return desired.request is not None and desired.request.kind in kinds


def _may_open(desired: Desired) -> bool:
    """Return whether an open request may be accepted.

    An abort is accepted even while an intent is in progress.
    """
    return _open(desired) and (_settled(desired) or _asks(desired, (ABORT,)))


def _aborts(desired: Desired) -> bool:
    """Return whether an abort is accepted. An abort does not wait for an intent in progress."""
    return _accepted(desired) and _asks(desired, (ABORT,))


def _failed(desired: Desired, observed: Observed) -> bool:
    return _accepted(desired) and observed.attempt == FAILED


def _is_left_over(observed: Observed) -> bool:
    """Return whether a canary that is not in the plan still has files or is still loaded."""
    return _plan_canary(observed) is None and (
        observed.placed is not None or not _load_canary(observed, None)
    )


def _serve(observed: Observed, version: int | None) -> bool:
    return all(server.serves == version for server in observed.servers)


def _load_canary(observed: Observed, version: int | None) -> bool:
    return all(server.canary == version for server in observed.servers)


_IN_PROGRESS = ("announced", "published", "configured", "undoing", "undone", "draining", "settled")
"""States of a change that continues after an abort interrupted it."""

TABLE: tuple[ProtocolRule, ...] = (
    ProtocolRule(
        state="fenced",
        condition="another controller has a lease with a larger number",
        holds=lambda d, o: o.lease < o.fence,
        move=STAND_DOWN,
        then=(),
    ),
    # An abort is carried out between two moves of any other change.
    ProtocolRule(
        state="abort failed",
        condition="a move of the abort failed",
        holds=lambda d, o: _aborts(d) and d.request is not None and d.request.has_failed,
        move=REFUSE,
        then=_IN_PROGRESS,
    ),
    ProtocolRule(
        state="abort accepted",
        condition="the plan names a canary",
        holds=lambda d, o: _aborts(d) and _plan_canary(o) is not None,
        move=RESET_PLAN,
        then=("abort done",),
    ),
    ProtocolRule(
        state="abort done",
        condition="the plan names no canary",
        holds=lambda d, o: _aborts(d),
        move=ANSWER,
        then=_IN_PROGRESS,
    ),
    ProtocolRule(
        state="requested",
        condition="the deadline of a request that may be accepted has passed",
        holds=lambda d, o: _may_open(d) and d.request is not None and d.request.is_expired,
        move=WITHDRAW,
        then=("settled",),
    ),
    ProtocolRule(
        state="requested",
        condition="an abort is requested",
        holds=lambda d, o: _may_open(d) and _asks(d, (ABORT,)),
        move=ACCEPT,
        then=("abort accepted", "abort done"),
    ),
    # Continue an intent that this controller announced.
    ProtocolRule(
        state="announced",
        condition="the version's files are neither published nor staged",
        holds=lambda d, o: _is_new(d, o) and o.staged != _version(d),
        move=STAGE,
        then=("staged",),
    ),
    ProtocolRule(
        state="staged",
        condition="not every server has rehearsed the version",
        holds=lambda d, o: _is_new(d, o) and not o.is_rehearsed,
        move=REHEARSE,
        then=("rehearsed",),
    ),
    ProtocolRule(
        state="rehearsed",
        condition="the version's files are staged and rehearsed",
        holds=lambda d, o: _is_new(d, o),
        move=PUBLISH,
        then=("published", "published canary"),
    ),
    ProtocolRule(
        state="published",
        condition="the configuration names another version",
        holds=lambda d, o: _goes_live(d, o) and o.config != _version(d),
        move=CONFIGURE,
        then=("configured", "served"),
    ),
    ProtocolRule(
        state="configured",
        condition="a server does not answer from the version",
        holds=lambda d, o: _goes_live(d, o) and not _serve(o, _version(d)),
        move=SERVE,
        then=("served",),
    ),
    ProtocolRule(
        state="served",
        condition="every server answers from the version",
        holds=lambda d, o: _goes_live(d, o),
        move=RECORD,
        then=("recorded", "plan wrong"),
    ),
    ProtocolRule(
        state="published canary",
        condition="the canary's files belong to another version",
        holds=lambda d, o: _becomes_canary(d, o) and o.placed != _version(d),
        move=PLACE_CANARY,
        then=("placed canary",),
    ),
    ProtocolRule(
        state="placed canary",
        condition="a server has not loaded the canary",
        holds=lambda d, o: _becomes_canary(d, o) and not _load_canary(o, _version(d)),
        move=LOAD_CANARY,
        then=("loaded canary",),
    ),
    ProtocolRule(
        state="loaded canary",
        condition="the plan does not name the canary",
        holds=lambda d, o: _becomes_canary(d, o) and _plan_canary(o) != _version(d),
        move=SHOW_CANARY,
        then=("shown canary",),
    ),
    ProtocolRule(
        state="shown canary",
        condition="the plan names the canary",
        holds=lambda d, o: _becomes_canary(d, o),
        move=RECORD,
        then=("recorded", "settled"),
    ),
    # An intent is undone if it failed, or if a crash interrupted it.
    ProtocolRule(
        state="undoing",
        condition="a controller with an older lease announced the intent",
        holds=lambda d, o: (
            _undo(d, o)
            and o.attempt == NONE
            and d.intent is not None
            and d.intent.lease is not None
            and d.intent.lease < o.lease
        ),
        move=ADOPT,
        then=("undoing", "undone"),
    ),
    ProtocolRule(
        state="undo blocked",
        condition="the attempt failed, and undoing it failed too",
        holds=lambda d, o: _undo(d, o) and _failed(d, o) and o.is_blocked,
        move=REFUSE,
        then=("undoing",),
    ),
    ProtocolRule(
        state="undoing",
        condition="the plan names the canary of the intent",
        holds=lambda d, o: (
            _undo(d, o)
            and d.intent is not None
            and d.intent.is_canary
            and _plan_canary(o) == _version(d)
        ),
        move=RESET_PLAN,
        then=("undoing", "undone"),
    ),
    ProtocolRule(
        state="undoing",
        condition="the configuration differs from the configuration before the intent",
        holds=lambda d, o: _undo(d, o) and o.config != _before(d),
        move=RESTORE_CONFIG,
        then=("undoing", "undone"),
    ),
    ProtocolRule(
        state="undoing",
        condition="a server does not answer from the previous version, or still has the candidate",
        holds=lambda d, o: (
            _undo(d, o)
            and not (
                _serve(o, _before(d)) and all(server.candidate is None for server in o.servers)
            )
        ),
        move=RESTORE_SERVERS,
        then=("undoing", "undone"),
    ),
    ProtocolRule(
        state="undoing",
        condition="files are staged",
        holds=lambda d, o: _undo(d, o) and o.staged is not None,
        move=DISCARD,
        then=("undoing", "undone"),
    ),
    ProtocolRule(
        state="undoing",
        condition="the version's files are published, and the version never served",
        holds=lambda d, o: (
            _undo(d, o)
            and d.intent is not None
            and not d.intent.was_known
            # If the writing of a record failed, the record may be in the journal until it is
            # withdrawn.
            and d.live != _version(d)
            and _version(d) in o.versions
        ),
        move=REMOVE_FILES,
        then=("undone",),
    ),
    ProtocolRule(
        state="undone",
        condition="nothing of the intent is left, except a canary that no plan names",
        holds=_undo,
        move=WITHDRAW_INTENT,
        then=("failed", "accepted", "expired", "superseded", "draining", "settled"),
    ),
    # The change of the request was made or has failed, so the requester gets the result.
    ProtocolRule(
        state="failed",
        condition="the request's attempt failed",
        holds=lambda d, o: _settled(d) and _failed(d, o),
        move=REFUSE,
        then=("settled",),
    ),
    ProtocolRule(
        state="recorded",
        condition="the journal contains the requested change",
        holds=lambda d, o: (
            _settled(d) and _accepted(d) and d.request is not None and d.request.is_recorded
        ),
        move=ANSWER,
        then=("plan wrong", "settled"),
    ),
    # Without an intent, plan and configuration follow the journal.
    ProtocolRule(
        state="plan wrong",
        condition="the plan and the journal name different versions",
        holds=lambda d, o: _settled(d) and _is_plan_wrong(d, o),
        move=RESET_PLAN,
        then=("draining", "settled"),
    ),
    ProtocolRule(
        state="share unrecorded",
        condition="the plan and the journal have different shares for the canary",
        holds=lambda d, o: (
            _settled(d)
            and d.canary is not None
            and o.plan is not None
            and o.plan.canary is not None
            and o.plan.share != d.share
        ),
        move=RECORD_SHARE,
        then=("recorded", "accepted", "settled"),
    ),
    ProtocolRule(
        state="configuration wrong",
        condition="the configuration does not name the live version",
        holds=lambda d, o: _settled(d) and d.live is not None and o.config != d.live,
        move=RESTORE_CONFIG,
        then=("servers wrong", "settled"),
    ),
    # Handle the next open request.
    ProtocolRule(
        state="superseded",
        condition="a later rollback or abort supersedes the request",
        holds=lambda d, o: _settled(d) and d.request is not None and d.request.is_superseded,
        move=REFUSE,
        then=("settled",),
    ),
    ProtocolRule(
        state="expired",
        condition="the accepted request's deadline has passed",
        holds=lambda d, o: (
            _settled(d) and _accepted(d) and d.request is not None and d.request.is_expired
        ),
        move=REFUSE,
        then=("settled",),
    ),
    ProtocolRule(
        state="accepted",
        condition="a canary is requested, and no client calls the previous canary any more",
        holds=lambda d, o: (
            _settled(d)
            and _accepted(d)
            and _asks(d, (CANARY,))
            and _is_left_over(o)
            and o.is_drained
        ),
        move=UNLOAD_CANARY,
        then=("accepted",),
    ),
    ProtocolRule(
        state="accepted",
        condition="the request needs an intent",
        holds=lambda d, o: _settled(d) and _accepted(d) and _asks(d, ANNOUNCED_KINDS),
        move=ANNOUNCE,
        then=("announced", "published", "published canary"),
    ),
    ProtocolRule(
        state="accepted",
        condition="the request gives the canary its next share",
        holds=lambda d, o: _settled(d) and _accepted(d) and _asks(d, (ADVANCE,)),
        move=GROW,
        then=("share unrecorded",),
    ),
    ProtocolRule(
        state="requested",
        condition="the request's deadline has not passed",
        holds=lambda d, o: _settled(d) and _open(d),
        move=ACCEPT,
        then=("accepted", "recorded"),
    ),
    # Clean up after a canary that no plan names.
    ProtocolRule(
        state="draining",
        condition="the plan's time is in the future",
        holds=lambda d, o: _settled(d) and _is_left_over(o) and o.is_plan_ahead,
        move=RESET_PLAN,
        then=("draining", "settled"),
    ),
    ProtocolRule(
        state="draining",
        condition="clients have read the plan without the canary",
        holds=lambda d, o: _settled(d) and _is_left_over(o) and o.is_drained,
        move=UNLOAD_CANARY,
        then=("canary unloaded", "settled"),
    ),
    ProtocolRule(
        state="canary unloaded",
        condition="the journal still names a canary",
        holds=lambda d, o: (
            _settled(d)
            and d.canary is not None
            and _plan_canary(o) is None
            and o.placed is None
            and o.is_drained
        ),
        move=END_CANARY,
        then=("settled",),
    ),
    # Change the servers so that they agree with the journal.
    ProtocolRule(
        state="servers wrong",
        condition="a server does not answer from the live version",
        holds=lambda d, o: _settled(d) and d.live is not None and not _serve(o, d.live),
        move=HEAL,
        then=("settled",),
    ),
    ProtocolRule(
        state="canary absent",
        condition="a server has not loaded the canary that the plan names",
        holds=lambda d, o: (
            _settled(d) and _plan_canary(o) is not None and not _load_canary(o, d.canary)
        ),
        move=LOAD_CANARY,
        then=("settled",),
    ),
    ProtocolRule(
        state="healthy",
        condition="the evidence allows the end of the baking",
        holds=lambda d, o: _settled(d) and d.is_baked,
        move=END_BAKING,
        then=("settled",),
    ),
)
"""Rules of the protocol, in order. The first rule that holds is applied. If no rule applies,
nothing is left to do."""


def next_rule(desired: Desired, observed: Observed) -> ProtocolRule | None:
    """Return the first rule that holds, or None if nothing is to be done."""
    return next((rule for rule in TABLE if rule.holds(desired, observed)), None)


def next_move(desired: Desired, observed: Observed) -> str | None:
    """Return the next move, one of `MOVES`, or None if nothing is to be done.

    >>> request = OpenRequest(kind=ROLLBACK, is_accepted=True)
    >>> next_move(Desired(live=2, request=request), Observed(config=2, versions=frozenset({1, 2})))
    'announce intent'
    >>> intent = Intent(version=1, before=2, was_known=True)
    >>> after_a_crash = Observed(config=1, servers=(Server(serves=1),), versions=frozenset({1, 2}))
    >>> next_move(Desired(live=2, intent=intent), after_a_crash)
    'restore configuration'
    """
    rule = next_rule(desired, observed)
    return None if rule is None else rule.move


def table_rows() -> list[tuple[str, str, str, str]]:
    """Return state, condition, move and next states of each rule, in the order of the table."""
    return [
        (rule.state, rule.condition, rule.move, ", ".join(rule.then) or "ended") for rule in TABLE
    ]


def table_markdown() -> str:
    """Return the table as Markdown, for the documentation."""
    head = ["| state | condition | move | next states |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in table_rows())])
