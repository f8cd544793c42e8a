"""Tests that a log's URL opens the file that it names, and that unknown parts are rejected."""

import pytest

from evergreen.events.locations import open_publisher, open_subscriber, partition_urls
from evergreen.events.sqlite import SqliteLog
from evergreen.runtime.errors import ContractError
from tests.support.errors import raises
from tests.support.log_benches import open_log


def test_log_url_opens_file_it_names(tmp_path):
    folder = tmp_path / "a log"
    folder.mkdir()
    SqliteLog(folder / "log.db").publish([("m", b"x")])
    now = [1000.0]
    log = open_subscriber(
        f"sqlite:///{folder}/log.db?lease_seconds=7".replace(" ", "%20"), clock=lambda: now[0]
    )
    pulled = []
    for now[0] in (1000.0, 1006.9, 1007.0):
        pulled.append([delivery.message_id for delivery in log.pull(5)])
    assert pulled == [["m"], [], ["m"]]


def test_log_url_may_hold_spaces_and_be_relative(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    open_log(f"sqlite:///{tmp_path}/a b/plain.db").close()
    open_log(f"sqlite:///{tmp_path}/a%20b/encoded.db").close()
    monkeypatch.chdir(tmp_path / "a b")
    open_log("sqlite:///relative.db").close()
    assert {p.name for p in (tmp_path / "a b").glob("*.db")} == {
        "plain.db",
        "encoded.db",
        "relative.db",
    }


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "log is ''"),
        ("kafka://[::1", r"log is 'kafka://\[::1', expected a URL: Invalid IPv6 URL"),
        (
            "kafka://me:secret@host:9092/t",
            r"kafka://\*\*\*@host:9092/t', expected credentials in the file",
        ),
        (
            "nats://me:pa/ss@host/topic?sasl.password=secret",
            r"nats://\*\*\*@host/topic\?sasl.password=\*\*\*'",
        ),
        ("log.db", "expected sqlite:///<path>"),
        ("nats://host/topic", "nats://host/topic.*sqlite, pubsub, kafka"),
        ("sqlite://log.db", "three slashes"),
        ("sqlite:///", "expected sqlite:///<path>"),
        ("sqlite:///log-{0-1}.db", "expected one of its partitions, as 'sqlite:///log-0.db'"),
        ("sqlite:////nowhere/at/all/log.db", "is not a folder"),
        ("sqlite:///x.db?leases=1", "leases is not a setting, expected lease_seconds"),
        ("sqlite:///x.db?lease_seconds=soon", "lease_seconds is 'soon', expected float"),
        ("sqlite:///x.db?lease_seconds=0", "above 0"),
        ("pubsub://project", "expected pubsub://<project>/<topic>"),
        ("pubsub://project/ab", "'ab' is not a valid name in Pub/Sub"),
        ("pubsub://project/topic?subscription=a/b", "'a/b' is not a valid name"),
        ("pubsub://project/topic?leases=1", "leases is not a setting, expected lease_seconds"),
        ("pubsub://project/topic?lease_seconds=5", "lease_seconds is 5.0, expected 10 to 600"),
        ("kafka:///clicks", "expected kafka://host:port"),
        ("kafka://host:9092/a/b", "expected a topic"),
        (
            "kafka://host:9092/clicks?subscription=x",
            "subscription is not a setting, expected one of group",
        ),
        ("kafka://host:9092/clicks?group=", "group is '', expected a name"),
        ("kafka://host:9092/clicks?lease_seconds=0", "above 0"),
        ("kafka://host:9092/clicks?config=/nowhere/at.all", "expected a file of name=value lines"),
    ],
)
@pytest.mark.parametrize("open_end", [open_publisher, open_subscriber])
def test_another_log_url_is_refused(url, text, open_end):
    with pytest.raises(ContractError, match=text):
        open_end(url)


def test_range_in_url_names_log_for_each_partition():
    assert partition_urls("kafka://broker:9092/clicks?group=monitor") == [
        "kafka://broker:9092/clicks?group=monitor"
    ]
    urls = partition_urls("kafka://broker:9092/clicks-{0-10}?group=monitor-{0-10}")
    assert urls == [f"kafka://broker:9092/clicks-{n}?group=monitor-{n}" for n in range(11)]
    with raises(ContractError, "same range of partitions"):
        partition_urls("pubsub://project/clicks-{0-3}?subscription=monitor-{0-2}")
