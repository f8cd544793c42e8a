"""Initial weights, growing vocabularies, and which parents are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from components.contracts.dcn import DcnConfig
from components.contracts.errors import ContractError
from components.contracts.manifests import Model
from components.contracts.model_files import ModelWeights, num_dense_parameters, write_model
from components.dcn.network import DcnNetwork, load_weights, predict
from components.training.initial import grow, initial_weights
from components.training.parent import continue_from

CONFIG = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(8,))
BEFORE = [6 + 3 * i for i in range(26)]
NOW = [size + i % 4 for i, size in enumerate(BEFORE)]


@pytest.fixture
def weights():
    fresh = initial_weights(CONFIG, BEFORE, click_rate=0.2, seed=3)
    random = np.random.default_rng(0)
    moments = [random.random(fresh.embeddings.shape).astype(np.float32) for _ in range(2)]
    flat = [random.random(num_dense_parameters(CONFIG)).astype(np.float32) for _ in range(2)]
    return ModelWeights(
        dense=fresh.dense, embeddings=fresh.embeddings, dense_moments=tuple(flat), embedding_moments=tuple(moments)
    )


@pytest.fixture
def parent(tmp_path, weights, make_training_set, world):
    """A stored parent, and a training set whose vocabularies go on from it."""
    write_model(tmp_path / "parent" / "weights", CONFIG, weights)
    old = make_training_set(*world.rows(20)[:3], name="old", slot_sizes=BEFORE)
    new = make_training_set(*world.rows(20)[:3], name="new", slot_sizes=NOW)
    (tmp_path / "work with space" / "old" / "workflow").rename(tmp_path / "parent" / "workflow")
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


def test_initial_embeddings_are_uniform_per_slot_and_the_seed_decides():
    sizes = [4] + [400] * 25
    weights = initial_weights(DcnConfig(), sizes, click_rate=0.25, seed=0)
    assert np.abs(weights.embeddings[:4]).max() <= 0.5
    assert np.abs(weights.embeddings[4:]).max() <= 0.05
    assert weights.embeddings[4:].std() == pytest.approx(0.05 / 3**0.5, rel=0.02)
    assert weights.dense["tower.0.weight"].std() == pytest.approx((2 / (429 + 128)) ** 0.5 / 0.87962566, rel=0.02)
    assert not weights.dense["cross.1.bias"].any()
    assert weights.dense["final.bias"][0] == pytest.approx(np.log(1 / 3))
    again, other = (initial_weights(DcnConfig(), sizes, click_rate=0.25, seed=s) for s in (0, 1))
    np.testing.assert_array_equal(weights.embeddings, again.embeddings)
    assert (weights.embeddings != other.embeddings).any()


def test_predictions_for_old_ids_are_bit_equal_directly_after_growth(weights):
    random = np.random.default_rng(5)
    dense = random.normal(size=(200, 13)).astype(np.float32)
    ids = np.stack([random.integers(0, size, 200) for size in BEFORE], axis=1)
    before, after = DcnNetwork(CONFIG, BEFORE), DcnNetwork(CONFIG, NOW)
    load_weights(before, weights)
    load_weights(after, grow(weights, BEFORE, NOW))
    np.testing.assert_array_equal(predict(after, dense, ids), predict(before, dense, ids))


def test_a_new_id_starts_as_its_slots_oov_with_zero_moments(weights):
    grown = grow(weights, BEFORE, NOW)
    old_at = new_at = 0
    for old, new in zip(BEFORE, NOW):
        for id_ in range(old, new):
            np.testing.assert_array_equal(grown.embeddings[new_at + id_], weights.embeddings[old_at + 2])
            assert not grown.embedding_moments[0][new_at + id_].any()
        for now, was in zip(grown.embedding_moments, weights.embedding_moments):
            np.testing.assert_array_equal(now[new_at : new_at + old], was[old_at : old_at + old])
        old_at, new_at = old_at + old, new_at + new
    assert grown.dense_moments is weights.dense_moments


def test_a_parent_gives_weights_moments_and_step_count(parent, weights):
    model, training_set = parent
    start = continue_from(model, training_set, CONFIG)
    assert start.optimizer_step == 77
    expected = grow(weights, BEFORE, NOW)
    np.testing.assert_array_equal(start.weights.embeddings, expected.embeddings)
    np.testing.assert_array_equal(start.weights.embedding_moments[1], expected.embedding_moments[1])
    np.testing.assert_array_equal(start.weights.dense_moments[0], weights.dense_moments[0])


def test_another_network_is_refused_naming_both(parent):
    with pytest.raises(ContractError, match=r"'tower': \[9\].*parent p's.*'tower': \[8\]"):
        continue_from(*parent, replace(CONFIG, tower=(9,)))


def test_a_shrunken_slot_is_refused_naming_both_sizes(parent):
    model, training_set = parent
    sizes = list(NOW)
    sizes[6] = 5
    with pytest.raises(ContractError, match="slot size of C7 is 5 in the training set and 24 in the parent p"):
        continue_from(model, replace(training_set, slot_sizes=sizes), CONFIG)
    with pytest.raises(ContractError, match="slot size of C7 is 5, expected at least the parent's 24"):
        grow(initial_weights(CONFIG, BEFORE, click_rate=0.2, seed=0), BEFORE, sizes)


def test_ids_that_mean_other_categories_are_refused(parent, world, make_training_set):
    model, _ = parent
    other = make_training_set(*world.rows(20)[:3], name="other", slot_sizes=NOW, workflow_start=1)
    with pytest.raises(ContractError, match="vocabulary of C1 .* does not begin with that of the parent p"):
        continue_from(model, other, CONFIG)


def test_a_parent_without_optimizer_state_starts_with_zero_moments(parent, tmp_path):
    for name in ("dcn_opt_dense_0.model", "dcn0_opt_sparse_0.model"):
        (tmp_path / "parent" / "weights" / name).unlink()
    start = continue_from(*parent, CONFIG)
    assert start.weights.embedding_moments is None
    from components.training.config import TrainingSettings
    from components.training.stepper import Stepper

    stepper = Stepper(CONFIG, NOW, TrainingSettings(), torch.device("cpu"))
    stepper.restore(start.weights, 77)
    assert not any(m.any() for m in stepper.weights().embedding_moments)


@pytest.mark.parametrize("name", ["dcn_opt_dense_0.model", "dcn0_opt_sparse_0.model"])
@pytest.mark.parametrize("change", [-8, 8], ids=["truncated", "oversized"])
def test_a_damaged_optimizer_file_is_refused_by_name(parent, tmp_path, name, change):
    path = tmp_path / "parent" / "weights" / name
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"\0" * change)
    with pytest.raises(ContractError, match=name):
        continue_from(*parent, CONFIG)
