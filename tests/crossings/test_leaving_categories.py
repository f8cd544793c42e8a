"""Tests that the real steps reuse the ids of evicted categories, and train them again."""

from datetime import date

import numpy as np
import onnxruntime
import pytest

from demo.simulation.simulator import Drift, Simulator, write_lake
from evergreen.contracts.manifests import Model
from evergreen.contracts.serving import CATEGORICAL_INPUT, DENSE_INPUT
from evergreen.contracts.workflow import FIRST_ID, TOMBSTONE, FeatureWorkflow, vocabulary_changes
from evergreen.networks.files import open_model
from evergreen.storage.uris import local_path

pytestmark = pytest.mark.timeout(900)

NEVER_SEEN = 2**32 - 1


@pytest.fixture(scope="module")
def leaving(chain, tmp_path_factory):
    """The chain's rounds, and two more rounds with one day each.

    Categories expire after 36 hours, so categories that occur only in round 1 are evicted first.
    """
    later = chain.copied_to(
        tmp_path_factory.mktemp("leaving"),
        settings={
            **chain.settings,
            "preprocessing": {"frequency_threshold": 2, "category_ttl_days": 1.5},
        },
    )
    world = Simulator.create(seed=3)
    for number, day in ((3, date(2026, 1, 6)), (4, date(2026, 1, 7))):
        drift = Drift(
            seed=number,
            new_category_columns=("C3", "C4"),
            new_category_share=0.5,
            new_categories=40,
        )
        write_lake(
            world.drifted(drift),
            str(later.root / "lake"),
            rows=2000,
            days=1,
            last_day=day,
            seed=number,
        )
        later.turn(f"round-{number}", validation_report=chain.rounds[1].paths["validation"])
    return later


def workflow_of(this):
    return FeatureWorkflow.load(local_path(this.training.uri) / Model.WORKFLOW)


def weights_of(this):
    return open_model(local_path(this.training.uri) / Model.WEIGHTS, this.training.slot_sizes)


def rows_of(ids, this):
    """Return the rows of the fused table for the ids of each column."""
    offsets = np.cumsum([0, *this.training.slot_sizes[:-1]])
    return np.concatenate([offset + column for offset, column in zip(offsets, ids)])


def test_categories_are_evicted_and_their_ids_are_reused_in_later_round(leaving):
    second, third, fourth = leaving.rounds[-3:]
    changes = [
        vocabulary_changes(workflow_of(a), workflow_of(b))
        for a, b in ((second, third), (third, fourth))
    ]
    evicted = [sum(len(column.evicted) for column in change) for change in changes]
    reused = [sum(len(column.reused) for column in change) for change in changes]
    assert evicted[0] > 100
    assert reused[0] == 0
    assert reused[1] > 50
    assert third.preprocessing.tombstones == workflow_of(third).tombstones
    assert sum(third.preprocessing.tombstones) == evicted[0]
    assert sum(fourth.preprocessing.tombstones) == evicted[0] + evicted[1] - reused[1]


def test_tombstone_row_is_empty_after_training_and_reused_row_is_trained(leaving):
    third, fourth = leaving.rounds[-2:]
    now = weights_of(fourth)
    dead = rows_of(
        [FIRST_ID + np.flatnonzero(v == TOMBSTONE) for v in workflow_of(fourth).vocabularies],
        fourth,
    )
    for tensors in now.parts:
        assert not tensors.table[dead].any()
    changes = vocabulary_changes(workflow_of(third), workflow_of(fourth))
    reused = rows_of([change.reused for change in changes], fourth)
    assert now.weights.table[reused].any(axis=1).all()
    assert now.moments[1].table[reused].any(axis=1).mean() > 0.5


def test_released_graph_treats_evicted_category_as_unknown(leaving, held_out_rows):
    fourth = leaving.rounds[-1]
    assert fourth.deployment.parity_max_abs_diff <= 1e-5
    dense, categorical, _ = held_out_rows(fourth.extraction)
    session = onnxruntime.InferenceSession(
        str(local_path(fourth.deployment.graph_uri)), providers=["CPUExecutionProvider"]
    )
    workflows = [workflow_of(this) for this in (leaving.rounds[0], fourth)]
    gone = [np.setdiff1d(a, b)[:1] for a, b in zip(*(w.vocabularies for w in workflows))]
    columns = [column for column, values in enumerate(gone) if len(values)]
    assert len(columns) > 5
    scores = []
    for value in (lambda column: gone[column][0], lambda _: NEVER_SEEN, lambda _: TOMBSTONE):
        raw = categorical.copy()
        for column in columns:
            raw[:, column] = value(column)
        scores.append(session.run(None, {DENSE_INPUT: dense, CATEGORICAL_INPUT: raw})[0])
    np.testing.assert_array_equal(scores[0], scores[1])
    np.testing.assert_array_equal(scores[0], scores[2])
