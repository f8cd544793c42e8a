"""The policy of a fit, shown on an engine in NumPy: parts, early stopping, replay, and what is kept of it all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from components.contracts.metrics import log_loss, roc_auc
from components.runtime.errors import ContractError, PermanentError, Preempted
from components.training.checkpoint import Moment
from components.training.config import TrainingSettings
from components.training.rows import Rows
from tests.support.clocks import Clock
from tests.support.logistic_engine import SETTINGS, LogisticEngine, StopAfter, TimedEngine, content, learned_rows
from tests.support.training_world import write_folder


@pytest.fixture
def parent(world, make_training_set, run):
    """Where a round goes on from."""
    result, _, _ = run(make_training_set(*world.rows(3_000, seed=8)[:3], name="parent"))
    return result.weights


def scores(weights, training_set, dense, ids):
    engine = LogisticEngine(training_set.slot_sizes, SETTINGS)
    engine.restore(weights)
    return engine.score(Rows(labels=np.zeros(len(dense), np.float32), dense=dense, ids=ids.astype(np.int32)))


def test_a_pass_learns_every_row_once_and_no_row_of_the_stopping_slice(world, make_training_set, run):
    training_set = make_training_set(*world.rows(3_000)[:3])
    _, engine, _ = run(training_set, replace(SETTINGS, max_epochs=1, finish=False))
    assert sorted(np.concatenate(learned_rows(engine))) == list(range(2_700))
    _, finished, _ = run(training_set, replace(SETTINGS, max_epochs=1))
    assert sorted(np.concatenate(learned_rows(finished, len(learned_rows(engine))))) == list(range(2_700, 3_000))


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
        return Moment(branch=branch, epoch=epoch, step=0, weights="w", scores={}, row_losses=np.array(row_losses))

    best = moment(0, best_epoch, [0.5, 0.5] * 10)
    assert moment(branch, 1, [0.5 - gain for gain in gains] * 10).is_better_than(best) is is_better


@pytest.mark.parametrize(
    ("steps_before", "gains", "is_better"),
    [(0, [-0.3, 0.28], False), (900, [-0.3, 0.28], True), (900, [-0.3, -0.28], False), (900, [0.3, 0.28], True)],
    ids=["fresh weights need a gain", "a loss by chance", "a loss for certain", "a gain"],
)
def test_a_parent_is_kept_only_where_it_is_better_by_more_than_chance(steps_before, gains, is_better):
    start = Moment(branch=0, epoch=0, step=steps_before, weights="start", scores={}, row_losses=np.array([0.5] * 20))
    losses = np.array([0.5 - gain for gain in gains] * 10)
    first = Moment(branch=0, epoch=1, step=steps_before + 9, weights="w", scores={}, row_losses=losses)
    assert first.is_better_than(start) is is_better


def test_a_single_judging_row_chooses_no_part():
    best, part = (
        Moment(branch=branch, epoch=1, step=9, weights="w", scores={}, row_losses=np.array([loss]))
        for branch, loss in ((0, 0.5), (1, 0.1))
    )
    assert not part.is_better_than(best)


def test_the_best_weights_are_kept_and_their_scores_are_those_of_the_newest_rows(world, make_training_set, run):
    labels, dense, ids, _ = world.rows(1_500)
    training_set = make_training_set(labels, dense, ids)
    settings = TrainingSettings(learning_rate=0.5, batch_size=32, max_epochs=9, finish=False)
    result, _, lines = run(training_set, settings)
    newest = scores(result.weights, training_set, dense[1350:], ids[1350:])
    assert result.early_stopping["log_loss"] == log_loss(labels[1350:], newest)
    assert result.early_stopping["auc"] == roc_auc(labels[1350:], newest)
    losses = [line["log_loss"] for line in lines]
    assert result.early_stopping["log_loss"] == min(losses)
    # It overfits by design: two epochs past the best one end it.
    assert len(losses) - 1 == losses.index(min(losses)) + 2 < 9


def test_a_part_of_the_rows_is_the_newest_and_passed_as_often_as_makes_the_steps_of_all_rows(
    world, make_training_set, run, parent
):
    settings = TrainingSettings(max_epochs=1, patience=99, num_halvings=2, finish=False)
    _, engine, lines = run(make_training_set(*world.rows(2_000)[:3]), settings, start=parent)
    assert [line["branch"] for line in lines if line["training_loss"] is not None] == [0, 1, 1, 2, 2, 2, 2]
    rows = np.concatenate(learned_rows(engine))
    assert len(rows) == 1_800 + 2 * 900 + 4 * 450
    assert rows[1_800:3_600].min() == 900
    assert rows[3_600:].min() == 1_350
    assert engine.calls.count(("restore", parent.name)) == 3  # each branch begins with the parent


def test_the_newest_rows_are_learned_in_the_end_in_as_many_passes_as_the_best_weights_had_made(
    world, make_training_set, run
):
    training_set = make_training_set(*world.rows(5_000)[:3])
    settings = TrainingSettings(learning_rate=0.1, batch_size=128, min_batch_size=128, max_epochs=2, finish=False)
    judged, _, lines = run(training_set, settings)
    finished, _, _ = run(training_set, replace(settings, finish=True))
    passes = min(lines, key=lambda line: line["log_loss"])["epoch"]
    assert passes > 0
    assert finished.optimizer_step - judged.optimizer_step == passes * 4  # 500 rows in batches of 128
    assert finished.early_stopping == judged.early_stopping
    assert content(finished.weights) != content(judged.weights)


@pytest.mark.parametrize(
    ("num_rows", "asked", "num_steps"),
    [(500, 512, 15), (500, 8, 57), (20_000, 512, 300)],
    ids=["tiny window", "the asked-for size is the most", "enough rows"],
)
def test_few_rows_make_small_but_not_tiny_batches(world, make_training_set, run, num_rows, asked, num_steps):
    settings = TrainingSettings(batch_size=asked, max_epochs=1, finish=False)
    _, _, lines = run(make_training_set(*world.rows(num_rows)[:3]), settings)
    assert lines[-1]["step"] == num_steps


@pytest.fixture
def with_replay(world, make_training_set, tmp_path):
    """A training set of 2,000 new rows, and 400 rows of older days."""

    def make(share):
        training_set = make_training_set(*world.rows(2_000)[:3], name=f"replay {share}")
        folder = write_folder(tmp_path / f"older {share}", *world.rows(400, seed=9)[:3])
        return replace(training_set, replay_uri=folder.as_uri(), num_replay_rows=400, replay_share=share)

    return make


def test_each_pass_holds_replay_rows_in_the_asked_for_share(with_replay, run):
    settings = replace(SETTINGS, max_epochs=2, patience=9, finish=False)
    _, engine, _ = run(with_replay(0.1), settings)
    first, second = np.split(np.concatenate(learned_rows(engine)), 2)
    for rows in (first, second):
        assert len(rows) == 2_000
        assert sorted(rows[rows < 2_000]) == list(range(1_800))
        # 200 of 400, one of each two neighbours.
        assert sorted((rows[rows >= 2_000] - 2_000) // 2) == list(range(200))
    assert set(first) != set(second)


def test_the_stopping_slice_is_learned_in_the_end_beside_older_rows_in_the_same_share(with_replay, run):
    _, engine, lines = run(with_replay(0.1), replace(SETTINGS, max_epochs=1, finish=True))
    assert lines[-1]["log_loss"] < lines[0]["log_loss"], "one pass is kept, so one finishes"
    rows = np.concatenate(learned_rows(engine))[2_000:]
    assert sorted(rows[rows < 2_000]) == list(range(1_800, 2_000))
    older = rows[rows >= 2_000]
    assert len(older) == len(set(older)) == 22


def test_no_share_reads_no_older_rows(with_replay, run, tmp_path):
    training_set = replace(with_replay(0.0), replay_uri="file:///nowhere")
    _, engine, _ = run(training_set, replace(SETTINGS, max_epochs=1))
    assert max(rows.max() for rows in learned_rows(engine)) < 2_000


@pytest.mark.parametrize("incremental", [False, True], ids=["scratch", "incremental"])
def test_stopped_anywhere_and_continued_equals_undisturbed_bit_for_bit(
    world, make_training_set, run, parent, tmp_path, incremental
):
    training_set, start = make_training_set(*world.rows(3_000)[:3]), parent if incremental else None
    whole, _, lines = run(training_set, start=start)
    path, again, resumed, stops = tmp_path / "stopped", [], None, 0
    while resumed is None:
        try:
            resumed, engine, _ = run(training_set, start=start, path=path, lines=again, should_stop=StopAfter(5))
        except Preempted:
            stops += 1
    assert stops > 5
    assert content(resumed.weights) == content(whole.weights)
    assert (resumed.optimizer_step, resumed.early_stopping) == (whole.optimizer_step, whole.early_stopping)
    judged = [{k: v for k, v in line.items() if k != "rows_per_second"} for line in again]
    assert judged == [{k: v for k, v in line.items() if k != "rows_per_second"} for line in lines]


def test_an_ended_fit_is_not_fitted_again_unless_its_weights_were_taken(world, make_training_set, run, tmp_path):
    training_set, path = make_training_set(*world.rows(2_000)[:3]), tmp_path / "once"
    first, _, _ = run(training_set, path=path)
    again, engine, lines = run(training_set, path=path)
    assert (again.weights, again.early_stopping) == (first.weights, first.early_stopping)
    assert again.rows_per_second is None
    assert not engine.calls
    assert not lines
    before = content(first.weights)
    first.weights.rename(tmp_path / "taken")
    third, engine, _ = run(training_set, path=path)
    assert content(third.weights) == before
    assert len(learned_rows(engine)) < 30  # the finish alone: no epoch


def test_the_checkpoint_folder_holds_no_more_than_start_now_best_and_final(world, make_training_set, run, tmp_path):
    training_set, path = make_training_set(*world.rows(2_000)[:3]), tmp_path / "lean"
    with pytest.raises(Preempted):
        run(training_set, path=path, should_stop=StopAfter(12))
    (path / ".weights-00-000001-000000004.0123456789abcdef0123456789abcdef").mkdir()  # as a killed try leaves it
    run(training_set, path=path)
    names = sorted(p.name.split("-")[0] for p in path.iterdir())
    assert names == ["final", "progress.json", "row_losses", "start", "weights"]


def test_labels_of_one_class_are_refused(world, make_training_set, run):
    labels, dense, ids, _ = world.rows(500)
    with pytest.raises(ContractError, match="labels of the 450 rows to fit hold 0 clicks"):
        run(make_training_set(labels * 0, dense, ids))


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_windows_too_small_to_fit_are_refused(world, make_training_set, run, num_rows):
    with pytest.raises(ContractError, match=f"labels of the {max(0, num_rows - 1)} rows to fit hold"):
        run(make_training_set(*world.rows(num_rows)[:3]))


def test_the_smallest_window_is_fitted_and_judged_by_one_row(world, make_training_set, run, parent):
    labels, dense, ids, _ = world.rows(3)
    labels[:2] = 0, 1
    result, _, _ = run(make_training_set(labels, dense, ids), start=parent)
    assert np.isfinite(result.early_stopping["log_loss"])
    assert all(p.stat().st_size for p in result.weights.rglob("*") if p.is_file())


def test_auc_is_none_where_the_newest_rows_have_one_class(world, make_training_set, run):
    labels, dense, ids, _ = world.rows(500)
    labels[450:] = 0
    result, _, _ = run(make_training_set(labels, dense, ids))
    assert result.early_stopping["auc"] is None
    assert result.early_stopping["log_loss"] > 0


def test_a_requested_stop_comes_at_the_next_segment_and_says_where(world, make_training_set, run):
    training_set = make_training_set(*world.rows(3_000)[:3])
    engine = LogisticEngine(training_set.slot_sizes, SETTINGS)
    with pytest.raises(Preempted, match="saved at epoch 1, batch 12 of 85"):
        run(training_set, engine=engine, should_stop=StopAfter(2))
    assert len(learned_rows(engine)) == 3


def test_saves_are_no_further_apart_than_the_interval_and_one_segment(world, make_training_set, run):
    training_set, clock = make_training_set(*world.rows(6_000)[:3]), Clock()
    settings = replace(SETTINGS, checkpoint_minutes=2, batch_size=32)
    engine, began = TimedEngine(training_set.slot_sizes, settings, clock=clock), clock()
    run(training_set, settings, engine=engine, clock=clock)
    assert len(engine.saves) > 10
    assert max(np.diff([began, *engine.saves])) <= 120 + 10 + 1
    # Ends of epochs aside, no oftener either.
    assert np.median(np.diff(engine.saves)) >= 120


class FullDiskEngine(LogisticEngine):
    """The disk is full when the second save has written half of its files."""

    def save(self, folder):
        if sum(call[0] == "save" for call in self.calls) == 1:
            (folder / "weights.safetensors").write_bytes(b"half")
            raise PermanentError("model file cannot be written: No space left on device")
        super().save(folder)


def test_a_save_that_finds_the_disk_full_costs_no_earlier_one(world, make_training_set, run, tmp_path):
    training_set, path = make_training_set(*world.rows(2_000)[:3]), tmp_path / "full"
    whole, _, _ = run(training_set)
    with pytest.raises(PermanentError, match="No space left"):
        run(training_set, path=path, engine=FullDiskEngine(training_set.slot_sizes, SETTINGS))
    assert {p.name for p in path.iterdir() if p.is_dir()} == {"start", "weights-00-000001-000000000"}
    again, engine, _ = run(training_set, path=path)
    assert engine.calls[0] == ("restore", "weights-00-000001-000000000")
    assert content(again.weights) == content(whole.weights)


def test_a_loss_or_score_that_is_not_finite_stops_the_fit_before_anything_is_saved(
    world, make_training_set, run, tmp_path
):
    training_set = make_training_set(*world.rows(1_000)[:3])
    for bad_at, message in ((10, "loss is not finite at epoch 1, batches 9 to 12 of 29"), (29, "after step 29")):
        engine, path = LogisticEngine(training_set.slot_sizes, SETTINGS, bad_at=bad_at), tmp_path / f"bad {bad_at}"
        with pytest.raises(PermanentError, match=message):
            run(training_set, engine=engine, path=path)
        assert {p.name for p in path.iterdir() if p.is_dir()} == {"start"}


def test_numbers_within_a_pass_are_emitted_every_ten_seconds(world, make_training_set, run, caplog):
    training_set, clock = make_training_set(*world.rows(2_000)[:3]), Clock()
    settings = replace(SETTINGS, max_epochs=1, finish=False)
    engine = TimedEngine(training_set.slot_sizes, settings, clock=clock)
    with caplog.at_level("INFO"):
        _, _, lines = run(training_set, settings, engine=engine, clock=clock)
    within = [line for line in lines if "batch" in line]
    assert [line["batch"] for line in within] == [*range(4, 57, 4), 57]
    assert within[3]["rows_per_second"] == 4 * 4 * 32 / 40
    assert all(0 < line["segment_loss"] < 1 for line in within)
    assert "branch 0, epoch 1: batch 12 of 57, loss 0." in caplog.text
