"""Tests of publishing to a real log and to failing logs: order, outages, limits and counts."""

import asyncio
import itertools
import logging
import sqlite3
import tracemalloc
import zlib
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from evergreen.config.features import Features
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import MAX_ID_CHARACTERS, OutcomeBatch, PredictionBatch
from evergreen.events.event_log import MAX_MESSAGE_BYTES
from evergreen.events.sqlite import SqliteLog
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from inference_client import publisher as publisher_module
from inference_client.publisher import (
    MAX_OUTCOMES_PER_MESSAGE,
    Outcome,
    PartitionedPublisher,
    PublisherSettings,
    PublishingCounts,
    RecordPublisher,
    Unpublished,
    metrics_text,
)
from testing.recommenders import SHOP
from tests.support.errors import raises
from tests.support.full_disk import files_of_at_most
from tests.support.virtual_time import SteppedTime


@pytest.fixture
def time():
    return SteppedTime()


@pytest.fixture
def prediction(make_rows):
    def make(request_id: str, time: float = 1000.0, n: int = 4) -> PredictionBatch:
        dense, categorical = make_rows(n)
        scores = np.linspace(0, 1, n, dtype=np.float32)
        return PredictionBatch(
            request_id=request_id,
            time=time,
            model_version=1,
            dense=dense,
            categorical=categorical,
            scores=scores,
        )

    return make


class MemoryLog:
    """Stores published messages.

    `publish` first calls `meanwhile`. If `outage` returns an error, `publish` raises the error.
    """

    def __init__(self, outage=lambda: None, meanwhile=lambda: None) -> None:
        self.outage, self.meanwhile, self.messages, self.sizes = outage, meanwhile, [], []

    def publish(self, messages):
        self.meanwhile()
        self.sizes.append(len(messages))
        if (error := self.outage()) is not None:
            # The log stores one message before the error, as if the broker failed in the middle of
            # a batch.
            self.messages += messages[:1]
            raise error
        self.messages += messages

    def close(self):
        pass

    def records(self):
        return [
            RecordFormat(SHOP.features).decode(payload) for payload in dict(self.messages).values()
        ]


def publisher_of(log, time, **settings):
    return RecordPublisher(
        log,
        features=SHOP.features,
        source="test",
        settings=PublisherSettings(**settings),
        timing=time.timing(),
    )


def sqlite_publisher(path, time, **settings):
    return publisher_of(SqliteLog(path, busy_timeout_seconds=0.05), time, **settings)


def clicks(request_id, *rows, time=1000.0):
    return [Outcome(request_id=request_id, row=row, time=time) for row in rows]


def outcomes_of(records):
    return [
        (o.event, name, int(row), when)
        for o in records
        if isinstance(o, OutcomeBatch)
        for name, row, when in zip(o.request_ids, o.rows, o.times.tolist())
    ]


def test_outcome_is_published_after_its_prediction_and_its_time(time, prediction):
    log = MemoryLog()
    publisher = publisher_of(log, time)
    publisher.add(prediction("r1"), clicks("r1", 1, time=1001.0) + clicks("r1", 0))
    asyncio.run(publisher.flush())
    assert [type(r) for r in log.records()] == [PredictionBatch, OutcomeBatch]
    time.now = 1000.99
    asyncio.run(publisher.flush())
    assert publisher.counts.published_outcomes == 1
    time.now = 1001.0
    asyncio.run(publisher.flush())
    assert publisher.counts.published_outcomes == 2


def test_nothing_is_lost_or_doubled_while_log_is_locked(tmp_path, time, prediction, read_log):
    path = tmp_path / "log.db"
    publisher = sqlite_publisher(path, time)
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    wakes = []

    def unlock_at_third():
        wakes.append(time.now)
        if len(wakes) == 2:
            publisher.add(prediction("later", time.now), clicks("later", 0, time=time.now + 0.1))
        if len(wakes) == 3:
            lock.execute("COMMIT")

    time.at_wake.append(unlock_at_third)
    publisher.add(prediction("first"), clicks("first", 0, 2))
    asyncio.run(publisher.drain())
    lock.close()
    records = read_log(path)
    assert [r.request_id for r in records if isinstance(r, PredictionBatch)] == ["first", "later"]
    assert sorted(o[1:3] for o in outcomes_of(records)) == [
        ("first", 0),
        ("first", 2),
        ("later", 0),
    ]


OUTAGES = [
    (TemporaryError, 600.0, 0.0),
    (PermanentError, 2.0, 0.0),
    (RuntimeError, 61.0, 0.0),
    (OSError, 61.0, 20.0),
]


@pytest.mark.parametrize(
    ("kind", "seconds", "slow_seconds"), OUTAGES, ids=["away", "refused", "broken", "slow"]
)
def test_publishing_continues_after_any_outage_and_reports_its_start_and_end(
    time, prediction, caplog, kind, seconds, slow_seconds
):
    """A log that recovers slowly needs 20 s for each flush.

    Requests are scored and logged while the flush waits.
    """
    caplog.set_level(logging.INFO, logger="inference_client.publisher")

    def store_slowly():
        for _ in range(20 if slow_seconds and time.now >= 1000.0 + seconds else 0):
            time.now += slow_seconds / 20
            live()

    log = MemoryLog(
        lambda: kind("gone") if 1000.0 < time.now < 1000.0 + seconds else None, store_slowly
    )
    publisher = publisher_of(log, time)
    during = []

    def live():
        if publisher._stopping:
            return
        number = len(during)
        during.append(publisher.counts.problem)
        publisher.add(
            prediction(f"r{number}", time.now, n=1), clicks(f"r{number}", 0, time=time.now)
        )
        if time.now > 1000.0 + seconds + 5.0:
            publisher._stopping = True

    async def run():
        time.at_wake.append(live)
        await publisher.run()
        time.at_wake.clear()
        await publisher.drain()

    asyncio.run(run())
    expected = {f"r{number}" for number in range(len(during))}
    assert {r.request_id for r in log.records() if isinstance(r, PredictionBatch)} == expected
    assert {name for _, name, _, _ in outcomes_of(log.records())} == expected
    assert "gone" in during
    assert publisher.counts.problem is None
    assert (publisher.counts.published_rows, publisher.counts.dropped_rows) == (len(expected), 0)
    assert len({payload for _, payload in log.messages}) == len(dict(log.messages)), (
        "two messages have the same id"
    )
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2
    assert (
        lines[0]
        == f"the event log {'refuses records' if kind is PermanentError else 'is unavailable'}, "
        "and records stay queued: gone"
    )
    assert "available again after" in lines[1]


def test_full_disk_is_outage_that_ends_once_disk_has_space(tmp_path, time, prediction, read_log):
    publisher = sqlite_publisher(tmp_path / "log.db", time)
    publisher.add(prediction("before"))
    asyncio.run(publisher.flush())
    used = max(path.stat().st_size for path in tmp_path.iterdir())
    for number in range(20):
        publisher.add(prediction(f"r{number}", n=200), clicks(f"r{number}", 3))
    with files_of_at_most(used + 100_000), pytest.raises(TemporaryError):
        asyncio.run(publisher.flush())
    assert (publisher.counts.queued_rows, publisher.counts.dropped_rows) == (4000, 0)
    assert "log.db" in publisher.counts.problem
    asyncio.run(publisher.drain())
    records = read_log(tmp_path / "log.db")
    stored = [record.request_id for record in records if isinstance(record, PredictionBatch)]
    assert stored == ["before", *(f"r{number}" for number in range(20))]
    assert len(outcomes_of(records)) == 20
    assert publisher.counts.problem is None


def test_each_change_of_state_is_one_line(time, prediction, caplog):
    """The log is unavailable, then refuses a record, then is unavailable, and then recovers.

    The publisher's queue is full until the log recovers.
    """
    caplog.set_level(logging.INFO, logger="inference_client.publisher")
    failures = [
        TemporaryError("gone"),
        TemporaryError("still gone"),
        PermanentError("no rights"),
        TemporaryError("gone"),
    ]
    log = MemoryLog(lambda: failures.pop(0) if failures else None)
    publisher = publisher_of(log, time, max_queued=8)
    for number in range(4):
        publisher.add(prediction(f"r{number}"), clicks(f"r{number}", 0))
    time.at_wake.append(lambda: setattr(publisher, "_stopping", len(log.sizes) > 4))
    asyncio.run(publisher.run())
    publisher.add(prediction("after"))
    asyncio.run(publisher.flush())
    assert [record.message for record in caplog.records] == [
        "the queue is full (8 rows, 2 outcomes): the newest records are dropped",
        "the event log is unavailable, and records stay queued: gone",
        "the event log refuses records, and records stay queued: no rights",
        "the event log is unavailable, and records stay queued: gone",
        "the log is available again after 2 s",
        "the queue has room again; 8 rows and 2 outcomes were dropped since the start",
    ]


def test_prometheus_reads_every_count_and_whether_log_is_there(time, prediction):
    away = []
    publisher = publisher_of(MemoryLog(lambda: away[0] if away else None), time, max_queued=12)
    publisher.add(prediction("r1"), clicks("r1", 0, 1))
    asyncio.run(publisher.flush())
    away.append(TemporaryError("gone"))
    for number in range(5):
        publisher.add(prediction(f"later-{number}"), clicks(f"later-{number}", 0))
    with pytest.raises(TemporaryError):
        asyncio.run(publisher.flush())
    text = metrics_text({"shop": publisher.counts, "news": PublishingCounts()})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    read = {
        (each.name.removeprefix("evergreen_client_log_"), each.labels["recommender"]): each.value
        for family in families.values()
        for each in family.samples
    }
    assert {name: value for (name, of), value in read.items() if of == "shop"} == {
        "published_rows_total": 4,
        "published_outcomes_total": 2,
        "dropped_rows_total": 8,
        "dropped_outcomes_total": 2,
        "queued_rows": 12,
        "queued_outcomes": 3,
        "available": 0,
    }
    assert read["available", "news"] == 1
    assert {family.type for family in families.values()} == {"counter", "gauge"}


def test_long_outage_keeps_oldest_within_bounds_and_counts_dropped(time, prediction, caplog):
    is_out = True
    log = MemoryLog(lambda: TemporaryError("gone") if is_out else None)
    publisher = publisher_of(log, time, max_queued=12)
    queued = [publisher.add(prediction(f"r{i}"), clicks(f"r{i}", 0)) for i in range(20)]
    assert queued == [True] * 3 + [False] * 17
    with pytest.raises(TemporaryError):
        asyncio.run(publisher.flush())
    queued = [publisher.add_outcome(Outcome(request_id="r0", row=1)) for _ in range(12)]
    assert queued == [True] * 9 + [False] * 3
    counts = publisher.counts
    assert (counts.queued_rows, counts.queued_outcomes, counts.problem, counts.refused) == (
        12,
        12,
        "gone",
        False,
    )
    assert (counts.dropped_rows, counts.dropped_outcomes) == (17 * 4, 17 + 3)
    assert caplog.text.count("the queue is full") == 1
    is_out = False
    asyncio.run(publisher.drain())
    assert [r.request_id for r in log.records() if isinstance(r, PredictionBatch)] == [
        "r0",
        "r1",
        "r2",
    ]
    assert (publisher.counts.published_rows, publisher.counts.published_outcomes) == (12, 12)
    assert publisher.add(prediction("after"))
    asyncio.run(publisher.drain())
    assert publisher.counts.published_rows == 16


def test_draining_into_lost_log_ends_and_reports_losses(time, prediction):
    publisher = publisher_of(MemoryLog(lambda: TemporaryError("gone")), time, close_seconds=20.0)
    publisher.add(prediction("r1"), clicks("r1", 0, 1))
    with raises(Unpublished, "4 rows and 2 outcomes", "lost", "gone") as loss:
        asyncio.run(publisher.drain())
    assert (loss.value.rows, loss.value.outcomes) == (4, 2)
    assert 1020.0 <= time.now <= 1024.0
    assert (
        publisher.counts.dropped_rows,
        publisher.counts.dropped_outcomes,
        publisher.counts.queued_rows,
    ) == (4, 2, 0)


def test_draining_into_log_that_refuses_does_not_wait(time, prediction):
    publisher = publisher_of(MemoryLog(lambda: PermanentError("no such topic")), time)
    publisher.add(prediction("r1"))
    with raises(Unpublished, "no such topic"):
        asyncio.run(publisher.drain())
    assert time.now == 1000.0


def test_closing_sends_long_overdue_outcomes_at_once(time):
    publisher = publisher_of(log := MemoryLog(), time, close_seconds=20.0)
    for name, ahead in (("soon", np.int64(10)), ("later", np.int64(7200))):
        publisher.add_outcome(Outcome(request_id=name, time=np.int64(time.now) + ahead))
    asyncio.run(publisher.drain())
    assert [name for _, name, _, _ in outcomes_of(log.records())] == ["later", "soon"]
    assert 1010.0 <= time.now < 1012.0


def test_one_partition_has_everything_of_request_and_none_waits_for_other(time, prediction):
    down = [True]
    logs = [MemoryLog(), MemoryLog(lambda: TemporaryError("gone") if down[0] else None)]
    publisher = PartitionedPublisher([publisher_of(log, time) for log in logs])
    names = [f"r{number}" for number in range(20)]
    for name in names:
        assert publisher.add(prediction(name), clicks(name, 1))
        assert publisher.add_outcome(clicks(name, 3)[0])

    async def run_for_a_while():
        running = asyncio.ensure_future(publisher.run())
        while publisher.counts.problem is None or publisher.counts.published_rows == 0:
            await asyncio.sleep(0)
        away = publisher.counts
        down[0] = False
        await publisher.drain()
        await running
        return away

    away = asyncio.run(run_for_a_while())
    assert away.problem == "gone"
    expected = [[name for name in names if zlib.crc32(name.encode()) % 2 == at] for at in (0, 1)]
    assert away.published_rows == 4 * len(expected[0])
    for log, of_partition in zip(logs, expected):
        records = log.records()
        assert {each.request_id for each in records if isinstance(each, PredictionBatch)} == set(
            of_partition
        )
        clicked = [(name, row) for _, name, row, _ in outcomes_of(records)]
        assert sorted(clicked) == sorted((name, row) for name in of_partition for row in (1, 3))
    counts = publisher.counts
    assert (
        counts.published_rows,
        counts.published_outcomes,
        counts.queued_rows,
        counts.problem,
    ) == (80, 40, 0, None)


def test_partition_that_is_lost_loses_its_own_records_alone(time, prediction):
    logs = [MemoryLog(), MemoryLog(lambda: PermanentError("no such topic"))]
    share = PublisherSettings(max_queued=8).share(2)
    publisher = PartitionedPublisher(
        [publisher_of(log, time, max_queued=share.max_queued) for log in logs]
    )
    # crc32 assigns the three requests in `lost` to the second partition. Each partition has half of
    # the queue, which has room for four rows. One request has four rows.
    names = [f"r{number}" for number in range(20)]
    lost = [name for name in names if zlib.crc32(name.encode()) % 2][:3]
    stored_name = next(name for name in names if not zlib.crc32(name.encode()) % 2)
    assert [publisher.add(prediction(name)) for name in (stored_name, *lost)] == [
        True,
        True,
        False,
        False,
    ]
    with raises(Unpublished, "4 rows and 0 outcomes", "lost", "no such topic"):
        asyncio.run(publisher.drain())
    assert [record.request_id for record in logs[0].records()] == [stored_name]
    assert (
        publisher.counts.dropped_rows,
        publisher.counts.published_rows,
        publisher.counts.refused,
    ) == (12, 4, True)


def test_long_queue_is_sent_in_parts_and_no_click_overtakes_its_prediction(
    time, prediction, monkeypatch
):
    monkeypatch.setattr(publisher_module, "_MAX_ROWS_PER_FLUSH", 10)
    log = MemoryLog()
    publisher = publisher_of(log, time)
    for i in range(7):
        publisher.add(prediction(f"r{i}"), clicks(f"r{i}", 0))
    asyncio.run(publisher.drain())
    assert log.sizes == [2, 2, 2, 2]
    assert [name for name, _ in log.messages] == [*(f"r{i}" for i in range(7)), "test-outcomes-1"]


def test_after_outage_outcomes_that_are_due_are_sent_in_parts_too(time, prediction, monkeypatch):
    monkeypatch.setattr(publisher_module, "_MAX_OUTCOMES_PER_FLUSH", 3)
    log = MemoryLog()
    publisher = publisher_of(log, time)
    for number in range(7):
        publisher.add_outcome(Outcome(request_id=f"r{number}", time=1000.0 - number))
    asyncio.run(publisher.drain())
    assert [len(record) for record in log.records()] == [3, 3, 1]
    # The oldest outcomes are dropped first.
    assert [name for _, name, *_ in outcomes_of(log.records())] == [
        f"r{number}" for number in reversed(range(7))
    ]


def test_large_rows_are_sent_in_smaller_flushes(time, prediction, monkeypatch):
    """One row takes 92 bytes.

    The row has two numbers of 4 bytes and eight positions of 8 bytes. The remaining bytes are a
    score, a position, a propensity and a shadow score.
    """
    monkeypatch.setattr(publisher_module, "_MAX_BYTES_PER_FLUSH", 10 * 92)
    log = MemoryLog()
    publisher = publisher_of(log, time)
    assert all(publisher.add(prediction(f"r{number}")) for number in range(3))
    asyncio.run(publisher.drain())
    assert log.sizes == [2, 1]


@pytest.mark.parametrize("num_rows", [1, 7, 64])
@pytest.mark.parametrize("full", [False, True])
def test_memory_of_queue_is_bounded(time, num_rows, full):
    most = 4_000_000
    publisher = publisher_of(MemoryLog(lambda: TemporaryError("gone")), time, max_queued_bytes=most)
    ids = itertools.count()

    def record():
        more = {}
        if full:
            more = {
                "positions": np.arange(1, num_rows + 1, dtype=np.int32),
                "propensities": np.ones(num_rows),
            }
            more |= {"shadow_version": 3, "shadow_scores": np.full(num_rows, 0.5, np.float32)}
        return PredictionBatch(
            request_id=f"{next(ids):032d}",
            time=1000.0 + next(ids),
            model_version=1,
            dense=np.ones((num_rows, 13), np.float32),
            categorical=np.ones((num_rows, 26), np.int64),
            scores=np.full(num_rows, 0.5, np.float32),
            **more,
        )

    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        while publisher.add(record()):
            pass
        of_rows = tracemalloc.get_traced_memory()[0] - before
        num_outcomes = 0
        while publisher.add_outcome(
            Outcome(request_id=f"{next(ids):032d}", time=1000.0 + next(ids))
        ):
            num_outcomes += 1
        of_all = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * most < of_rows < 0.75 * most
    assert 0.7 * most < of_all < most
    assert num_outcomes > 2000


def test_memory_of_published_or_abandoned_records_is_freed(time, prediction):
    failures = []
    log = MemoryLog(lambda: failures[0] if failures else None)
    publisher = publisher_of(log, time, max_queued_bytes=20_000, close_seconds=5.0)

    def fill():
        taken = 0
        while publisher.add(prediction(f"{taken}"), clicks(f"{taken}", 0)):
            taken += 1
        return taken

    first = fill()
    assert first > 3
    asyncio.run(publisher.drain())
    assert fill() == first
    failures.append(TemporaryError("gone"))
    with pytest.raises(Unpublished):
        asyncio.run(publisher.drain())
    failures.clear()
    assert fill() == first


def test_conversions_are_published_even_for_requests_of_other_publishers(time, prediction):
    log = MemoryLog()
    publisher = publisher_of(log, time)
    publisher.add(prediction("r1"), clicks("r1", 0, time=1001.0))
    publisher.add_outcome(Outcome(request_id="r1", row=0, time=1001.0, event="conversion"))
    publisher.add_outcome(Outcome(request_id="another", row=2, time=1005.0, event="conversion"))
    asyncio.run(publisher.drain())
    assert set(outcomes_of(log.records())) == {
        ("click", "r1", 0, 1001.0),
        ("conversion", "r1", 0, 1001.0),
        ("conversion", "another", 2, 1005.0),
    }
    assert publisher.counts.published_outcomes == 3


@pytest.mark.parametrize(
    "features",
    [SHOP.features, Features(numeric=(), categorical=tuple(f"c{i}" for i in range(350)))],
)
def test_largest_messages_fit_log(time, features):
    log, longest = MemoryLog(), '"' * MAX_ID_CHARACTERS
    publisher = RecordPublisher(log, features=features, source="test", timing=time.timing())
    scores = np.full(publisher.max_rows, 0.5, np.float32)
    dense = np.ones((len(scores), len(features.numeric)), np.float32)
    categorical = np.full((len(scores), len(features.position_names)), 2**50)
    ranked = PredictionBatch(
        request_id=longest,
        positions=np.ones(len(scores), np.int32),
        time=1.0,
        model_version=1,
        dense=dense,
        categorical=categorical,
        scores=scores,
        shadow_version=2,
        shadow_scores=scores,
        propensities=np.ones(len(scores)),
    )
    publisher.add(ranked, [Outcome(request_id=longest, time=1.0)] * (MAX_OUTCOMES_PER_MESSAGE + 1))
    asyncio.run(publisher.drain())
    sizes = [len(payload) for _, payload in log.messages]
    assert (len(sizes), max(sizes) < MAX_MESSAGE_BYTES) == (3, True)
    assert len(scores) == 2048 or sizes[0] > 0.99 * MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"event": "purchase"}, "outcome event is 'purchase', expected one of"),
        ({"row": -1}, "outcome row is -1"),
        ({"request_id": ""}, "request_id is '', expected 1 to 128"),
        ({"request_id": "x" * 129}, "expected 1 to 128 printable"),
        (
            {"time": 1_760_000_000_000.0},
            "outcome time is 1760000000000.0, expected seconds since the epoch",
        ),
        ({"time": float("nan")}, "outcome time is nan"),
        ({"time": -1.0}, "outcome time is -1.0"),
        (
            {"time": datetime(2026, 3, 1)},
            r"outcome time is datetime.datetime\(2026, 3, 1, 0, 0\), expected .*zone",
        ),
        (
            {"time": "2026-03-01T00:00:00Z"},
            "outcome time is '2026-03-01T00:00:00Z', expected seconds since the epoch",
        ),
        ({"time": np.datetime64("NaT")}, "outcome time is .*NaT"),
        ({"time": None}, "outcome time is None"),
        ({"time": True}, "outcome time is True"),
        ({"time": 10**400}, "outcome time is 1000"),
        ({"row": 1.5}, "outcome row is 1.5, expected 0..2047"),
        ({"row": "1"}, "outcome row is '1', expected 0..2047"),
        ({"row": True}, "outcome row is True"),
        ({"row": None}, "outcome row is None"),
        ({"request_id": 7}, "request_id is 7, expected 1 to 128 printable"),
        ({"request_id": ["r1"]}, r"request_id is \['r1'\], expected 1 to 128 printable"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_outcome_that_no_reader_could_match_is_refused(time, wrong, text):
    publisher = publisher_of(MemoryLog(), time)
    with pytest.raises(ContractError, match=text):
        publisher.add_outcome(Outcome(**{"request_id": "r1", **wrong}))
    assert publisher.counts.queued_outcomes == 0


@pytest.mark.parametrize(
    "when",
    [
        datetime(1970, 1, 1, 0, 16, 40, 250_000, tzinfo=timezone.utc),
        datetime(1970, 1, 1, 5, 46, 40, 250_000, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        np.datetime64("1970-01-01T00:16:40.250"),
        np.datetime64("1970-01-01T00:16:40.250000000"),
        np.float64(1000.25),
        1000.25,
    ],
)
def test_time_of_outcome_is_same_moment_in_every_form(time, when):
    log = MemoryLog()
    publisher = publisher_of(log, time)
    publisher.add_outcome(Outcome(request_id="r1", time=when, row=np.int64(2)))
    asyncio.run(publisher.drain())
    assert outcomes_of(log.records()) == [("click", "r1", 2, 1000.25)]


class SmallLog(MemoryLog):
    """Accepts messages of limited size, like a broker whose limit was lowered."""

    def __init__(self, most: int, **how) -> None:
        super().__init__(**how)
        self.most = most

    def publish(self, messages):
        for name, payload in messages:
            if len(payload) > self.most:
                raise ContractError(
                    f"message {name} has {len(payload)} bytes, expected at most {self.most}"
                )
        super().publish(messages)


@pytest.mark.parametrize("position", [0, 3, 6])
def test_record_over_limit_of_log_is_dropped_with_message_and_next_are_sent(
    time, prediction, caplog, position
):
    log = SmallLog(3000)
    publisher = publisher_of(log, time)
    names = [f"r{i}" for i in range(7)]
    for at, name in enumerate(names):
        publisher.add(prediction(name, n=60 if at == position else 2), clicks(name, 0))
    with caplog.at_level(logging.ERROR):
        asyncio.run(publisher.flush())
    assert [r.request_id for r in log.records() if isinstance(r, PredictionBatch)] == [
        *names[:position],
        *names[position + 1 :],
    ]
    assert {name for _, name, *_ in outcomes_of(log.records())} == {*names}
    counts = publisher.counts
    assert (counts.published_rows, counts.dropped_rows, counts.queued_rows, counts.problem) == (
        12,
        60,
        0,
        None,
    )
    (message,) = caplog.messages
    assert f"60 rows of record r{position} are dropped: message r{position} has" in message
    publisher.add(prediction("later"))
    asyncio.run(publisher.drain())
    assert log.records()[-1].request_id == "later"
    assert publisher.counts.published_rows == 16


def test_outcomes_over_limit_of_log_are_sent_in_smaller_messages(time):
    log = SmallLog(400)
    publisher = publisher_of(log, time)
    for row in range(50):
        publisher.add_outcome(Outcome(request_id="r", row=row, time=1000.0))
    asyncio.run(publisher.drain())
    assert sorted(row for *_, row, _ in outcomes_of(log.records())) == list(range(50))
    assert len({name for name, _ in log.messages}) == len(log.messages) > 1
    assert (publisher.counts.published_outcomes, publisher.counts.dropped_outcomes) == (50, 0)


def test_outage_during_refusal_drops_nothing_twice(time, prediction):
    failures = [None, TemporaryError("gone"), TemporaryError("gone")]
    log = SmallLog(3000, outage=lambda: failures.pop(0) if failures else None)
    publisher = publisher_of(log, time)
    for name, n in (("a", 2), ("large", 60), ("b", 2), ("c", 2)):
        publisher.add(prediction(name, n=n), clicks("a", *range(40)) if name == "a" else ())
    asyncio.run(publisher.drain())
    assert {r.request_id for r in log.records() if isinstance(r, PredictionBatch)} == {
        "a",
        "b",
        "c",
    }
    assert len(outcomes_of(log.records())) == 40
    counts = publisher.counts
    assert (counts.published_rows, counts.dropped_rows, counts.published_outcomes) == (6, 60, 40)


def test_record_that_cannot_be_encoded_stops_no_other(time, prediction):
    log = MemoryLog()
    publisher = publisher_of(log, time)
    wide = prediction("wide")
    object.__setattr__(wide, "dense", np.zeros((4, 99), np.float32))
    for record in (prediction("a"), wide, prediction("b")):
        publisher.add(record)
    asyncio.run(publisher.drain())
    assert [record.request_id for record in log.records()] == ["a", "b"]
    assert (publisher.counts.published_rows, publisher.counts.dropped_rows) == (8, 4)


def test_closing_reports_logged_rows_and_dropped_rows(time, prediction, caplog):
    publisher = publisher_of(MemoryLog(), time, max_queued=4)
    for name in "abc":
        publisher.add(prediction(name))
    asyncio.run(publisher.drain())
    assert (
        "closed; 4 rows and 0 outcomes are in the log, 8 rows and 0 outcomes were dropped"
        in caplog.messages
    )
