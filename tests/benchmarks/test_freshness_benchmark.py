"""The freshness study is fair: nobody scores what it has seen, rounds go on from their parent, gains are as stated."""

import math
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import freshness_days
from benchmarks.freshness import CONTROL, LEARNING, chart, days_of, figures, gain, table
from benchmarks.freshness_days import BEST, EXACT, FROZEN, Days, Learner, Scores, drifting_world, run_days
from components.contracts.metrics import roc_auc
from components.contracts.workflow import OOV_ID

SMALL = replace(LEARNING, first=replace(LEARNING.first, max_epochs=1))


@pytest.fixture(scope="module")
def world():
    return drifting_world(5)


def drawn(world, hours, count, seed):
    return world.at(hours).draw(count, np.random.default_rng(seed))


def scores_of(hours, labels, **by):
    return Scores(hour=hours, label=labels, by=by, num_rounds={}, num_models={}, seconds={})


class RecordingLearner:
    """In a learner's place: keeps which rows it learnt and which it scored, by the object that holds them."""

    made = []

    def __init__(self, folder, learning):
        self.learnt, self.scored, self.num_rounds, self.num_models, self.seconds = [], [], 0, 0, 0.0
        self.early_stopping = {"auc": 0.5}
        self.refuses = False
        RecordingLearner.made.append(self)

    def copy(self, folder):
        return RecordingLearner(folder, None)

    def score(self, rows):
        self.scored.append(set(rows.probability.tolist()))
        return np.full(len(rows.label), 0.5)

    def learn(self, rows, *, hour):
        self.learnt.append((hour, rows.probability.tolist(), len(self.scored)))
        self.num_rounds += 1
        return not self.refuses


@pytest.fixture
def recorded(monkeypatch, world):
    monkeypatch.setattr(freshness_days, "Learner", RecordingLearner)
    monkeypatch.setattr(RecordingLearner, "made", [])

    def run(intervals, **settings):
        plan = Days(earlier_hours=1, hours=2, rows_per_hour=80, intervals=intervals, seed=5)
        scores = run_days(world, plan, LEARNING, **settings)
        return scores, dict(zip(("first", *intervals), RecordingLearner.made))

    return run


def test_every_row_is_scored_by_every_policy_before_it_is_learnt(recorded):
    scores, learners = recorded({FROZEN: math.inf, "every 30 min": 0.5})
    learner = learners["every 30 min"]
    assert [hour for hour, _, _ in learner.learnt] == [1.5, 2.0, 2.5], "what is learnt at the end scores nothing"
    all_scored = [p for part in learner.scored for p in part]
    for _, rows, num_scored in learner.learnt:
        before = {p for part in learner.scored[:num_scored] for p in part}
        after = {p for part in learner.scored[num_scored:] for p in part}
        assert set(rows) <= before
        assert not set(rows) & after
    assert len(all_scored) == len(scores.label) == 160
    assert learners[FROZEN].learnt == []


def test_rows_of_a_round_that_made_no_model_stay_in_the_window(recorded, monkeypatch):
    monkeypatch.setattr(RecordingLearner, "copy", lambda self, folder: _refusing(folder))
    _, learners = recorded({"every 30 min": 0.5})
    sizes = [len(rows) for _, rows, _ in learners["every 30 min"].learnt]
    assert sizes == [40, 80, 120]


def _refusing(folder):
    learner = RecordingLearner(folder, None)
    learner.refuses = True
    return learner


def test_a_round_goes_on_from_its_parent_and_knows_more(tmp_path, world):
    folder = tmp_path / "model"
    folder.mkdir()
    learner = Learner(folder, SMALL)
    assert learner.learn(drawn(world, 0, 30_000, 1), hour=1)
    test, known = drawn(world, 1, 20_000, 2), learner._features
    before = learner.score(test)
    assert roc_auc(test.label, before) > 0.7
    other = learner.copy(tmp_path / "other")
    (tmp_path / "other").mkdir()
    rows = drawn(world, 1, 30_000, 3)
    assert other.learn(rows, hour=2)
    grown = other._features
    assert all(np.array_equal(new[: len(old)], old) for old, new in zip(known.vocabularies, grown.vocabularies))
    assert (grown.encode_categorical(rows.categorical) == OOV_ID).sum() < (
        known.encode_categorical(rows.categorical) == OOV_ID
    ).sum()
    assert other._model.optimizer_step > learner._model.optimizer_step
    assert roc_auc(test.label, other.score(test)) > roc_auc(test.label, before)
    # The learner it was copied from stays as it was.
    np.testing.assert_array_equal(learner.score(test), before)


def test_a_round_that_its_newest_rows_refuse_changes_nothing(tmp_path, world):
    tmp_path.joinpath("model").mkdir()
    diverging = replace(SMALL, round=replace(SMALL.round, learning_rate=0.5))
    learner = Learner(tmp_path / "model", diverging)
    learner.learn(drawn(world, 0, 20_000, 1), hour=1)
    test, known = drawn(world, 1, 2_000, 2), learner._features
    before = learner.score(test)
    assert not learner.learn(drawn(world, 1, 20_000, 3), hour=2)
    np.testing.assert_array_equal(learner.score(test), before)
    assert learner._features is known
    assert (learner.num_rounds, learner.num_models) == (2, 1)


def test_gain_is_the_mean_of_the_hours_differences_and_covers_the_truth():
    sklearn = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    n, covered = 4000, 0
    for _ in range(60):
        hours = np.repeat(np.arange(4), n // 4)
        signal = random.normal(size=n)
        labels = (random.random(n) < 1 / (1 + np.exp(-signal))).astype(np.int32)
        noise = random.normal(size=(2, n))
        # Both see the signal equally well, so the truth is 0.
        scores = scores_of(hours, labels, a=signal + noise[0], b=signal + noise[1])
        found = gain(scores, "a", "b")
        by_hour = [
            100
            * (
                sklearn.roc_auc_score(labels[hours == h], scores.by["a"][hours == h])
                - sklearn.roc_auc_score(labels[hours == h], scores.by["b"][hours == h])
            )
            for h in range(4)
        ]
        assert found["points"] == pytest.approx(np.mean(by_hour), abs=1e-9)
        covered += found["low"] <= 0 <= found["high"]
    assert covered >= 50, "95 % of 60"


def test_figures_chart_and_table_come_from_one_document(recorded):
    intervals = days_of(5, is_quick=True).intervals
    scores, _ = recorded(intervals)
    noisy = {name: by + 1e-3 * np.arange(len(by)) % 0.07 for name, by in scores.by.items()}
    result = {"study": figures(replace(scores, by=noisy)), "control": figures(replace(scores, by=noisy)), "seconds": 1}
    assert {*intervals, BEST, EXACT} == set(result["study"]["hourly_auc"])
    assert CONTROL in result["control"]["gain_over_frozen"]
    drawing = ElementTree.fromstring(chart(result))
    assert len(drawing.findall("{http://www.w3.org/2000/svg}polyline")) == 5
    assert "+0.24" in table(result)
