"""Passes: their order (every row once, by seed), and what happens between two calls of an engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from components.runtime.errors import PermanentError, Preempted
from components.training import passes
from components.training.config import TrainingSettings
from components.training.passes import PassOrder, PassRows, derived_seed, replayed
from tests.support.clocks import Clock
from tests.support.logistic_engine import (
    SETTINGS,
    LogisticEngine,
    StopAfter,
    TimedEngine,
    content,
    learned_rows,
)


def part(num_new, num_replayed=0, available=0, first=0):
    stop = first + num_new
    return PassRows(
        first=first, stop=stop, replay_first=stop + 7, replay_stop=stop + 7 + available, num_replayed=num_replayed
    )


@pytest.fixture
def small_windows(monkeypatch):
    """Passes of more than 64 rows are long ones."""
    monkeypatch.setattr(passes, "_RUN_ROWS", 8)
    monkeypatch.setattr(passes, "_MOST_RUNS", 8)


def test_a_short_pass_is_numpys_permutation():
    order = PassOrder(part(1000, first=50), 7)
    np.testing.assert_array_equal(order.rows(0, 1000), 50 + np.random.default_rng(7).permutation(1000))


@pytest.mark.parametrize("num_rows", [1, 64, 65, 128, 129, 1000, 1003])
def test_every_row_comes_once_also_in_a_long_pass(small_windows, num_rows):
    rows = PassOrder(part(num_rows, first=3), 1).rows(0, num_rows)
    assert sorted(rows) == list(range(3, 3 + num_rows))


def test_pieces_make_the_same_order_wherever_a_reader_begins(small_windows):
    order = PassOrder(part(1003), 1).rows(0, 1003)
    assert (np.diff(order) != 1).mean() > 0.9
    for start in (0, 1, 63, 64, 500, 1002):
        other = PassOrder(part(1003), 1)
        np.testing.assert_array_equal(other.rows(start, start + 150), order[start : start + 150])


def test_a_batch_of_a_long_pass_holds_rows_of_all_of_it(small_windows):
    rows = PassOrder(part(64 * 64), 1).rows(0, 64)
    assert len(np.unique(rows // 8)) > 5  # of the 8 runs in its window
    assert rows.max() - rows.min() > 64 * 32


def test_the_last_window_of_a_long_pass_is_no_leftover(small_windows):
    rows = PassOrder(part(8 * 9), 1).rows(40, 72)
    assert len(np.unique(rows // 8)) == 4  # nine runs: five, then four


def test_replay_rows_are_spread_over_all_of_them_and_over_the_pass():
    order = PassOrder(part(900, num_replayed=100, available=1000), 1).rows(0, 1000)
    drawn = order[order >= 907] - 907
    assert sorted(drawn // 10) == list(range(100))
    positions = np.flatnonzero(order >= 907)
    assert 20 < (positions < 500).sum() < 80


def test_other_passes_draw_other_replay_rows():
    drawn = [
        {row for row in PassOrder(part(900, num_replayed=100, available=1000), seed).rows(0, 1000) if row >= 907}
        for seed in range(20)
    ]
    assert len(set.union(*drawn)) > 700


@pytest.mark.parametrize(
    ("num_new", "share", "available", "expected"),
    [(900, 0.1, 5000, 100), (900, 0.5, 5000, 900), (900, 0.5, 10, 10), (900, 0.0, 10, 0), (1, 0.9, 10, 9)],
)
def test_the_share_is_that_of_all_rows_of_a_pass(num_new, share, available, expected):
    assert replayed(num_new, share, available) == expected


def test_seeds_differ_by_every_number_and_by_their_order():
    seeds = [derived_seed(*numbers) for numbers in [(42, 0, 1), (42, 1, 1), (1, 42, 1), (42, 0, 1, 1), (42, 0, 2, 1)]]
    assert len(set(seeds)) == len(seeds)
    assert derived_seed(42, 1, 2) == int(np.random.SeedSequence([42, 1, 2]).generate_state(1)[0])


def test_a_stop_is_heeded_at_the_next_segment_and_says_where(world, make_training_set, run):
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


def test_an_epoch_that_is_no_better_is_not_written_before_it_is_time(world, make_training_set, run):
    training_set = make_training_set(*world.rows(1_500)[:3])
    settings = TrainingSettings(learning_rate=0.5, batch_size=32, max_epochs=9, finish=False)
    _, engine, sink = run(training_set, settings)
    losses = [line["log_loss"] for line in sink.lines]
    improvements = sum(loss < min(losses[:i]) for i, loss in enumerate(losses) if i)
    assert sum(call[0] == "save" for call in engine.calls) == improvements + 1  # the final weights


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


def test_a_loss_that_is_no_number_stops_with_the_files_and_rows_of_its_batch(world, make_training_set, run, tmp_path):
    training_set, path = make_training_set(*world.rows(1_000)[:3]), tmp_path / "bad"
    engine = LogisticEngine(training_set.slot_sizes, SETTINGS, bad_at=10)
    with pytest.raises(PermanentError, match=r"loss is not finite at epoch 1, batch 11 of 29 \(32 rows") as caught:
        run(training_set, engine=engine, path=path)
    # The third call of the engine made batches 9 to 12; the 11th is its third.
    expected = learned_rows(engine)[2][64:96][:5]
    for number in expected:
        name, row = ("part_9", number) if number < 500 else ("part_10", number - 500)
        assert f"{name}.parquet rows [" in str(caught.value)
        assert f"{row}" in str(caught.value)
    assert "smaller learning rate" in str(caught.value)
    assert {p.name for p in path.iterdir() if p.is_dir()} == {"start"}


def test_weights_spoilt_by_the_last_step_of_a_pass_are_neither_kept_nor_scored(world, make_training_set, run, tmp_path):
    training_set, path = make_training_set(*world.rows(1_000)[:3]), tmp_path / "bad"
    for keywords in ({"bad_at": 29}, {"bad_at": 8, "should_stop": StopAfter(1)}):
        stop = {"should_stop": keywords.pop("should_stop")} if "should_stop" in keywords else {}
        engine = LogisticEngine(training_set.slot_sizes, SETTINGS, **keywords)
        with pytest.raises(PermanentError, match="scores are not finite after step"):
            run(training_set, engine=engine, path=path, **stop)
        assert {p.name for p in path.iterdir() if p.is_dir()} == {"start"}


def test_scores_spoilt_within_a_pass_are_told_with_the_step_that_spoilt_them(world, make_training_set, run):
    training_set, clock = make_training_set(*world.rows(2_000)[:3]), Clock()
    engine = TimedEngine(training_set.slot_sizes, SETTINGS, clock=clock, bad_at=8)
    with pytest.raises(PermanentError, match=r"after step 8 \(epoch 0, batch 8\)"):
        run(training_set, engine=engine, clock=clock)


class SlowlyScoringEngine(TimedEngine):
    """As HugeCTR's: a score within a pass costs a save of the table."""

    scores_cheaply = False

    def score(self, rows):
        self.calls.append(("score", len(rows)))
        return super().score(rows)


def test_an_engine_that_scores_slowly_is_not_asked_within_a_pass(world, make_training_set, run):
    training_set, clock = make_training_set(*world.rows(2_000)[:3]), Clock()
    settings = replace(SETTINGS, max_epochs=1, finish=False)
    engine = SlowlyScoringEngine(training_set.slot_sizes, settings, clock=clock)
    _, _, sink = run(training_set, settings, engine=engine, clock=clock)
    assert [call[1] for call in engine.calls if call[0] == "score"] == [200] * 3  # begin, end of the epoch, end
    within = [line for line in sink.lines if "batch" in line]
    assert len(within) == 15
    assert {(line["sample_auc"], line["sample_log_loss"]) for line in within} == {(None, None)}
    assert all(0 < line["segment_loss"] < 1 for line in within)


def test_an_engine_that_scores_slowly_saves_no_weights_that_are_no_numbers_either(
    world, make_training_set, run, tmp_path
):
    training_set, clock, path = make_training_set(*world.rows(2_000)[:3]), Clock(), tmp_path / "bad"
    settings = replace(SETTINGS, checkpoint_minutes=0.1)
    engine = SlowlyScoringEngine(training_set.slot_sizes, settings, clock=clock, bad_at=8)
    with pytest.raises(PermanentError, match="scores are not finite after step 8"):
        run(training_set, settings, engine=engine, clock=clock, path=path)
    assert {p.name for p in path.iterdir() if p.is_dir()} == {"start", "weights-00-000000-000000004"}


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


def test_the_log_says_every_half_minute_how_far_a_pass_is(world, make_training_set, run, caplog):
    training_set, clock = make_training_set(*world.rows(2_000)[:3]), Clock()
    settings = replace(SETTINGS, max_epochs=1, finish=False)
    with caplog.at_level("INFO"):
        run(training_set, settings, engine=TimedEngine(training_set.slot_sizes, settings, clock=clock), clock=clock)
    lines = [message for message in caplog.messages if "batch" in message]
    assert len(lines) == 5  # of 15 calls, ten seconds each
    assert lines[0].startswith("branch 0, epoch 1: batch 12 of 57, loss 0.")
