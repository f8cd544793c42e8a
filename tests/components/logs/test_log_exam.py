"""The exam that every log backend takes: at least once, kept until acknowledged, set aside but never dropped.

A backend enters by a `Bench` in `BENCHES`: how to open both ends and how its time passes. A backend whose leases run
on a server's clock (Pub/Sub, Kafka) waits in `expire_leases`; SQLite moves an injected clock.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from components.contracts.errors import ContractError
from components.contracts.event_log import MAX_MESSAGE_BYTES, Publisher, Subscriber
from components.logs.sqlite import SqliteLog

LEASE_SECONDS = 30.0

PUBLISH_ELSEWHERE = """
import sys
from components.logs.sqlite import SqliteLog
log = SqliteLog(sys.argv[1])
log.publish([(f"far-{i}", str(i).encode()) for i in range(5)])
log.close()
"""


class SqliteBench:
    """Opens ends of one log file, all on one hand-moved clock."""

    def __init__(self, folder) -> None:
        self.path, self.now, self._open = folder / "log with space.sqlite", 1000.0, []

    def _end(self) -> SqliteLog:
        log = SqliteLog(self.path, lease_seconds=LEASE_SECONDS, clock=lambda: self.now)
        self._open.append(log)
        return log

    def publisher(self) -> Publisher:
        return self._end()

    def subscriber(self) -> Subscriber:
        return self._end()

    def expire_leases(self) -> None:
        self.now += LEASE_SECONDS

    def publish_from_another_process(self) -> None:
        subprocess.run([sys.executable, "-c", PUBLISH_ELSEWHERE, str(self.path)], check=True, timeout=60)

    def close(self) -> None:
        for log in self._open:
            log.close()


BENCHES: dict[str, Callable] = {"sqlite": SqliteBench}


@pytest.fixture(params=BENCHES, ids=str)
def bench(request, tmp_path) -> Iterator:
    bench = BENCHES[request.param](tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def publisher(bench):
    return bench.publisher()


@pytest.fixture
def subscriber(bench):
    return bench.subscriber()


def names(deliveries):
    return [d.message_id for d in deliveries]


def test_published_messages_are_delivered_once_each_oldest_first(publisher, subscriber):
    publisher.publish([("a", b"1"), ("b", b"")])
    publisher.publish([("c", bytes(range(256)))])
    got = subscriber.pull(10)
    assert [(d.message_id, d.payload, d.attempt) for d in got] == [
        ("a", b"1", 1),
        ("b", b"", 1),
        ("c", bytes(range(256)), 1),
    ]
    assert subscriber.pull(10) == []


def test_pull_returns_at_most_what_was_asked(publisher, subscriber):
    publisher.publish([(str(i), b"x") for i in range(5)])
    assert names(subscriber.pull(2)) == ["0", "1"]
    assert names(subscriber.pull(2)) == ["2", "3"]


def test_empty_log_gives_nothing_and_does_not_wait(subscriber):
    assert subscriber.pull(10) == []
    assert subscriber.backlog() == 0
    assert subscriber.list_set_aside() == []


def test_acknowledged_message_never_comes_back(bench, publisher, subscriber):
    publisher.publish([("a", b"1"), ("b", b"2")])
    first, _ = subscriber.pull(10)
    subscriber.acknowledge([first.token])
    bench.expire_leases()
    assert names(subscriber.pull(10)) == ["b"]


def test_message_whose_lease_ran_out_is_delivered_again_with_its_bytes(bench, publisher, subscriber):
    publisher.publish([("a", b"payload")])
    (first,) = subscriber.pull(10)
    bench.expire_leases()
    (again,) = subscriber.pull(10)
    assert (again.message_id, again.payload, again.attempt) == ("a", b"payload", 2)
    assert again.token != first.token


def test_late_acknowledgement_with_a_stale_token_is_ignored(bench, publisher, subscriber):
    publisher.publish([("a", b"1")])
    (stale,) = subscriber.pull(10)
    bench.expire_leases()
    (fresh,) = subscriber.pull(10)
    subscriber.acknowledge([stale.token])
    subscriber.set_aside(stale.token, "too late")
    assert subscriber.backlog() == 1
    assert subscriber.list_set_aside() == []
    subscriber.acknowledge([fresh.token, fresh.token])
    assert subscriber.backlog() == 0


def test_message_published_again_is_not_stored_again(bench, publisher, subscriber):
    publisher.publish([("a", b"1"), ("a", b"1")])
    publisher.publish([("a", b"1"), ("b", b"2")])
    deliveries = subscriber.pull(10)
    assert names(deliveries) == ["a", "b"]
    subscriber.acknowledge(d.token for d in deliveries)
    bench.publisher().publish([("a", b"1")])
    bench.expire_leases()
    assert subscriber.pull(10) == []


def test_set_aside_keeps_bytes_and_reason_and_ends_delivery(bench, publisher, subscriber):
    publisher.publish([("bad", b"\x00garbage"), ("worse", b"")])
    bad, worse = subscriber.pull(10)
    subscriber.set_aside(bad.token, "no log record")
    subscriber.set_aside(worse.token, "empty")
    kept = bench.subscriber().list_set_aside()
    assert [(s.message_id, s.payload, s.reason) for s in kept] == [
        ("bad", b"\x00garbage", "no log record"),
        ("worse", b"", "empty"),
    ]
    bench.expire_leases()
    assert subscriber.pull(10) == []
    assert subscriber.backlog() == 0


def test_two_subscribers_never_hold_a_lease_on_the_same_message(bench, publisher):
    publisher.publish([(str(i), b"x") for i in range(50)])
    one, two = bench.subscriber(), bench.subscriber()
    pulled = []
    while batch := names(one.pull(3)) + names(two.pull(4)):
        pulled += batch
    assert sorted(pulled, key=int) == [str(i) for i in range(50)]


def test_messages_survive_closing_and_reopening(bench, publisher, subscriber):
    publisher.publish([("a", b"1"), ("b", b"2"), ("c", b"3")])
    a, b, _ = subscriber.pull(10)
    subscriber.acknowledge([a.token])
    subscriber.set_aside(b.token, "reason")
    bench.close()
    reopened = bench.subscriber()
    assert (reopened.backlog(), names(reopened.list_set_aside())) == (1, ["b"])
    bench.expire_leases()
    assert names(reopened.pull(10)) == ["c"]


def test_messages_of_another_process_arrive(bench, subscriber):
    bench.publish_from_another_process()
    assert [(d.message_id, d.payload) for d in subscriber.pull(10)] == [(f"far-{i}", b"%d" % i) for i in range(5)]


def test_backlog_counts_what_is_neither_acknowledged_nor_set_aside(publisher, subscriber):
    publisher.publish([(str(i), b"x") for i in range(4)])
    assert subscriber.backlog() == 4
    a, b, _, _ = subscriber.pull(4)
    assert subscriber.backlog() == 4
    subscriber.acknowledge([a.token])
    subscriber.set_aside(b.token, "bad")
    assert subscriber.backlog() == 2


def test_oversize_message_is_refused_and_none_of_its_batch_is_stored(publisher, subscriber):
    with pytest.raises(ContractError, match=f"big has {MAX_MESSAGE_BYTES + 1} bytes, expected at most"):
        publisher.publish([("small", b"x"), ("big", b"x" * (MAX_MESSAGE_BYTES + 1))])
    assert subscriber.backlog() == 0
    publisher.publish([("largest", b"x" * MAX_MESSAGE_BYTES)])
    assert len(subscriber.pull(1)[0].payload) == MAX_MESSAGE_BYTES
