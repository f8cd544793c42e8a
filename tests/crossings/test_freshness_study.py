"""The freshness study is fair, its rounds and canaries are the shipped ones, and its gains are as stated."""

import math
from datetime import datetime, timezone

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import freshness
from benchmarks.freshness import (
    FROZEN,
    FULL,
    Cadence,
    Days,
    Scores,
    drifting_world,
    gain,
    run_days,
)
from benchmarks.model_line import CANARY, RELEASED, CanaryEnd, LineRound, ModelLine, TimedRows
from components.deployment.canary.evidence import read_pairs
from components.deployment.graph.parity import open_graph
from components.storage.locations import open_objects

SECONDS = {"extraction": 1.0, "training": 2.0}


@pytest.fixture(scope="module")
def world():
    return drifting_world(5)


def scores_of(hours, labels, **by):
    return Scores(hour=hours, label=labels, by=by, first=LineRound(RELEASED, 1, SECONDS), lines={})


class RecordingLine:
    """In a line's place: keeps which requests it served, and which lay in the lake at each round."""

    def __init__(self, root, *, lake, warm):
        self.lake, self.served, self.read, self.rounds, self.parents = lake, [], [], [], []
        self.canary_ends = [CanaryEnd(True, 2000)]

    def branched(self, root):
        return RecordingLine(root, lake=self.lake, warm=None)

    def run_round(self, *, parent="current"):
        files = sorted(self.lake.rglob("*.parquet"))
        self.read.append({each for path in files for each in pq.read_table(path)["request_id"].to_pylist()})
        self.parents.append((parent, len(self.served)))
        self.rounds.append(LineRound(CANARY if len(self.rounds) % 2 else RELEASED, 100, SECONDS))
        return self.rounds[-1]

    def serve(self, traffic):
        self.served.append(set(traffic.requests))
        return np.linspace(0.1, 0.9, len(traffic.requests))

    def step_canary(self):
        pass


@pytest.fixture
def recorded(monkeypatch, tmp_path, world):
    monkeypatch.setattr(freshness, "ModelLine", RecordingLine)

    def run(policies):
        return run_days(world, Days(hours=2, rows_per_hour=80, policies=policies, seed=5), tmp_path)

    return run


def test_every_row_is_served_by_every_policy_before_a_round_can_read_it(recorded):
    policies = {FROZEN: Cadence(math.inf), FULL: Cadence(1.0, parent="none"), "every 30 min": Cadence(0.5)}
    scores = recorded(policies)
    frozen, full, often = (scores.lines[name] for name in policies)
    assert [at for _, at in often.parents] == [2, 4, 6], "what is learned at the end scores nothing"
    assert (full.parents, frozen.parents) == ([("none", 4)], [])
    for read, (_, num_served) in zip(often.read, often.parents):
        before, after = (set().union(*part) for part in (often.served[:num_served], often.served[num_served:]))
        assert before <= read, "and it reads all of them, beside those before hour 0"
        assert not read & after
    assert len(scores.label) == len(scores.by["every 30 min"]) == 160


def test_gain_is_the_mean_of_the_hours_differences_and_covers_the_truth():
    random = np.random.default_rng(0)
    n, covered = 2000, 0

    def auc(labels, scores):
        clicked, other = scores[labels == 1], scores[labels == 0]
        return float((clicked[:, None] > other).mean())

    for _ in range(60):
        hours = np.repeat(np.arange(4), n // 4)
        signal = random.normal(size=n)
        labels = (random.random(n) < 1 / (1 + np.exp(-signal))).astype(np.int32)
        noise = random.normal(size=(2, n))
        # Both see the signal equally well, so the truth is 0.
        a, b = signal + noise[0], signal + noise[1]
        found = gain(scores_of(hours, labels, a=a, b=b), "a", "b")
        by_hour = [auc(labels[hours == h], a[hours == h]) - auc(labels[hours == h], b[hours == h]) for h in range(4)]
        assert found["points"] == pytest.approx(100 * np.mean(by_hour), abs=1e-9)
        covered += found["low"] <= 0 <= found["high"]
    assert covered >= 50, "95 % of 60"


@pytest.mark.timeout(300)
def test_an_undecided_round_becomes_a_canary_that_is_judged_by_what_both_arms_said(tmp_path, warm, world):
    def traffic(number, rows):
        drawn = world.at(number).draw(rows, np.random.default_rng([5, number]))
        return TimedRows.of(drawn, start=number, end=number + 1)

    traffic(0, 6000).write(tmp_path / "lake")
    line = ModelLine(tmp_path / "line", lake=tmp_path / "lake", warm=warm)
    first = line.run_round()
    assert (first.outcome, first.rows) == (RELEASED, 5400)
    traffic(1, 1000).write(tmp_path / "lake")
    assert line.run_round().outcome == CANARY, "160 held-out rows decide nothing"

    served = traffic(2, 12_000)
    scores = line.serve(served)
    inputs = {"dense": served.rows.dense, "categorical": served.rows.categorical}
    stable, canary = (
        open_graph(tmp_path / "line/store/graphs" / version / "model.onnx").run(None, inputs)[0].ravel()
        for version in "12"
    )
    by_canary = scores == canary.astype(np.float64)
    assert 0 < by_canary.mean() < 0.05
    np.testing.assert_array_equal(scores, np.where(by_canary, canary, stable))
    since = datetime(2039, 1, 1, tzinfo=timezone.utc)
    archive = open_objects((tmp_path / "line/archive").as_uri())
    pairs = read_pairs([archive], stable=1, canary=2, since=since, most=99_999)
    # Their order is that of request names within a time.
    for name, expected in (("stable", stable), ("canary", canary), ("labels", served.rows.label)):
        np.testing.assert_array_equal(np.sort(getattr(pairs, name)), np.sort(expected))

    for number in range(3, 40):
        if line.canary_ends:
            break
        line.serve(traffic(number, 3000))
        line.step_canary()
    assert line.canary_ends, "after so many pairs it grew to all or was taken back"
    assert not list((tmp_path / "line/archive").iterdir())
    plan = line._canary.site.open_repository().read_plan()
    assert plan.canary is None
    assert plan.stable.version == (2 if line.canary_ends[0].is_released else 1)
