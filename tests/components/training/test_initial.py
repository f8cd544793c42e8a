"""Fresh weights are drawn as HugeCTR draws them."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from components.contracts.criteo import CATEGORICAL
from components.contracts.dcn import DcnConfig
from components.contracts.model_files import read_model
from components.training import initial
from components.training.initial import write_initial

V1 = DcnConfig(embedding_dim=16, num_cross_layers=4, tower=(256, 64))
V2 = DcnConfig(embedding_dim=16, num_cross_layers=4, tower=(256, 64), projection_dim=48)
SIZES = [1, 2, 3, *(50 * (i + 1) for i in range(23))]


@pytest.fixture
def drawn(tmp_path):
    def draw(config=V1, sizes=SIZES, seed=0, click_rate=0.25, name="drawn"):
        write_initial(tmp_path / name, config, sizes, click_rate=click_rate, seed=seed)
        return read_model(tmp_path / name, config, sizes, optimizer=True)

    return draw


def assert_normal(values, deviation):
    """Mean, spread and tails of N(0, deviation), each within 5 standard errors of what so many draws have."""
    z, n = values.ravel().astype(np.float64) / deviation, values.size
    assert abs(z.mean()) < 5 / n**0.5
    assert abs(z.std() - 1) < 5 / (2 * n) ** 0.5
    # HugeCTR names it truncated, yet does not truncate: 4.55 % lie beyond 2 deviations.
    beyond = 0.0455
    assert abs((np.abs(z) > 2).mean() - beyond) < 5 * (beyond * (1 - beyond) / n) ** 0.5


@pytest.mark.parametrize("config", [V1, V2], ids=["v1", "v2"])
def test_dense_parameters_have_hugectrs_distributions(drawn, config):
    dense, n, k = drawn(config).dense, config.input_width, config.projection_dim
    for i in range(config.num_cross_layers):
        assert not dense[f"cross.{i}.bias"].any()
    if k:
        for letter in "uv":
            together = [dense[f"cross.{i}.{letter}"] for i in range(config.num_cross_layers)]
            assert_normal(np.stack(together), (2 / (n + k)) ** 0.5)
    else:
        assert_normal(np.stack([dense[f"cross.{i}.weight"] for i in range(config.num_cross_layers)]), n**-0.5)
    for name, fan_in, fan_out in (("tower.0", n, 256), ("tower.1", 256, 64), ("final", 64 + n, 1)):
        assert_normal(dense[f"{name}.weight"], (2 / (fan_in + fan_out)) ** 0.5 / 0.87962566)
    assert_normal(dense["tower.0.bias"], 256**-0.5)
    assert_normal(dense["tower.1.bias"], 64**-0.5)
    assert dense["final.bias"][0] == pytest.approx(np.log(0.25 / 0.75))


def test_embeddings_are_uniform_within_one_over_the_root_of_their_slots_size(drawn):
    at, table = 0, drawn().embeddings
    for name, size in zip(CATEGORICAL, SIZES):
        values, bound = table[at : at + size].astype(np.float64), size**-0.5
        assert np.abs(values).max() <= bound, name
        assert np.abs(values).max() > bound * (1 - 20 / values.size), name
        assert values.std() == pytest.approx(bound / 3**0.5, rel=4 / values.size**0.5), name
        at += size


def test_seeds_decide_and_chunks_do_not(drawn, monkeypatch):
    first, other = drawn(), drawn(seed=1, name="other")
    monkeypatch.setattr(initial, "ROWS_PER_CHUNK", 37)
    again = drawn(name="again")
    np.testing.assert_array_equal(again.embeddings, first.embeddings)
    for name, values in first.dense.items():
        np.testing.assert_array_equal(again.dense[name], values)
    assert (first.embeddings != other.embeddings).any()
    assert first.dense_moments is None
    assert first.embedding_moments is None


def test_no_table_is_held_in_memory(tmp_path):
    sizes = [20_000] * 26
    tracemalloc.start()
    try:
        write_initial(tmp_path, V1, sizes, click_rate=0.5, seed=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A chunk of 20,000 rows is drawn in float64 before it becomes float32.
    assert peak < sum(sizes) * 16 * 4 / 2
