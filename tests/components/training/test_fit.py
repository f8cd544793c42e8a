"""The policy of a fit, shown on an engine in NumPy: parts, early stopping, replay, saves, stops, and bad numbers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from components.contracts.errors import ContractError, PermanentError, Preempted
from components.contracts.metrics import log_loss, roc_auc
from components.training.checkpoint import Moment
from components.training.config import TrainingSettings
from components.training.fit import FitJob, fit
from components.training.metrics_sink import MemorySink
from components.training.rows import Rows
from components.training.start import Start
from tests.components.training.conftest import write_folder
from tests.components.training.logistic_engine import CONFIG, LogisticEngine

SETTINGS = TrainingSettings(learning_rate=0.1, batch_size=256, max_epochs=3)


class Clock:
    """Seconds that pass only while an engine learns."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


class Asked:
    """A stop request that comes after so many looks at it."""

    def __init__(self, looks):
        self.looks = looks

    def __call__(self):
        self.looks -= 1
        return self.looks < 0


class TimedEngine(LogisticEngine):
    """Learning takes ten seconds a call, saving one; `saves` are the times at which saves ended."""

    def __init__(self, *arguments, clock, **keywords):
        super().__init__(*arguments, **keywords)
        self._clock, self.saves = clock, []

    def learn(self, *arguments):
        self._clock.seconds += 10
        return super().learn(*arguments)

    def save(self, folder):
        super().save(folder)
        self._clock.seconds += 1
        self.saves.append(self._clock.seconds)


@pytest.fixture
def run(tmp_path):
    """Fits; gives the result, the engine and the sink."""
    count = iter(range(1000))

    def go(training_set, settings=SETTINGS, start=None, path=None, sink=None, engine=None, **keywords):
        sink = MemorySink() if sink is None else sink
        engine = engine or LogisticEngine(training_set.slot_sizes, settings)
        path = path or tmp_path / f"checkpoint {next(count)}"
        job = FitJob(training_set=training_set, config=CONFIG, settings=settings, start=start, checkpoint_path=path)
        return fit(job, engine, sink, **keywords), engine, sink

    return go


@pytest.fixture
def parent(world, make_training_set, run):
    """Where a round goes on from."""
    result, _, _ = run(make_training_set(*world.rows(3_000, seed=8)[:3], name="parent"))
    return Start(weights=result.weights, optimizer_step=result.optimizer_step)


def content(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def scores(weights, training_set, dense, ids):
    engine = LogisticEngine(training_set.slot_sizes, SETTINGS)
    engine.restore(weights, 0)
    return engine.score(Rows(labels=np.zeros(len(dense), np.float32), dense=dense, ids=ids.astype(np.int32)))


def learnt(engine, first=0):
    """Row numbers of the calls of `learn` from the `first`-th on."""
    return [call[1] for call in engine.calls if call[0] == "learn"][first:]


def test_a_fit_needs_no_torch():
    code = "import sys, components.training.fit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_pass_learns_every_row_once_and_no_row_of_the_stopping_slice(world, make_training_set, run):
    training_set = make_training_set(*world.rows(3_000)[:3])
    _, engine, _ = run(training_set, replace(SETTINGS, max_epochs=1, finish=False))
    assert sorted(np.concatenate(learnt(engine))) == list(range(2_700))
    _, finished, _ = run(training_set, replace(SETTINGS, max_epochs=1))
    assert sorted(np.concatenate(learnt(finished, len(learnt(engine))))) == list(range(2_700, 3_000))


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


def test_the_best_weights_are_kept_and_their_scores_are_those_of_the_newest_rows(world, make_training_set, run):
    labels, dense, ids, _ = world.rows(1_500)
    training_set = make_training_set(labels, dense, ids)
    settings = TrainingSettings(learning_rate=0.5, batch_size=32, max_epochs=9, finish=False)
    result, _, sink = run(training_set, settings)
    newest = scores(result.weights, training_set, dense[1350:], ids[1350:])
    assert result.early_stopping["log_loss"] == log_loss(labels[1350:], newest)
    assert result.early_stopping["auc"] == roc_auc(labels[1350:], newest)
    losses = [line["log_loss"] for line in sink.lines]
    assert result.early_stopping["log_loss"] == min(losses)
    # It overfits by design: two epochs past the best one end it.
    assert len(losses) - 1 == losses.index(min(losses)) + 2 < 9


def test_a_part_of_the_rows_is_the_newest_and_passed_as_often_as_makes_the_steps_of_all_rows(
    world, make_training_set, run, parent
):
    settings = TrainingSettings(max_epochs=1, patience=99, num_halvings=2, finish=False)
    _, engine, sink = run(make_training_set(*world.rows(2_000)[:3]), settings, start=parent)
    assert [line["branch"] for line in sink.lines if line["training_loss"] is not None] == [0, 1, 1, 2, 2, 2, 2]
    rows = np.concatenate(learnt(engine))
    assert len(rows) == 1_800 + 2 * 900 + 4 * 450
    assert rows[1_800:3_600].min() == 900
    assert rows[3_600:].min() == 1_350
    assert engine.calls.count(("restore", parent.weights.name)) == 3  # each branch begins with the parent


def test_the_newest_rows_are_learnt_in_the_end_in_as_many_passes_as_the_best_weights_had_made(
    world, make_training_set, run
):
    training_set = make_training_set(*world.rows(5_000)[:3])
    settings = TrainingSettings(learning_rate=0.1, batch_size=128, min_batch_size=128, max_epochs=2, finish=False)
    judged, _, sink = run(training_set, settings)
    finished, _, _ = run(training_set, replace(settings, finish=True))
    passes = min(sink.lines, key=lambda line: line["log_loss"])["epoch"]
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
    _, _, sink = run(make_training_set(*world.rows(num_rows)[:3]), settings)
    assert sink.lines[-1]["step"] == num_steps


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
    first, second = np.split(np.concatenate(learnt(engine)), 2)
    for rows in (first, second):
        assert len(rows) == 2_000
        assert sorted(rows[rows < 2_000]) == list(range(1_800))
        # 200 of 400, one of each two neighbours.
        assert sorted((rows[rows >= 2_000] - 2_000) // 2) == list(range(200))
    assert set(first) != set(second)


def test_a_branch_is_mixed_too_and_the_stopping_slice_stays_new(with_replay, run, parent):
    settings = TrainingSettings(max_epochs=1, patience=0, num_halvings=1, finish=False, batch_size=64)
    _, engine, sink = run(with_replay(0.1), settings, start=parent)
    rows = np.concatenate(learnt(engine))[2_000:]
    assert [line["branch"] for line in sink.lines][:3] == [0, 0, 1]
    assert (rows[:1_000] >= 2_000).sum() == 100
    assert not ((rows >= 1_800) & (rows < 2_000)).any()


def test_a_share_that_older_rows_cannot_fill_takes_all_of_them_once(with_replay, run):
    _, engine, _ = run(with_replay(0.5), replace(SETTINGS, max_epochs=1, finish=False))
    rows = np.concatenate(learnt(engine))
    assert sorted(rows[rows >= 2_000]) == list(range(2_000, 2_400))
    assert len(rows) == 1_800 + 400


def test_no_share_reads_no_older_rows(with_replay, run, tmp_path):
    training_set = replace(with_replay(0.0), replay_uri="file:///nowhere")
    _, engine, _ = run(training_set, replace(SETTINGS, max_epochs=1))
    assert max(rows.max() for rows in learnt(engine)) < 2_000


@pytest.mark.parametrize("incremental", [False, True], ids=["scratch", "incremental"])
def test_stopped_anywhere_and_continued_equals_undisturbed_bit_for_bit(
    world, make_training_set, run, parent, tmp_path, incremental
):
    training_set, start = make_training_set(*world.rows(3_000)[:3]), parent if incremental else None
    whole, _, sink = run(training_set, start=start)
    path, again, resumed, stops = tmp_path / "stopped", MemorySink(), None, 0
    while resumed is None:
        try:
            resumed, engine, _ = run(training_set, start=start, path=path, sink=again, should_stop=Asked(5))
        except Preempted:
            stops += 1
    assert stops > 5
    assert content(resumed.weights) == content(whole.weights)
    assert (resumed.optimizer_step, resumed.early_stopping) == (whole.optimizer_step, whole.early_stopping)
    judged = [{k: v for k, v in line.items() if k != "rows_per_second"} for line in again.lines]
    assert judged == [{k: v for k, v in line.items() if k != "rows_per_second"} for line in sink.lines]


def test_a_stop_is_heeded_at_the_next_segment_and_says_where(world, make_training_set, run):
    training_set = make_training_set(*world.rows(3_000)[:3])
    engine = LogisticEngine(training_set.slot_sizes, SETTINGS)
    with pytest.raises(Preempted, match="saved at epoch 1, batch 12 of 85"):
        run(training_set, engine=engine, should_stop=Asked(2))
    assert len(learnt(engine)) == 3


def test_saves_are_no_further_apart_than_the_interval_and_one_segment(world, make_training_set, run):
    training_set, clock = make_training_set(*world.rows(6_000)[:3]), Clock()
    settings = replace(SETTINGS, checkpoint_minutes=2, batch_size=32)
    engine = TimedEngine(training_set.slot_sizes, settings, clock=clock)
    run(training_set, settings, engine=engine, clock=clock)
    assert len(engine.saves) > 10
    assert max(np.diff([0.0, *engine.saves])) <= 120 + 10 + 1
    # Ends of epochs aside, no oftener either.
    assert np.median(np.diff(engine.saves)) >= 120


def test_an_epoch_that_is_no_better_is_not_written_before_it_is_time(world, make_training_set, run):
    training_set = make_training_set(*world.rows(1_500)[:3])
    settings = TrainingSettings(learning_rate=0.5, batch_size=32, max_epochs=9, finish=False)
    _, engine, sink = run(training_set, settings)
    losses = [line["log_loss"] for line in sink.lines]
    improvements = sum(loss < min(losses[:i]) for i, loss in enumerate(losses) if i)
    assert sum(call[0] == "save" for call in engine.calls) == improvements + 1  # the final weights


def test_an_ended_fit_is_not_fitted_again_unless_its_weights_were_taken(world, make_training_set, run, tmp_path):
    training_set, path = make_training_set(*world.rows(2_000)[:3]), tmp_path / "once"
    first, _, _ = run(training_set, path=path)
    again, engine, sink = run(training_set, path=path)
    assert (again.weights, again.early_stopping) == (first.weights, first.early_stopping)
    assert again.rows_per_second is None
    assert not engine.calls
    assert not sink.lines
    before = content(first.weights)
    first.weights.rename(tmp_path / "taken")
    third, engine, _ = run(training_set, path=path)
    assert content(third.weights) == before
    assert len(learnt(engine)) < 30  # the finish alone: no epoch


def test_the_checkpoint_folder_holds_no_more_than_start_now_best_and_final(world, make_training_set, run, tmp_path):
    training_set, path = make_training_set(*world.rows(2_000)[:3]), tmp_path / "lean"
    with pytest.raises(Preempted):
        run(training_set, path=path, should_stop=Asked(12))
    (path / ".weights-00-000001-000000004.0123456789abcdef0123456789abcdef").mkdir()  # as a killed try leaves it
    run(training_set, path=path)
    names = sorted(p.name.split("-")[0] for p in path.iterdir())
    assert names == ["final", "progress.json", "row_losses", "start", "weights"]


def test_labels_of_one_class_are_refused(world, make_training_set, run):
    labels, dense, ids, _ = world.rows(500)
    with pytest.raises(ContractError, match="labels of the 450 rows to fit hold 0 clicks"):
        run(make_training_set(labels * 0, dense, ids))


def test_auc_is_none_where_the_newest_rows_have_one_class(world, make_training_set, run):
    labels, dense, ids, _ = world.rows(500)
    labels[450:] = 0
    result, _, _ = run(make_training_set(labels, dense, ids))
    assert result.early_stopping["auc"] is None
    assert result.early_stopping["log_loss"] > 0


def test_a_loss_that_is_no_number_stops_with_the_files_and_rows_of_its_batch(world, make_training_set, run, tmp_path):
    training_set, path = make_training_set(*world.rows(1_000)[:3]), tmp_path / "bad"
    engine = LogisticEngine(training_set.slot_sizes, SETTINGS, bad_at=10)
    with pytest.raises(PermanentError, match=r"loss is not finite at epoch 1, batch 11 of 29 \(32 rows") as caught:
        run(training_set, engine=engine, path=path)
    # The third call of the engine made batches 9 to 12; the 11th is its third.
    expected = learnt(engine)[2][64:96][:5]
    for number in expected:
        name, row = ("part_9", number) if number < 500 else ("part_10", number - 500)
        assert f"{name}.parquet rows [" in str(caught.value)
        assert f"{row}" in str(caught.value)
    assert "smaller learning rate" in str(caught.value)
    assert {p.name for p in path.iterdir() if p.is_dir()} == {"start"}


def test_weights_spoilt_by_the_last_step_of_a_pass_are_neither_kept_nor_scored(world, make_training_set, run, tmp_path):
    training_set, path = make_training_set(*world.rows(1_000)[:3]), tmp_path / "bad"
    for keywords in ({"bad_at": 29}, {"bad_at": 8, "should_stop": Asked(1)}):
        stop = {"should_stop": keywords.pop("should_stop")} if "should_stop" in keywords else {}
        engine = LogisticEngine(training_set.slot_sizes, SETTINGS, **keywords)
        with pytest.raises(PermanentError, match="scores are not finite after step"):
            run(training_set, engine=engine, path=path, **stop)
        assert {p.name for p in path.iterdir() if p.is_dir()} == {"start"}


def test_numbers_within_an_epoch_are_told_every_ten_seconds(world, make_training_set, run):
    training_set, clock = make_training_set(*world.rows(2_000)[:3]), Clock()
    settings = replace(SETTINGS, max_epochs=1, finish=False)
    engine = TimedEngine(training_set.slot_sizes, settings, clock=clock)
    _, _, sink = run(training_set, settings, engine=engine, clock=clock)
    within = [line for line in sink.lines if "batch" in line]
    assert [line["batch"] for line in within] == [*range(4, 57, 4), 57]
    assert within[3]["rows_per_second"] == 4 * 4 * 32 / 40
    assert within[-1]["sample_log_loss"] == sink.lines[-1]["log_loss"]
    assert within[-1]["sample_auc"] == sink.lines[-1]["auc"]
