"""The PyTorch engine on a GPU learns what it learns on a CPU."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

from components.contracts.dcn import DcnConfig
from components.contracts.model_files import read_model
from components.training.config import TrainingSettings
from components.training.initial import write_initial
from components.training.pytorch.engine import PytorchEngine
from components.training.rows import Rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

V1 = DcnConfig(embedding_dim=8, num_cross_layers=2, tower=(32, 16))
V2 = DcnConfig(embedding_dim=8, num_cross_layers=2, tower=(32, 16), projection_dim=4)
networks = pytest.mark.parametrize("config", [V1, V2], ids=["v1", "v2"])
BATCH_SIZE, NUM_ROWS = 128, 128 * 12 + 40
"""Batches before the graph, with it, and one that is smaller."""


@pytest.fixture
def rows(world):
    labels, dense, ids, _ = world.rows(NUM_ROWS)
    return Rows(labels=labels, dense=dense, ids=ids.astype(np.int32))


@pytest.fixture
def learnt(tmp_path, world, rows):
    """Learns the rows twice; the saved model, what was seen, and the scores."""
    count = iter(range(100))

    def run(device, config=V1, precision="float32", seed=0):
        start, end = tmp_path / f"start {config.projection_dim}", tmp_path / f"end {next(count)}"
        if not start.exists():
            write_initial(start, config, world.slot_sizes, click_rate=0.3, seed=0)
        settings = TrainingSettings(learning_rate=0.003, precision=precision)
        with closing(PytorchEngine(config, world.slot_sizes, settings, device=device)) as engine:
            engine.restore(start, 0)
            seen = [engine.learn(rows, np.arange(NUM_ROWS), BATCH_SIZE, seed) for _ in range(2)]
            engine.save(end)
            assert engine.num_steps == 26
            scores = engine.score(rows)
        return read_model(end, config, world.slot_sizes, optimizer=True), seen, scores

    return run


@networks
def test_float32_steps_equal_the_cpus_up_to_the_order_of_sums(learnt, config):
    (on_gpu, seen, scores), (on_cpu, expected_seen, expected_scores) = learnt("cuda", config), learnt("cpu", config)
    for mine, its in zip(seen, expected_seen):
        assert mine.mean_loss == pytest.approx(its.mean_loss, rel=1e-3)
        assert mine.bad_batches is None
    np.testing.assert_allclose(scores, expected_scores, atol=5e-3)
    for name, values in on_cpu.dense.items():
        # Adam moves a weight by the learning rate even where its gradient is nothing but rounding.
        np.testing.assert_allclose(on_gpu.dense[name], values, atol=0.01)
    np.testing.assert_allclose(on_gpu.embeddings, on_cpu.embeddings, atol=0.01)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
@networks
def test_shortened_precisions_learn_what_float32_learns(learnt, config, precision):
    _, seen, _ = learnt("cuda", config, precision)
    _, expected, _ = learnt("cpu", config)
    for mine, its in zip(seen, expected):
        assert mine.mean_loss == pytest.approx(its.mean_loss, rel=0.02)


def test_the_seed_decides_dropout_also_within_the_graph(learnt):
    config = DcnConfig(embedding_dim=8, num_cross_layers=2, tower=(32, 16), dropout=0.5)
    losses = [learnt("cuda", config, seed=seed)[1][1].mean_loss for seed in (1, 1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] != pytest.approx(losses[2], rel=1e-5)


def test_a_batch_whose_loss_is_no_number_is_named(learnt, rows):
    rows.dense[9 * BATCH_SIZE + 5, 2] = np.nan
    _, seen, _ = learnt("cuda")
    assert seen[0].bad_batches == range(9, 10)


def test_a_checkpoint_of_a_gpu_continues_on_a_cpu(learnt, tmp_path, world, rows):
    _, _, scores = learnt("cuda")
    with closing(PytorchEngine(V1, world.slot_sizes, TrainingSettings(), device="cpu")) as engine:
        engine.restore(tmp_path / "end 0", 26)
        np.testing.assert_allclose(engine.score(rows), scores, atol=1e-5)
        assert engine.learn(rows, np.arange(NUM_ROWS), BATCH_SIZE, 0).bad_batches is None
