"""Tests that a candidate with a stale verdict is not released.

A verdict is stale if it compares the candidate with another model than the live model.
"""

import dataclasses

import pytest

from controller.announce import StaleVerdict
from evergreen.registry.promotion_journal import read_entries, read_journal
from tests.support.deployments import release


@pytest.fixture
def candidate_of(make_candidate):
    """Makes a model with `seed`, and a verdict that compares the model with `champion`.

    The verdict refers to the champion by `reference`.
    """

    def make(store, seed, champion, reference="current"):
        model, verdict, raw = make_candidate(store, seed)
        return (
            model,
            dataclasses.replace(verdict, champion_model_id=champion, champion_reference=reference),
            raw,
        )

    return make


def test_verdict_against_none_or_another_than_live_model_is_refused(candidate_of, unserved):
    release(*candidate_of(unserved.store, 1, None, "current"), settings=unserved)
    with pytest.raises(StaleVerdict, match="compared with no champion, but model-1 is live"):
        release(*candidate_of(unserved.store, 4, None), settings=unserved)
    release(*candidate_of(unserved.store, 2, "model-1"), settings=unserved)
    with pytest.raises(
        StaleVerdict,
        match="model-3 was compared with model-1, but model-2 is live: evaluate it again",
    ):
        release(*candidate_of(unserved.store, 3, "model-1"), settings=unserved)
    assert [entry.version for entry in read_journal(unserved.store)] == [1, 2]
    assert read_entries(unserved.store)[-1].action == "release", (
        "the journal must have no intent of the stale release"
    )


@pytest.mark.parametrize(("champion", "reference"), [(None, "none"), ("model-1", "model-1")])
def test_run_that_named_its_champion_is_not_compared_with_live_model(
    candidate_of, unserved, champion, reference
):
    release(*candidate_of(unserved.store, 1, None), settings=unserved)
    release(*candidate_of(unserved.store, 2, "model-1"), settings=unserved)
    assert (
        release(*candidate_of(unserved.store, 3, champion, reference), settings=unserved).version
        == 3
    )
