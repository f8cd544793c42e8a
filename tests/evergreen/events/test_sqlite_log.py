"""Tests that concern only the embedded log: locks, threads, disk and SIGKILL."""

import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from evergreen.events.sqlite import SqliteLog
from evergreen.runtime.errors import PermanentError, TemporaryError
from tests.support.errors import raises

PUBLISH_AND_DIE = """
import os, signal, sys
from evergreen.events.sqlite import SqliteLog
log = SqliteLog(sys.argv[1])
log.publish([("kept", b"1")])
log._connection.execute("BEGIN IMMEDIATE")
log._connection.execute("INSERT INTO messages (message_id, digest, payload) VALUES ('half', 0, x'00')")
os.kill(os.getpid(), signal.SIGKILL)
"""  # noqa: E501


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.sqlite"


def test_locked_database_is_temporary_error_and_message_passes_later(path):
    log = SqliteLog(path, busy_timeout_seconds=0.01)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with raises(TemporaryError, "locked"):
        log.publish([("a", b"1")])
    with raises(TemporaryError, "locked"):
        log.pull(1)
    other.execute("ROLLBACK")
    log.publish([("a", b"1")])
    assert log.backlog() == 1
    other.close()
    log.close()


def test_full_disk_is_temporary_error_and_leaves_no_transaction_open(path):
    log = SqliteLog(path)
    (pages,) = log._connection.execute("PRAGMA page_count").fetchone()
    log._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with raises(TemporaryError, "full"):
        log.publish([(str(i), b"x" * 5000) for i in range(10)])
    log._connection.execute("PRAGMA max_page_count = 1000000")
    assert log.backlog() == 0
    log.publish([("a", b"1")])
    assert log.backlog() == 1
    log.close()


def test_file_that_is_no_database_is_permanent_error(path):
    path.write_bytes(b"no database at all, but long enough to be read as one" * 100)
    with raises(PermanentError, "log.sqlite", "not a database"):
        SqliteLog(path)


def test_file_of_older_version_is_permanent_error(path):
    with sqlite3.connect(path) as older:
        older.execute(
            "CREATE TABLE messages (number INTEGER PRIMARY KEY, message_id TEXT NOT NULL UNIQUE, "
            "payload BLOB,"
            " state TEXT, leased_until REAL)"
        )
    older.close()
    with raises(PermanentError, "log.sqlite", "older format version"):
        SqliteLog(path)


def test_ids_of_acknowledged_messages_are_forgotten_in_time_and_no_others(path):
    now = 1000.0
    log = SqliteLog(path, lease_seconds=10.0, keep_ids_seconds=100.0, clock=lambda: now)
    log.publish([("acknowledged", b"1"), ("dead letter", b"2"), ("leased", b"3")])
    first, second, _ = log.pull(3)
    log.acknowledge([first.token])
    log.dead_letter([(second.token, "bad")])

    payloads = {"acknowledged": b"1", "dead letter": b"2", "leased": b"3"}

    def is_new(message_id):
        before = log.backlog()
        log.publish([(message_id, payloads[message_id])])
        return log.backlog() > before

    now += 110.0
    log.acknowledge([])
    assert not is_new("acknowledged")
    now += 1.0
    log.acknowledge([])
    assert [is_new(name) for name in ("dead letter", "leased", "acknowledged")] == [
        False,
        False,
        True,
    ]
    assert [message.payload for message in log.list_dead_letters()] == [b"2"]
    now += 1e8  # The clock is wrong for one call.
    log.acknowledge([delivery.token for delivery in log.pull(3)])
    now -= 1e8
    log.acknowledge([])
    assert is_new("leased")
    log.close()


def test_watermark_waits_for_leases_of_killed_predecessor(path):
    now = 1000.0
    killed = SqliteLog(path, lease_seconds=30.0, clock=lambda: now)
    killed.publish([("leased", b"1")])
    killed.pull(1)
    now = 1010.0
    log = SqliteLog(path, lease_seconds=5.0, clock=lambda: now)  # the new reader has shorter leases
    assert log.read_up_to() is None
    marks = []
    for moment in (1010.0, 1029.0, 1030.0):
        now = moment
        pulled = log.pull(10)
        log.acknowledge(d.token for d in pulled)
        marks.append((len(pulled), log.read_up_to()))
    assert marks == [(0, None), (0, None), (1, 1030.0)]
    killed.close()
    log.close()


def test_watermark_moves_only_after_all_messages_were_pulled_and_acknowledged(path):
    now = 1000.0
    log = SqliteLog(path, lease_seconds=30.0, clock=lambda: now)
    log.publish([(str(i), b"x") for i in range(5)])
    first = log.pull(4)
    log.acknowledge(d.token for d in first)
    assert log.read_up_to() is None  # The pull was full, so more messages may be in the log.
    now = 1001.0
    (last,) = log.pull(4)
    assert log.read_up_to() is None
    log.acknowledge([last.token])
    assert log.read_up_to() == 1001.0
    now = 1002.0
    log.publish([("not stored in time", b"x")])
    log.pull(4)
    now = 1003.0
    assert (log.pull(4), log.read_up_to()) == ([], 1001.0)
    now = 1033.0
    log.acknowledge(d.token for d in log.pull(4))
    assert log.read_up_to() == 1033.0
    log.close()


def test_moved_file_is_problem_although_it_still_answers(path):
    log = SqliteLog(path)
    assert log.problem() is None
    path.rename(path.with_name("moved"))
    assert log.pull(1) == []
    assert "was moved or replaced" in log.problem()
    SqliteLog(path).close()
    with raises(TemporaryError, "moved or replaced"):
        log.publish([("a", b"1")])
    log.close()


def test_threads_may_share_one_log_handle(path):
    log = SqliteLog(path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: log.publish([(f"{i}-{j}", b"x") for j in range(5)]), range(40)))
        pulled = list(pool.map(lambda _: log.pull(10), range(40)))
    names = [d.message_id for batch in pulled for d in batch]
    assert len(names) == len(set(names)) == 200
    log.close()


def test_openers_of_new_file_do_not_fail_each_other(tmp_path):
    # Without retries, 1 of 50 attempts failed with "database is locked".
    start = threading.Barrier(4)

    def open_and_publish(path):
        start.wait()
        log = SqliteLog(path)
        log.publish([(str(threading.get_ident()), b"x")])
        log.close()

    with ThreadPoolExecutor(4) as pool:
        for number in range(10):
            list(pool.map(open_and_publish, [tmp_path / f"{number}.sqlite"] * 4))


def test_sigkill_loses_no_published_message_and_leaves_no_half_batch(path):
    killed = subprocess.run([sys.executable, "-c", PUBLISH_AND_DIE, str(path)], timeout=60)
    assert killed.returncode == -9
    log = SqliteLog(path)
    assert [d.message_id for d in log.pull(10)] == ["kept"]
    log.close()


def test_clock_that_was_set_back_delays_neither_messages_nor_watermark(path):
    now = [86_400.0 + 1000.0]
    dead = SqliteLog(path, clock=lambda: now[0])
    dead.publish([("a", b"1"), ("b", b"2")])
    dead.pull(1)
    dead.close()
    log = SqliteLog(path, clock=lambda: now[0])
    log.pull(10)  # message "b" is leased too while the clock is wrong
    now[0] -= 86_400.0
    again = log.pull(10)
    assert [delivery.message_id for delivery in again] == ["a", "b"]
    log.acknowledge([delivery.token for delivery in again])
    now[0] += 31.0
    assert log.pull(10) == []
    assert log.read_up_to() == now[0]
    log.close()
