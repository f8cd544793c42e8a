"""State folders of older and newer monitors."""

from __future__ import annotations

import sqlite3

import pytest

from components.runtime.errors import PermanentError
from monitoring.memory import schema
from monitoring.memory.store import Store
from tests.monitoring.conftest import START, WINDOW, clicks, prediction, publish
from tests.monitoring.memory.first_state import write_first_state
from tests.monitoring.memory.test_archive import archived_rows, expected_rows

OPEN = [prediction("open", 3, time=START), prediction("open too", 2, time=START + 1)]
MATURED, INTENDED, SEALED = [[prediction(name, 4)] for name in ("matured", "intended", "sealed")]


def write(path):
    write_first_state(
        path,
        open_requests=OPEN,
        matured=MATURED,
        intended=INTENDED,
        sealed=SEALED,
        clicks=[("open", 1, START + 2)],
    )


def test_a_state_folder_of_the_first_monitor_is_taken_up_and_loses_no_row(bench):
    b = bench(conversion_window_seconds=2 * WINDOW)
    write(b.settings.state / "monitor.db")
    monitor = b.start()
    assert {request.request_id for request in b.store.newest_rows()} == {"matured", "intended", "sealed"}
    publish(b.log, clicks("o", [("open too", 0, START + 3)]))
    b.clock.time = START + 1 + WINDOW
    monitor.tick()
    monitor.stop()
    expected = expected_rows([*OPEN, *MATURED, *INTENDED], {("open", 1), ("open too", 0)})
    assert archived_rows(b.archived) == expected  # the sealed file was the first monitor's
    assert b.store.counters["archived"] == b.store.counters["predicted"] == 17


def test_a_first_state_whose_upgrade_was_killed_midway_is_upgraded_by_the_next_start(tmp_path, monkeypatch):
    path = tmp_path / "monitor.db"
    write(path)

    def killed(connection):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(schema, "_read_scores", killed)
        with pytest.raises(KeyboardInterrupt):
            Store(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (0,)
    assert "scores" not in {row[1] for row in connection.execute("PRAGMA table_info(predictions)")}
    connection.close()
    store = Store(path)
    assert [waiting.scores.tolist() for waiting in store.waiting(START + 9, 9)] == [b.scores.tolist() for b in OPEN]
    store.close()
    store = Store(path)  # and opens again, unchanged
    assert [waiting.clicks for waiting in store.waiting(START + 9, 9)] == [[(1, START + 2)], []]
    store.close()


def test_an_upgraded_state_has_the_tables_of_a_new_one(tmp_path):
    write(tmp_path / "old" / "monitor.db")
    found = []
    for name in ("old", "new"):
        store = Store(tmp_path / name / "monitor.db")
        connection = store._connection
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master ORDER BY name")]
        columns = {name: {row[1:4] for row in connection.execute(f"PRAGMA table_info({name})")} for name in names}
        columns["predictions"] -= {("payload", "BLOB", 0)}  # empty in an old one: its messages have moved
        found.append(columns)
        store.close()
    assert found[0] == found[1]


def test_a_state_of_a_newer_monitor_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "monitor.db"
    Store(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    for _ in range(2):
        with pytest.raises(PermanentError, match="has version 99, expected at most 2: a newer monitor wrote it"):
            Store(path)


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "monitor.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(PermanentError, match="state .*: file is not a database"):
        Store(tmp_path / "monitor.db")
