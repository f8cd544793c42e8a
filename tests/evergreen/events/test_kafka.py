"""Tests that concern only Kafka: offsets per partition, changing readers and stopped brokers."""

import dataclasses
import itertools
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from evergreen.events.event_log import MAX_MESSAGE_BYTES
from evergreen.events.kafka import offsets
from evergreen.events.kafka.location import KafkaLocation, sorted_error
from evergreen.events.kafka.offsets import PartitionProgress
from evergreen.events.kafka.publisher import KafkaPublisher
from evergreen.events.kafka.subscriber import KafkaSubscriber
from evergreen.events.urls import LogUrl
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from testing.paths import REPOSITORY
from testing.processes import freeze_group, wait_for
from tests.support.errors import raises
from tests.support.kafka_cluster import KafkaCluster
from tests.support.log_benches import pull

names = itertools.count()


@pytest.fixture
def cluster(kafka_server):
    return kafka_server


class TopicClients:
    """Publishers and readers of one new topic, closed after the test."""

    def __init__(self, cluster: KafkaCluster, partitions: int) -> None:
        self.cluster, self.now, self._open = cluster, 1_000_000.0, []
        topic = f"clicks-{next(names)}"
        cluster.create_topic(topic, partitions=partitions)
        cluster.create_topic(f"{topic}.dead-letters", partitions=partitions)
        self.location = KafkaLocation(
            brokers=cluster.brokers, topic=topic, group=topic, lease_seconds=2.0
        )

    def publisher(self, **changes: object) -> KafkaPublisher:
        return self._closed_later(KafkaPublisher(dataclasses.replace(self.location, **changes)))

    def reader(self) -> KafkaSubscriber:
        return self._closed_later(KafkaSubscriber(self.location, clock=lambda: self.now))

    def close(self) -> None:
        for end in self._open:
            end.close()

    def _closed_later(self, end):
        self._open.append(end)
        return end


@pytest.fixture
def ends(cluster):
    ends = TopicClients(cluster, partitions=1)
    yield ends
    ends.close()


@pytest.fixture
def wide(cluster):
    ends = TopicClients(cluster, partitions=4)
    yield ends
    ends.close()


def until(condition):
    return wait_for(condition, "the condition")


def batch(count: int, begin: int = 0):
    return [(str(i), b"%d" % i) for i in range(begin, begin + count)]


# -- one offset for each partition


@given(st.permutations(list(range(8))), st.integers(0, 8))
def test_committed_offset_is_first_unacknowledged_in_any_order(order, count):
    progress: PartitionProgress[str] = PartitionProgress(1)
    for offset in range(8):
        progress.take(10 + offset, "m", until=1.0)
    for offset in order[:count]:
        progress.end(10 + offset, 1)
    open_ = set(order[count:])
    assert progress.offset_to_commit() == 10 + (min(open_) if open_ else 8)
    assert progress.unfinished(0, 18) == len(open_)


def test_lease_taken_before_clock_was_set_back_is_over():
    progress: PartitionProgress[str] = PartitionProgress(1)
    progress.take(5, "m", until=86_445.0)
    assert progress.take_expired(0.0, 10, until=45.0) == [5]
    assert progress.take_expired(1.0, 10, until=46.0) == []


# -- readers that join and leave


def test_partitions_move_to_second_reader_and_old_tokens_of_them_are_void(wide):
    wide.publisher().publish(batch(40))
    one = wide.reader()
    first = pull(one, count=40)
    two = wide.reader()
    read, again = set(), set()

    def are_shared():
        again.update(one.pull(100))
        read.update(two.pull(100))
        return read and two.backlog() == 40

    def only_what_moved_is_open():
        # On a busy machine, Kafka may reassign partitions once more, even to the first reader. The
        # first reader then gets the messages of the reassigned partitions again.
        again.update(one.pull(100))
        read.update(two.pull(100))
        return one.backlog() == len({d.message_id for d in read | again})

    until(are_shared)
    assert len({d.message_id for d in read}) < 40
    # Some of the acknowledged messages belong to partitions that are now assigned to the second
    # reader.
    one.acknowledge([d.token for d in first])
    until(only_what_moved_is_open)
    two.acknowledge([d.token for d in read])

    def all_ended():
        for reader in (one, two):
            reader.acknowledge([d.token for d in reader.pull(100)])
        return one.backlog() == 0

    until(all_ended)


def test_watermark_waits_for_messages_of_another_reader(wide):
    wide.publisher().publish(batch(8))
    one, two = wide.reader(), wide.reader()
    assert one.read_up_to() is None
    held: list = []
    until(
        lambda: (
            held.extend(one.pull(8))
            or held.extend(two.pull(8))
            or len({d.message_id for d in held}) == 8
        )
    )
    assert two.read_up_to() is None
    until(lambda: _acknowledge_all(one, two, held) or two.read_up_to() == wide.now)


def _acknowledge_all(one, two, held):
    for reader in (one, two):
        held += reader.pull(8)
        reader.acknowledge([d.token for d in held])


def test_reader_that_acknowledges_nothing_holds_bounded_number_of_bytes(ends, monkeypatch):
    monkeypatch.setattr("evergreen.events.kafka.subscriber._MAX_HELD_BYTES", 2500)
    ends.publisher().publish([(str(i), b"x" * 1000) for i in range(10)])
    reader = ends.reader()
    held = []
    until(lambda: held.extend(reader.pull(1)) or len(held) == 3)
    assert reader.pull(1) == []
    reader.acknowledge([held[0].token])
    assert [d.message_id for d in pull(reader, count=1)] == ["3"]


CLOSE_WHILE_JOINING = """
import time
from evergreen.events.kafka.location import KafkaLocation
from evergreen.events.kafka.subscriber import KafkaSubscriber
from tests.support.kafka_cluster import KafkaCluster

with KafkaCluster() as cluster:
    for number in range(20):
        topic = f"clicks-{number}"
        cluster.create_topic(topic)
        reader = KafkaSubscriber(KafkaLocation(brokers=cluster.brokers, topic=topic, group=topic))
        reader.pull(1)
        time.sleep(0.01 * number)
        reader.close()
"""


def test_reader_closes_at_any_stage_of_joining_its_group():
    """The reader runs in its own process, because a deadlock would block the interpreter's lock."""
    subprocess.run(
        [sys.executable, "-c", CLOSE_WHILE_JOINING], cwd=REPOSITORY, check=True, timeout=120
    )


# -- brokers that stop and return


def test_absent_broker_is_temporary_problem_and_loses_nothing(ends, caplog):
    publisher, reader = ends.publisher(delivery_seconds=2.0), ends.reader()
    until(lambda: _published(publisher, batch(3)))
    held = pull(reader, count=3)
    assert reader.problem() is None
    mark = reader.read_up_to()
    ends.cluster.stop_brokers()
    try:
        until(lambda: reader.pull(10) == [] and reader.backlog() is None)
        assert ends.location.brokers in reader.problem()
        reader.acknowledge([d.token for d in held[:2]])
        ends.now += 100
        assert reader.read_up_to() == mark
        with raises(TemporaryError, "1 messages"):
            publisher.publish([("late", b"late")])
    finally:
        ends.cluster.start_brokers()
    until(lambda: reader.backlog() is not None)
    assert reader.problem() is None
    until(lambda: _published(publisher, [("late", b"late")]))
    # If the broker was stopped for longer than the lease, unacknowledged messages are delivered
    # again.
    got = {}
    until(lambda: got.update({d.message_id: d for d in reader.pull(10)}) or "late" in got)
    reader.acknowledge([d.token for d in (*held, *got.values())])
    until(lambda: reader.acknowledge([d.token for d in reader.pull(10)]) or reader.backlog() == 0)
    assert reader.read_up_to() == ends.now
    assert not [line for line in caplog.records if "Connect to" in line.getMessage()]


def _published(publisher, messages):
    try:
        publisher.publish(messages)
    except TemporaryError:
        return False
    return True


def test_absent_topic_is_problem_until_it_exists(cluster):
    topic = f"clicks-{next(names)}"
    cluster.refuse_topic(topic, KafkaError.UNKNOWN_TOPIC_OR_PART)
    reader = KafkaSubscriber(KafkaLocation(brokers=cluster.brokers, topic=topic))
    try:
        reader.read_up_to()
        assert f"topic {topic} does not exist" in reader.problem()
        cluster.refuse_topic(topic, 0)
        until(lambda: reader.read_up_to() is not None)
        until(lambda: reader.pull(1) == [] and reader.problem() is None)
    finally:
        reader.close()


@pytest.fixture
def frozen_cluster(tmp_path):
    """A Kafka cluster in a process that can be stopped, and the URL of one of its topics."""
    address = tmp_path / "brokers"
    command = [
        sys.executable,
        "-m",
        "demo.kafka_cluster",
        "--address",
        str(address),
        "--topic",
        "clicks",
    ]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until(address.exists)
        yield (
            process,
            KafkaLocation(
                brokers=address.read_text().strip(), topic="clicks", delivery_seconds=5.0
            ),
        )
    finally:
        # librdkafka may wait forever if a mock cluster ends after its clients were abandoned.
        process.kill()
        process.wait(120)


def test_hanging_broker_is_problem_too_and_blocks_no_caller_for_long(frozen_cluster):
    process, location = frozen_cluster
    with (
        closing(KafkaPublisher(location)) as publisher,
        closing(KafkaSubscriber(location)) as reader,
    ):
        publisher.publish(batch(1))
        reader.acknowledge([d.token for d in pull(reader, count=1)])
        until(lambda: reader.backlog() == 0)
        freeze_group(process.pid)
        until(lambda: reader.backlog() is None)
        assert "Timed out" in reader.problem()
        assert reader.pull(5) == []
        process.send_signal(signal.SIGCONT)
        until(lambda: reader.backlog() == 0)
        assert reader.problem() is None


@pytest.mark.slow
def test_reader_beside_hanging_broker_closes_within_its_bound(frozen_cluster, monkeypatch):
    """The close of librdkafka waits forever while a commit has no answer.

    The test is marked slow because the abandoned client stays in the process until its end.
    """
    process, location = frozen_cluster
    monkeypatch.setattr(offsets, "_CLOSE_SECONDS", 2.0)
    reader = KafkaSubscriber(location)
    with closing(KafkaPublisher(location)) as publisher:
        publisher.publish(batch(1))
        held = pull(reader, count=1)
        freeze_group(process.pid)
        reader.acknowledge([d.token for d in held])
        began = time.monotonic()
        reader.close()
        assert time.monotonic() - began < 30.0
        process.send_signal(signal.SIGCONT)


# -- dead letters


@pytest.mark.timeout(30)
def test_reader_of_dead_letters_has_no_group_to_leave_and_closes_at_once(ends, monkeypatch):
    monkeypatch.setattr(offsets, "_CLOSE_SECONDS", 300)
    assert ends.reader().list_dead_letters() == []


def test_message_dead_lettered_twice_by_crash_is_listed_once(ends):
    ends.publisher().publish([("a", b"1"), ("a", b"another of this key")])
    reader = ends.reader()
    delivery, other = pull(reader, count=2)
    # Simulate a crash after a dead letter was stored and before its message was acknowledged. The
    # reader after the crash stores the dead letter a second time.
    reader._dead_letters.keep([(delivery.message_id, delivery.payload, "before the crash")])
    reader.dead_letter([(delivery.token, "after it")])
    reader.dead_letter([(other.token, "bad too")])
    assert [s.reason for s in reader.list_dead_letters()] == ["before the crash", "bad too"]
    assert reader.replay_dead_letters() == 2
    assert reader.list_dead_letters() == []
    assert {d.payload for d in pull(reader, count=2)} == {b"1", b"another of this key"}


def test_message_stays_unacknowledged_where_it_cannot_be_dead_lettered(ends):
    ends.publisher().publish(batch(1))
    reader = ends.reader()
    (delivery,) = pull(reader, count=1)
    ends.cluster.refuse_topic(
        ends.location.dead_letter_topic, KafkaError.TOPIC_AUTHORIZATION_FAILED
    )
    try:
        with pytest.raises((PermanentError, TemporaryError)):
            reader.dead_letter([(delivery.token, "bad")])
    finally:
        ends.cluster.refuse_topic(ends.location.dead_letter_topic, 0)
    assert reader.backlog() == 1


# -- names and settings


def test_message_without_key_is_named_by_its_position(ends):
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": ends.location.brokers})
    producer.produce(ends.location.topic, b"keyless")
    producer.produce(ends.location.topic, None, key=b"\xff")
    assert producer.flush(10) == 0
    deliveries = pull(ends.reader(), count=2)
    assert [(d.message_id, d.payload) for d in deliveries] == [
        (f"{ends.location.topic}/0/0", b"keyless"),
        ("\\xff", b""),
    ]


def test_largest_message_with_long_name_and_reason_can_be_dead_lettered(ends):
    ends.publisher().publish([("n" * 500, b"x" * MAX_MESSAGE_BYTES)])
    reader = ends.reader()
    (delivery,) = pull(reader, count=1)
    reader.dead_letter([(delivery.token, "é" * 100_000)])
    (letter,) = reader.list_dead_letters()
    assert len(letter.payload) == MAX_MESSAGE_BYTES
    assert letter.reason.startswith("éé")


def test_messages_too_large_for_broker_are_dead_lettered_by_their_start(ends):
    from confluent_kafka import Producer

    producer = Producer(
        {"bootstrap.servers": ends.location.brokers, "message.max.bytes": 10_000_000}
    )
    producer.produce(ends.location.topic, bytes(range(256)) * 12_000, key=b"k" * 100_000)
    assert producer.flush(10) == 0
    reader = ends.reader()
    (delivery,) = pull(reader, count=1)
    reader.dead_letter([(delivery.token, "request_id is too long")])
    (letter,) = reader.list_dead_letters()
    assert letter.payload == (bytes(range(256)) * 12_000)[:MAX_MESSAGE_BYTES]
    assert letter.message_id == "k" * 1024
    assert (
        letter.reason
        == "request_id is too long (only the first 1000000 of 3072000 bytes are stored)"
    )
    assert reader.backlog() == 0


def test_kafka_url_is_read_with_its_options_and_settings_file(tmp_path):
    (tmp_path / "kafka.conf").write_text(
        "# mine\nsecurity.protocol = SASL_SSL\nsasl.password=a=b\n\n"
    )
    url = f"kafka://a:9092,b:9093/clicks.v1?group=g&lease_seconds=6&config={tmp_path}/kafka.conf"
    location = KafkaLocation.parse(LogUrl.parse(url))
    assert (location.brokers, location.topic, location.dead_letter_topic, location.group) == (
        "a:9092,b:9093",
        "clicks.v1",
        "clicks.v1.dead-letters",
        "g",
    )
    assert location.lease_seconds == 6.0
    settings = location.client(acks="all", enable_idempotence=True)
    assert settings["security.protocol"] == "SASL_SSL"
    assert settings["sasl.password"] == "a=b"
    assert settings["acks"] == "all"
    assert KafkaLocation.parse(LogUrl.parse("kafka://a:1/clicks")).group == "evergreen-monitor"


def test_setting_unknown_to_librdkafka_is_refused_by_name(tmp_path, cluster):
    (tmp_path / "kafka.conf").write_text("no.such.setting=1\n")
    url = LogUrl.parse(f"kafka://{cluster.brokers}/clicks?config={tmp_path}/kafka.conf")
    with raises(ContractError, "no.such.setting"):
        KafkaSubscriber(KafkaLocation.parse(url))
    with raises(ContractError, "no.such.setting"):
        KafkaPublisher(KafkaLocation.parse(url)).publish([("a", b"1")])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._ALL_BROKERS_DOWN, TemporaryError),
        (KafkaError.LEADER_NOT_AVAILABLE, TemporaryError),
        (KafkaError.MSG_SIZE_TOO_LARGE, ContractError),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, PermanentError),
    ],
)
def test_errors_are_sorted_by_what_caller_must_do(code, kind):
    found = sorted_error(KafkaError(code), "publishing")
    assert type(found) is kind
    assert str(found).startswith("publishing: ")
