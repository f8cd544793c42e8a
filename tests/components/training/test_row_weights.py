"""Tests of sample weights in training: a row of weight 3 counts as three rows."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.training.calibration import bias_shift, newest_bias_shift
from components.training.pytorch.engine import PytorchEngine
from components.training.rows import RowFolder, open_rows
from components.training.start import write_initial
from evergreen.config.data import WEIGHT, ColumnNames
from evergreen.config.training import TrainingSettings
from evergreen.networks.files import open_model
from evergreen.runtime.errors import ContractError
from evergreen.storage.uris import local_path
from tests.support.errors import raises
from tests.support.logistic_engine import content
from tests.support.planted_rows import FEATURES, POSITIONS, dcn, fit_by_pytorch

CONFIG = dcn(embedding_dim=4, num_cross_layers=1, tower=(8,))
SETTINGS = TrainingSettings(learning_rate=0.01)


@pytest.fixture
def stepped(tmp_path, planted):
    """The engine after one step over all rows, and its saved state.

    After Adam's first step, m is a tenth of the gradient.
    """
    write_initial(
        tmp_path / "start", CONFIG, planted.slot_sizes, click_rate=0.3, seed=3, positions=POSITIONS
    )

    def step(rows, name):
        engine = PytorchEngine(
            CONFIG, planted.slot_sizes, SETTINGS, device="cpu", positions=POSITIONS
        )
        engine.restore(tmp_path / "start")
        loss = engine.train(rows, np.arange(len(rows)), batch_size=1_000, seed=1)
        engine.save(tmp_path / name)
        return loss, engine.num_steps, open_model(tmp_path / name, planted.slot_sizes)

    return step


def test_row_of_weight_three_counts_as_three_copies_and_zero_as_none(stepped, planted):
    rows = planted.encoded(300)
    weights = np.random.default_rng(0).integers(0, 4, 300)
    loss, _, by_weight = stepped(replace(rows, weights=(weights / 2).astype(np.float32)), "weights")
    loss_of_copies, _, by_copies = stepped(rows.take(np.repeat(np.arange(300), weights)), "copies")
    assert loss == pytest.approx(loss_of_copies, rel=1e-6)
    for mine, its in zip(by_weight.moments, by_copies.moments):
        np.testing.assert_allclose(mine.table, its.table, rtol=1e-4, atol=1e-8)
        for name, values in its.dense.items():
            np.testing.assert_allclose(mine.dense[name], values, rtol=1e-4, atol=1e-8)


def test_rows_without_any_weight_take_no_step(stepped, planted, tmp_path):
    loss, num_steps, _ = stepped(
        replace(planted.encoded(50), weights=np.zeros(50, np.float32)), "after"
    )
    assert (loss, num_steps) == (0.0, 0)
    stepped(planted.encoded(0), "untouched")
    assert content(tmp_path / "after") == content(tmp_path / "untouched")


def sampled(seed, *, n=40_000, shift=0.0):
    """Return all clicks and a tenth of the other rows. The predicted logits are off by `shift`."""
    random = np.random.default_rng(seed)
    logits = random.normal(-3.0, 1.0, n)
    clicked = random.random(n) < 1 / (1 + np.exp(-logits))
    kept = clicked | (random.random(n) < 0.1)
    predicted = (1 / (1 + np.exp(-logits - shift)))[kept].astype(np.float32)
    return (
        clicked[kept].astype(np.float32),
        predicted,
        np.where(clicked[kept], 1, 10).astype(np.float32),
    )


@pytest.mark.parametrize("unit", [1.0, 0.01], ids=["tens", "tenths"])
def test_logits_of_sampled_rows_are_corrected_to_those_of_all_rows(unit):
    labels, predicted, weights = sampled(1, n=400_000, shift=0.5)
    assert newest_bias_shift(labels, predicted, weights * np.float32(unit)) == pytest.approx(
        -0.5, abs=0.03
    )


def test_weighted_rows_outweigh_prior_as_their_errors_allow():
    # A normal prior of deviation 0.1 shrinks a shift of variance v by 0.01 / (0.01 + v).
    n, wanted = 4_000, 0.2
    found = [bias_shift(*sampled(seed, n=n, shift=-wanted)) for seed in range(200)]
    free = [bias_shift(*sampled(seed, n=100 * n, shift=-wanted)) for seed in range(20)]
    assert np.mean(free) == pytest.approx(wanted, abs=0.01)
    variance = np.var(free) * 100
    assert np.mean(found) == pytest.approx(wanted * 0.01 / (0.01 + variance), rel=0.1)


def test_equal_weights_correct_as_no_weights_do():
    labels, predicted, _ = sampled(3)
    found = newest_bias_shift(labels, predicted, np.full(len(labels), 2.5, np.float32))
    assert found == pytest.approx(newest_bias_shift(labels, predicted), rel=1e-9)


def test_weights_are_read_and_wrong_ones_refused(planted, make_training_set, tmp_path):
    training_set = make_training_set(*planted.rows(200)[:3], num_files=1)
    folder = local_path(training_set.train_uri)
    (path,) = folder.glob("*.parquet")
    table, weights, cache = (
        pq.read_table(path),
        np.linspace(0, 10, 200, dtype=np.float32),
        tmp_path / "cache",
    )
    source = RowFolder(path=folder, num_rows=200, features=FEATURES, weighted=True)
    with raises(ContractError, "lacks", [WEIGHT]):
        open_rows([source], planted.slot_sizes, cache)
    pq.write_table(table.append_column(WEIGHT, [weights]), path)
    np.testing.assert_array_equal(open_rows([source], planted.slot_sizes, cache).weights, weights)
    for weights[7] in (-1.0, np.nan, np.inf):
        pq.write_table(table.append_column(WEIGHT, [weights]), path)
        with raises(ContractError, WEIGHT, weights[7], "finite"):
            open_rows([source], planted.slot_sizes, cache)


@pytest.mark.parametrize("is_round", [False, True], ids=["first model", "round"])
def test_rows_of_weight_zero_do_not_change_fit(planted, make_training_set, tmp_path, is_round):
    settings = TrainingSettings(batch_size=128, round_rates=(0.1, 3.0), seed=2)
    write_initial(
        tmp_path / "parent", CONFIG, planted.slot_sizes, click_rate=0.3, seed=3, positions=POSITIONS
    )
    labels, dense, ids, _ = planted.rows(12_000)
    weights = (np.random.default_rng(1).random(12_000) < 0.3).astype(np.float32)
    found = []
    for name, said in (("first", labels), ("other", np.where(weights == 0, 1 - labels, labels))):
        training_set = make_training_set(said, dense, ids, name=name, num_files=1)
        recommender = replace(training_set.recommender, data=ColumnNames(weight="counts"))
        (path,) = local_path(training_set.train_uri).glob("*.parquet")
        pq.write_table(pq.read_table(path).append_column(WEIGHT, [weights]), path)
        weighted, start = (
            replace(training_set, recommender=recommender),
            tmp_path / "parent" if is_round else None,
        )
        result = fit_by_pytorch(weighted, CONFIG, settings, tmp_path / name, start=start)
        found.append(
            (content(result.weights), result.learning_rate, result.progressive["log_loss"])
        )
    assert found[0] == found[1]
    assert found[0][1] == settings.learning_rate * (3 if is_round else 1)
