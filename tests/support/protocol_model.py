"""A finite model of the release protocol, and an exhaustive search of its states.

The model chooses every move by `controller.protocol.TABLE`, which the controller uses too. The
model defines what each move changes in the journal, the repository, the plan and the servers. The
model also contains disturbances, such as a kill. Two controllers, two servers, a pipeline and a
monitor take part. A controller can be killed before and after each durable write and between two
servers. An answer can be lost, a server can restart, a clock can jump, and a lease can expire while
its holder is paused between its check and its write.

States are immutable, so the search can use a set. The search is breadth-first, so the path to a
violation is a shortest path. `tests/controller/test_protocol_model.py` runs the search.
`tests/controller/test_protocol_traces.py` compares the effect of each move with the effect of the
real controller's move.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from controller import protocol
from controller.protocol import FAILED, NONE, RUNNING, SUPERSEDED_KINDS, UNKNOWN, URGENT_KINDS
from evergreen.contracts.requests import (
    ABORT,
    ADVANCE,
    CANARY,
    CANCELLED,
    DONE,
    REFUSED,
    RELEASE,
    ROLLBACK,
)


class Attempt(NamedTuple):
    """Journal entries of an attempt to change the served versions."""

    version: int
    before: int | None
    is_canary: bool
    was_known: bool
    request: int
    lease: int
    share: float = 0


class RequestState(NamedTuple):
    """State of one request, from all its journal entries (see `evergreen.registry.requests`)."""

    kind: str
    model: str = ""
    run: str = ""
    """Pipeline run that requests the change. A second request of the same run for the same model is
    a retry."""
    share: float = 0
    """First share of a `CANARY`. 0 = shadow traffic only."""
    has_old_plan: bool = False
    """Whether the plan has changed since the evidence for the request was read."""
    replaces: int | None = None
    live_then: int | None = None
    intent_then: int | None = None
    rollback_then: bool = False
    is_accepted: bool = False
    is_expired: bool = False
    result: str | None = None
    is_final: bool = False
    """Whether a retry gets the same result."""
    version: int | None = None
    """Version in the result."""
    recorded: int | None = None


class Journal(NamedTuple):
    """State that results from all entries of the journal."""

    live: int = 1
    before: int | None = None
    """Version that was live before the current live version."""
    last: tuple[str, int] = ("live", 1)
    canary: int | None = None
    share: float = 0
    intent: Attempt | None = None
    numbers: tuple[tuple[int, str, int | None], ...] = ((1, "first", None),)
    """Announced versions with their models, and the versions that were live before them."""
    blocked: frozenset[str] = frozenset()
    lease: int = 0
    """Highest lease number of any entry."""
    request_states: tuple[RequestState, ...] = ()

    def model(self, version: int) -> str:
        return dict((number, model) for number, model, _ in self.numbers)[version]


class Files(NamedTuple):
    """The model repository with its traffic plan."""

    fence: int = 0
    config: int | None = 1
    staged: int | None = None
    versions: frozenset[int] = frozenset({1})
    placed: int | None = None
    plan: tuple[int, int | None, float] | None = None
    is_drained: bool = True
    is_ahead: bool = False


class Server(NamedTuple):
    """Versions that one server has loaded under each of its three model names."""

    serves: int | None = 1
    canary: int | None = None
    candidate: int | None = None


class Controller(NamedTuple):
    """State in the memory of one controller process."""

    lease: int = 0
    """0 = the process is not running or is waiting for the lock."""
    attempt: str = NONE
    request: int | None = None
    line: Attempt | None = None
    is_blocked: bool = False
    is_rehearsed: bool = False
    is_refused: bool = False
    """Whether the attempt ended because a check failed or a later request superseded it."""
    failed_abort: int | None = None
    """Position of the abort request whose move failed."""
    known: Server | None = None
    paused: tuple[int, Attempt | None, int | None] | None = None
    """Move that the controller checked before a pause: the number of the rule, the observed intent,
    and the position of the observed request."""


class State(NamedTuple):
    """State of the journal, the files, the servers and the controllers."""

    journal: Journal = Journal()
    files: Files = Files()
    servers: tuple[Server, ...] = (Server(), Server())
    controllers: tuple[Controller, ...] = (Controller(), Controller())
    flushed: Journal | None = None
    """Journal that remains after a crash if the last entry was not flushed."""
    budget: tuple[int, ...] = ()
    """Number of remaining disturbances, by kind as in `Scenario.budget`."""


class View(NamedTuple):
    """Observation of the state by a controller."""

    live: int
    canary: int | None
    share: float
    intent: tuple[int, int | None, bool, bool, int] | None
    request: tuple[str, bool, bool, bool, bool, bool] | None
    lease: int
    attempt: str
    is_blocked: bool
    is_rehearsed: bool
    files: Files
    servers: tuple[Server, ...]

    def as_protocol(self) -> tuple[protocol.Desired, protocol.Observed]:
        """Convert the observation to the protocol's types."""
        intent, request, files = None, None, self.files
        if self.intent is not None:
            version, before, is_canary, was_known, lease = self.intent
            intent = protocol.Intent(
                version=version,
                before=before,
                is_canary=is_canary,
                was_known=was_known,
                lease=lease,
            )
        if self.request is not None:
            kind, is_accepted, is_expired, is_recorded, is_superseded, has_failed = self.request
            request = protocol.OpenRequest(
                kind=kind,
                is_accepted=is_accepted,
                is_expired=is_expired,
                is_recorded=is_recorded,
                is_superseded=is_superseded,
                has_failed=has_failed,
            )
        plan = None
        if files.plan is not None:
            stable, canary, share = files.plan
            plan = protocol.ShownPlan(stable=stable, canary=canary, share=float(share))
        desired = protocol.Desired(
            live=self.live,
            canary=self.canary,
            share=float(self.share),
            intent=intent,
            request=request,
        )
        observed = protocol.Observed(
            lease=self.lease,
            fence=files.fence,
            attempt=self.attempt,
            is_blocked=self.is_blocked,
            is_rehearsed=self.is_rehearsed,
            config=files.config,
            staged=files.staged,
            versions=files.versions,
            placed=files.placed,
            plan=plan,
            is_drained=files.is_drained,
            is_plan_ahead=files.is_ahead,
            servers=tuple(protocol.Server(**each._asdict()) for each in self.servers),
        )
        return desired, observed


DISTURBANCES = CRASH, FAILURE, RESTART, JUMP, PAUSE, RECALL = range(6)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The requests of a search, and how often each kind of disturbance may happen."""

    request_states: tuple[RequestState, ...]
    """Requests in the order in which they are appended to the journal. Each request can be appended
    at any time."""
    shares: tuple[float, ...] = (1,)
    crashes: int = 1
    failures: int = 1
    restarts: int = 0
    jumps: int = 0
    pauses: int = 1
    recalls: int = 1
    """Number of times that a waiting process may withdraw its request, or that a deadline may
    pass."""

    @property
    def budget(self) -> tuple[int, ...]:
        """Return how often each of `DISTURBANCES` may happen in a search."""
        return (
            self.crashes,
            self.failures,
            self.restarts,
            self.jumps,
            self.pauses,
            self.recalls,
        )


class Violation(Exception):
    """Raised if a property of the protocol does not hold.

    The message contains the property's name.
    """


def expect(is_true: bool, name: str) -> None:
    """Raise the violation of property `name` if the condition is false."""
    if not is_true:
        raise Violation(name)


JOURNAL_MOVES = {
    protocol.ACCEPT,
    protocol.WITHDRAW,
    protocol.ANNOUNCE,
    protocol.ADOPT,
    protocol.RECORD,
    protocol.WITHDRAW_INTENT,
    protocol.ANSWER,
    protocol.REFUSE,
    protocol.RECORD_SHARE,
    protocol.END_CANARY,
}
SERVER_MOVES = {
    protocol.REHEARSE,
    protocol.SERVE,
    protocol.RESTORE_SERVERS,
    protocol.LOAD_CANARY,
    protocol.UNLOAD_CANARY,
    protocol.HEAL,
}


@dataclass
class ProtocolModel:
    """The transitions of the model. Mutants in the tests replace `table`, or override a method."""

    scenario: Scenario
    table: tuple[protocol.ProtocolRule, ...] = protocol.TABLE
    mutant: str = ""
    """Name of the built-in fault, or an empty text."""
    rules: Callable[[View], int | None] = field(init=False)

    def __post_init__(self) -> None:
        @cache
        def first(view: View) -> int | None:
            desired, observed = view.as_protocol()
            found = (at for at, rule in enumerate(self.table) if rule.holds(desired, observed))
            return next(found, None)

        self.rules = first

    def start(self) -> State:
        """Return the initial state: version 1 is live, and no controller runs."""
        return State(budget=self.scenario.budget)

    # The following methods return what a controller sees, as in `controller.reconcile.observe`.

    def chosen(self, journal: Journal) -> int | None:
        """Return the position of the next request to handle, or None."""
        results = (None, CANCELLED) if self.mutant == "begin withdrawn requests" else (None,)
        found = [at for at, entry in enumerate(journal.request_states) if entry.result in results]
        urgent = [
            at for kind in URGENT_KINDS for at in found if journal.request_states[at].kind == kind
        ]
        return next(iter([*urgent, *found]), None)

    def first(self, journal: Journal, at: int) -> int:
        """Return the position of the first request of the same run for the same model."""
        entry = journal.request_states[at]
        if not entry.run or self.mutant == "treat a retry as a new request":
            return at
        return next(
            position
            for position, each in enumerate(journal.request_states)
            if (each.run, each.model) == (entry.run, entry.model)
        )

    def earlier(self, journal: Journal, at: int) -> RequestState | None:
        """Return an earlier request of the same run if its result is final, otherwise None."""
        first = self.first(journal, at)
        same = [each for each in range(first, at) if self.first(journal, each) == first]
        return next(
            (
                journal.request_states[each]
                for each in same
                if journal.request_states[each].is_final
            ),
            None,
        )

    def is_superseded(self, journal: Journal, at: int) -> bool:
        """Return whether a later rollback or abort supersedes the request."""
        entry = journal.request_states[at]
        is_done = entry.recorded is not None or self.earlier(journal, at) is not None
        return not is_done and any(
            entry.kind in SUPERSEDED_KINDS.get(later.kind, ())
            for later in journal.request_states[self.first(journal, at) + 1 :]
            if later.result in (None, DONE) or (later.result == REFUSED and later.replaces is None)
        )

    def intent(self, state: State, me: int) -> Attempt | None:
        """Return the intent that the controller sees."""
        mine = state.controllers[me]
        if state.journal.intent is None and mine.attempt in (RUNNING, FAILED):
            return mine.line
        return state.journal.intent

    def kind(self, state: State, entry: RequestState) -> str:
        """Return the kind of the moves that the request needs."""
        if entry.kind == CANARY and self.gives_first_share(state, entry):
            return ADVANCE
        if entry.kind == ADVANCE and self.next_share(state, entry) is None:
            return RELEASE
        return entry.kind

    def gives_first_share(self, state: State, entry: RequestState) -> bool:
        """Return whether a canary request gives traffic to its shadow canary."""
        canary, plan = state.journal.canary, state.files.plan
        is_same = canary is not None and state.journal.model(canary) == entry.model
        return bool(is_same and plan and plan[1] is not None and plan[2] == 0 and entry.share)

    def next_share(self, state: State, entry: RequestState) -> float | None:
        """Return the share of the canary's next stage, or None after the last."""
        if entry.kind == CANARY:
            return entry.share
        now = state.files.plan[2] if state.files.plan else 0
        return next((share for share in self.scenario.shares if share > now), None)

    def wanted_then(self, entry: RequestState) -> int | None:
        """Return the version that a rollback must restore if it was requested during a change."""
        if entry.intent_then is None:
            return None
        return entry.intent_then if entry.rollback_then else entry.live_then

    def satisfied(self, state: State, at: int) -> int | None:
        """Return the version that already satisfies the request, or None."""
        journal, entry = state.journal, state.journal.request_states[at]
        if entry.recorded is not None:
            return entry.recorded
        if (earlier := self.earlier(journal, at)) is not None:
            return earlier.version
        if entry.kind in (RELEASE, CANARY) and journal.model(journal.live) == entry.model:
            return journal.live
        is_same = journal.canary and journal.model(journal.canary) == entry.model
        if entry.kind == CANARY and is_same and not self.gives_first_share(state, entry):
            return journal.canary
        wanted = self.wanted_then(entry)
        if entry.kind == ROLLBACK and entry.replaces is None and wanted == journal.live:
            return journal.live
        return None

    def observe(self, state: State, me: int, *, probed: bool = False) -> View:
        """Return the controller's observation of the state.

        If `probed` is true, the observation includes probes of the servers, as the watchdog's does.
        """
        journal, files, mine = state.journal, state.files, state.controllers[me]
        at, line, request = self.chosen(journal), self.intent(state, me), None
        if at is not None:
            entry = journal.request_states[at]
            kind = self.kind(state, entry)
            is_recorded = entry.is_accepted and self.satisfied(state, at) is not None
            is_superseded = self.is_superseded(journal, at)
            has_failed = mine.failed_abort == at
            request = (
                *(kind, entry.is_accepted, entry.is_expired),
                *(is_recorded, is_superseded, has_failed),
            )
        is_own = at is not None and mine.request == at
        if probed:
            servers = state.servers
        elif mine.known is not None:
            servers = (mine.known,)
        elif line is not None:
            servers = (Server(UNKNOWN, UNKNOWN, UNKNOWN),)
        else:
            canary = None if files.placed is None else journal.canary or UNKNOWN
            servers = (Server(journal.live, canary),)
        return View(
            live=journal.live,
            canary=journal.canary,
            share=journal.share if journal.canary else 0,
            intent=line and (line.version, line.before, line.is_canary, line.was_known, line.lease),
            request=request,
            lease=mine.lease,
            attempt=mine.attempt if line is not None or is_own else NONE,
            is_blocked=mine.is_blocked and is_own,
            is_rehearsed=mine.is_rehearsed,
            files=files,
            servers=servers,
        )

    def superseded(self, state: State, me: int) -> State:
        """Fail the running attempt if a later request supersedes its request."""
        mine = state.controllers[me]
        if mine.attempt != RUNNING or mine.line is None:
            return state
        entry = state.journal.request_states[mine.line.request]
        if entry.kind != ROLLBACK and self.is_superseded(state.journal, mine.line.request):
            return self._with(state, me, attempt=FAILED, is_refused=True)
        return state

    def rule(self, state: State, me: int) -> protocol.ProtocolRule | None:
        """Return the controller's next rule, or None."""
        at = self.rules(self.observe(state, me))
        if at is None:
            at = self.rules(self.observe(state, me, probed=True))
            if at is not None and self.table[at].move not in (protocol.HEAL, protocol.LOAD_CANARY):
                at = None
        return None if at is None else self.table[at]

    # Effects of moves, as in `controller.moves` and `controller.announce`.

    def _with(self, state: State, me: int, **changes: Any) -> State:
        controllers = list(state.controllers)
        controllers[me] = controllers[me]._replace(**changes)
        return state._replace(controllers=tuple(controllers))

    def _know(self, state: State, me: int, **changes: Any) -> State:
        known = state.controllers[me].known or Server(serves=None)
        return self._with(state, me, known=known._replace(**changes))

    def _entry(self, state: State, me: int, change: Callable[[Journal], Journal]) -> State:
        """Append an entry.

        Readers ignore an entry with a lower lease number than an earlier entry.
        """
        lease, journal = state.controllers[me].lease, state.journal
        if lease < journal.lease and self.mutant != "count entries of old leases":
            return state
        expect(lease >= journal.lease, "entries of a fenced controller have no effect")
        return state._replace(journal=change(journal)._replace(lease=lease), flushed=None)

    def _answered(
        self,
        journal: Journal,
        at: int,
        result: str,
        *,
        is_final: bool = False,
        version: int | None = None,
    ) -> Journal:
        request_states, entry = list(journal.request_states), journal.request_states[at]
        if entry.result is None and not (result == CANCELLED and entry.is_accepted):
            request_states[at] = entry._replace(result=result, is_final=is_final, version=version)
        return journal._replace(request_states=tuple(request_states))

    def _promoted(self, journal: Journal, line: Attempt, action: str) -> Journal:
        """Append an entry about a promotion."""
        request_states, at, version = list(journal.request_states), line.request, line.version
        if action != "intent":
            request_states[at] = request_states[at]._replace(
                recorded=None if action == "withdrawn" else version
            )
        known = {number for number, _, _ in journal.numbers}
        numbers = journal.numbers
        if version not in known:
            numbers = (*numbers, (version, request_states[at].model, journal.live))
        changed = journal._replace(
            request_states=tuple(request_states), numbers=numbers, last=(action, version)
        )
        if action == "intent":
            return changed._replace(intent=line)
        changed = changed._replace(intent=None)
        if action == "live":
            blocked = journal.blocked
            if (replaces := request_states[at].replaces) is not None:
                blocked |= {journal.model(replaces)}
            return changed._replace(
                live=version, before=journal.live, canary=None, share=0, blocked=blocked
            )
        if action == "canary":
            return changed._replace(canary=version, share=line.share)
        if journal.last == ("live", version):
            return changed._replace(live=journal.before or journal.live)
        if journal.last == ("canary", version):
            return changed._replace(canary=None, share=0)
        return changed

    def _announce(self, journal: Journal, line: Attempt) -> Journal:
        numbers = {number: model for number, model, _ in journal.numbers}
        model = numbers.get(line.version)
        expect(
            line.was_known or model in (None, journal.request_states[line.request].model),
            "no number for two models",
        )
        return self._promoted(journal, line, "intent")

    def next_number(self, state: State) -> int:
        """Return the number of the next version."""
        used = {number for number, _, _ in state.journal.numbers} | state.files.versions
        if self.mutant == "reuse the number of a withdrawn version":
            used = {state.journal.live, *state.files.versions}
        return 1 + max(used)

    def is_stale(self, journal: Journal, entry: RequestState) -> bool:
        """Return whether another model went live after the gate's comparison."""
        entry = journal.request_states[self.first(journal, journal.request_states.index(entry))]
        then = journal.live if entry.live_then is None else entry.live_then
        return journal.model(then) != journal.model(journal.live)

    def announced(self, state: State, at: int, lease: int) -> Attempt | None:
        """Return the change that a request asks for, or None if it is refused."""
        journal, files, entry = state.journal, state.files, state.journal.request_states[at]
        line = Attempt(
            version=0,
            before=files.config,
            is_canary=False,
            was_known=False,
            request=at,
            lease=lease,
        )
        if self.earlier(journal, at) is not None:
            return None
        if entry.kind in (RELEASE, CANARY):
            if self.is_stale(journal, entry) or entry.model in journal.blocked:
                return None
            if entry.kind == CANARY and (journal.canary is not None or files.placed is not None):
                return None
            number = self.next_number(state)
            is_canary = entry.kind == CANARY
            return line._replace(version=number, is_canary=is_canary, share=entry.share)
        if entry.kind == ADVANCE:
            if journal.canary is None or entry.has_old_plan:
                return None
            return line._replace(version=journal.canary, was_known=True)
        if entry.replaces is not None and journal.live != entry.replaces:
            return None
        target = self.wanted_then(entry)
        if target is None:
            target = next(before for number, _, before in journal.numbers if number == journal.live)
        if target is None or target == journal.live:
            return None
        return line._replace(version=target, was_known=True)

    def write(
        self,
        state: State,
        me: int,
        rule: protocol.ProtocolRule,
        *,
        seen: tuple[Attempt | None, int | None] | None = None,
    ) -> State | None:
        """Return the state after a move that involves no servers, or None if the move is refused.

        `seen` contains an observation from before a pause: the intent and the position of the
        request.
        """
        move, mine, files = rule.move, state.controllers[me], state.files
        line, at = seen or (self.intent(state, me), self.chosen(state.journal))
        if move == protocol.ANNOUNCE:
            assert at is not None
            if (line := self.announced(state, at, mine.lease)) is None:
                return None
            entry = state.journal.request_states[at]
            expect(entry.result is None, "an answered request is not begun")
            expect(not entry.is_expired, "no request is begun after its deadline")
            self.check_retry(state.journal, at)
            made = self._entry(state, me, lambda j: self._announce(j, line))
            if self.mutant == "do not flush the intent":
                made = made._replace(flushed=state.journal)
            return self._with(
                made,
                me,
                attempt=RUNNING,
                request=at,
                line=line,
                is_blocked=False,
                is_rehearsed=False,
                known=Server(serves=files.config, canary=UNKNOWN),
            )
        if move == protocol.RECORD:
            assert line is not None
            action = "canary" if line.is_canary else "live"
            if mine.lease == files.fence and action == "live":
                served = all(each.serves == line.version for each in state.servers)
                expect(served, "a version is recorded after every server answers from it")
            made = self._entry(state, me, lambda j: self._promoted(j, line, action))
            return self._with(made, me, **_FORGOTTEN, known=None)
        if move == protocol.ADOPT:
            assert line is not None
            line = line._replace(lease=mine.lease)
            return self._entry(state, me, lambda j: self._promoted(j, line, "intent"))
        if move == protocol.WITHDRAW_INTENT and self.mutant == "forget to withdraw":
            return state
        if move == protocol.WITHDRAW_INTENT:
            assert line is not None
            made = self._entry(state, me, lambda j: self._promoted(j, line, "withdrawn"))
            return self._with(made, me, line=None, known=None)
        if move == protocol.ACCEPT:
            return self._entry(state, me, lambda j: self._accepted(j, at))
        if move in (protocol.ANSWER, protocol.REFUSE, protocol.WITHDRAW):
            assert at is not None
            results = {protocol.ANSWER: DONE, protocol.REFUSE: REFUSED}
            result = results.get(move, CANCELLED)
            if move == protocol.ANSWER:
                self.check_done(state, at)
            is_own = mine.request == at and mine.attempt == FAILED
            is_final = move == protocol.ANSWER or (
                move == protocol.REFUSE
                and (mine.is_refused if is_own else self.is_superseded(state.journal, at))
            )
            version = self.satisfied(state, at) if move == protocol.ANSWER else None
            made = self._entry(
                state,
                me,
                lambda j: self._answered(j, at, result, is_final=is_final, version=version),
            )
            if move == protocol.REFUSE and mine.request == at and line is None:
                made = self._with(made, me, **_FORGOTTEN)
            if move == protocol.ANSWER and rule.state != "abort done":
                made = self._with(made, me, **{**_FORGOTTEN, "request": at})
            return made
        if move == protocol.RECORD_SHARE:
            assert files.plan is not None
            share = files.plan[2]
            return self._entry(state, me, lambda j: self._shared(j, at, share))
        if move == protocol.END_CANARY:
            return self._entry(state, me, lambda j: j._replace(canary=None, share=0))
        return self._written(state, me, rule, line)

    def _accepted(self, journal: Journal, at: int | None) -> Journal:
        assert at is not None
        request_states = list(journal.request_states)
        if request_states[at].result is None or self.mutant == "begin withdrawn requests":
            request_states[at] = request_states[at]._replace(is_accepted=True)
        return journal._replace(request_states=tuple(request_states))

    def _shared(self, journal: Journal, at: int | None, share: int) -> Journal:
        request_states = list(journal.request_states)
        if (
            at is not None
            and request_states[at].is_accepted
            and request_states[at].kind in (ADVANCE, CANARY)
        ):
            request_states[at] = request_states[at]._replace(recorded=journal.canary)
        version = journal.canary or 0
        return journal._replace(
            request_states=tuple(request_states), share=share, last=("canary", version)
        )

    def _written(
        self, state: State, me: int, rule: protocol.ProtocolRule, line: Attempt | None
    ) -> State | None:
        """Return the state after the controller has written to the repository or to the plan."""
        move, mine, files = rule.move, state.controllers[me], state.files
        expect(mine.lease == files.fence, "no write of a fenced controller has an effect")
        live, version = state.journal.live, line.version if line else 0
        if move == protocol.STAGE:
            files = files._replace(staged=version)
        elif move == protocol.PUBLISH:
            expect(mine.is_rehearsed, "only a rehearsed version is published")
            files = files._replace(staged=None, versions=files.versions | {version})
        elif move == protocol.CONFIGURE:
            state = self._know(state, me, serves=UNKNOWN)
            files = files._replace(config=version)
        elif move == protocol.PLACE_CANARY:
            files = files._replace(placed=version)
        elif move == protocol.SHOW_CANARY:
            plan = (live, version, line.share if line else 0)
            files = files._replace(plan=plan, is_drained=False, is_ahead=False)
        elif move == protocol.RESET_PLAN:
            at = self.chosen(state.journal)
            is_abort = rule.state == "abort accepted" and at is not None
            if is_abort and state.journal.request_states[at].has_old_plan:
                return None
            if files.plan is not None:
                had = files.plan[1] is not None or rule.state == "draining"
                drained = files.is_drained and not had
                ahead = files.is_ahead and not had
                files = files._replace(plan=(live, None, 0), is_drained=drained, is_ahead=ahead)
        elif move == protocol.RESTORE_CONFIG:
            files = files._replace(config=line.before if line else live)
        elif move == protocol.DISCARD:
            files = files._replace(staged=None)
        elif move == protocol.REMOVE_FILES:
            files = files._replace(versions=files.versions - {version})
        elif move == protocol.GROW:
            entry = state.journal.request_states[self.chosen(state.journal) or 0]
            share = self.next_share(state, entry)
            if files.plan is None or files.plan[1] is None or share is None or entry.has_old_plan:
                return None
            files = files._replace(plan=(*files.plan[:2], share), is_drained=False, is_ahead=False)
        else:
            raise AssertionError(move)
        return state._replace(files=files)

    def serve(self, state: State, me: int, rule: protocol.ProtocolRule, at: int) -> State:
        """Return the state after a move's action on the server at position `at`."""
        move, files, server = rule.move, state.files, state.servers[at]
        line = self.intent(state, me)
        if move == protocol.REHEARSE:
            server = server._replace(candidate=None)
        elif move in (protocol.SERVE, protocol.HEAL):
            server = server._replace(serves=files.config)
        elif move == protocol.RESTORE_SERVERS:
            known = state.controllers[me].known
            server = server._replace(candidate=None)
            # A server that has not received the new version keeps its loaded versions.
            if known is None or line is None or known.serves != line.before:
                server = server._replace(serves=files.config)
        elif move == protocol.LOAD_CANARY:
            server = server._replace(canary=files.placed)
        elif move == protocol.UNLOAD_CANARY:
            expect(
                files.plan is None or files.plan[1] != server.canary or server.canary is None,
                "no server unloads a canary that the plan names",
            )
            expect(files.is_drained, "no server unloads a canary that clients may still call")
            server = server._replace(canary=None)
        assert line is not None or move not in (protocol.REHEARSE, protocol.SERVE)
        return self._on(state, at, server)

    def begun(self, state: State, me: int, rule: protocol.ProtocolRule, at: int) -> State:
        """Return the state after the action on a server has begun but not ended."""
        server = state.servers[at]
        if rule.move == protocol.REHEARSE:
            return self._on(state, at, server._replace(candidate=state.files.staged))
        return state

    def _on(self, state: State, at: int, server: Server) -> State:
        servers = list(state.servers)
        servers[at] = server
        return state._replace(servers=tuple(servers))

    def served(self, state: State, me: int, rule: protocol.ProtocolRule) -> State:
        """Return the state after a move's actions on all servers."""
        move, line = rule.move, self.intent(state, me)
        if move == protocol.REHEARSE:
            return self._with(self._know(state, me, candidate=None), me, is_rehearsed=True)
        if move == protocol.SERVE and line is not None:
            return self._know(state, me, serves=line.version)
        if move == protocol.RESTORE_SERVERS and line is not None:
            return self._know(state, me, serves=line.before, candidate=None)
        if move == protocol.LOAD_CANARY and state.controllers[me].known is not None:
            return self._know(state, me, canary=state.files.placed)
        if move == protocol.UNLOAD_CANARY:
            return state._replace(files=state.files._replace(placed=None))
        return state

    def is_of_request(self, rule: protocol.ProtocolRule) -> bool:
        """Return whether the move begins or ends an attempt to carry out a request.

        The move that ends an abort does not count.
        """
        return rule.state == "accepted" or (
            rule.move == protocol.ANSWER and rule.state != "abort done"
        )

    def begin(self, state: State, me: int, rule: protocol.ProtocolRule) -> State:
        """Return the state after the controller has started a move."""
        at = self.chosen(state.journal)
        if self.is_of_request(rule) and at is not None:
            return self._with(state, me, **{**_FORGOTTEN, "request": at})
        if rule.move == protocol.REHEARSE:
            return self._know(state, me, candidate=UNKNOWN)
        return state

    def done(self, state: State, me: int, rule: protocol.ProtocolRule) -> State:
        """Return the state after a move without disturbances.

        A refused move may change the state too.
        """
        before, state = state, self.begin(state, me, rule)
        if rule.move == protocol.STAND_DOWN:
            return self._killed(state, me)
        made: State | None = state
        if rule.move in SERVER_MOVES:
            for at in range(len(state.servers)):
                state = self.serve(state, me, rule, at)
            made = self.served(state, me, rule)
        else:
            made = self.write(state, me, rule)
        if made is None:
            return self.failed(state, me, rule, is_refused=self.is_refusal_final(state))
        # If a move changes nothing, the round ends with an error.
        return self._ended(made, me) if made == before else made

    def is_refusal_final(self, state: State) -> bool:
        """Return whether the request that is handled next is refused for good."""
        at = self.chosen(state.journal)
        kind = "" if at is None else state.journal.request_states[at].kind
        # A canary that is draining is temporary.
        return kind != CANARY or state.journal.canary is not None

    def failed(
        self, state: State, me: int, rule: protocol.ProtocolRule, *, is_refused: bool = False
    ) -> State:
        """Return the state after a move has raised an error, as in `reconcile._perform`."""
        mine, at = state.controllers[me], self.chosen(state.journal)
        if rule.state in ("abort accepted", "abort done"):
            return self._with(state, me, failed_abort=at)
        if rule.state in ("undoing", "undone"):
            is_own = at is not None and mine.request == at
            if mine.is_blocked or not is_own:
                return self._ended(state, me)
            return self._with(state, me, is_blocked=True)
        if self.is_of_request(rule) or mine.attempt == RUNNING:
            return self._with(state, me, attempt=FAILED, is_refused=is_refused)
        return self._ended(state, me)

    def _ended(self, state: State, me: int) -> State:
        """Return the state after the end of a round. The controller's observations are deleted."""
        return self._with(state, me, **_FORGOTTEN, failed_abort=None, known=None)

    # -- transitions

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield each possible event with the state after it."""
        yield from self._outside(state)
        for me, mine in enumerate(state.controllers):
            if mine.lease == 0:
                yield from self._take_lock(state, me)
            elif mine.paused is not None:
                rule = self.table[mine.paused[0]]
                yield f"{me} resumes: {rule.move}", self._resume(state, me, rule)
                yield from self._spend(state, CRASH, f"{me} is killed", self._killed(state, me))
            else:
                state_now = self.superseded(state, me)
                if (rule := self.rule(state_now, me)) is not None:
                    yield from self._make(state_now, me, rule)

    def fair(self, state: State) -> State | None:
        """Return the next state without further disturbances, or None if nothing is left to do."""
        for me, mine in enumerate(state.controllers):
            if mine.lease and mine.paused is not None:
                return self._resume(state, me, self.table[mine.paused[0]])
        holders = [me for me, mine in enumerate(state.controllers) if mine.lease]
        if not holders:
            return next(after for _, after in self._take_lock(state, 0))
        for me in sorted(holders, key=lambda each: state.controllers[each].lease):
            now = self.superseded(state, me)
            if (rule := self.rule(now, me)) is not None:
                return self.done(now, me, rule)
        if not state.files.is_drained:
            return state._replace(files=state.files._replace(is_drained=True, is_ahead=False))
        return None

    def _spend(
        self, state: State, kind: int, event: str, after: State
    ) -> Iterator[tuple[str, State]]:
        if state.budget[kind]:
            budget = list(state.budget)
            budget[kind] -= 1
            yield event, after._replace(budget=tuple(budget))

    def _killed(self, state: State, me: int) -> State:
        if state.flushed is not None:
            state = state._replace(journal=state.flushed, flushed=None)
        return self._with(state, me, **Controller()._asdict())

    def _take_lock(self, state: State, me: int) -> Iterator[tuple[str, State]]:
        """Take the lock if it is free, or if its holder is paused for too long."""
        others = [each for each in state.controllers if each.lease]
        if all(each.paused is not None for each in others):
            fence = state.files.fence + 1
            locked = state._replace(files=state.files._replace(fence=fence))
            yield f"{me} takes lease {fence}", self._with(locked, me, lease=fence)

    def _outside(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield the events of the pipeline, the monitor, servers and clocks."""
        journal, files = state.journal, state.files
        if len(journal.request_states) < len(self.scenario.request_states):
            entry = self.scenario.request_states[len(journal.request_states)]
            line, last = journal.intent, journal.request_states
            entry = entry._replace(
                live_then=journal.live,
                intent_then=line.version if line else None,
                rollback_then=line is not None and last[line.request].kind == ROLLBACK,
                replaces=journal.live if entry.replaces is not None else None,
            )
            yield (
                f"{entry.kind} is requested",
                state._replace(
                    journal=journal._replace(request_states=(*journal.request_states, entry))
                ),
            )
        for at, entry in enumerate(journal.request_states):
            if entry.result is None and not entry.is_expired:
                request_states = list(journal.request_states)
                request_states[at] = entry._replace(is_expired=True)
                after = state._replace(
                    journal=journal._replace(request_states=tuple(request_states))
                )
                yield from self._spend(state, RECALL, f"deadline of {entry.kind} passes", after)
            if entry.result is None and not entry.is_accepted:
                after = state._replace(journal=self._answered(journal, at, CANCELLED))
                yield from self._spend(state, RECALL, f"{entry.kind} is withdrawn", after)
        if not files.is_drained and not files.is_ahead:
            yield "clients read the plan", state._replace(files=files._replace(is_drained=True))
        if files.plan is not None and not files.is_ahead:
            after = state._replace(files=files._replace(is_ahead=True, is_drained=False))
            yield from self._spend(state, JUMP, "the clock is set back", after)
        for at in range(len(state.servers)):
            fresh = Server(serves=files.config, canary=files.placed)
            after = self._on(state, at, fresh)
            yield from self._spend(state, RESTART, f"server {at} restarts", after)

    def _make(
        self, state: State, me: int, rule: protocol.ProtocolRule
    ) -> Iterator[tuple[str, State]]:
        """Yield the states after a successful move, and after each way to disturb the move."""
        name = f"{me}: {rule.move}"
        yield name, self.done(state, me, rule)
        if rule.move == protocol.STAND_DOWN:
            return
        line, at = self.intent(state, me), self.chosen(state.journal)
        if rule.move == protocol.ANNOUNCE and at is not None:
            line = self.announced(state, at, state.controllers[me].lease)
        seen = (self.table.index(rule), line, at)
        paused = self._with(state, me, paused=seen)
        yield from self._spend(state, PAUSE, f"{me} pauses before: {rule.move}", paused)
        for event, partly in self._parts(self.begin(state, me, rule), me, rule):
            killed, failed = self._killed(partly, me), self.failed(partly, me, rule)
            yield from self._spend(state, CRASH, f"{name} killed {event}", killed)
            yield from self._spend(state, FAILURE, f"{name} fails {event}", failed)

    def _parts(
        self, state: State, me: int, rule: protocol.ProtocolRule
    ) -> Iterator[tuple[str, State]]:
        """Yield each state in which a disturbance can leave the system in the middle of a move."""
        yield "before", state
        if rule.move in SERVER_MOVES:
            for at in range(len(state.servers)):
                if (begun := self.begun(state, me, rule, at)) != state:
                    yield f"on server {at}", begun
                state = self.serve(state, me, rule, at)
                yield f"after server {at}", state
            return
        if (made := self.write(state, me, rule)) is None:
            return
        if self.mutant == "configure before the intent" and rule.move == protocol.ANNOUNCE:
            version = made.journal.intent.version if made.journal.intent else 0
            yield "between", state._replace(files=state.files._replace(config=version))
        # If a response is lost, the controller's state does not change.
        memory = self._remembered(state, me, rule)
        controllers = list(made.controllers)
        controllers[me] = memory
        yield "after", made._replace(controllers=tuple(controllers))

    def _remembered(self, state: State, me: int, rule: protocol.ProtocolRule) -> Controller:
        mine = state.controllers[me]
        if rule.move != protocol.ANNOUNCE:
            return mine
        at = self.chosen(state.journal)
        assert at is not None
        line = self.announced(state, at, mine.lease)
        known = Server(serves=state.files.config, canary=UNKNOWN)
        return mine._replace(line=line, known=known, request=at)

    def _resume(self, state: State, me: int, rule: protocol.ProtocolRule) -> State:
        """Make a move of a controller that was paused between its check and its write.

        If another controller took the lock during the pause, the holder's next check fails and the
        holder stops. A write to the repository is conditional. An append to the journal and a load
        of a server are not conditional.
        """
        mine, fence = state.controllers[me], state.files.fence
        assert mine.paused is not None
        seen = mine.paused[1:]
        state = self._with(state, me, paused=None)
        if mine.lease == fence and rule.move in (protocol.ACCEPT, protocol.WITHDRAW):
            # The process that waits for the request may have withdrawn it during the pause.
            return self.write(state, me, rule, seen=seen) or state
        if mine.lease == fence:
            now = self.superseded(state, me)
            current = self.rule(now, me)
            is_same = current is not None and current.move == rule.move
            return self.done(now, me, rule) if is_same else now
        if rule.move in JOURNAL_MOVES:
            if rule.move == protocol.ANNOUNCE:  # the intent already has its version number
                line = seen[0]
                if line is not None:
                    state = self._entry(state, me, lambda j: self._announce(j, line))
                return self._killed(state, me)
            made = self.write(state, me, rule, seen=seen)
            return self._killed(made or state, me)
        if rule.move in (protocol.SERVE, protocol.HEAL, protocol.RESTORE_SERVERS):
            # A server reads its configuration when it loads a model.
            for at, server in enumerate(state.servers):
                state = self._on(state, at, server._replace(serves=state.files.config))
        elif self.mutant == "ignore the fencing number" and rule.move not in SERVER_MOVES:
            return self._killed(self.write(state, me, rule, seen=seen) or state, me)
        return self._killed(state, me)

    # The following methods check the properties.

    def check_retry(self, journal: Journal, at: int) -> None:
        """Check that no change is made twice for a run, or after a person's rollback."""
        entry = journal.request_states[at]
        same = [
            position
            for position, each in enumerate(journal.request_states[:at])
            if entry.run and (each.run, each.model) == (entry.run, entry.model)
        ]
        expect(
            all(journal.request_states[each].result != DONE for each in same),
            "a run releases a model once",
        )
        later = journal.request_states[same[0] :] if same else ()
        overruled = [each for each in later if each.kind == ROLLBACK and each.result == DONE]
        expect(not overruled, "a retry does not overrule a rollback")

    def check_done(self, state: State, at: int) -> None:
        """Check the effect of a request whose result is `done`."""
        journal, files, entry = state.journal, state.files, state.journal.request_states[at]
        if entry.kind == RELEASE:
            is_live = journal.model(journal.live) == entry.model
            was_live = entry.recorded is not None or self.earlier(journal, at) is not None
            expect(is_live or was_live, "a release that is done was live")
        if entry.kind == ROLLBACK and entry.replaces is not None:
            expect(journal.live != entry.replaces, "a demanded version is gone when it is done")
        if entry.kind == ABORT:
            is_shown = files.plan is not None and files.plan[1] is not None
            expect(not is_shown, "no client is sent to an aborted canary")

    def check(self, state: State) -> None:
        """Check the properties of every state."""
        journal, files = state.journal, state.files
        named = {number for number, _, _ in journal.numbers}
        expect(files.config in named, "the configuration names an announced version")
        expect({each.serves for each in state.servers} <= named, "servers serve announced versions")
        expect(files.config in files.versions, "the configuration names a complete version")
        for each in state.servers:
            allowed = {None, files.staged}
            expect(each.canary in named | allowed, "canaries are announced versions")
        if files.plan is not None and files.plan[1] is not None:
            expect(
                all(each.canary == files.plan[1] for each in state.servers)
                or bool(state.budget[RESTART] < self.scenario.restarts),
                "every server has loaded the canary that the plan names",
            )
        numbers = [number for number, _, _ in journal.numbers]
        expect(len(numbers) == len(set(numbers)), "no number for two models")

    def check_settled(self, state: State) -> None:
        """Check the properties that must hold when nothing is left to do."""
        journal, files = state.journal, state.files
        expect(journal.intent is None, "every intent is recorded or withdrawn")
        expect(
            all(entry.result is not None for entry in journal.request_states),
            "every request is answered",
        )
        expect(files.config == journal.live, "the configuration names the live version")
        for each in state.servers:
            expect(each.serves == journal.live, "servers answer from the live version")
            expect(each.candidate is None, "no server keeps a candidate")
            expect(each.canary == journal.canary, "servers have the canary of the journal")
        expect(files.staged is None, "no staged files are left")
        expect(files.placed == journal.canary, "the canary's files are those of the journal")
        shown = files.plan[1] if files.plan else None
        expect(shown == journal.canary, "the plan names the journal's canary")
        if files.plan is not None:
            expect(files.plan[0] == journal.live, "the plan names the live version")
        for at, entry in enumerate(journal.request_states):
            if entry.result == REFUSED and entry.kind == ROLLBACK and entry.replaces is not None:
                is_last = at == len(journal.request_states) - 1
                spent = state.budget[FAILURE] < self.scenario.failures or entry.is_expired
                gone = journal.live != entry.replaces or journal.model(journal.live) == "first"
                expect(gone or spent or not is_last, "a demanded rollback is carried out")


_FORGOTTEN = {
    "attempt": NONE,
    "request": None,
    "line": None,
    "is_blocked": False,
    "is_rehearsed": False,
    "is_refused": False,
}


class Explored(NamedTuple):
    """Result of a search that found no violation."""

    states: int
    transitions: int
    longest: int
    """Maximum number of moves from any state to a final state, without kills and failures. A final
    state allows no further move."""


def canonical(state: State) -> State:
    """Return the state with servers and controllers in a fixed order, because they are alike."""
    servers, controllers = state.servers, state.controllers
    if hash(servers[0]) > hash(servers[1]):
        servers = servers[::-1]
    if hash(controllers[0]) > hash(controllers[1]):
        controllers = controllers[::-1]
    return state._replace(servers=servers, controllers=controllers)


def explore(model: ProtocolModel, *, most: int = 5_000_000) -> Explored:
    """Search all states breadth first, and check all properties.

    Raises:
        Violation: a property does not hold. The message contains the shortest path to the
            violation.
    """
    start = model.start()
    parents: dict[State, tuple[State, str] | None] = {start: None}
    queue, transitions = deque([start]), 0
    state = start
    try:
        while queue:
            state = queue.popleft()
            model.check(state)
            for event, after in model.steps(state):
                transitions += 1
                after = canonical(after)
                if after not in parents:
                    parents[after] = (state, event)
                    queue.append(after)
                    assert len(parents) <= most, f"more than {most:,} states"
        longest = 0
        settled: dict[State, int] = {}
        for state in parents:
            longest = max(longest, _check_settles(model, state, settled))
    except Violation as violation:
        path, at = [], state
        while (found := parents[at]) is not None:
            path.append(found[1])
            at = found[0]
        raise Violation("\n  ".join([str(violation), *reversed(path)])) from violation
    return Explored(len(parents), transitions, longest)


def _check_settles(model: ProtocolModel, state: State, settled: dict[State, int]) -> int:
    """Return the number of undisturbed moves to the final state, and check the final state."""
    path: list[State] = []
    seen: set[State] = set()
    at: State | None = state
    while at is not None and at not in settled:
        expect(at not in seen, "undisturbed moves come to an end")
        seen.add(at)
        path.append(at)
        after = model.fair(at)
        after = None if after is None else canonical(after)
        if after is None:
            model.check_settled(at)
            settled[at] = 0
            path.pop()
        at = after
    steps = settled[path[-1]] if at is None and path and path[-1] in settled else 0
    if at is not None:
        steps = settled[at]
    for each in reversed(path):
        steps += 1
        settled[each] = steps
    return settled.get(state, 0)
