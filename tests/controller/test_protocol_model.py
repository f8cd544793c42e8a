"""Search all states of the release protocol, and check that the search finds built-in faults.

`tests.support.protocol_model` explains the model. Run this file as a program to print the tables of
docs/design/protocol-model.md: `.venvs/driver/bin/python -m tests.controller.test_protocol_model`.
"""

import dataclasses
import time

import pytest

from controller import protocol
from controller.protocol import TABLE
from evergreen.contracts.requests import ABORT, ADVANCE, CANARY, RELEASE, ROLLBACK
from tests.support.protocol_model import ProtocolModel, RequestState, Scenario, Violation, explore

NEW, OTHER = RequestState(RELEASE, model="new"), RequestState(RELEASE, model="other")
BACK, DEMAND = RequestState(ROLLBACK), RequestState(ROLLBACK, replaces=0)
TRIED, ENDED, GROWN = (
    RequestState(CANARY, model="tried", share=1),
    RequestState(ABORT),
    RequestState(ADVANCE),
)
OF_RUN = RequestState(RELEASE, model="new", run="run-1")

ONE_REQUEST = {
    "a release": Scenario(request_states=(NEW,)),
    "a canary": Scenario(request_states=(TRIED,)),
    "a release, with a restart and two crashes": Scenario(
        request_states=(NEW,), restarts=1, crashes=2, failures=0, recalls=0
    ),
}
TWO_REQUESTS = {
    "a release, and the monitor's demand to roll back": Scenario(request_states=(NEW, DEMAND)),
    "a release, and a person's rollback": Scenario(request_states=(NEW, BACK)),
    "two releases": Scenario(request_states=(NEW, OTHER)),
    "a canary, and its end": Scenario(request_states=(TRIED, ENDED), jumps=1, recalls=0),
    "a canary, and its release": Scenario(request_states=(TRIED, GROWN), recalls=0),
    "a canary, and its next share": Scenario(
        request_states=(TRIED, GROWN), shares=(1, 2), recalls=0
    ),
    "a release, and an abort": Scenario(request_states=(NEW, ENDED), recalls=0),
    "a release, and the step's retry": Scenario(request_states=(OF_RUN, OF_RUN)),
}
QUIET = {"recalls": 0, "failures": 0}
RETRIED = Scenario(request_states=(OF_RUN, BACK, OF_RUN), **QUIET)


@pytest.mark.parametrize("name", ONE_REQUEST)
def test_all_states_of_one_request_keep_every_property(name):
    found = explore(ProtocolModel(ONE_REQUEST[name]))
    assert found.states > 5_000
    assert found.longest <= 20, "largest number of undisturbed moves to a final state"


@pytest.mark.parametrize("name", TWO_REQUESTS)
def test_kill_and_pause_during_two_requests_keep_every_property(name):
    scenario = dataclasses.replace(TWO_REQUESTS[name], **QUIET)
    assert explore(ProtocolModel(scenario)).states > 1_000


def test_retry_after_persons_rollback_changes_nothing_in_any_state():
    assert explore(ProtocolModel(RETRIED)).states > 1_000


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_REQUESTS)
def test_all_states_of_two_requests_keep_every_property(name):
    found = explore(ProtocolModel(TWO_REQUESTS[name]))
    assert found.states > 50_000
    assert found.longest <= 30


def without(move, state=None):
    """Return the table without this move's rules.

    With `state`, only rules of this state are removed.
    """
    return tuple(
        rule for rule in TABLE if rule.move != move or state is not None and rule.state != state
    )


def changed(move, holds, state=None):
    """Return the table with another condition in the rules of this move."""
    return tuple(
        dataclasses.replace(rule, holds=holds(rule.holds))
        if rule.move == move and state in (None, rule.state)
        else rule
        for rule in TABLE
    )


def always_removed(holds):
    """Return a faulty condition: files may be removed before the journal's record is certain."""

    def condition(desired, observed):
        intent = desired.intent
        return holds(desired, observed) or (
            intent is not None
            and observed.attempt != protocol.RUNNING
            and not intent.was_known
            and intent.version in observed.versions
        )

    return condition


def undrained(holds):
    """Return a condition that is met before clients have read the plan."""
    return lambda desired, observed: holds(desired, dataclasses.replace(observed, is_drained=True))


def unexpired(holds):
    """Return a condition that ignores deadlines."""

    def condition(desired, observed):
        request = desired.request
        if request is not None:
            request = dataclasses.replace(request, is_expired=False)
        return holds(dataclasses.replace(desired, request=request), observed)

    return condition


class Mutant:
    """A fault that is built into the protocol.

    Args:
        found: The search must find the violation of a property whose name contains this text.
        scenario: Scenario in which the fault has an effect.
        table: Changed table.
        built_in: Name of a fault in the model's effects.
    """

    def __init__(self, found, *, scenario=ONE_REQUEST["a release"], table=TABLE, built_in=""):
        self.found = found
        self.model = ProtocolModel(scenario, table=table, mutant=built_in)


TWO = dataclasses.replace(TWO_REQUESTS["two releases"], failures=0)
CANARY_ONLY = ONE_REQUEST["a canary"]
CANARY_ENDED = dataclasses.replace(TWO_REQUESTS["a canary, and its end"], **QUIET, jumps=0)
CANARY_RELEASED = dataclasses.replace(TWO_REQUESTS["a canary, and its release"], **QUIET)
MUTANTS = {
    "ignore the fencing number": Mutant(
        "no write of a fenced controller", built_in="ignore the fencing number"
    ),
    "let readers count entries of old leases": Mutant(
        "entries of a fenced controller", built_in="count entries of old leases"
    ),
    "undo the intent of another controller without announcing it again": Mutant(
        "names a complete version", table=without(protocol.ADOPT)
    ),
    "do not flush the intent": Mutant(
        "names an announced version", built_in="do not flush the intent"
    ),
    "write the configuration before the intent": Mutant(
        "names an announced version", built_in="configure before the intent"
    ),
    "publish before the rehearsal": Mutant(
        "only a rehearsed version", table=without(protocol.REHEARSE)
    ),
    "record before servers have loaded": Mutant(
        "after every server answers", table=without(protocol.SERVE)
    ),
    "remove files of a change whose record may be in the journal": Mutant(
        "names a complete version", table=changed(protocol.REMOVE_FILES, always_removed)
    ),
    "reuse the number of a withdrawn version": Mutant(
        "no number for two models",
        scenario=TWO,
        built_in="reuse the number of a withdrawn version",
    ),
    "forget to withdraw the intent": Mutant("come to an end", built_in="forget to withdraw"),
    "begin a request that was withdrawn": Mutant(
        "an answered request is not begun", built_in="begin withdrawn requests"
    ),
    "begin a request after its deadline": Mutant(
        "no request is begun after its deadline",
        table=tuple(dataclasses.replace(rule, holds=unexpired(rule.holds)) for rule in TABLE),
    ),
    "leave servers as they are": Mutant(
        "servers answer from the live version", table=without(protocol.HEAL)
    ),
    "leave the configuration as it is": Mutant(
        "names the live version",
        table=tuple(rule for rule in TABLE if rule.state != "configuration wrong"),
    ),
    "leave staged files": Mutant("no staged files", table=without(protocol.DISCARD)),
    "show the canary before servers have loaded it": Mutant(
        "every server has loaded the canary",
        scenario=CANARY_ONLY,
        table=without(protocol.LOAD_CANARY, "placed canary"),
    ),
    "unload the canary before clients have read the plan": Mutant(
        "clients may still call",
        scenario=CANARY_ENDED,
        table=changed(protocol.UNLOAD_CANARY, undrained),
    ),
    "answer an abort before the plan is written": Mutant(
        "no client is sent to an aborted canary",
        scenario=CANARY_ENDED,
        table=without(protocol.RESET_PLAN, "abort accepted"),
    ),
    "do not record the canary's end": Mutant(
        "journal", scenario=CANARY_ENDED, table=without(protocol.END_CANARY)
    ),
    "treat a retry as a new request": Mutant(
        "a retry does not overrule", scenario=RETRIED, built_in="treat a retry as a new request"
    ),
    "leave the plan of a canary that was released": Mutant(
        "come to an end", scenario=CANARY_RELEASED, table=without(protocol.RESET_PLAN, "plan wrong")
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_search_finds_fault_that_is_built_in(name):
    mutant = MUTANTS[name]
    with pytest.raises(Violation, match=mutant.found):
        explore(mutant.model)


def main() -> None:
    """Print the tables of the documentation."""
    for title, scenarios in (("one request", ONE_REQUEST), ("two requests", TWO_REQUESTS)):
        print(f"\n| {title} | states | transitions | longest way to rest | seconds |")
        print("|---|---|---|---|---|")
        for name, scenario in scenarios.items():
            began = time.perf_counter()
            found = explore(ProtocolModel(scenario))
            seconds = time.perf_counter() - began
            print(
                f"| {name} | {found.states:,} | {found.transitions:,} | {found.longest} moves | "
                f"{seconds:.0f} |",
                flush=True,
            )
    print("\n| fault | property that fails | events to it |\n|---|---|---|")
    for name, mutant in MUTANTS.items():
        try:
            explore(mutant.model)
        except Violation as violation:
            first, *events = str(violation).split("\n  ")
            print(f"| {name} | {first} | {len(events)} |", flush=True)
        else:
            print(f"| {name} | **not found** | |", flush=True)


if __name__ == "__main__":
    main()
