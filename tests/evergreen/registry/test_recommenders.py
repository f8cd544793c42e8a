"""Tests that a run uses the right accepted recommender, and that its acceptance is atomic."""

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from evergreen.config.features import Features
from evergreen.config.spec import Recommender
from evergreen.registry import recommenders
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises

SHOP = Recommender(name="shop", features=Features(numeric=("price", "age"), categorical=("item",)))
NOON = datetime(2026, 11, 23, 12, tzinfo=timezone.utc)


def accept(store, recommender, *, why="because", **more):
    return recommenders.accept(store, recommender, who="ann", why=why, now=NOON, **more)


def test_current_is_newest_and_earlier_recommenders_have_number_and_digest(tmp_path):
    seeded = SHOP.with_settings({"training.seed": 7, "model.tower": [64, 32]})
    assert [accept(tmp_path, SHOP), accept(tmp_path, seeded)] == [1, 2]
    assert recommenders.accepted(tmp_path, "current") == seeded
    for reference in ("1", SHOP.digest, SHOP.digest[:8]):
        assert recommenders.accepted(tmp_path, reference) == SHOP


def test_separate_registry_may_accept_recommender_of_another(tmp_path):
    accept(tmp_path / "shared", SHOP)
    for reference in (str(tmp_path / "shared"), (tmp_path / "shared").as_uri()):
        assert recommenders.accepted(tmp_path / "own", reference) == SHOP


def test_journal_records_who_when_and_why(tmp_path):
    accept(tmp_path, SHOP, why="first shop")
    (line,) = recommenders.read_accepted(tmp_path)
    assert (line.version, line.who, line.reason, line.name) == (1, "ann", "first shop", "shop")
    assert (line.time, line.digest) == ("2026-11-23T12:00:00+00:00", SHOP.digest)


def test_registry_without_recommender_reports_how_to_accept_one(tmp_path):
    with raises(ContractError, "evergreen data accept"):
        recommenders.accepted(tmp_path, "current")


@pytest.mark.parametrize("reference", ["2", "0", "", "abc", SHOP.digest[:7], "0" * 64])
def test_unknown_reference_is_refused(tmp_path, reference):
    accept(tmp_path, SHOP)
    with raises(ContractError, "expected current", "accepted version"):
        recommenders.accepted(tmp_path, reference)


@pytest.mark.parametrize(
    "change", [lambda path: path.write_bytes(b"{}"), lambda path: path.unlink()]
)
def test_version_with_changed_files_is_refused(tmp_path, change):
    accept(tmp_path, SHOP)
    change(tmp_path / "recommender" / "1.json")
    with raises(ContractError, "changed in place"):
        recommenders.accepted(tmp_path, "current")


@pytest.mark.parametrize(
    ("why", "message"), [("again", "has the same content"), (" ", "reason is empty")]
)
def test_acceptance_without_change_or_reason_is_refused_and_changes_nothing(tmp_path, why, message):
    accept(tmp_path, SHOP)
    with pytest.raises(ContractError, match=message):
        accept(tmp_path, SHOP, why=why)
    assert len(recommenders.read_accepted(tmp_path)) == 1


def test_killed_accept_leaves_previous_version_in_force(tmp_path):
    accept(tmp_path, SHOP)
    (tmp_path / "recommender" / "2.json").write_bytes(b"half")
    assert recommenders.accepted(tmp_path, "current") == SHOP
    assert accept(tmp_path, SHOP.with_settings({"training.seed": 7})) == 2
    assert recommenders.accepted(tmp_path, "2").settings == {"training": {"seed": 7}}


OTHERS = {
    "another name": (replace(SHOP, name="films"), "names its recommender 'films', expected 'shop'"),
    "no column in common": (
        replace(SHOP, features=Features(numeric=("length",), categorical=("film",))),
        r"has none of the features of 'shop' \(price, age, item, ...\)",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_recommender_is_refused_in_used_registry_unless_replaced(tmp_path, kind):
    other, message = OTHERS[kind]
    accept(tmp_path, SHOP)
    with pytest.raises(ContractError, match=message) as refused:
        accept(tmp_path, other)
    assert "a store of its own (--store)" in str(refused.value)
    assert "on purpose by --replace" in str(refused.value)
    assert recommenders.accepted(tmp_path, "current") == SHOP
    assert accept(tmp_path / "own", other) == 1
    assert accept(tmp_path, other, replaces_other=True) == 2
    assert recommenders.accepted(tmp_path, "current") == other
    with raises(ContractError, "expected"):
        accept(tmp_path, SHOP)


def test_columns_may_be_added_and_removed_within_one_recommender(tmp_path):
    accept(tmp_path, SHOP)
    assert (
        accept(
            tmp_path,
            replace(SHOP, features=Features(numeric=("size",), categorical=("age", "city"))),
        )
        == 2
    )
