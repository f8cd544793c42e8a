"""Publishing to a real SQLite log: order, delays, and a log that is locked for a while."""

from __future__ import annotations

import asyncio
import sqlite3

import numpy as np
import pytest

from components.contracts.records import OutcomeBatch, PredictionBatch
from components.logs.sqlite import SqliteLog
from components.runtime.errors import ContractError, TemporaryError
from inference_client.publisher import PublisherSettings, RecordPublisher


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.at_wake = 1000.0, []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for action in self.at_wake:
            action()
        await asyncio.sleep(0)


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def prediction(make_rows):
    def make(request_id: str, time: float = 1000.0, n: int = 4) -> PredictionBatch:
        dense, categorical = make_rows(n)
        scores = np.linspace(0, 1, n, dtype=np.float32)
        return PredictionBatch(
            request_id=request_id, time=time, model_version=1, dense=dense, categorical=categorical, scores=scores
        )

    return make


def publisher_of(path, time, **settings):
    log = SqliteLog(path, busy_timeout_seconds=0.05)
    return RecordPublisher(
        log, source="test", settings=PublisherSettings(**settings), clock=time.clock, sleep=time.sleep
    )


def test_what_is_read_back_is_what_was_scored(tmp_path, time, prediction, read_log):
    publisher, sent = publisher_of(tmp_path / "log.db", time), prediction("r1")
    publisher.add(sent, [(0, 1.0), (3, 2.5)])
    asyncio.run(publisher.drain())
    read, *outcomes = read_log(tmp_path / "log.db")
    for name in ("dense", "categorical", "scores"):
        np.testing.assert_array_equal(getattr(read, name), getattr(sent, name))
    clicks = [(r, int(row), t) for o in outcomes for r, row, t in zip(o.request_ids, o.rows, o.times)]
    assert clicks == [("r1", 0, 1001.0), ("r1", 3, 1002.5)]
    assert (publisher.published_rows, publisher.published_outcomes) == (4, 2)


def test_an_outcome_is_published_after_its_prediction_and_not_before_its_time(tmp_path, time, prediction, read_log):
    path = tmp_path / "log.db"
    publisher = publisher_of(path, time)
    publisher.add(prediction("r1"), [(1, 1.0)])
    asyncio.run(publisher.flush())
    assert [type(r) for r in read_log(path)] == [PredictionBatch]
    time.now = 1000.99
    asyncio.run(publisher.flush())
    assert publisher.published_outcomes == 0
    time.now = 1001.0
    asyncio.run(publisher.flush())
    assert publisher.published_outcomes == 1


def test_without_delay_the_prediction_still_comes_first(tmp_path, time, prediction, read_log):
    publisher = publisher_of(tmp_path / "log.db", time)
    publisher.add(prediction("r1"), [(0, 0.0)])
    asyncio.run(publisher.flush())
    assert [type(r) for r in read_log(tmp_path / "log.db")] == [PredictionBatch, OutcomeBatch]


def test_one_flush_is_one_commit_and_an_empty_one_none(time, prediction):
    class Counting:
        calls: list[int] = []

        def publish(self, messages):
            self.calls.append(len(messages))

        def close(self):
            pass

    publisher = RecordPublisher(Counting(), source="s", clock=time.clock, sleep=time.sleep)
    for i in range(30):
        publisher.add(prediction(f"r{i}"), [(0, 0.0), (1, 0.0)])
    asyncio.run(publisher.flush())
    asyncio.run(publisher.flush())
    assert Counting.calls == [31]


def test_nothing_is_lost_or_doubled_while_the_log_is_locked(tmp_path, time, prediction, read_log):
    path = tmp_path / "log.db"
    publisher = publisher_of(path, time)
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    wakes = []

    def unlock_at_third():
        wakes.append(time.now)
        if len(wakes) == 2:
            publisher.add(prediction("later", time.now), [(0, 0.1)])
        if len(wakes) == 3:
            lock.execute("COMMIT")

    time.at_wake.append(unlock_at_third)
    publisher.add(prediction("first"), [(0, 0.0), (2, 0.0)])
    asyncio.run(publisher.drain())
    lock.close()
    records = read_log(path)
    assert [r.request_id for r in records if isinstance(r, PredictionBatch)] == ["first", "later"]
    clicks = [(i, int(row)) for o in records if isinstance(o, OutcomeBatch) for i, row in zip(o.request_ids, o.rows)]
    assert sorted(clicks) == [("first", 0), ("first", 2), ("later", 0)]
    assert (publisher.published_rows, publisher.published_outcomes) == (8, 3)


def test_clicks_of_a_long_outage_fit_the_logs_messages(tmp_path, time, prediction, read_log):
    """All are due at once when the log is back: in one message they would be larger than the log takes, for ever."""
    path = tmp_path / "log.db"
    publisher = publisher_of(path, time)
    names = [f"replay-0123456789ab-{i}" for i in range(9000)]
    for name in names:
        publisher.add(prediction(name, n=4), [(row, 0.0) for row in range(4)])
    asyncio.run(publisher.flush())
    outcomes = [record for record in read_log(path) if isinstance(record, OutcomeBatch)]
    assert len({batch.batch_id for batch in outcomes}) == len(outcomes)
    clicks = [(name, row) for o in outcomes for name, row in zip(o.request_ids, o.rows.tolist())]
    assert sorted(clicks) == sorted((name, row) for name in names for row in range(4))
    assert publisher.published_outcomes == 36_000


def test_a_log_that_stays_locked_is_an_error_and_the_records_stay_queued(tmp_path, time, prediction, read_log):
    path = tmp_path / "log.db"
    publisher = publisher_of(path, time, give_up_seconds=3.0)
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    publisher.add(prediction("r1"), [(0, 0.0)])
    with pytest.raises(TemporaryError, match="locked"):
        asyncio.run(publisher.flush())
    assert publisher.published_rows == 0
    lock.execute("COMMIT")
    lock.close()
    publisher.add(prediction("r2"))
    asyncio.run(publisher.drain())
    assert [r.request_id for r in read_log(path) if isinstance(r, PredictionBatch)] == ["r1", "r2"]
    assert (publisher.published_rows, publisher.published_outcomes) == (8, 1)


def test_a_commit_whose_answer_was_lost_is_stored_once(tmp_path, time, prediction, read_log):
    path = tmp_path / "log.db"
    log = SqliteLog(path)

    class Forgetful:
        failed = False

        def publish(self, messages):
            log.publish(messages)
            if not self.failed:
                self.failed = True
                raise TemporaryError("connection lost after the commit")

        def close(self):
            log.close()

    publisher = RecordPublisher(Forgetful(), source="s", clock=time.clock, sleep=time.sleep)
    publisher.add(prediction("r1"), [(0, 0.0)])
    asyncio.run(publisher.drain())
    assert len(read_log(path)) == 2


class FlakyLog:
    """Stores the first of every batch and then fails, as a broker may that is lost in mid-way, `failures` times."""

    def __init__(self, failures: int) -> None:
        self.failures, self.stored, self.sizes = failures, [], []

    def publish(self, messages):
        self.sizes.append(len(messages))
        if self.failures > 0:
            self.failures -= 1
            self.stored += messages[:1]
            raise TemporaryError("one confirmed, the rest not")
        self.stored += messages

    def close(self):
        pass


def test_a_log_that_stores_a_part_and_fails_gets_all_with_the_same_ids(time, prediction):
    log = FlakyLog(failures=3)
    publisher = RecordPublisher(log, source="s", clock=time.clock, sleep=time.sleep)
    for i in range(5):
        publisher.add(prediction(f"r{i}"), [(0, 0.0)])
    asyncio.run(publisher.drain())
    assert [name for name, _ in log.stored] == ["r0"] * 3 + [f"r{i}" for i in range(5)] + ["s-outcomes-1"]
    assert len({name: payload for name, payload in log.stored}) == len(set(log.stored))
    assert (publisher.published_rows, publisher.dropped_rows) == (20, 0)


def test_a_full_queue_drops_the_newest_with_their_clicks_and_says_how_many(time, prediction, caplog):
    log = FlakyLog(failures=2)
    publisher = RecordPublisher(
        log, source="s", settings=PublisherSettings(max_queued_rows=12), clock=time.clock, sleep=time.sleep
    )
    time.at_wake.append(lambda: [publisher.add(prediction(f"late-{time.now}-{i}"), [(0, 0.0)]) for i in range(2)])
    publisher.add(prediction("r0"), [(0, 0.0)])
    publisher.add(prediction("r1"), [(0, 0.0)])
    asyncio.run(publisher.flush())
    time.at_wake.clear()
    asyncio.run(publisher.drain())
    kept = [name for name, _ in log.stored if not name.startswith("s-")]
    assert kept[-3:] == ["r0", "r1", "late-1000.1-0"]
    assert (publisher.published_rows, publisher.dropped_rows, publisher.published_outcomes) == (12, 12, 3)
    assert "dropped 4 rows" in caplog.text
    assert "12 in all" in caplog.text
    publisher.add(prediction("after"))
    asyncio.run(publisher.drain())
    assert publisher.published_rows == 16


def test_a_long_queue_goes_in_parts_and_no_click_overtakes_its_prediction(time, prediction, monkeypatch):
    monkeypatch.setattr("inference_client.publisher.MAX_ROWS_PER_FLUSH", 10)
    log = FlakyLog(failures=0)
    publisher = RecordPublisher(log, source="s", clock=time.clock, sleep=time.sleep)
    for i in range(7):
        publisher.add(prediction(f"r{i}"), [(0, 0.0)])
    asyncio.run(publisher.drain())
    assert log.sizes == [2, 2, 2, 2]
    assert [name for name, _ in log.stored] == [*(f"r{i}" for i in range(7)), "s-outcomes-1"]
    assert (publisher.published_rows, publisher.published_outcomes) == (28, 7)


def test_conversions_travel_beside_clicks_and_not_before_their_time(tmp_path, time, prediction, read_log):
    publisher = publisher_of(tmp_path / "log.db", time)
    publisher.add(prediction("r1"), [(0, 1.0)])
    publisher.tell("r1", 0, 1001.0, event="conversion")
    publisher.tell("of another publisher", 2, 1005.0, event="conversion")
    asyncio.run(publisher.flush())
    asyncio.run(publisher.drain())
    outcomes = [record for record in read_log(tmp_path / "log.db") if isinstance(record, OutcomeBatch)]
    told = {
        (batch.event, name, int(row), when)
        for batch in outcomes
        for name, row, when in zip(batch.request_ids, batch.rows, batch.times.tolist())
    }
    assert told == {
        ("click", "r1", 0, 1001.0),
        ("conversion", "r1", 0, 1001.0),
        ("conversion", "of another publisher", 2, 1005.0),
    }
    assert len({batch.batch_id for batch in outcomes}) == len(outcomes)
    assert publisher.published_outcomes == 3


def test_an_unknown_event_is_refused_before_it_is_queued(tmp_path, time):
    publisher = publisher_of(tmp_path / "log.db", time)
    with pytest.raises(ContractError, match="outcome event is 'purchase', expected one of"):
        publisher.tell("r1", 0, 1001.0, event="purchase")
