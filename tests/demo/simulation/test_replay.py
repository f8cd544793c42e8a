"""Tests of the replay's schedule, counts and commands, in virtual time."""

import numpy as np
import pytest

from demo.simulation.replay import MAX_DELAY_FACTOR, Replay, ReplaySettings
from demo.simulation.traffic import Request
from evergreen.contracts.criteo import CRITEO_RECOMMENDER
from evergreen.contracts.records import OutcomeBatch, PredictionBatch
from evergreen.runtime.errors import ContractError
from evergreen.statistics.metrics import roc_auc
from inference_client.errors import ServerUnavailable
from inference_client.recommender import RecommenderClient
from inference_client.rows import FeatureRows
from inference_client.scoring import Scored
from tests.support.virtual_time import VirtualTime


class Scorer:
    """A client that scores by a known function after `seconds`, and fails on command."""

    def __init__(self, time: VirtualTime, score_rows) -> None:
        self.time, self.score_rows, self.seconds = time, score_rows, 0.001
        self.requests: list[tuple[float, int]] = []
        self.fails = lambda number: False
        self.version_of = lambda number: 1
        self.after_request = lambda number: None

    async def score(self, dense, categorical, *, request_id=None, key=None):
        number = len(self.requests)
        self.requests.append((self.time.now, len(dense)))
        self.after_request(number)
        await self.time.sleep(self.seconds)
        if self.fails(number):
            raise ServerUnavailable("server x is unavailable: gone")
        return Scored(self.score_rows(dense, categorical), self.version_of(number))


class Rows:
    """Traffic that repeats the rows of a fixed table. Drift inverts the labels."""

    def __init__(self, make_rows, limit=None) -> None:
        self.make_rows, self.limit, self.taken, self.requests, self.drifted = (
            make_rows,
            limit,
            0,
            [],
            False,
        )

    def take(self, rows):
        if self.limit is not None:
            rows = min(rows, self.limit - self.taken)
        if not rows:
            return None
        dense, categorical = self.make_rows(rows, self.taken)
        probability = np.random.default_rng(self.taken).random(rows)
        label = (np.random.default_rng(self.taken + 1).random(rows) < probability).astype(np.int32)
        self.taken += rows
        features = FeatureRows(dense=dense, categorical=categorical)
        self.requests.append(Request(features, 1 - label if self.drifted else label, probability))
        return self.requests[-1]

    def drift(self):
        self.drifted = True

    drift_note = {}


@pytest.fixture
def time():
    return VirtualTime()


@pytest.fixture
def scorer(time, score_rows):
    return Scorer(time, score_rows)


@pytest.fixture
def play(time, scorer, make_rows, tmp_path):
    """Runs a replay to its end. Returns the replay, its traffic, and the status of its records."""

    def run(traffic=None, prepare=lambda replay: None, **settings):
        traffic = traffic or Rows(make_rows)
        settings = ReplaySettings(**{"rate": 1000.0, "rows_per_request": 10, **settings})

        async def all_of_it():
            log = f"sqlite:///{tmp_path}/log.db"
            async with RecommenderClient(
                scorer, recommender=CRITEO_RECOMMENDER, log=log, source="t", timing=time.timing()
            ) as client:
                random = np.random.default_rng(1)
                replay = Replay(
                    client, traffic, settings, random=random, run="t", timing=time.timing()
                )
                prepare(replay)
                await replay.send()
            return replay, traffic, client.log_counts

        return time.run(all_of_it())

    return run


def test_requests_are_sent_at_stated_rate(play, scorer):
    replay, _, _ = play(max_rows=1000, rate=2000.0)
    times = [t for t, _ in scorer.requests]
    assert [n for _, n in scorer.requests] == [10] * 100
    np.testing.assert_allclose(np.diff(times), 0.005, atol=1e-9)
    assert (replay.statistics.rows, replay.statistics.sent, replay.exhausted) == (1000, 100, False)


def test_replay_reports_if_bound_delays_it(play, scorer):
    scorer.seconds = 1.0
    replay, _, _ = play(max_rows=100, max_in_flight=2)
    times = np.array([t for t, _ in scorer.requests])
    assert max(((times <= t) & (times > t - 1.0)).sum() for t in times) <= 2
    assert replay.skipped_seconds > 1.0
    assert replay.statistics.rows == 100


def test_after_stall_replay_does_not_burst(play, scorer):
    scorer.seconds = 5.0

    def quick(number):
        if number >= 1:
            scorer.seconds = 0.001

    scorer.after_request = quick
    play(max_rows=500, max_in_flight=1)
    gaps = np.diff([t for t, _ in scorer.requests])
    assert (gaps[3:] > 0.009).all()


def test_each_rows_record_and_each_clicks_outcome_reach_log(play, read_log, tmp_path, score_rows):
    _, traffic, logged = play(max_rows=195, label_delay_seconds=2.0)
    records = read_log(tmp_path / "log.db")
    predictions = {
        r.request_id: (at, r) for at, r in enumerate(records) if isinstance(r, PredictionBatch)
    }
    assert sum(len(p) for _, p in predictions.values()) == 195 == logged.published_rows
    clicks = {}
    for at, batch in enumerate(records):
        if isinstance(batch, OutcomeBatch):
            for request_id, row, time in zip(
                batch.request_ids, batch.rows.tolist(), batch.times.tolist()
            ):
                assert (request_id, row) not in clicks
                published_at, prediction = predictions[request_id]
                assert published_at < at
                assert 0 <= time - prediction.time <= MAX_DELAY_FACTOR * 2.0
                clicks[request_id, row] = time - prediction.time
    expected = set()
    for number, request in enumerate(traffic.requests, start=1):
        prediction = predictions[f"t-{number}"][1]
        np.testing.assert_array_equal(prediction.dense, request.features.dense)
        np.testing.assert_array_equal(prediction.categorical, request.features.categorical)
        np.testing.assert_array_equal(
            prediction.scores, score_rows(request.features.dense, request.features.categorical)
        )
        expected |= {(f"t-{number}", int(row)) for row in np.flatnonzero(request.label)}
    assert clicks.keys() == expected
    assert 1.2 < np.mean(list(clicks.values())) < 2.8


def test_drift_changes_rows_counts_and_best_auc(play, scorer, make_rows):
    traffic = Rows(make_rows)

    def prepare(replay):
        scorer.after_request = lambda number: replay.command("drift\n") if number == 49 else None

    replay, _, _ = play(traffic, prepare, max_rows=2000)
    summary = replay.statistics.summary()
    before, after = traffic.requests[:50], traffic.requests[50:]
    assert 5000 < summary["drift_time"] < 5002

    def auc(requests):
        return roc_auc(
            np.concatenate([r.label for r in requests]),
            np.concatenate([r.probability for r in requests]),
        )

    assert summary["bayes_auc"]["before"] == pytest.approx(auc(before), abs=1e-4)
    assert summary["bayes_auc"]["after"] == pytest.approx(auc(after), abs=1e-4)


def test_unknown_commands_are_reported_and_ignored(play, caplog):
    replay, _, _ = play(None, lambda replay: replay.command("drift now"), max_rows=20)
    assert replay.statistics.rows == 20
    assert "command ignored" in caplog.text


def test_failed_request_is_counted_reported_and_not_published(play, scorer):
    scorer.fails = lambda number: number % 4 == 0
    replay, _, logged = play(max_rows=200)
    summary = replay.statistics.summary()
    assert summary["requests"] == {"sent": 20, "failed": 5}
    assert summary["errors"] == {"ServerUnavailable": 5}
    assert summary["rows"] == logged.published_rows == 150
    assert replay.failure is None


def test_lines_report_one_second_each(play):
    replay, _, _ = play(max_rows=100)
    assert replay.statistics.take_second(1.0) == {
        "time": 1.0,
        "phase": "before",
        "requests_sent": 10,
        "requests_failed": 0,
        "rows": 100,
        "p50_ms": pytest.approx(1.0),
        "p99_ms": pytest.approx(1.0),
        "versions": {"1": 100},
    }
    empty = replay.statistics.take_second(2.0)
    assert (empty["rows"], empty["p50_ms"], empty["versions"]) == (0, None, {})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": float("nan")},
        {"rows_per_request": 4096},
        {"label_delay_seconds": -1.0},
        {"max_in_flight": 0},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ContractError, match=next(iter(wrong))):
        ReplaySettings(**{"rate": 1.0, **wrong})
