"""What the PyTorch engine promises beyond the exam of all engines: equal bits, seeds, bounded memory, exact places."""

from __future__ import annotations

import tracemalloc
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

CONFIG = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(16, 8))
DROPPING = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(16, 8), dropout=0.5)
SETTINGS = TrainingSettings(learning_rate=0.01)


@pytest.fixture
def rows(world):
    labels, dense, ids, _ = world.rows(1_000)
    return Rows(labels=labels, dense=dense, ids=ids.astype(np.int32))


@pytest.fixture
def learnt(tmp_path, world, rows):
    """Learns the rows from fresh weights; the model as it was saved, what was seen, and the scores."""
    count = iter(range(100))

    def run(config=CONFIG, settings=SETTINGS, seed=0, order=None, batch_size=64):
        start, end = tmp_path / f"start {config.projection_dim}", tmp_path / f"end {next(count)}"
        if not start.exists():
            write_initial(start, config, world.slot_sizes, click_rate=0.3, seed=0)
        with closing(PytorchEngine(config, world.slot_sizes, settings, device="cpu")) as engine:
            engine.restore(start, 0)
            seen = engine.learn(rows, np.arange(len(rows)) if order is None else order, batch_size, seed)
            engine.save(end)
            scores = engine.score(rows)
        return read_model(end, config, world.slot_sizes, optimizer=True), seen, scores

    return run


def assert_same_bits(one, other):
    for name, values in one.dense.items():
        np.testing.assert_array_equal(values, other.dense[name])
    np.testing.assert_array_equal(one.embeddings, other.embeddings)
    for moments in ("dense_moments", "embedding_moments"):
        for mine, its in zip(getattr(one, moments), getattr(other, moments)):
            np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("projection_dim", [0, 3], ids=["v1", "v2"])
def test_equal_input_gives_equal_bits(learnt, precision, projection_dim):
    config = DcnConfig(**{**DROPPING.as_document(), "tower": DROPPING.tower, "projection_dim": projection_dim})
    settings = TrainingSettings(learning_rate=0.01, precision=precision)
    (one, seen, scores), (other, seen_again, scores_again) = (learnt(config, settings) for _ in range(2))
    assert_same_bits(one, other)
    assert seen == seen_again
    np.testing.assert_array_equal(scores, scores_again)


def test_the_seed_decides_dropout_and_nothing_without_dropout(learnt):
    one, other = (learnt(DROPPING, seed=seed)[0].dense["tower.0.weight"] for seed in (1, 2))
    assert (one != other).any()
    assert_same_bits(learnt(seed=1)[0], learnt(seed=2)[0])


def test_torchs_own_random_numbers_stay_the_callers(learnt):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    learnt(DROPPING)
    assert torch.equal(torch.rand(3), expected)


def test_tf32_is_float32_on_a_cpu(learnt):
    assert_same_bits(learnt(settings=TrainingSettings(precision="tf32"))[0], learnt(settings=TrainingSettings())[0])


def test_dropout_is_off_in_scoring(tmp_path, world, rows):
    write_initial(tmp_path, CONFIG, world.slot_sizes, click_rate=0.3, seed=0)
    scores = []
    for config in (CONFIG, DROPPING):
        with closing(PytorchEngine(config, world.slot_sizes, SETTINGS, device="cpu")) as engine:
            engine.restore(tmp_path, 0)
            scores += [engine.score(rows), engine.score(rows)]
    for other in scores[1:]:
        np.testing.assert_array_equal(scores[0], other)


def test_the_mean_loss_is_the_batches_and_the_step_count_counts_them(tmp_path, world, rows):
    write_initial(tmp_path, CONFIG, world.slot_sizes, click_rate=0.3, seed=0)
    with closing(PytorchEngine(CONFIG, world.slot_sizes, SETTINGS, device="cpu")) as engine:
        engine.restore(tmp_path, 40)
        each = [engine.learn(rows, np.arange(at, min(at + 300, 1000)), 300, 0).mean_loss for at in range(0, 1000, 300)]
        assert engine.num_steps == 44
        engine.restore(tmp_path, 40)
        assert engine.learn(rows, np.arange(1000), 300, 0).mean_loss == pytest.approx(np.mean(each), rel=1e-6)
        assert engine.num_steps == 44


def test_the_first_batch_whose_loss_is_no_number_is_named(learnt, rows):
    rows.dense[3 * 64 + 5, 2] = np.nan
    _, seen, _ = learnt()
    assert seen.bad_batches == range(3, 4)
    assert np.isnan(seen.mean_loss)


def test_restoring_and_saving_hold_no_second_table(tmp_path):
    sizes = [20_000] * 26
    write_initial(tmp_path / "start", CONFIG, sizes, click_rate=0.3, seed=0)
    with closing(PytorchEngine(CONFIG, sizes, SETTINGS, device="cpu")) as engine:
        tracemalloc.start()
        try:
            engine.restore(tmp_path / "start", 0)
            engine.save(tmp_path / "end")
            engine.restore(tmp_path / "end", 0)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # NumPy's arrays are traced; one table of three has 8.3 MB, a chunk with its moments 3.1 MB.
    assert peak < 0.7 * sum(sizes) * 4 * 4


def test_a_call_gets_a_second_or_so_of_rows_whatever_the_batch(world):
    with closing(PytorchEngine(CONFIG, world.slot_sizes, SETTINGS, device="cpu")) as engine:
        assert engine.segment_batches(32) == 1024
        assert engine.segment_batches(2048) == 16
        assert engine.segment_batches(10**6) == 1
