"""Tests of the fit's policy with a NumPy engine: order, rates, rehearsal and checkpoints."""

from dataclasses import replace

import numpy as np
import pytest

from components.training.checkpoint import TrialEvaluation, best_of
from components.training.rows import Rows
from evergreen.config.training import TrainingSettings
from evergreen.runtime.errors import ContractError, PermanentError, Preempted
from evergreen.statistics.metrics import log_loss, roc_auc
from tests.support.clocks import Clock
from tests.support.errors import raises
from tests.support.logistic_engine import (
    SETTINGS,
    LogisticEngine,
    StopAfter,
    TimedEngine,
    content,
    trained_rows,
)
from tests.support.planted_rows import write_folder


@pytest.fixture
def parent(planted, make_training_set, run):
    """The model from which a run continues."""
    result, _, _ = run(make_training_set(*planted.rows(3_000, seed=8)[:3], name="parent"))
    return result.weights


def scores(weights, training_set, dense, ids):
    engine = LogisticEngine(training_set.slot_sizes, SETTINGS)
    engine.restore(weights)
    return engine.score(
        Rows(labels=np.zeros(len(dense), np.float32), dense=dense, ids=ids.astype(np.int32))
    )


def test_every_row_is_used_once_and_round_tries_each_rate_on_same_rows(
    planted, make_training_set, run, parent
):
    training_set = make_training_set(*planted.rows(3_000)[:3])
    _, first, _ = run(training_set)
    assert sorted(np.concatenate(trained_rows(first))) == list(range(3_000))
    _, later, _ = run(training_set, replace(SETTINGS, round_rates=(0.2, 1.0)), start=parent)
    low, high = np.split(np.concatenate(trained_rows(later)), 2)
    np.testing.assert_array_equal(low, high)
    assert sorted(low) == list(range(3_000))
    assert later.calls.count(("restore", parent.name)) == 2  # each trial starts from the parent
    assert [set(half) for half in np.split(np.array(later.rates), 2)] == [{0.2 * 0.1}, {0.1}]


@pytest.mark.parametrize("passes", [1, 3])
def test_first_models_rate_falls_to_zero_over_second_half_of_its_steps(
    planted, make_training_set, run, passes
):
    _, engine, _ = run(
        make_training_set(*planted.rows(3_200)[:3]), replace(SETTINGS, passes=passes)
    )
    expected = 0.1 * np.minimum(1, 2 * np.arange(100 * passes, 0, -1) / (100 * passes))
    np.testing.assert_allclose(engine.rates, expected)


def test_first_model_trains_on_shuffled_rows_and_later_runs_in_time_order(
    planted, make_training_set, run, parent
):
    training_set = make_training_set(*planted.rows(4_000)[:3])
    first, later = (
        np.concatenate(trained_rows(run(training_set, start=s)[1])[:30]) for s in (None, parent)
    )
    assert first[:400].max() > 3_500
    for tenth in range(9):
        rows = later[400 * tenth :][:400]
        assert sorted(rows) == list(range(400 * tenth, 400 * tenth + 400))
        assert (np.diff(rows) != 1).mean() > 0.9


class WatchedEngine(LogisticEngine):
    """Records the scored rows, and the number of `train` calls before each score."""

    scored = ()

    def score(self, rows):
        scores = super().score(rows)
        self.scored = (
            *self.scored,
            (len(trained_rows(self)), rows.dense[:, 0].copy(), rows.labels.copy(), scores),
        )
        return scores


@pytest.mark.parametrize("incremental", [False, True], ids=["scratch", "incremental"])
def test_last_tenth_of_pass_is_scored_before_training_and_used_by_fit(
    planted, make_training_set, run, parent, incremental
):
    labels, dense, ids, _ = planted.rows(3_200)
    training_set = make_training_set(labels, dense, ids)
    engine = WatchedEngine(training_set.slot_sizes, SETTINGS)
    settings = replace(SETTINGS, round_rates=(1.0,))
    result, _, lines = run(
        training_set, settings, start=parent if incremental else None, engine=engine
    )
    calls, scored, truth, scores = engine.scored[0]
    trained = dense[np.concatenate(trained_rows(engine)[:calls]), 0]
    assert (len(scored), len(trained)) == (320, 2_880)
    assert set(scored) | set(trained) == set(dense[:, 0])
    assert set(scored) == set(dense[-320:, 0]) or not incremental
    assert result.progressive == {
        "auc": roc_auc(truth, scores),
        "log_loss": log_loss(truth, scores),
    }
    assert [line["auc"] for line in lines if "auc" in line] == [result.progressive["auc"]]


@pytest.mark.parametrize(
    ("gains", "best"),
    [
        ([[0.3, -0.28]], 0),
        ([[0.3, 0.28]], 1),
        ([[-0.3, 0.28]], 0),
        ([[0.2, 0.2], [0.3, 0.3]], 2),
        ([[]], 0),
        ([[0.4]], 0),
    ],
    ids=[
        "by chance",
        "for certain",
        "a loss",
        "the best of three",
        "no row",
        "one row is no evidence",
    ],
)
def test_another_rate_is_chosen_only_if_it_is_better_by_more_than_chance(gains, best):
    losses = [[0.5] * len(gains[0]), *([0.5 - gain for gain in each] for each in gains)]
    repeated = [np.tile(np.array(each, float), 10 if len(each) > 1 else 1) for each in losses]
    assert best_of([TrialEvaluation(scores={}, row_losses=each) for each in repeated]) == best


@pytest.mark.parametrize("rows_a_request", [1, 64])
def test_equally_good_rate_is_chosen_as_rarely_with_long_requests(rows_a_request):
    random, num_requests, chosen = np.random.default_rng(5), 6_400 // rows_a_request, 0

    def shared(deviation):
        """Return a normal number for each row.

        Half of the variance is shared by the rows of a request.
        """
        of_request = np.repeat(random.normal(size=num_requests), rows_a_request)
        return deviation * (of_request + random.normal(size=6_400)) / 2**0.5

    for _ in range(400):
        known = shared(0.7) - 1.1
        labels = random.random(6_400) < 1 / (1 + np.exp(-known - shared(0.7)))
        # Both models are equally wrong, but make different errors.
        logits = [known + 0.1 + shared(0.25) for _ in range(2)]
        losses = [np.logaddexp(0, np.where(labels, -each, each)) for each in logits]
        chosen += best_of([TrialEvaluation(scores={}, row_losses=each) for each in losses])
    # A difference exceeds one standard error by chance 16 % of the time. If rows were treated as
    # independent, the share would be 26 % here.
    assert 0.11 < chosen / 400 < 0.22


class BiasedEngine(LogisticEngine):
    """Engine that adds a bias to the log-odds of all scores if the learning rate is high."""

    def __init__(self, slot_sizes, bias):
        super().__init__(slot_sizes, SETTINGS)
        self._bias = bias

    def score(self, rows):
        odds = np.exp(self._bias if self.rates and self.rates[-1] > 0.05 else 0.0)
        scores = super().score(rows)
        return scores * odds / (1 - scores + scores * odds)


@pytest.mark.parametrize("bias", [0.0, -0.7, 0.7])
def test_run_picks_high_rate_after_change_and_low_rate_otherwise(
    planted, make_training_set, run, parent, bias
):
    settings = replace(SETTINGS, round_rates=(0.01, 1.0))
    other = planted.drifted(range(4))
    changed = [
        np.concatenate(p)
        for p in zip(planted.rows(4_000, seed=3)[:3], other.rows(2_000, seed=4)[:3])
    ]
    training_set = make_training_set(*changed, name="changed")
    moved, _, _ = run(
        training_set, settings, start=parent, engine=BiasedEngine(training_set.slot_sizes, bias)
    )
    assert moved.learning_rate == 0.1
    stayed, engine, _ = run(
        make_training_set(*planted.rows(300, seed=5)[:3], name="unchanged"), settings, start=parent
    )
    assert stayed.learning_rate == pytest.approx(0.001)
    assert (
        sum(map(len, trained_rows(engine))) == 300 + 288
    )  # a rejected learning rate does not use the last batch


@pytest.mark.parametrize("incremental", [False, True], ids=["scratch", "incremental"])
def test_mean_prediction_is_click_rate_of_all_rows_unless_newest_differ(
    planted, make_training_set, run, parent, incremental
):
    labels, dense, ids, _ = planted.rows(20_000, seed=3)
    newest = np.arange(20_000) >= 18_000

    def mean_predictions(name):
        training_set = make_training_set(labels, dense, ids, name=name)
        result, _, _ = run(training_set, start=parent if incremental else None)
        predicted = scores(result.weights, training_set, dense, ids).astype(np.float64)
        return predicted.mean(), predicted[newest].mean()

    assert mean_predictions("unchanged")[0] == pytest.approx(
        labels.mean(dtype=np.float64), rel=0.02
    )
    # Half of the newest clicks were lost.
    labels[newest & (labels == 1) & (np.random.default_rng(1).random(20_000) < 0.5)] = 0
    assert mean_predictions("changed")[1] == pytest.approx(
        labels[newest].mean(dtype=np.float64), rel=0.25
    )


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "num_steps"),
    [(500, 512, 32), (500, 8, 63), (20_000, 512, 607)],
    ids=["tiny window", "the requested size is the maximum", "enough rows"],
)
def test_few_rows_make_small_but_not_tiny_batches(
    planted, make_training_set, run, num_rows, batch_size, num_steps
):
    settings = TrainingSettings(batch_size=batch_size)
    _, _, lines = run(make_training_set(*planted.rows(num_rows)[:3]), settings)
    assert lines[-1]["step"] == num_steps


@pytest.fixture
def with_replay(planted, make_training_set, tmp_path):
    """A training set of 2,000 new rows, and 400 rows of older days."""

    def make(share):
        training_set = make_training_set(*planted.rows(2_000)[:3], name=f"replay {share}")
        folder = write_folder(tmp_path / f"older {share}", *planted.rows(400, seed=9)[:3])
        return replace(
            training_set, replay_uri=folder.as_uri(), num_replay_rows=400, replay_share=share
        )

    return make


def test_each_pass_holds_replay_rows_in_asked_for_share_spread_over_it(with_replay, run):
    _, engine, _ = run(with_replay(0.1), replace(SETTINGS, passes=2))
    first, second = np.split(np.concatenate(trained_rows(engine)), 2)
    for rows in (first, second):
        assert len(rows) == 2_222
        assert sorted(rows[rows < 2_000]) == list(range(2_000))
        assert len(set(rows[rows >= 2_000])) == 222
    assert set(first) != set(second)


def test_replayed_rows_come_among_new_ones_of_round_and_do_not_evaluate_it(
    with_replay, run, parent
):
    training_set = with_replay(0.1)
    engine = WatchedEngine(training_set.slot_sizes, SETTINGS)
    run(training_set, replace(SETTINGS, round_rates=(1.0,)), start=parent, engine=engine)
    old = np.flatnonzero(np.concatenate(trained_rows(engine)) >= 2_000)
    assert all(
        len(old[(old >= start) & (old < start + 223)]) in (22, 23) for start in range(0, 2_007, 223)
    )
    assert len(engine.scored[0][1]) == pytest.approx(0.9 * 222, abs=16)


def test_no_share_reads_no_older_rows(with_replay, run, tmp_path):
    training_set = replace(with_replay(0.0), replay_uri="file:///nowhere")
    _, engine, _ = run(training_set)
    assert max(rows.max() for rows in trained_rows(engine)) < 2_000


@pytest.mark.parametrize("incremental", [False, True], ids=["scratch", "incremental"])
def test_stopped_anywhere_and_continued_equals_undisturbed_bit_for_bit(
    planted, make_training_set, run, parent, tmp_path, incremental
):
    training_set, start = (
        make_training_set(*planted.rows(3_000)[:3]),
        parent if incremental else None,
    )
    whole, _, lines = run(training_set, start=start)
    path, again, resumed, stops = tmp_path / "stopped", [], None, 0
    while resumed is None:
        try:
            resumed, engine, _ = run(
                training_set, start=start, path=path, lines=again, should_stop=StopAfter(5)
            )
        except Preempted:
            stops += 1
    assert stops > 3
    assert content(resumed.weights) == content(whole.weights)
    assert (resumed.optimizer_step, resumed.progressive) == (
        whole.optimizer_step,
        whole.progressive,
    )
    evaluations = [{k: v for k, v in line.items() if k != "rows_per_second"} for line in again]
    assert evaluations == [
        {k: v for k, v in line.items() if k != "rows_per_second"} for line in lines
    ]


def test_ended_fit_is_not_fitted_again_unless_its_weights_were_taken(
    planted, make_training_set, run, tmp_path
):
    training_set, path = make_training_set(*planted.rows(2_000)[:3]), tmp_path / "once"
    first, _, _ = run(training_set, path=path)
    again, engine, lines = run(training_set, path=path)
    assert (again.weights, again.progressive) == (first.weights, first.progressive)
    assert again.rows_per_second is None
    assert not engine.calls
    assert not lines
    before = content(first.weights)
    first.weights.rename(tmp_path / "taken")
    third, engine, _ = run(training_set, path=path)
    assert content(third.weights) == before
    assert not trained_rows(engine)  # Only the bias is corrected.


def test_checkpoint_folder_holds_no_more_than_start_now_best_and_final(
    planted, make_training_set, run, tmp_path
):
    training_set, path = make_training_set(*planted.rows(2_000)[:3]), tmp_path / "lean"
    with pytest.raises(Preempted):
        run(training_set, path=path, should_stop=StopAfter(12))
    (
        path / ".weights-00-000001-000000004.0123456789abcdef0123456789abcdef"
    ).mkdir()  # A killed attempt left this file.
    run(training_set, path=path)
    names = sorted(p.name.split("-")[0] for p in path.iterdir())
    assert names == ["final", "progress.json", "row_losses", "start", "weights"]


@pytest.mark.parametrize("num_rows", [500, 0, 1], ids=["one class", "no row", "one row"])
def test_window_without_labels_of_both_classes_is_refused(
    planted, make_training_set, run, num_rows
):
    labels, dense, ids, _ = planted.rows(num_rows)
    with raises(ContractError, f"{num_rows} training rows", "0 clicks"):
        run(make_training_set(labels * 0, dense, ids))


def test_smallest_window_is_fitted_and_evaluated_by_one_row(
    planted, make_training_set, run, parent
):
    labels, dense, ids, _ = planted.rows(3)
    labels[:2] = 0, 1
    result, _, _ = run(make_training_set(labels, dense, ids), start=parent)
    assert np.isfinite(result.progressive["log_loss"])
    assert all(p.stat().st_size for p in result.weights.rglob("*") if p.is_file())


def test_auc_is_none_where_newest_rows_have_one_class(planted, make_training_set, run, parent):
    labels, dense, ids, _ = planted.rows(500)
    labels[400:] = 0
    result, _, _ = run(make_training_set(labels, dense, ids), start=parent)
    assert result.progressive["auc"] is None
    assert result.progressive["log_loss"] > 0


def test_requested_stop_comes_at_next_segment_and_reports_position(planted, make_training_set, run):
    training_set = make_training_set(*planted.rows(3_000)[:3])
    engine = LogisticEngine(training_set.slot_sizes, SETTINGS)
    with raises(Preempted, "saved", "pass 1, batch 12 of 94"):
        run(training_set, engine=engine, should_stop=StopAfter(2))
    assert len(trained_rows(engine)) == 3


def test_saves_are_no_further_apart_than_interval_and_one_segment(planted, make_training_set, run):
    training_set, clock = make_training_set(*planted.rows(20_000)[:3]), Clock()
    settings = replace(SETTINGS, checkpoint_minutes=2, batch_size=32)
    engine, began = TimedEngine(training_set.slot_sizes, settings, clock=clock), clock()
    run(training_set, settings, engine=engine, clock=clock)
    assert len(engine.saves) > 10
    assert max(np.diff([began, *engine.saves])) <= 120 + 10 + 1
    # Checkpoints are at least 120 s apart, except at the ends of epochs.
    assert np.median(np.diff(engine.saves)) >= 120


class FullDiskEngine(LogisticEngine):
    """An engine whose disk is full when the second save has written half of its files."""

    def save(self, folder):
        if sum(call[0] == "save" for call in self.calls) == 1:
            (folder / "weights.safetensors").write_bytes(b"half")
            raise PermanentError("model file cannot be written: No space left on device")
        super().save(folder)


def test_save_that_finds_disk_full_costs_no_earlier_one(planted, make_training_set, run, tmp_path):
    training_set, path = make_training_set(*planted.rows(2_000)[:3]), tmp_path / "full"
    whole, _, _ = run(training_set)
    with raises(PermanentError, "No space left"):
        run(training_set, path=path, engine=FullDiskEngine(training_set.slot_sizes, SETTINGS))
    assert {p.name for p in path.iterdir() if p.is_dir()} == {
        "start",
        "weights-00-000001-000000000",
    }
    again, engine, _ = run(training_set, path=path)
    assert engine.calls[0] == ("restore", "weights-00-000001-000000000")
    assert content(again.weights) == content(whole.weights)


def test_non_finite_loss_or_score_stops_fit_before_anything_is_saved(
    planted, make_training_set, run, tmp_path
):
    training_set = make_training_set(*planted.rows(1_000)[:3])
    for bad_at, message in (
        (10, "loss is not finite in pass 1, batches 9 to 12 of 32"),
        (32, "after step 32"),
    ):
        engine, path = (
            LogisticEngine(training_set.slot_sizes, SETTINGS, bad_at=bad_at),
            tmp_path / f"bad {bad_at}",
        )
        with pytest.raises(PermanentError, match=message):
            run(training_set, engine=engine, path=path)
        assert {p.name for p in path.iterdir() if p.is_dir()} == {"start"}


class DivergingEngine(LogisticEngine):
    """If the learning rate is above the settings' rate, the weights become NaN after some steps."""

    def __init__(self, *arguments, steps, **keywords):
        super().__init__(*arguments, **keywords)
        self._steps = steps

    def restore(self, weights):
        super().restore(weights)
        self._began = self.num_steps

    def train(self, *arguments, rate, **keywords):
        loss = super().train(*arguments, rate=rate, **keywords)
        if (
            rate(self.num_steps) > self._settings.learning_rate
            and self.num_steps - self._began >= self._steps
        ):
            self._flat[:] = np.nan
        return loss


@pytest.mark.parametrize(
    "steps", [8, 29, 32], ids=["before it is evaluated", "as it is evaluated", "at its end"]
)
def test_diverging_rate_is_replaced_by_earlier_rates(
    planted, make_training_set, run, parent, caplog, steps
):
    training_set = make_training_set(*planted.drifted([1, 2]).rows(1_000)[:3])
    low, _, _ = run(training_set, replace(SETTINGS, round_rates=(0.1,)), start=parent)
    engine = DivergingEngine(training_set.slot_sizes, SETTINGS, steps=steps)
    result, _, _ = run(
        training_set, replace(SETTINGS, round_rates=(0.1, 5.0)), start=parent, engine=engine
    )
    assert "learning rate 0.5 is abandoned" in caplog.text
    assert content(result.weights) == content(low.weights)
    assert (result.learning_rate, result.progressive) == (low.learning_rate, low.progressive)


def test_round_continues_after_break_that_follows_rejected_rate(
    planted, make_training_set, run, parent, tmp_path
):
    training_set, path = make_training_set(*planted.rows(1_000)[:3]), tmp_path / "broken off"
    settings = replace(SETTINGS, round_rates=(0.1, 5.0, 0.2))
    whole, _, _ = run(
        training_set,
        settings,
        start=parent,
        engine=DivergingEngine(training_set.slot_sizes, SETTINGS, steps=8),
    )
    for looks in (12, 1):
        engine = DivergingEngine(training_set.slot_sizes, SETTINGS, steps=8)
        with pytest.raises(Preempted):
            run(
                training_set,
                settings,
                path,
                start=parent,
                engine=engine,
                should_stop=StopAfter(looks),
            )
    again, _, _ = run(training_set, settings, path, start=parent)
    assert content(again.weights) == content(whole.weights)


def test_numbers_within_pass_are_emitted_every_ten_seconds(planted, make_training_set, run, caplog):
    training_set, clock = make_training_set(*planted.rows(2_000)[:3]), Clock()
    engine = TimedEngine(training_set.slot_sizes, SETTINGS, clock=clock)
    with caplog.at_level("INFO"):
        _, _, lines = run(training_set, engine=engine, clock=clock)
    within = [line for line in lines if "segment_loss" in line]
    assert [line["batch"] for line in within] == [*range(4, 57, 4), 57, 61, 63]
    assert within[3]["rows_per_second"] == 4 * 4 * 32 / 40
    assert all(0 < line["segment_loss"] < 1 for line in within)
    assert "step 12, trial 0, pass 1, batch 12, batches 63, segment_loss 0." in caplog.text
