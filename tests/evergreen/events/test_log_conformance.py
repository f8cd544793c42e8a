"""The conformance suite of every log backend: at least once, and never dropped."""

import os
import signal
import subprocess
import sys
import time

import pytest

from evergreen.events import event_log
from evergreen.events.event_log import MAX_MESSAGE_BYTES
from evergreen.runtime.errors import ContractError
from testing.paths import REPOSITORY
from testing.processes import wait_for
from tests.support.errors import raises
from tests.support.log_benches import pull

PUBLISH_FOR_EVER = """
import sys
from evergreen.events.locations import open_publisher
log = open_publisher(sys.argv[1])
for number in range(10**6):
    names = [f"{number}-{i}" for i in range(5)]
    log.publish([(name, name.encode()) for name in names])
    print(*names, flush=True)
"""
PULL_AND_HOLD = """
import sys, time
from evergreen.events.locations import open_subscriber
log, held = open_subscriber(sys.argv[1]), []
while True:
    pulled = log.pull(4)
    log.acknowledge([d.token for d in pulled if d.message_id == "done"])
    held += [d.message_id for d in pulled]
    if "done" in held and len(held) == 4:
        print(*held, flush=True)
    time.sleep(0.01)
"""


def start(code: str, bench) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, bench.url],
        cwd=REPOSITORY,
        env={**os.environ, **bench.environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def names(deliveries) -> list[str]:
    return sorted(d.message_id for d in deliveries)


def test_published_messages_are_delivered_with_their_bytes(publisher, subscriber):
    publisher.publish([("a", b"1"), ("b", b"")])
    publisher.publish([("c", bytes(range(256)))])
    got = sorted((d.message_id, d.payload) for d in pull(subscriber, count=3))
    assert got == [("a", b"1"), ("b", b""), ("c", bytes(range(256)))]
    assert subscriber.pull(10) == []


def test_empty_log_gives_nothing_and_does_not_wait(bench, subscriber):
    started = time.monotonic()
    assert subscriber.pull(10) == []
    assert time.monotonic() - started < 5.0  # Time that a pull waits for messages.
    assert subscriber.backlog() == (0 if bench.knows_backlog else None)
    assert subscriber.list_dead_letters() == []


def test_pull_ends_with_message_that_reaches_limit_of_bytes(
    bench, publisher, subscriber, monkeypatch
):
    monkeypatch.setattr(event_log, "MAX_PULL_BYTES", 100_000)
    count = 100  # librdkafka's mock stores 5 MB
    publisher.publish([(f"{number:03d}", b"x" * 40_000) for number in range(count)])
    most = 2 + bench.handed_out_at_once
    got: list[str] = []

    def pull_some() -> bool:
        pulled = subscriber.pull(1000)
        assert len(pulled) <= most
        assert not pulled or not event_log.is_short(pulled, 1000) or len(got) + len(pulled) == count
        subscriber.acknowledge([each.token for each in pulled])
        got.extend(names(pulled))
        return len(got) >= count

    wait_for(pull_some, "all messages")
    assert sorted(got) == [f"{number:03d}" for number in range(count)]


def test_acknowledged_message_never_comes_back(bench, publisher, subscriber):
    publisher.publish([("a", b"1"), ("b", b"2")])
    subscriber.acknowledge([d.token for d in pull(subscriber, count=2) if d.message_id == "a"])
    bench.expire_leases()
    for _ in range(2):
        assert names(pull(subscriber, count=1)) == ["b"]
        bench.expire_leases()
    assert "a" not in names(bench.rest(subscriber))


def test_unacknowledged_message_is_delivered_again_with_its_bytes(bench, publisher, subscriber):
    publisher.publish([("a", b"payload")])
    (first,) = pull(subscriber, count=1)
    bench.expire_leases()
    (again,) = pull(subscriber, count=1)
    assert (again.message_id, again.payload) == ("a", b"payload")
    assert again.token != first.token


def test_late_acknowledgement_with_stale_token_is_ignored(bench, publisher, subscriber):
    publisher.publish([("a", b"1")])
    (stale,) = pull(subscriber, count=1)
    bench.expire_leases()
    (fresh,) = pull(subscriber, count=1)
    subscriber.acknowledge([stale.token])
    subscriber.dead_letter([(stale.token, "too late")])
    assert subscriber.list_dead_letters() == []
    bench.expire_leases()
    (fresh,) = pull(subscriber, count=1)
    subscriber.acknowledge([fresh.token, fresh.token])
    bench.expire_leases()
    assert bench.rest(subscriber) == []


def test_message_published_again_is_recognised_by_its_id(bench, publisher, subscriber):
    publisher.publish([("a", b"1"), ("a", b"1")])
    publisher.publish([("a", b"1"), ("b", b"2")])
    deliveries = bench.rest(subscriber)
    assert {(d.message_id, d.payload) for d in deliveries} == {("a", b"1"), ("b", b"2")}
    subscriber.acknowledge(d.token for d in deliveries)
    bench.publisher().publish([("a", b"1")])
    bench.expire_leases()
    again = names(bench.rest(subscriber))
    if bench.deduplicates:
        assert (names(deliveries), again) == (["a", "b"], [])
    else:
        assert set(again) <= {"a"}


def test_other_content_with_known_id_is_delivered_too(bench, publisher, subscriber):
    publisher.publish([("session", b"first"), ("session", b"second")])
    publisher.publish([("session", b"third"), ("session", b"first")])
    deliveries = bench.rest(subscriber)
    assert {(d.message_id, d.payload) for d in deliveries} == {
        ("session", b"first"),
        ("session", b"second"),
        ("session", b"third"),
    }
    subscriber.acknowledge(d.token for d in deliveries)
    bench.publisher().publish([("session", b"fourth")])
    deliveries = [d for d in bench.rest(subscriber) if d.payload == b"fourth"]
    assert names(deliveries)[:1] == ["session"]
    for delivery in deliveries:
        subscriber.dead_letter([(delivery.token, "its id is known")])
    publisher.publish([("session", b"fifth")])
    for delivery in pull(subscriber, count=1):
        subscriber.dead_letter([(delivery.token, "its id is known")])
    assert {letter.payload for letter in subscriber.list_dead_letters()} == {b"fourth", b"fifth"}


def test_poison_message_becomes_dead_letter_with_reason_and_is_removed(
    bench, publisher, subscriber
):
    publisher.publish([("bad", b"\x00garbage"), ("worse", b"")])
    deliveries = {d.message_id: d for d in pull(subscriber, count=2)}
    began = time.time()
    subscriber.dead_letter([(deliveries["bad"].token, "no log record")])
    subscriber.dead_letter([(deliveries["worse"].token, "empty: é" + "\n" + "x" * 3000)])
    for _ in range(2):  # a listing must not remove dead letters
        letters = subscriber.list_dead_letters()
        assert [(s.message_id, s.payload) for s in letters] == [
            ("bad", b"\x00garbage"),
            ("worse", b""),
        ]
        assert letters[0].reason == "no log record"
        assert letters[1].reason.startswith("empty: é\nxxx")
        assert [
            began - 1 <= s.time - getattr(bench, "passed", 0.0) <= time.time() + 1 for s in letters
        ] == [True, True]
    bench.expire_leases()
    assert bench.rest(subscriber) == []
    if bench.knows_backlog:
        assert subscriber.backlog() == 0


def test_replay_delivers_dead_letters_again_with_their_bytes(bench, publisher, subscriber):
    publisher.publish([("a", b"\x00"), ("b", b"")])
    for delivery in pull(subscriber, count=2):
        subscriber.dead_letter([(delivery.token, "first")])
    assert subscriber.replay_dead_letters() == 2
    assert subscriber.list_dead_letters() == []
    again = {d.message_id: d for d in pull(subscriber, count=2)}
    assert {name: d.payload for name, d in again.items()} == {"a": b"\x00", "b": b""}
    subscriber.acknowledge([again["a"].token])
    subscriber.dead_letter([(again["b"].token, "second")])
    assert [(s.message_id, s.reason) for s in subscriber.list_dead_letters()] == [("b", "second")]
    assert subscriber.replay_dead_letters() == 1
    assert subscriber.replay_dead_letters() == 0


def test_slow_reader_holds_no_more_than_its_bound_and_loses_nothing(bench, publisher):
    subscriber = bench.subscriber(most_in_hand=20)
    publisher.publish([(f"{i:03}", b"x" * 1000) for i in range(300)])
    got, most = [], 0

    def all_received():
        nonlocal most
        pulled = subscriber.pull(7)
        most = max(most, len(pulled) + len(getattr(subscriber, "_queue", ())))
        subscriber.acknowledge(d.token for d in pulled)
        got.extend(pulled)
        return len(got) >= 300

    wait_for(all_received, "300 messages")
    assert names(got) == [f"{i:03}" for i in range(300)]
    assert most <= 20


def test_messages_survive_readers_closing_and_reopening(bench, publisher, subscriber):
    publisher.publish([("a", b"1"), ("b", b"2"), ("c", b"3")])
    pulled = {d.message_id: d for d in pull(subscriber, count=3)}
    subscriber.acknowledge([pulled["a"].token])
    subscriber.dead_letter([(pulled["b"].token, "reason")])
    subscriber.close()
    reopened = bench.subscriber()
    bench.expire_leases()
    assert names(pull(reopened, count=1)) == ["c"]
    assert names(reopened.list_dead_letters()) == ["b"]


def test_message_acknowledged_to_killed_publisher_is_delivered(bench, subscriber):
    process = start(PUBLISH_FOR_EVER, bench)
    try:
        acknowledged = [name for _ in range(20) for name in process.stdout.readline().split()]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(120)
        # Add the acknowledged messages that the process printed between the last read line and the
        # kill.
        acknowledged += [
            name
            for line in process.stdout.read().splitlines(keepends=True)
            if line[-1] == "\n"
            for name in line.split()
        ]
        process.stdout.close()
    missing = {name: name.encode() for name in acknowledged}
    assert len(missing) >= 100

    def all_received():
        pulled = subscriber.pull(1000)
        subscriber.acknowledge(d.token for d in pulled)
        for delivery in pulled:
            assert missing.pop(delivery.message_id, delivery.payload) == delivery.payload
        return not missing

    wait_for(all_received, "every message whose publication was confirmed")


def test_next_reader_gets_unacknowledged_messages_of_killed_reader(bench, publisher):
    publisher.publish([("a", b"1"), ("b", b"2"), ("c", b"3"), ("done", b"4")])
    process = start(PULL_AND_HOLD, bench)
    try:
        assert sorted(process.stdout.readline().split()) == ["a", "b", "c", "done"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(120)
        process.stdout.close()
    bench.expire_leases()
    got = pull(bench.subscriber(), count=3)
    assert [(d.message_id, d.payload) for d in sorted(got)] == [
        ("a", b"1"),
        ("b", b"2"),
        ("c", b"3"),
    ]


def test_backlog_counts_what_is_neither_acknowledged_nor_dead_lettered(
    bench, publisher, subscriber
):
    if not bench.knows_backlog:
        pytest.skip("the backend does not report its backlog")
    publisher.publish([(str(i), b"x") for i in range(4)])
    assert subscriber.backlog() == 4
    a, b, _, _ = pull(subscriber, count=4)
    assert subscriber.backlog() == 4
    subscriber.acknowledge([a.token])
    subscriber.dead_letter([(b.token, "bad")])
    assert subscriber.backlog() == 2


def test_oversize_message_is_refused_before_anything_of_its_batch_is_sent(
    bench, publisher, subscriber
):
    with raises(ContractError, "big", f"{MAX_MESSAGE_BYTES + 1} bytes", "at most"):
        publisher.publish([("small", b"x"), ("big", b"x" * (MAX_MESSAGE_BYTES + 1))])
    assert bench.rest(subscriber) == []
    publisher.publish([("largest", b"x" * MAX_MESSAGE_BYTES)])
    assert len(pull(subscriber, count=1)[0].payload) == MAX_MESSAGE_BYTES


def test_connected_log_has_no_problem_and_is_current_once_it_is_empty(bench, publisher, subscriber):
    publisher.publish([("a", b"1")])
    subscriber.acknowledge(d.token for d in pull(subscriber, count=1))
    bench.expire_leases()  # an earlier subscriber may still have leases
    before = time.time()

    def is_read():
        subscriber.pull(10)
        return (subscriber.read_up_to() or 0.0) >= before

    wait_for(is_read, "the mark")
    assert subscriber.read_up_to() <= time.time() + getattr(bench, "passed", 0.0)
    wait_for(lambda: subscriber.problem() is None, "the connection")


def test_watermark_does_not_move_while_pulled_message_is_unacknowledged(
    bench, publisher, subscriber
):
    bench.rest(subscriber)
    bench.expire_leases()
    published_after = time.time() + getattr(bench, "passed", 0.0)
    publisher.publish([("a", b"1")])
    (held,) = pull(subscriber, count=1)
    for _ in range(50):
        assert subscriber.pull(10) == []
        assert (subscriber.read_up_to() or 0.0) <= max(published_after, time.time())
    marks = {subscriber.read_up_to() for _ in range(2)}
    assert len(marks) == 1
    subscriber.acknowledge([held.token])
    after = time.time()
    wait_for(
        lambda: (subscriber.pull(10), (subscriber.read_up_to() or 0.0) >= after)[1], "the mark"
    )
