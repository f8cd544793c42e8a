"""Tests of notifications about a monitor's incidents over real HTTP."""

import logging

import pytest

from evergreen.notifications.webhook import Answer, compose, post_to_file
from evergreen.runtime.errors import ContractError
from monitoring.journal import Event
from monitoring.retraining import notifications
from monitoring.retraining.notifications import NotificationSettings, Notifier, Outbox
from testing.processes import wait_for
from testing.recommenders import SHOP
from tests.support.clocks import Clock
from tests.support.errors import raises
from tests.support.monitors import DRIFT, START
from tests.support.stored_documents import StoredDocuments
from tests.support.webhook_server import SECRET, WebhookServer


@pytest.fixture
def server():
    made = WebhookServer()
    yield made
    made.close()


@pytest.fixture
def webhook_file(server, tmp_path):
    path = tmp_path / "webhook address"
    path.write_text(server.url + "\n")
    return path


def texts(server):
    """Return the first line of each message, without the recommender's name before the colon."""
    lines = [message["text"].split("\n")[0].partition(": ") for message in server.messages]
    assert {recommender for recommender, _, _ in lines} == {SHOP.name}
    return [text for _, _, text in lines]


def turn(monitor, until, *, what="the messages"):
    """Let the loop poll until the messages are delivered. The monitor's clock stands still."""

    def look():
        monitor.actions.notifier.step(monitor._clock())
        return until()

    wait_for(look, what)


@pytest.fixture
def notified(bench, server, webhook_file):
    def make(**changes):
        return bench(**{**DRIFT, "webhook_file": str(webhook_file), **changes})

    return make


def test_drift_is_reported_once_with_size_start_action_and_link(notified, server):
    b = notified(status_url="https://monitor.example/page")
    monitor = b.start()
    for i in range(5):
        b.evaluate(f"bad{i}", auc="bad")
    b.trigger.end("released", version=2)
    monitor.tick()
    b.evaluate("v2", auc="good", version=2)
    turn(monitor, lambda: len(monitor.actions.notifier.outbox) == 0)
    titles = [text.split(":")[0] for text in texts(server)]
    assert titles == [
        "Drift confirmed",
        "Retraining requested",
        "A new version was released",
        "Recovered",
    ]
    first = server.messages[0]
    assert "AUC 0.497" in first["text"]
    assert "threshold 0.740, rows 400, clicks 200" in first["text"]
    assert "Since: 2025-11-13 02:14:20 UTC" in first["text"]
    assert first["text"].endswith("https://monitor.example/page")
    assert "Done: a run was started" in server.messages[1]["text"]
    assert f"Run: {b.trigger.requests[0].request_id}" in server.messages[1]["text"]
    assert b.store.counters["notification_delivered"] == 4


def test_run_that_ends_after_drift_is_reported_and_opens_no_incident():
    clock, documents = Clock(START), StoredDocuments()
    notifier = Notifier(
        documents,
        Outbox(documents, lambda body: Answer("delivered")),
        NotificationSettings(),
        recommender="shop",
        clock=clock,
    )
    for kind, details in (
        ("decision", {}),
        ("requested", {"request_id": "r"}),
        ("recovered", {}),
        ("run_ended", {"outcome": "released", "request_id": "r"}),
    ):
        notifier.on_event(
            Event(time=clock.now, kind=kind, text="as the test says", details=details)
        )
    assert len(notifier.outbox) == 4
    assert notifier.open == {}  # an open incident would be repeated in every notification


def test_incident_without_end_is_not_remembered_forever(notified):
    """The monitor was killed after it sent the event, and before it stored the open incident."""
    b = notified(cooldown_seconds=1e6)
    monitor = b.start()
    b.evaluate("bad", auc="bad")
    b.trigger.end("released", version=2)
    monitor.tick()
    assert list(monitor.actions.notifier.open) == ["drift"]
    b.store.write_documents({"reported": {"action": ""}})
    assert b.start().actions.notifier.open == {}


def test_restart_neither_forgets_nor_repeats(notified, server):
    b = notified()
    server.answers = [(503, {})] * 3
    monitor = b.start()
    b.evaluate("bad", auc="bad")
    waiting = len(monitor.actions.notifier.outbox)
    assert waiting == 2
    wait_for(lambda: server.num_requests, "the first try")
    for number in range(3):  # the monitor restarts while the webhook is unreachable
        monitor = b.start()
        b.evaluate(f"bad{number}", auc="bad")

    def through():
        b.clock.now += 10.0
        monitor.actions.notifier.step(b.clock.now)
        return not len(monitor.actions.notifier.outbox)

    wait_for(through, "the messages")
    titles = [text.split(":")[0] for text in texts(server)]
    assert list(dict.fromkeys(titles)) == ["Drift confirmed", "Retraining requested"]


def test_dead_log_is_reported_after_minute_and_so_is_its_return(notified, server):
    b = notified()
    monitor = b.start()
    for _ in range(10):
        monitor.actions.step(b.clock.now, log_problem="broker 127.0.0.1:9092 does not answer")
        b.clock.now += 10.0
    for _ in range(3):
        monitor.actions.step(b.clock.now, log_problem=None)
    turn(monitor, lambda: not len(monitor.actions.notifier.outbox))
    expected = [
        "The record log cannot be reached: broker 127.0.0.1:9092 does not answer",
        "The record log can be reached",
    ]
    assert [text[: len(want)] for text, want in zip(texts(server), expected)] == expected
    assert len(texts(server)) == 2


def test_dead_log_is_reported_although_clock_was_set_back(notified):
    b = notified()
    acting = b.start().actions
    acting.step(b.clock.now, log_problem="away")
    acting.step(b.clock.now - 3600.0, log_problem="away")
    assert list(acting.notifier.open) == ["log"]


def test_growing_number_of_dead_letters_is_reported_once_and_remembered(notified, server):
    b = notified(remind_seconds=1000.0)
    monitor = b.start()
    for number in range(3):
        b.log.publish([(f"poison-{number}", b"no record")])
        monitor.tick()
        b.clock.now += 300.0
    b.tick(at=b.clock.now + 1000.0)
    b.clock.now += 1000.0
    monitor.tick()  # No event follows, so the incident ends without a message.
    turn(monitor, lambda: not len(monitor.actions.notifier.outbox))
    assert [text.split(":")[0] for text in texts(server)] == ["Messages could not be used", "Still"]
    assert "messages 3" in server.messages[1]["text"]
    assert monitor.actions.notifier.open == {}


# -- outbox with a clock that the test advances


def deliver(outbox, clock, server, *, until, seconds=1.0):
    def look():
        clock.now += seconds
        outbox.step(clock.now)
        return until()

    wait_for(look, "the outbox")


@pytest.fixture
def outbox(server, webhook_file):
    return lambda documents: Outbox(
        documents, lambda body: post_to_file(webhook_file, body, timeout_seconds=60.0)
    )


def test_failures_are_retried_in_order_and_respect_retry_after(server, outbox):
    clock, documents = Clock(START), StoredDocuments()
    server.answers = [(500, {}), (429, {"Retry-After": "120"}), (503, {"Retry-After": "soon"})]
    box, tries = outbox(documents), []
    for number in range(3):
        box.put({"text": str(number)}, now=clock.now)

    def until():
        if len(tries) < server.num_requests:
            tries.append(clock.now)
        return not len(box)

    deliver(box, clock, server, until=until)
    assert [message["text"] for message in server.messages] == ["0", "1", "2"]
    pauses = [later - earlier for earlier, later in zip(tries, tries[1:])]
    assert pauses[1] >= 120.0
    assert pauses[0] >= 2.0
    assert documents.counts == {"notification_delivered": 3}


def test_message_that_server_refuses_is_dropped_and_next_is_sent(server, outbox):
    clock, documents = Clock(START), StoredDocuments()
    server.answers = [(404, {}), (302, {"Location": "http://127.0.0.1:1/"})]
    box = outbox(documents)
    for number in range(3):
        box.put({"text": str(number)}, now=clock.now)
    deliver(box, clock, server, until=lambda: not len(box))
    assert [message["text"] for message in server.messages] == ["2"]
    assert documents.counts == {"notification_delivered": 1, "notification_dropped": 2}


def test_outbox_is_bounded_newest_stay_and_drop_is_counted(server, outbox, monkeypatch):
    monkeypatch.setattr(notifications, "_MAX_WAITING", 3)
    clock, documents = Clock(START), StoredDocuments()
    server.answers = [(503, {})] * 1000
    box = outbox(documents)
    for number in range(10):
        box.put({"text": str(number)}, now=clock.now)
    assert len(box) == 3
    assert documents.counts["notification_dropped"] == 7
    server.answers = []
    deliver(outbox(documents), clock, server, until=lambda: len(server.messages) == 3)
    assert [message["text"] for message in server.messages] == ["7", "8", "9"]


def test_message_older_than_day_is_dropped(server, outbox):
    clock, documents = Clock(START), StoredDocuments()
    server.answers = [(503, {})] * 1000
    box = outbox(documents)
    box.put({"text": "old"}, now=clock.now)
    deliver(box, clock, server, until=lambda: not len(box), seconds=3600.0)
    assert documents.counts == {"notification_dropped": 1}


def test_address_never_reaches_log_store_or_error(server, outbox, webhook_file, caplog):
    caplog.set_level(logging.DEBUG)
    clock, documents = Clock(START), StoredDocuments()
    server.answers = [(503, {}), (302, {"Location": server.url})]
    box = outbox(documents)
    box.put({"text": "a"}, now=clock.now)
    deliver(box, clock, server, until=lambda: not len(box))
    server.close()
    reasons = [post_to_file(webhook_file, b"{}", timeout_seconds=0.3).reason]
    webhook_file.write_text("http://127.0.0.1:not-a-port" + SECRET)
    reasons.append(post_to_file(webhook_file, b"{}").reason)
    webhook_file.unlink()
    reasons.append(post_to_file(webhook_file, b"{}").reason)
    assert all(reasons)
    assert "a-secret" not in "".join([caplog.text, *documents.texts.values(), *reasons])
    assert "a notification was not delivered: answered 503" in caplog.text


def test_address_instead_of_file_name_is_refused_without_being_repeated():
    with raises(ContractError, "webhook_file", "address") as error:
        NotificationSettings(webhook_file="https://hooks.example" + SECRET)
    assert "a-secret" not in str(error.value)


def test_message_shows_what_exists_and_escapes_what_slack_reads():
    numbers = {"auc": None, "rows": 20_000, "clicks": 0}
    message = compose("auc < 0.7 & falling", numbers=numbers, since=0.0, done="", link="")
    expected = (
        "auc &lt; 0.7 &amp; falling\nHow much: rows 20000, clicks 0\nSince: 1970-01-01 00:00:00 UTC"
    )
    assert message == {"text": expected}
    cut = compose("<" * 10_000, numbers={}, since=0.0, done="", link="")["text"]
    assert len(cut) <= 3000
    assert cut.replace("&lt;", "") == ""
