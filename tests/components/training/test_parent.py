"""What a round takes from its parent, and which parents are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.manifests import Model
from components.contracts.model_files import ModelWeights, num_dense_parameters, read_model, write_model
from components.contracts.workflow import TOMBSTONE, FeatureWorkflow
from components.runtime.durable import sha256_tree
from components.runtime.errors import ContractError
from components.storage.uris import local_path
from components.training.parent import continue_from

CONFIG = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(8,))
BEFORE = [6 + 3 * i for i in range(26)]
NOW = [size + i % 4 for i, size in enumerate(BEFORE)]


@pytest.fixture
def weights():
    random = np.random.default_rng(0)
    shape, size = (sum(BEFORE), CONFIG.embedding_dim), num_dense_parameters(CONFIG)
    return ModelWeights(
        dense={name: random.normal(size=s).astype(np.float32) for name, s in dense_layout(CONFIG)},
        embeddings=random.normal(size=shape).astype(np.float32),
        dense_moments=tuple(random.random((2, size)).astype(np.float32)),
        embedding_moments=tuple(random.random((2, *shape)).astype(np.float32)),
    )


@pytest.fixture
def parent(tmp_path, weights, make_training_set, world):
    """A stored parent, and a training set whose vocabularies go on from it."""
    write_model(tmp_path / "parent" / "weights", CONFIG, weights)
    old = make_training_set(*world.rows(20)[:3], name="old", slot_sizes=BEFORE)
    new = make_training_set(*world.rows(20)[:3], name="new", slot_sizes=NOW)
    local_path(old.workflow_uri).rename(tmp_path / "parent" / "workflow")
    model = Model(
        model_id="p",
        uri=(tmp_path / "parent").as_uri(),
        backend="pytorch",
        config=CONFIG.as_document(),
        slot_sizes=BEFORE,
        parent_model_id=None,
        seed=1,
        num_train_rows=20,
        optimizer_step=77,
        early_stopping={},
        last_event_time="",
        raw_digest=old.raw_digest,
        sha256={},
        created_at="",
    )
    return model, new


@pytest.fixture
def into(tmp_path):
    return tmp_path / "run" / "start"


def change_vocabulary(training_set, column, change):
    """Saves the training set's workflow with one vocabulary changed."""
    folder = local_path(training_set.workflow_uri)
    workflow = FeatureWorkflow.load(folder)
    vocabularies = [v.copy() for v in workflow.vocabularies]
    vocabularies[column] = change(vocabularies[column])
    replace(workflow, vocabularies=tuple(vocabularies)).save(folder)


def put(id_, value):
    def change(vocabulary):
        vocabulary[id_ - 3] = value
        return vocabulary

    return change


def test_a_parent_gives_weights_moments_and_step_count(parent, weights, into):
    model, training_set = parent
    start = continue_from(model, training_set, CONFIG, into)
    assert (start.weights, start.optimizer_step) == (into, 77)
    grown = read_model(into, CONFIG, NOW, optimizer=True)
    for name, value in weights.dense.items():
        np.testing.assert_array_equal(grown.dense[name], value)
    np.testing.assert_array_equal(grown.dense_moments[0], weights.dense_moments[0])
    old_at = new_at = 0
    for old, new in zip(BEFORE, NOW):
        for now, was in zip(
            (grown.embeddings, *grown.embedding_moments), (weights.embeddings, *weights.embedding_moments)
        ):
            np.testing.assert_array_equal(now[new_at : new_at + old], was[old_at : old_at + old])
        appended = slice(new_at + old, new_at + new)
        assert (grown.embeddings[appended] == weights.embeddings[old_at + 2]).all()
        assert not any(moment[appended].any() for moment in grown.embedding_moments)
        old_at, new_at = old_at + old, new_at + new


def test_going_on_from_a_parent_leaves_its_folder_as_it_was(parent, into, tmp_path):
    before = sha256_tree(tmp_path / "parent")
    continue_from(*parent, CONFIG, into)
    first = sha256_tree(into)
    assert sha256_tree(tmp_path / "parent") == before
    continue_from(*parent, CONFIG, into)
    assert sha256_tree(into) == first


def test_an_evicted_category_leaves_a_zero_row(parent, into):
    model, training_set = parent
    change_vocabulary(training_set, 0, put(4, TOMBSTONE))
    continue_from(model, training_set, CONFIG, into)
    grown = read_model(into, CONFIG, NOW, optimizer=True)
    rows = [table[4] for table in (grown.embeddings, *grown.embedding_moments)]
    assert not np.any(rows)
    assert grown.embeddings[3].any()
    assert grown.embeddings[5].any()


def test_another_network_is_refused_naming_both(parent, into):
    with pytest.raises(
        ContractError, match=r"has {'tower': \[9\]}, expected the parent p's {'tower': \[8\]}; .* with parent=none"
    ):
        continue_from(*parent, replace(CONFIG, tower=(9,)), into)


def test_a_shrunken_slot_is_refused_naming_both_sizes(parent, into):
    model, training_set = parent
    sizes = list(NOW)
    sizes[6] = 5
    with pytest.raises(ContractError, match="slot size of C7 is 5 in the training set and 24 in the parent p"):
        continue_from(model, replace(training_set, slot_sizes=sizes), CONFIG, into)


def test_a_workflow_of_other_sizes_than_its_manifest_is_refused(parent, into):
    model, training_set = parent
    sizes = [size + 1 for size in NOW]
    with pytest.raises(ContractError, match="workflow in .* has slot sizes"):
        continue_from(model, replace(training_set, slot_sizes=sizes), CONFIG, into)


def test_ids_that_mean_other_categories_are_refused_and_nothing_is_left(parent, world, make_training_set, into):
    model, _ = parent
    other = make_training_set(*world.rows(20)[:3], name="other", slot_sizes=NOW, workflow_start=1)
    with pytest.raises(ContractError, match="does not go on from the parent p's: id 3 of C1"):
        continue_from(model, other, CONFIG, into)
    assert not into.exists()


def test_a_category_directly_replaced_by_another_is_refused(parent, into):
    model, training_set = parent
    change_vocabulary(training_set, 2, put(5, 4_000_000_000))
    with pytest.raises(ContractError, match="id 5 of C3 means category 4000000000 and meant 20002 before"):
        continue_from(model, training_set, CONFIG, into)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("means", np.full(13, 0.5, np.float32)),
        ("stds", np.full(13, 2, np.float32)),
        ("fill", 1.0),
        ("clip_min", -1.0),
    ],
)
def test_other_arithmetic_of_the_dense_columns_is_refused(parent, into, name, value):
    model, training_set = parent
    folder = local_path(training_set.workflow_uri)
    replace(FeatureWorkflow.load(folder), **{name: value}).save(folder)
    with pytest.raises(ContractError, match=f"does not go on from the parent p's: {name} "):
        continue_from(model, training_set, CONFIG, into)


@pytest.mark.parametrize("name", ["dcn_opt_dense_0.model", "dcn0_opt_sparse_0.model"])
def test_a_parent_without_optimizer_state_starts_without(parent, into, tmp_path, name):
    (tmp_path / "parent" / "weights" / name).unlink()
    start = continue_from(*parent, CONFIG, into)
    grown = read_model(start.weights, CONFIG, NOW, optimizer=True)
    assert (grown.dense_moments is None) == (name == "dcn_opt_dense_0.model")
    assert (grown.embedding_moments is None) == (name == "dcn0_opt_sparse_0.model")


@pytest.mark.parametrize("name", ["dcn_dense_0.model", "dcn_opt_dense_0.model", "dcn0_opt_sparse_0.model"])
@pytest.mark.parametrize("change", [-8, 8], ids=["truncated", "oversized"])
def test_a_damaged_file_is_refused_by_name(parent, into, tmp_path, name, change):
    path = tmp_path / "parent" / "weights" / name
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"\0" * change)
    with pytest.raises(ContractError, match=name):
        continue_from(*parent, CONFIG, into)
    assert not into.exists()
