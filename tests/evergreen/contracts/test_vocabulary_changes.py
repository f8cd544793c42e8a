"""Tests of the changes between two workflows.

Expected changes are written by hand, or computed by a loop over ids.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergreen.config.features import ListOptions
from evergreen.contracts.workflow import TOMBSTONE, vocabulary_changes
from evergreen.runtime.errors import ContractError
from testing.recommenders import SHOP
from tests.support.workflows import workflow_of


def workflow(first, *others):
    return workflow_of([first, *others, *[[]] * (3 - len(others))])


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            [10, 20, 30],
            [10, 21, 31],
            r"id 4 of item is now category 21, expected category 20 as before.*\(2 such ids\)",
        ),
        ([10, 20, 30], [10, 20], "vocabulary of item has 2 ids, expected at least 3"),
        ([10, 20], [TOMBSTONE, 20, 10], "category 10 of item moved to another id"),
        ([10, TOMBSTONE, 20], [TOMBSTONE, 10, 20], "category 10 of item moved to another id"),
    ],
    ids=["replaced", "shrunk", "moved to the end", "moved to a tombstone"],
)
def test_ids_with_another_meaning_are_refused(before, now, message):
    with pytest.raises(ContractError, match=message):
        vocabulary_changes(workflow(before), workflow(now))


def test_slots_are_found_by_name_and_new_slot_has_only_new_categories():
    before = workflow([10])
    options = {**SHOP.features.list_options, "seen": ListOptions(max=2, table="sku")}
    renamed = replace(
        SHOP.features, categorical=("sku", *SHOP.features.categorical[1:]), list_options=options
    )
    changes = vocabulary_changes(before, replace(before, features=renamed))
    assert [each.entered.tolist() for each in changes] == [[3], *[[]] * 3]


columns = st.lists(st.one_of(st.just(TOMBSTONE), st.integers(0, 12)), max_size=6).filter(
    lambda v: len({x for x in v if x >= 0}) == sum(x >= 0 for x in v)
)


@given(before=columns, now=columns)
def test_any_two_columns_are_compared_like_in_loop_over_ids(before, now):
    was = {id_: c for id_, c in enumerate(before, 3) if c != TOMBSTONE}
    is_ = {id_: c for id_, c in enumerate(now, 3) if c != TOMBSTONE}
    meant_for_another = any(was[i] != is_[i] for i in was.keys() & is_.keys())
    moved = {c for i, c in was.items() if i not in is_} & {
        c for i, c in is_.items() if i not in was
    }
    if len(now) < len(before) or meant_for_another or moved:
        with pytest.raises(ContractError):
            vocabulary_changes(workflow(before), workflow(now))
        return
    change, *_ = vocabulary_changes(workflow(before), workflow(now))
    assert change.entered.tolist() == sorted(is_.keys() - was.keys())
    assert change.reused.tolist() == sorted(
        i for i in is_.keys() - was.keys() if i < 3 + len(before)
    )
    assert change.evicted.tolist() == sorted(was.keys() - is_.keys())
