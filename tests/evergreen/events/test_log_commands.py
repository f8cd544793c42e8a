"""Tests of `evergreen monitor log`: the on-call engineer's view, and redelivery."""

import json
import re

import pytest

from evergreen.events import __main__ as command
from evergreen.events.sqlite import SqliteLog
from evergreen.runtime.terminal import local_time
from tests.support.kafka_cluster import KafkaCluster


@pytest.fixture
def log(tmp_path):
    log = SqliteLog(tmp_path / "a log.sqlite", clock=lambda: 86_400.0)
    log.publish([("bad/1", b"\x00" * 80), ("worse", b""), ("good", b"fine")])
    bad, worse, _ = log.pull(3)
    log.dead_letter([(bad.token, "no log record")])
    log.dead_letter([(worse.token, "empty")])
    yield log
    log.close()


@pytest.fixture
def url(tmp_path, log):
    return f"sqlite:///{tmp_path}/a%20log.sqlite"


def answer(capsys, *words):
    code = command.main(list(words))
    return code, capsys.readouterr()


def test_check_reports_backlog(url, capsys):
    code, output = answer(capsys, "check", url)
    assert (code, output.out) == (0, "connected; 1 messages wait to be read\n")


def test_check_of_unresponsive_brokers_fails_with_message(capsys):
    with KafkaCluster() as cluster:
        cluster.create_topic("clicks")
        url = f"kafka://{cluster.brokers}/clicks"
        code, output = answer(capsys, "check", f"kafka://{cluster.brokers}/typo")
        assert (code, output.out) == (
            1,
            f"problem: topic typo does not exist at {cluster.brokers}\n",
        )
        code, output = answer(capsys, "check", url)
        assert (code, output.out) == (0, "connected; 0 messages wait to be read\n")
        cluster.stop_brokers()
        code, output = answer(capsys, "check", url)
        assert code == 1
        assert output.out.startswith(f"problem: asking {cluster.brokers}")


def test_list_shows_reason_time_and_first_bytes(url, capsys):
    code, output = answer(capsys, "dead-letters", "list", url)
    assert code == 0
    _, first, second, count = output.out.splitlines()
    assert re.search(r"bad/1 +80 +no log record +" + re.escape(r"\x00" * 60 + "..."), first)
    assert re.search(r"worse +0 +empty +-$", second)
    assert first.startswith(local_time(86_400.0))
    assert count == "2 dead letters"


def test_list_prints_json(url, capsys):
    code, output = answer(capsys, "dead-letters", "list", url, "--json")
    assert code == 0
    assert [
        (each["message_id"], each["bytes"], each["time"]) for each in json.loads(output.out)
    ] == [
        ("bad/1", 80, "1970-01-02T00:00:00+00:00"),
        ("worse", 0, "1970-01-02T00:00:00+00:00"),
    ]


def test_list_saves_original_bytes_under_safe_names(url, capsys, tmp_path):
    code, output = answer(capsys, "dead-letters", "list", url, "--save", str(tmp_path / "bytes"))
    assert code == 0
    assert output.out.endswith(f"2 dead letters, their bytes in {tmp_path}/bytes\n")
    saved = {path.name: path.read_bytes() for path in (tmp_path / "bytes").iterdir()}
    assert saved == {"000000-bad%2F1.bin": b"\x00" * 80, "000001-worse.bin": b""}


def test_replay_publishes_all_again_with_their_bytes(url, capsys, log):
    code, output = answer(capsys, "dead-letters", "replay", url)
    assert (code, output.out) == (0, "2 messages published again\n")
    assert log.list_dead_letters() == []
    assert [(d.message_id, d.payload) for d in log.pull(10)] == [
        ("bad/1", b"\x00" * 80),
        ("worse", b""),
    ]


def test_mistyped_path_is_refused_and_makes_no_file(capsys, tmp_path):
    code, output = answer(capsys, "dead-letters", "list", f"sqlite:///{tmp_path}/typo.sqlite")
    assert code == 2
    assert "there is no file" in output.err
    assert list(tmp_path.iterdir()) == []


def test_absent_kafka_fails_listing_and_is_named(capsys):
    with KafkaCluster() as cluster:
        brokers = cluster.brokers
    code, output = answer(capsys, "dead-letters", "list", f"kafka://{brokers}/clicks")
    assert code == 3
    assert brokers in output.err
