"""Tests of the table of the release protocol: every rule is reachable, named and documented."""

import itertools

import pytest

from controller.protocol import (
    FAILED,
    MOVES,
    NONE,
    RUNNING,
    STAND_DOWN,
    TABLE,
    Desired,
    Intent,
    Observed,
    OpenRequest,
    Server,
    ShownPlan,
    next_move,
    table_markdown,
)
from evergreen.contracts.requests import ABORT, ADVANCE, RELEASE, ROLLBACK
from testing.paths import REPOSITORY


def test_table_equals_table_in_documentation():
    page = (REPOSITORY / "docs" / "design" / "release-protocol.md").read_text()
    _, _, rest = page.partition("<!-- the table of the protocol -->\n")
    assert rest.partition("\n<!-- end of the table -->")[0] == table_markdown()


def test_every_move_has_rule_and_every_next_state_exists():
    states = {rule.state for rule in TABLE} | {"settled"}
    assert {rule.move for rule in TABLE} == set(MOVES)
    for rule in TABLE:
        assert set(rule.then) <= states, rule


def test_canary_of_plan_without_journal_has_no_share_to_record():
    """A new registry was given the repository of an older registry."""
    plan = ShownPlan(stable=1, canary=2, share=0.05)
    assert next_move(Desired(), Observed(config=1, plan=plan)) is None


def test_holder_of_old_lease_makes_no_move():
    for attempt, intent in itertools.product(
        (NONE, RUNNING, FAILED), (None, Intent(version=2, before=1))
    ):
        stale = Observed(lease=1, fence=2, attempt=attempt, config=2)
        assert next_move(Desired(live=1, intent=intent), stale) == STAND_DOWN


@pytest.mark.parametrize("kind", [RELEASE, ROLLBACK, ADVANCE, ABORT])
def test_request_is_withdrawn_after_its_deadline_and_otherwise_accepted(kind):
    well = Observed(config=1, servers=(Server(serves=1),))
    for is_expired, move in ((True, "withdraw request"), (False, "accept request")):
        open_request = OpenRequest(kind=kind, is_expired=is_expired)
        assert next_move(Desired(live=1, request=open_request), well) == move


def test_interrupted_request_is_undone_before_it_is_announced_again():
    open_request = OpenRequest(kind=RELEASE, is_accepted=True)
    crashed = Observed(config=2, versions=frozenset({1, 2}), servers=(Server(serves=2),))
    intent = Intent(version=2, before=1)
    assert next_move(Desired(live=1, intent=intent, request=open_request), crashed) == (
        "restore configuration"
    )
    undone = Observed(config=1, versions=frozenset({1}), servers=(Server(serves=1),))
    assert (
        next_move(Desired(live=1, intent=intent, request=open_request), undone) == "withdraw intent"
    )
    assert next_move(Desired(live=1, request=open_request), undone) == "announce intent"
    late = OpenRequest(kind=RELEASE, is_accepted=True, is_expired=True)
    assert next_move(Desired(live=1, request=late), undone) == "refuse request"


def test_abort_waits_for_no_intent():
    shown = Observed(config=1, plan=ShownPlan(stable=1, canary=2, share=0.05), attempt=RUNNING)
    open_request = OpenRequest(kind=ABORT, is_accepted=True)
    wanted = Desired(
        live=1, intent=Intent(version=2, before=1, is_canary=True), request=open_request
    )
    assert next_move(wanted, shown) == "write plan without canary"


def test_recorded_request_is_answered_and_not_made_again():
    open_request = OpenRequest(kind=RELEASE, is_accepted=True, is_recorded=True)
    assert next_move(Desired(live=2, request=open_request), Observed(config=2)) == "answer request"
