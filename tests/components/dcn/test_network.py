"""The network against its formula in float64 NumPy, layer by layer."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from components.contracts.dcn import DcnConfig, dense_layout
from components.contracts.model_files import ModelWeights, write_model
from components.dcn.network import DcnNetwork, load_network, load_weights, predict, to_weights
from components.runtime.errors import ContractError

V1 = DcnConfig(embedding_dim=4, num_cross_layers=3, tower=(8, 5))
V2 = DcnConfig(embedding_dim=4, num_cross_layers=3, tower=(8, 5), projection_dim=6)
SLOT_SIZES = [3 + i % 5 for i in range(26)]
OFFSETS = np.cumsum([0, *SLOT_SIZES[:-1]])


@pytest.fixture(params=[V1, V2], ids=["v1", "v2"])
def config(request):
    return request.param


@pytest.fixture
def weights(config):
    random = np.random.default_rng(0)
    return ModelWeights(
        dense={name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in dense_layout(config)},
        embeddings=random.normal(0, 0.5, (sum(SLOT_SIZES), config.embedding_dim)).astype(np.float32),
    )


@pytest.fixture
def network(config, weights):
    network = DcnNetwork(config, SLOT_SIZES)
    load_weights(network, weights)
    return network


@pytest.fixture
def rows():
    random = np.random.default_rng(1)
    dense = random.normal(size=(50, 13)).astype(np.float32)
    return dense, np.stack([random.integers(0, size, 50) for size in SLOT_SIZES], axis=1)


def logits_by_the_book(weights, dense, ids):
    """Each cross layer and each tower layer on its own, in float64."""
    p = {name: value.astype(np.float64) for name, value in weights.dense.items()}
    table = weights.embeddings.astype(np.float64)
    vectors = np.where(
        ((ids >= 0) & (ids < SLOT_SIZES))[..., None], table[np.clip(ids, 0, np.array(SLOT_SIZES) - 1) + OFFSETS], 0.0
    )
    x0 = np.concatenate([vectors.reshape(len(ids), -1), dense.astype(np.float64)], axis=1)
    cross = x0
    for i in range(3):
        if "cross.0.u" in p:
            cross = x0 * (cross @ p[f"cross.{i}.u"] @ p[f"cross.{i}.v"] + p[f"cross.{i}.bias"]) + cross
        else:
            cross = x0 * (cross @ p[f"cross.{i}.weight"])[:, None] + cross + p[f"cross.{i}.bias"]
    tower = x0
    for i in range(2):
        tower = np.maximum(tower @ p[f"tower.{i}.weight"] + p[f"tower.{i}.bias"], 0)
    return (np.concatenate([tower, cross], axis=1) @ p["final.weight"] + p["final.bias"])[:, 0]


def test_logits_equal_the_layers_run_one_by_one_in_float64(network, weights, rows):
    dense, ids = rows
    logits = network(torch.from_numpy(dense), torch.from_numpy(ids)).detach().numpy()
    np.testing.assert_allclose(logits, logits_by_the_book(weights, dense, ids), rtol=2e-5, atol=2e-5)
    network.double()
    logits = network(torch.from_numpy(dense).double(), torch.from_numpy(ids)).detach().numpy()
    np.testing.assert_allclose(logits, logits_by_the_book(weights, dense, ids), rtol=1e-12, atol=1e-12)


def test_gradients_equal_central_differences_of_the_formula(network, weights, rows):
    dense, ids = rows
    labels = (np.arange(len(ids)) % 3 == 0).astype(np.float64)
    network.double()
    vectors = network.embed(torch.from_numpy(ids)).requires_grad_()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        network.logits(torch.from_numpy(dense).double(), vectors), torch.from_numpy(labels)
    )
    gradients = dict(zip(network.named_dense(), torch.autograd.grad(loss, list(network.named_dense().values()))))

    def loss_by_the_book(name, index, change):
        dense64 = {k: v.astype(np.float64) for k, v in weights.dense.items()}
        dense64[name][index] += change
        z = logits_by_the_book(ModelWeights(dense=dense64, embeddings=weights.embeddings), dense, ids)
        return float(np.mean(np.maximum(z, 0) - z * labels + np.log1p(np.exp(-np.abs(z)))))

    random = np.random.default_rng(2)
    for name, gradient in gradients.items():
        for _ in range(3):
            index = tuple(int(random.integers(0, n)) for n in gradient.shape)
            slope = (loss_by_the_book(name, index, 1e-5) - loss_by_the_book(name, index, -1e-5)) / 2e-5
            assert gradient[index].item() == pytest.approx(slope, rel=1e-5, abs=1e-8), name


def test_an_id_outside_its_slot_scores_with_a_zero_vector(network, weights, rows):
    dense, ids = rows
    ids[0, 3], ids[1, 25], ids[2, 0] = SLOT_SIZES[3], 10**9, -1
    probabilities = predict(network, dense, ids)
    expected = 1 / (1 + np.exp(-logits_by_the_book(weights, dense, ids)))
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)


def test_scores_are_identical_after_saving_and_loading(config, network, rows, tmp_path):
    write_model(tmp_path, config, to_weights(network))
    loaded = load_network(tmp_path, config, SLOT_SIZES)
    np.testing.assert_array_equal(predict(loaded, *rows), predict(network, *rows))


def test_predict_switches_dropout_off_and_leaves_the_mode(config, rows, weights):
    network = DcnNetwork(DcnConfig(**{**config.as_document(), "tower": config.tower, "dropout": 0.5}), SLOT_SIZES)
    load_weights(network, weights)
    network.train()
    first = predict(network, *rows)
    np.testing.assert_array_equal(predict(network, *rows), first)
    assert network.training
    assert first.dtype == np.float32
    assert len(predict(network, rows[0][:0], rows[1][:0])) == 0


@pytest.mark.parametrize(
    "name",
    ["dcn_dense_0.model", "dcn0_sparse_0.model/key", "dcn0_sparse_0.model/emb_vector"],
)
@pytest.mark.parametrize("damage", ["absent", "truncated", "oversized"])
def test_a_damaged_weight_file_is_refused_by_name(config, network, tmp_path, name, damage):
    write_model(tmp_path, config, to_weights(network))
    path = tmp_path / name
    content = path.read_bytes()
    path.unlink()
    if damage != "absent":
        path.write_bytes(content[:-8] if damage == "truncated" else content + b"\0" * 8)
    with pytest.raises(ContractError, match=r"(dcn_dense_0|key|emb_vector)"):
        load_network(tmp_path, config, SLOT_SIZES)


def test_loading_holds_no_second_table(tmp_path):
    sizes = [20_000] * 26
    write_model(tmp_path, V1, to_weights(DcnNetwork(V1, sizes)))
    tracemalloc.start()
    try:
        load_network(tmp_path, V1, sizes)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # NumPy's arrays are traced, torch's are not.
    assert peak < sum(sizes) * 4 * 4 / 2


def test_weights_of_another_shape_are_refused(config, network, weights):
    with pytest.raises(ContractError, match=r"embeddings have shape .* expected"):
        load_weights(DcnNetwork(config, [s + 1 for s in SLOT_SIZES]), weights)
    del weights.dense["final.bias"]
    with pytest.raises(ContractError, match=r"final\.bias has shape None, expected \(1,\)"):
        load_weights(network, weights)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([5] * 25, "there are 25 slot sizes, expected 26"),
        ([5] * 25 + [0], "slot size of C26 is 0, expected at least 1"),
    ],
    ids=["count", "empty"],
)
def test_impossible_slot_sizes_are_refused(sizes, message):
    with pytest.raises(ContractError, match=message):
        DcnNetwork(V1, sizes)


def test_rows_of_another_width_are_refused(network, rows):
    with pytest.raises(ContractError, match=r"\(50, 12\)"):
        predict(network, rows[0][:, :12], rows[1])
