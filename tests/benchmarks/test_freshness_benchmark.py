"""The freshness study is fair: nobody scores what it has seen, rounds go on from their parent, gains are as stated."""

import math
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import freshness
from benchmarks.freshness import (
    BEST,
    CONTROL,
    EXACT,
    FROZEN,
    POLICIES,
    Days,
    Learner,
    Scores,
    chart,
    drifting_world,
    figures,
    gain,
    run_days,
    table,
)
from components.contracts.metrics import roc_auc
from components.contracts.workflow import OOV_ID


@pytest.fixture(scope="module")
def world():
    return drifting_world(5)


def drawn(world, hours, count, seed):
    return world.at(hours).draw(count, np.random.default_rng(seed))


def scores_of(hours, labels, **by):
    return Scores(hour=hours, label=labels, by=by, num_rounds={})


class RecordingLearner:
    """In a learner's place: keeps which rows it learned and which it scored, by the object that holds them."""

    made = []

    def __init__(self, scratch=None):
        self.learned, self.scored, self.num_rounds = [], [], 0
        RecordingLearner.made.append(self)

    def copy(self):
        return RecordingLearner()

    def score(self, rows):
        self.scored.append(set(rows.probability.tolist()))
        return np.full(len(rows.label), 0.5)

    def learn(self, rows, *, hour):
        self.learned.append((hour, rows.probability.tolist(), len(self.scored)))
        self.num_rounds += 1


@pytest.fixture
def recorded(monkeypatch, world):
    monkeypatch.setattr(freshness, "Learner", RecordingLearner)
    monkeypatch.setattr(RecordingLearner, "made", [])

    def run(intervals):
        scores = run_days(world, Days(hours=2, rows_per_hour=80, intervals=intervals, seed=5))
        return scores, dict(zip(("first", *intervals), RecordingLearner.made))

    return run


def test_every_row_is_scored_by_every_policy_before_it_is_learned(recorded):
    scores, learners = recorded({FROZEN: math.inf, "every 30 min": 0.5})
    learner = learners["every 30 min"]
    assert [hour for hour, _, _ in learner.learned] == [2.5, 3.0, 3.5], "what is learned at the end scores nothing"
    all_scored = [p for part in learner.scored for p in part]
    for _, rows, num_scored in learner.learned:
        before = {p for part in learner.scored[:num_scored] for p in part}
        after = {p for part in learner.scored[num_scored:] for p in part}
        assert set(rows) <= before
        assert not set(rows) & after
    assert len(all_scored) == len(scores.label) == 160
    assert learners[FROZEN].learned == []


def test_a_round_goes_on_from_its_parent_and_knows_more(tmp_path, world):
    learner = Learner(tmp_path)
    learner.learn(drawn(world, 0, 30_000, 1), hour=1)
    test, known = drawn(world, 1, 20_000, 2), learner._features
    before = learner.score(test)
    assert roc_auc(test.label, before) > 0.7
    other = learner.copy()
    rows = drawn(world, 1, 30_000, 3)
    other.learn(rows, hour=2)
    grown = other._features
    assert all(np.array_equal(new[: len(old)], old) for old, new in zip(known.vocabularies, grown.vocabularies))
    assert (grown.encode_categorical(rows.categorical) == OOV_ID).sum() < (
        known.encode_categorical(rows.categorical) == OOV_ID
    ).sum()
    assert other._model.optimizer_step > learner._model.optimizer_step
    assert roc_auc(test.label, other.score(test)) > roc_auc(test.label, before)
    # The learner it was copied from stays as it was.
    np.testing.assert_array_equal(learner.score(test), before)


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
    scores, _ = recorded(POLICIES)
    noisy = {name: by + 1e-3 * np.arange(len(by)) % 0.07 for name, by in scores.by.items()}
    result = {"study": figures(replace(scores, by=noisy)), "control": figures(replace(scores, by=noisy))}
    assert {*POLICIES, BEST, EXACT} == set(result["study"]["hourly_auc"])
    assert CONTROL in result["control"]["gain_over_frozen"]
    drawing = ElementTree.fromstring(chart(result))
    assert len(drawing.findall("{http://www.w3.org/2000/svg}polyline")) == 5
    assert "+0.24" in table(result)
