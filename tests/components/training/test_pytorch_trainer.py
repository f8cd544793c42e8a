"""The PyTorch trainer learns what is there, repeats itself, resumes, and stops with a place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from components.contracts.dcn import DcnConfig
from components.contracts.errors import ContractError, PermanentError
from components.contracts.metrics import log_loss, roc_auc
from components.dcn.network import DcnNetwork, load_weights, predict
from components.training import checkpoint as checkpoints
from components.training.checkpoint import Moment
from components.training.config import TrainingSettings
from components.training.metrics_sink import MemorySink
from components.training.pytorch_trainer import PytorchTrainer
from components.training.trainer import FitJob, Start

CONFIG = DcnConfig(embedding_dim=8, num_cross_layers=2, tower=(32,))
FAST = TrainingSettings(learning_rate=0.003, batch_size=512, max_epochs=3)


@pytest.fixture
def fit(tmp_path):
    """Fits on the CPU; gives the result and the sink."""
    count = iter(range(100))

    def run(training_set, settings=FAST, start=None, config=CONFIG, checkpoint_path=None, sink=None):
        sink = sink or MemorySink()
        path = checkpoint_path or tmp_path / f"checkpoint {next(count)}"
        job = FitJob(training_set=training_set, config=config, settings=settings, start=start, checkpoint_path=path)
        return PytorchTrainer(sink, device="cpu").fit(job), sink

    return run


def scores(weights, slot_sizes, dense, ids, config=CONFIG):
    network = DcnNetwork(config, slot_sizes)
    load_weights(network, weights)
    return predict(network, dense, ids)


def assert_same_weights(one, other):
    assert one.optimizer_step == other.optimizer_step
    for name, value in one.weights.dense.items():
        np.testing.assert_array_equal(value, other.weights.dense[name])
    np.testing.assert_array_equal(one.weights.embeddings, other.weights.embeddings)
    for mine, its in zip(one.weights.embedding_moments, other.weights.embedding_moments):
        np.testing.assert_array_equal(mine, its)
    for mine, its in zip(one.weights.dense_moments, other.weights.dense_moments):
        np.testing.assert_array_equal(mine, its)


def test_learns_the_planted_signal_and_an_incremental_round_regains_most_of_a_drift(world, make_training_set, fit):
    first, _ = fit(make_training_set(*world.rows(40_000, seed=1)[:3], name="first"))
    labels, dense, ids, logit = world.rows(8_000, seed=2)
    learnt = roc_auc(labels, scores(first.weights, world.slot_sizes, dense, ids))
    assert learnt > roc_auc(labels, logit) - 0.02

    # The newest third of the new window follows a world whose ids changed their meaning.
    drifted = world.drifted(range(10, 22))
    window = [np.concatenate(p) for p in zip(world.rows(16_000, seed=3)[:3], drifted.rows(8_000, seed=4)[:3])]
    second, _ = fit(
        make_training_set(*window, name="second"),
        start=Start(weights=first.weights, optimizer_step=first.optimizer_step),
    )
    labels, dense, ids, _ = drifted.rows(8_000, seed=5)
    lost = learnt - roc_auc(labels, scores(first.weights, world.slot_sizes, dense, ids))
    regained = roc_auc(labels, scores(second.weights, world.slot_sizes, dense, ids)) - (learnt - lost)
    assert lost > 0.08
    assert regained > 0.7 * lost


def test_a_round_in_an_unchanged_world_is_no_worse_than_its_parent(world, make_training_set, fit):
    first, _ = fit(make_training_set(*world.rows(30_000, seed=1)[:3], name="first"))
    start = Start(weights=first.weights, optimizer_step=first.optimizer_step)
    second, _ = fit(make_training_set(*world.rows(10_000, seed=3)[:3], name="second"), start=start)
    labels, dense, ids, _ = world.rows(8_000, seed=2)
    before, after = (roc_auc(labels, scores(r.weights, world.slot_sizes, dense, ids)) for r in (first, second))
    assert after > before - 0.003
    assert second.optimizer_step >= first.optimizer_step


@pytest.mark.parametrize(
    ("branch", "best_epoch", "gains", "is_better"),
    [
        (0, 1, [0.001, -0.0005], True),
        (3, 1, [0.3, -0.28], False),
        (3, 1, [0.3, 0.28], True),
        (3, 0, [0.3, -0.28], True),
        (0, 1, [-0.3, 0.28], False),
    ],
    ids=["any gain", "a part by chance", "a part for certain", "a part against the start", "a loss"],
)
def test_a_part_of_the_rows_is_chosen_only_if_it_is_better_by_more_than_chance(branch, best_epoch, gains, is_better):
    def moment(branch, epoch, row_losses):
        return Moment(branch=branch, epoch=epoch, step=0, weights=None, scores={}, row_losses=np.array(row_losses))

    best = moment(0, best_epoch, [0.5, 0.5] * 10)
    assert moment(branch, 1, [0.5 - gain for gain in gains] * 10).is_better_than(best) is is_better


def test_the_best_weights_are_kept_and_their_scores_are_those_of_the_newest_rows(world, make_training_set, fit):
    labels, dense, ids, _ = world.rows(5_000)
    settings = TrainingSettings(learning_rate=0.02, batch_size=128, max_epochs=8, finish=False, patience=1)
    result, sink = fit(make_training_set(labels, dense, ids), settings)
    newest = scores(result.weights, world.slot_sizes, dense[4500:], ids[4500:])
    assert result.early_stopping["log_loss"] == log_loss(labels[4500:], newest)
    assert result.early_stopping["auc"] == roc_auc(labels[4500:], newest)
    losses = [line["log_loss"] for line in sink.lines]
    assert result.early_stopping["log_loss"] == min(losses)
    # It overfits by design: two epochs past the best one end it.
    assert len(losses) - 1 == losses.index(min(losses)) + 2 < 8


def test_a_part_of_the_rows_may_be_passed_as_often_as_makes_the_steps_of_all_rows(world, make_training_set, fit):
    training_set = make_training_set(*world.rows(2_000)[:3])
    parent, _ = fit(training_set)
    settings = TrainingSettings(max_epochs=1, patience=99, num_halvings=2, finish=False)
    _, sink = fit(training_set, settings, start=Start(weights=parent.weights, optimizer_step=parent.optimizer_step))
    branches = [line["branch"] for line in sink.lines if line["training_loss"] is not None]
    assert branches == [0, 1, 1, 2, 2, 2, 2]


def test_the_newest_rows_are_learnt_in_the_end_in_as_many_passes_as_the_best_weights_had_made(
    world, make_training_set, fit
):
    labels, dense, ids, _ = world.rows(5_000)
    training_set = make_training_set(labels, dense, ids)
    settings = TrainingSettings(learning_rate=0.003, batch_size=128, min_batch_size=128, max_epochs=2, finish=False)
    judged, sink = fit(training_set, settings)
    finished, _ = fit(training_set, replace(settings, finish=True))
    passes = min(sink.lines, key=lambda line: line["log_loss"])["epoch"]
    assert passes > 0
    assert finished.optimizer_step - judged.optimizer_step == passes * 4  # 500 rows in batches of 128
    assert finished.early_stopping == judged.early_stopping
    learnt = scores(finished.weights, world.slot_sizes, dense[4500:], ids[4500:])
    assert log_loss(labels[4500:], learnt) < judged.early_stopping["log_loss"]


@pytest.mark.parametrize("incremental", [False, True], ids=["scratch", "incremental"])
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(
    world, make_training_set, fit, tmp_path, monkeypatch, incremental
):
    config = DcnConfig(embedding_dim=4, num_cross_layers=2, tower=(8,), dropout=0.2)
    training_set = make_training_set(*world.rows(3_000)[:3])
    start = None
    if incremental:
        parent, _ = fit(training_set, config=config)
        start = Start(weights=parent.weights, optimizer_step=parent.optimizer_step)
    whole, sink = fit(training_set, config=config, start=start)
    path, resumed = tmp_path / "interrupted", None
    real, saved = checkpoints.save, []

    def power_cut(folder, config, checkpoint):
        real(folder, config, checkpoint)
        saved.append(checkpoint)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "save", power_cut)
    again = MemorySink()
    while resumed is None:
        try:
            resumed, _ = fit(training_set, config=config, start=start, checkpoint_path=path, sink=again)
        except KeyboardInterrupt:
            continue
    assert len(saved) == len(sink.lines) - 1
    assert_same_weights(whole, resumed)
    assert resumed.early_stopping == whole.early_stopping


def test_seeds_decide_everything(world, make_training_set, fit):
    training_set = make_training_set(*world.rows(2_000)[:3])
    one, again = (fit(training_set)[0] for _ in range(2))
    assert_same_weights(one, again)
    other, _ = fit(training_set, TrainingSettings(learning_rate=0.003, batch_size=512, max_epochs=3, seed=7))
    assert (other.weights.embeddings != one.weights.embeddings).any()


def test_labels_of_one_class_are_refused(world, make_training_set, fit):
    labels, dense, ids, _ = world.rows(500)
    with pytest.raises(ContractError, match="labels of the 450 rows to fit hold 0 clicks"):
        fit(make_training_set(labels * 0, dense, ids))


def test_auc_is_none_where_the_newest_rows_have_one_class(world, make_training_set, fit):
    labels, dense, ids, _ = world.rows(500)
    labels[450:] = 0
    result, _ = fit(make_training_set(labels, dense, ids))
    assert result.early_stopping["auc"] is None
    assert result.early_stopping["log_loss"] > 0


def test_a_loss_that_is_no_number_stops_with_its_place(world, make_training_set, fit):
    labels, dense, ids, _ = world.rows(1_000)
    dense[123] = 3e38
    with pytest.raises(PermanentError, match=r"loss is (nan|inf|-inf) at epoch 1, batch \d+ of 29 \(32 rows.*rows \["):
        fit(make_training_set(labels, dense, ids))


@pytest.mark.parametrize(
    ("num_rows", "asked", "num_steps"),
    [(500, 512, 15), (500, 8, 57), (20_000, 512, 300)],
    ids=["tiny window", "the asked-for size is the most", "enough rows"],
)
def test_few_rows_make_small_but_not_tiny_batches(world, make_training_set, fit, num_rows, asked, num_steps):
    settings = TrainingSettings(batch_size=asked, max_epochs=1, finish=False)
    _, sink = fit(make_training_set(*world.rows(num_rows)[:3]), settings)
    assert sink.lines[-1]["step"] == num_steps
