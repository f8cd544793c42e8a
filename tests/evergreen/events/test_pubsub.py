"""Tests that concern only Pub/Sub: a restarted emulator, absent resources, dead letters."""

import time
import traceback
import uuid
from contextlib import suppress
from datetime import datetime, timezone

import pytest
from google.cloud.pubsub_v1.types import PubsubMessage, PullResponse, ReceivedMessage

from evergreen.events.pubsub import resources
from evergreen.events.pubsub import subscriber as subscriber_module
from evergreen.events.pubsub.resources import (
    Names,
    PubsubPublisher,
    publish_all,
    publisher_client,
    subscriber_client,
)
from evergreen.events.pubsub.subscriber import PubsubSettings, PubsubSubscriber
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from testing.processes import wait_for
from tests.support.errors import raises
from tests.support.log_benches import BENCHES, open_log, pull
from tests.support.pubsub_emulator import Emulator


@pytest.fixture
def bench(pubsub_server, tmp_path):
    bench = BENCHES["pubsub"](tmp_path, pubsub_server)
    try:
        yield bench
    finally:
        bench.close()


@pytest.fixture
def killable_server(pubsub_server, tmp_path):
    """A separate emulator that this test may kill."""
    emulator = Emulator(tmp_path)
    try:
        emulator.start()
        yield emulator
    finally:
        emulator.stop()


def test_server_that_dies_is_reported_and_ends_reconnect_when_it_is_back(killable_server, tmp_path):
    bench = BENCHES["pubsub"](tmp_path, killable_server)
    subscriber = bench.subscriber()
    publisher = PubsubPublisher(bench.names, publisher_client(seconds=1.0))
    try:
        publisher.publish([("before", b"1")])
        subscriber.acknowledge(d.token for d in pull(subscriber, count=1))
        assert subscriber.problem() is None
        killable_server.stop()
        with pytest.raises(TemporaryError, match=bench.names.topic) as raised:
            publisher.publish([("during", b"2"), ("too", b"3")])
        # All messages of one publish request share the same error. If each message raised an error
        # of its own, the traceback would have thousands of lines.
        assert len(traceback.format_exception(raised.value)) < 100
        problem = wait_for(subscriber.problem, "the problem")
        assert bench.names.subscription in problem
        assert subscriber.pull(10) == []
        mark = subscriber.read_up_to()
        bench.expire_leases()
        # The watermark does not move while no message can arrive.
        assert subscriber.read_up_to() == mark
        killable_server.start()

        def back() -> bool:
            # The server is still down, or the subscription is still absent.
            with suppress(TemporaryError, PermanentError):
                bench.create()  # the server lost all messages in the restart
                assert subscriber.pull(10) == []
            return subscriber.problem() is None

        wait_for(back, "the connection")
        publisher.publish([("during", b"2"), ("too", b"3")])
        assert {(d.message_id, d.payload) for d in pull(subscriber, count=2)} == {
            ("during", b"2"),
            ("too", b"3"),
        }
    finally:
        publisher.close()
        bench.close()


def test_ack_unconfirmed_by_frozen_server_is_error_and_reading_continues(
    killable_server, tmp_path, monkeypatch
):
    """When the server resumes, the call is either processed or dropped.

    The message is acknowledged if the server processes the call, and delivered again if not.
    """
    monkeypatch.setattr(subscriber_module, "CALL_SECONDS", 0.5)
    bench = BENCHES["pubsub"](tmp_path, killable_server)
    subscriber = bench.subscriber()
    try:
        bench.publisher().publish([("a", b"1")])
        (delivery,) = pull(subscriber, count=1)
        killable_server.freeze()
        with pytest.raises(TemporaryError, match=bench.names.subscription):
            subscriber.acknowledge([delivery.token])
        assert subscriber.pull(1) == []
        killable_server.thaw()
        bench.expire_leases()
        bench.publisher().publish([("b", b"2")])
        came: list[str] = []

        def is_received():
            for delivery in subscriber.pull(2):
                subscriber.acknowledge([delivery.token])
                came.append(delivery.message_id)
            return "b" in came

        wait_for(is_received, "the next message")
        assert set(came) <= {"a", "b"}
        assert {delivery.message_id for delivery in bench.rest(subscriber)} <= {"a"}
    finally:
        killable_server.thaw()
        bench.close()


def test_absent_topic_and_subscription_are_named(bench):
    absent = Names("evergreen-test", f"absent-{uuid.uuid4().hex[:6]}", "absent-subscription")
    publisher = PubsubPublisher(absent, publisher_client())
    with pytest.raises(PermanentError, match=absent.topic):
        publisher.publish([("a", b"1")])
    publisher.close()
    client = subscriber_client()
    with raises(ContractError, "absent-subscription", "does not exist"):
        resources.check(absent, client)
    wrong = Names("evergreen-test", "another-topic", bench.names.subscription)
    with raises(ContractError, "expected projects/evergreen-test/topics/another-topic"):
        resources.check(wrong, client)
    client.close()


def test_subscription_that_is_deleted_while_it_is_read_is_permanent_error(bench):
    subscriber = PubsubSubscriber(
        bench.names,
        PubsubSettings(lease_seconds=10.0),
        publisher=publisher_client(),
        subscriber=subscriber_client(),
    )
    bench._open.append(subscriber)
    bench.publisher().publish([("a", b"1")])
    pull(subscriber, count=1)
    client = subscriber_client()
    client.delete_subscription(subscription=bench.names.subscription_path)
    client.close()

    with pytest.raises(PermanentError, match=bench.names.subscription):
        wait_for(lambda: subscriber.pull(1), "the error")
    assert bench.names.subscription in subscriber.problem()


def test_url_opens_both_ends_and_creates_missing_resources_on_emulator(bench):
    name, options = uuid.uuid4().hex[:6], "lease_seconds=12.5&settle_seconds=0.5"
    both = open_log(f"pubsub://evergreen-test/fresh-{name}?subscription=mine-{name}&{options}")
    both.publisher.publish([("a", b"1")])
    assert [d.message_id for d in pull(both.subscriber, count=1)] == ["a"]
    both.close()


def test_dead_letters_and_foreign_messages_are_listed_as_such(bench, subscriber):
    client = publisher_client()
    publish_all(
        client,
        bench.names.dead_letters.topic_path,
        [(b"1", {"id": "m", "CloudPubSubDeadLetterSourceDeliveryCount": "100"})],
    )
    publish_all(client, bench.names.dead_letters.topic_path, [(b"2", {})])
    client.transport.close()
    letters = {k.payload: k for k in subscriber.list_dead_letters()}
    assert (letters[b"1"].message_id, letters[b"1"].reason) == (
        "m",
        "dead letter of Pub/Sub after 100 deliveries",
    )
    assert letters[b"2"].message_id.startswith("pubsub-")
    assert abs(letters[b"2"].time - time.time()) < 60


def test_id_that_no_attribute_can_hold_is_refused(bench, publisher):
    for message_id in ("", "é" * 513):
        with raises(ContractError, "1 to 1024 bytes"):
            publisher.publish([("fine", b"1"), (message_id, b"2")])
    assert bench.rest(bench.subscriber()) == []


class Slow:
    """A subscriber whose leases always expire before its next pull.

    All messages are redelivered under new ids.
    """

    def __init__(self, messages):
        self.messages, self.pulls, self.freed = messages, 0, []

    def pull(self, **_):
        self.pulls += 1
        assert self.pulls < 1_000_000, "the listing does not end"
        received = [
            ReceivedMessage(ack_id=f"{m.message_id}/{self.pulls}", message=m) for m in self.messages
        ]
        return PullResponse(received_messages=received)

    def modify_ack_deadline(self, request, **_):
        self.freed += request["ack_ids"]


def test_listing_of_dead_letters_ends_although_they_are_redelivered_meanwhile():
    now = datetime.now(timezone.utc)
    messages = [
        PubsubMessage(data=b"x", message_id=name, attributes={"id": name}, publish_time=now)
        for name in "ab"
    ]
    client = Slow(messages)
    names = Names("p", "t", "s")
    letters = subscriber_module.PubsubDeadLetters(
        names, publisher=None, subscriber=client, wait_seconds=0.1
    )
    assert {letter.message_id for letter in letters.read()} == {"a", "b"}
    assert client.freed == [f"a/{client.pulls}", f"b/{client.pulls}"]
