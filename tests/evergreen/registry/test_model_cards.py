"""Tests of a card's serving history, from hand-written journals."""

import re

import pytest

from evergreen.registry.model_cards import MAX_ANCESTORS, ModelCard, card_path, read_card
from evergreen.registry.promotion_journal import Promotion, append_promotion
from evergreen.reports.model_card import card_page
from evergreen.runtime.errors import ContractError
from testing.releases import passing_verdict, release, store_model
from testing.validation_models import make_dataset


@pytest.fixture
def write(tmp_path):
    """Writes a journal of (action, version, changes) with one line per day.

    Version N has model mN. Only m2 has a model card.
    """

    def journal(*lines):
        for version in (1, 2):
            model = store_model(
                tmp_path, f"m{version}", parent_model_id="m1" if version == 2 else "gone"
            )
            release(tmp_path, version, f"m{version}")
        verdict, raw = (
            passing_verdict("m2", tmp_path / "scores", num_rows=1),
            make_dataset(tmp_path, 1, digest="d"),
        )
        empty = {
            "gate": {},
            "slices": [],
            "calibration": [],
            "champion_calibration": [],
            "validation": None,
        }
        ModelCard(run="r", model=model, raw=raw, verdict=verdict, **empty).write(
            card_path(tmp_path, "m2")
        )
        for day, (action, version, *changes) in enumerate(lines, start=1):
            line = {
                "time": f"2026-01-0{day}",
                "previous_version": 1,
                "model_uri": "",
                "release_uri": "",
            }
            line |= {"trigger_id": None, "reason": "why", "who": "ann", **dict(*changes)}
            append_promotion(
                tmp_path, Promotion(action=action, version=version, model_id=f"m{version}", **line)
            )
        return read_card(tmp_path, "2")

    return journal


def spans(card):
    return [
        (each.begun.action, each.begun.time[-1], each.ended and each.ended.time[-1])
        for each in card.served
    ]


def test_each_share_of_canary_is_span_and_its_promotion_is_one(write):
    card = write(
        ("release", 1),
        ("intent", 2),
        ("canary", 2, {"share": 0.1}),
        ("baked", 1),
        ("canary", 2, {"share": 0.5}),
        ("promote", 2),
        ("baked", 2),
    )
    assert spans(card) == [("canary", "3", "5"), ("canary", "5", "6"), ("promote", "6", None)]
    assert [each.baked and each.baked.time for each in card.served] == [None, None, "2026-01-07"]
    assert [each.is_live for each in card.served] == [False, False, True]
    assert card.journal_time == "2026-01-07"
    assert {"canary at 10 %", "canary at 50 %"} < set(
        re.findall("version 2, ([^<]+)", card_page(card))
    )


def test_lineage_is_shown_as_far_as_known_and_no_longer_than_page(write, tmp_path):
    assert [each.model_id for each in write().lineage] == ["m1"]
    store_model(tmp_path, "m1", parent_model_id="m1")
    assert len(read_card(tmp_path, "2").lineage) == MAX_ANCESTORS


@pytest.mark.parametrize(
    ("after", "is_blocked"),
    [
        ([], True),
        ([("promote", 2)], False),
        ([("intent", 2), ("promote", 2), ("withdrawn", 2)], True),
    ],
    ids=["rolled back", "promoted since", "whose promotion was rolled back"],
)
def test_model_that_was_rolled_back_is_blocked_until_person_promotes_it(write, after, is_blocked):
    card = write(
        ("release", 1), ("release", 2), ("rollback", 1, {"blocked_model_id": "m2"}), *after
    )
    assert spans(card)[0] == ("release", "2", "3")
    assert bool(card.blocked and card.blocked.time == "2026-01-03") == is_blocked
    assert card.served[-1].is_live != is_blocked
    page = card_page(card)
    assert ("Rolled back at 2026-01-03" in page) == is_blocked
    assert ("blocked" in re.search("<h1>(.*)</h1>", page)[1]) == is_blocked


@pytest.mark.parametrize(
    ("reference", "message"),
    [("7", "version 7 is not in"), ("m9", "'m9' is not in"), ("1", "no card")],
)
def test_absent_card_is_named(write, tmp_path, reference, message):
    write()
    with pytest.raises(ContractError, match=message):
        read_card(tmp_path, reference)
