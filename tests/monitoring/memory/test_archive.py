"""The archive: schema and values, whole files, and nothing lost or doubled by a crash at any named point."""

from __future__ import annotations

import sqlite3
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.contracts import criteo
from monitoring.memory import archive
from monitoring.memory.archive import SCHEMA
from monitoring.memory.store import Store
from tests.conftest import REPOSITORY
from tests.monitoring.conftest import START, WINDOW, clicks, prediction, publish, read_rows


class Crash(BaseException):
    """Ends the monitor where a kill would."""


def crash_at(point: str, visit: int = 1):
    seen = 0

    def checkpoint(name: str) -> None:
        nonlocal seen
        seen += name == point
        if name == point and seen == visit:
            raise Crash

    return checkpoint


def expected_rows(batches, clicked=()):
    return {
        (batch.request_id, i): (int((batch.request_id, i) in clicked), float(batch.scores[i]))
        for batch in batches
        for i in range(len(batch))
    }


def archived_rows(rows):
    found = {(row["request_id"], row["row"]): (row["label"], row["score"]) for row in rows}
    assert len(found) == len(rows), "a row is archived twice"
    return found


def test_rows_are_archived_in_the_raw_schema_with_their_values(bench):
    b = bench()
    monitor = b.start()
    batches = [prediction("a", 5, time=START + 0.25), prediction("b", 3, version=2)]
    publish(b.log, *batches, clicks("o", [("a", 4, START + 1)]))
    b.clock.time = START + WINDOW + 1
    monitor.tick()
    monitor.stop()
    (path,) = b.settings.archive.glob("day=2025-11-13/part-*.parquet")
    table = pq.ParquetFile(path).read()
    assert table.schema.equals(SCHEMA)
    spelled = {"float32": "float"}
    expected = [(name, spelled.get(text, text)) for name, text in criteo.RAW_TYPES.items()]
    assert [(field.name, str(field.type)) for field in table.schema] == expected
    rows = {(row["request_id"], row["row"]): row for row in table.to_pylist()}
    assert archived_rows(rows.values()) == expected_rows(batches, {("a", 4)})
    for batch in batches:
        for i in range(len(batch)):
            row = rows[batch.request_id, i]
            assert row["event_time"].timestamp() == batch.time
            assert row["model_version"] == batch.model_version
            dense = [np.nan if row[name] is None else row[name] for name in criteo.DENSE]
            np.testing.assert_array_equal(np.float32(dense), batch.dense[i])
            assert [-1 if row[name] is None else row[name] for name in criteo.CATEGORICAL] == batch.categorical[
                i
            ].tolist()


def test_a_file_is_on_the_disk_before_its_name_and_its_name_before_the_store_lets_the_rows_go(bench, monkeypatch):
    """No crash of a process shows this, only one of the machine: so the order of the calls is held."""
    calls = []

    def told(module, name, describe):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **more: (calls.append(describe(*args)), real(*args, **more))[1])

    told(archive, "fsync_path", lambda path: "fsync file" if path.suffix == ".aside" else f"fsync {path.name}")
    told(archive.os, "rename", lambda *_: "rename")
    told(Store, "seal_file", lambda *_: "seal")
    b = bench()
    monitor = b.start()
    assert b.store._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
    publish(b.log, prediction("a", 3))
    b.clock.time = START + WINDOW
    monitor.stop()
    assert calls == ["fsync archive", "fsync file", "rename", "fsync day=2025-11-13", "seal"]


def test_a_full_disk_is_named_and_leaves_the_store_as_it_was(bench):
    b = bench()
    b.start()
    pages = b.store._connection.execute("PRAGMA page_count").fetchone()[0]
    b.store._connection.execute(f"PRAGMA max_page_count = {pages}")
    batches = [(prediction(f"r{i}", 64), b"x" * 20_000) for i in range(20)]
    with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
        b.store.add(batches, [], [], now=START)
    assert b.store.counters.get("predicted", 0) == 0
    b.store._connection.execute("PRAGMA max_page_count = 100000")
    b.store.add(batches, [], [], now=START)
    assert b.store.counters["predicted"] == 20 * 64


def test_a_file_holds_rows_of_one_utc_day(bench):
    midnight = 1_763_078_400.0  # 2025-11-14
    b = bench()
    monitor = b.start()
    publish(b.log, prediction("before", 2, time=midnight - 0.001), prediction("after", 2, time=midnight))
    b.clock.time = midnight + WINDOW
    monitor.tick()
    monitor.stop()
    found = {p.parent.name: pq.ParquetFile(p).read()["request_id"][0].as_py() for p in b.settings.archive.glob("*/*")}
    assert found == {"day=2025-11-13": "before", "day=2025-11-14": "after"}


def test_files_roll_by_rows_and_by_seconds(bench):
    b = bench(archive_roll_rows=10, archive_roll_seconds=30.0)
    monitor = b.start()
    publish(b.log, *[prediction(f"r{i}", 4) for i in range(7)])
    b.clock.time = START + WINDOW
    monitor.tick()
    assert len(b.archived) == 24  # three files of 8, the last 4 rows wait
    b.clock.time += 29
    monitor.tick()
    assert len(b.archived) == 24
    b.clock.time += 1
    monitor.tick()
    assert len(b.archived) == 28


def test_a_request_larger_than_a_file_is_archived_whole(bench):
    b = bench(archive_roll_rows=10)
    monitor = b.start()
    publish(b.log, prediction("big", 40))
    b.clock.time = START + WINDOW
    monitor.tick()
    assert len(b.archived) == 40


CRASH_POINTS = [
    ("intake.pulled", 1),
    ("intake.stored", 1),
    ("intake.stored", 2),
    ("intake.acknowledged", 1),
    ("join.matured", 1),
    ("archive.intended", 1),
    ("archive.written_aside", 1),
    ("archive.renamed", 1),
    ("archive.renamed", 2),
    ("archive.sealed", 1),
]


@pytest.mark.parametrize(("point", "visit"), CRASH_POINTS, ids=lambda value: str(value))
def test_a_crash_at_any_point_loses_no_row_and_archives_none_twice(bench, point, visit):
    b = bench(archive_roll_rows=20, pull_messages=4)
    batches = [prediction(f"r{i}", 3, time=START + i) for i in range(12)]
    outcome = clicks("o", [(f"r{i}", i % 3, START + i + 1) for i in range(12)])
    b.checkpoint = crash_at(point, visit)

    def run() -> None:
        monitor = b.start()
        publish(b.log, *batches, outcome)
        b.clock.time = START + 12 + WINDOW
        monitor.tick()
        monitor.stop()

    with pytest.raises(Crash):
        run()
    b.checkpoint = lambda name: None
    b.clock.time += 6.0  # the leases of the crashed monitor run out
    b.start().tick()
    b.monitor.stop()
    assert archived_rows(b.archived) == expected_rows(batches, {(f"r{i}", i % 3) for i in range(12)})
    assert b.store.counters["archived"] == b.store.counters["matured"] == b.store.counters["predicted"] == 36
    assert not list(b.settings.archive.glob("*/.*"))
    assert b.log.backlog() == 0


EXIT_AT = """
import os, sys
from pathlib import Path
from tests.monitoring.conftest import START, WINDOW, Bench, prediction, publish
b = Bench(Path(sys.argv[1]), archive_roll_rows=20)
monitor = b.start()
publish(b.log, *[prediction(f"r{i}", 3) for i in range(12)])
b.clock.time = START + WINDOW
b.checkpoint = lambda name: os._exit(9) if name == sys.argv[2] else None
monitor.tick()
monitor.stop()
"""


@pytest.mark.parametrize("point", ["intake.stored", "join.matured", "archive.written_aside", "archive.renamed"])
def test_a_process_that_vanishes_at_a_point_loses_no_row(tmp_path, bench, point):
    """As above with a process that ends on the spot: no `finally`, no rollback of ours, open leases and locks."""
    code = subprocess.run([sys.executable, "-c", EXIT_AT, str(tmp_path), point], cwd=REPOSITORY, timeout=60).returncode
    assert code == 9
    b = bench(archive_roll_rows=20)
    b.clock.time = START + WINDOW + 6.0
    b.start().tick()
    b.monitor.stop()
    assert archived_rows(b.archived) == expected_rows([prediction(f"r{i}", 3) for i in range(12)])
    assert b.store.counters["archived"] == 36


def test_a_sealed_file_uploaded_before_the_restart_is_not_written_again(bench):
    from monitoring.uploader import Uploader

    b = bench()
    b.checkpoint = crash_at("archive.renamed")
    monitor = b.start()
    publish(b.log, prediction("a", 3))
    b.clock.time = START + WINDOW
    monitor.tick()
    with pytest.raises(Crash):
        monitor.stop()
    Uploader(b.settings.archive, b.folder / "lake").run_once()
    b.checkpoint = lambda name: None
    b.start().stop()
    assert b.archived == []
    assert len(archived_rows(read_rows(b.folder / "lake"))) == 3
    assert b.store.counters["archived"] == 3


def test_redeliveries_are_counted_and_archived_once(bench):
    b = bench()
    monitor = b.start()
    batch = prediction("a", 3)
    publish(b.log, batch)
    monitor.tick()
    from components.contracts.records import encode

    b.log.publish([("another message id", encode(batch))])
    b.clock.time = START + WINDOW
    monitor.tick()
    monitor.stop()
    assert archived_rows(b.archived) == expected_rows([batch])
    assert b.store.counters["duplicate"] == 1


def test_windows_are_rebuilt_after_a_restart_from_archived_and_waiting_rows(bench):
    b = bench(archive_roll_rows=8, window_rows=24, min_clicks=12)
    monitor = b.start()
    publish(b.log, *[prediction(f"r{i}", 4, time=START + i) for i in range(11)], clicks("o", [("r9", 2, START + 10)]))
    b.clock.time = START + 11 + WINDOW
    monitor.tick()
    before = (monitor.windows[1].labels.tolist(), monitor.windows[1].scores.tolist())
    monitor = b.start()
    assert (monitor.windows[1].labels.tolist(), monitor.windows[1].scores.tolist()) == before
    assert len(before[0]) == 24
    assert monitor.windows.serving_version == 1


def test_a_stop_archives_matured_rows_and_keeps_the_others_for_the_next_start(bench):
    b = bench()
    monitor = b.start()
    publish(b.log, prediction("old", 2), prediction("young", 3, time=START + 50))
    b.clock.time = START + WINDOW
    monitor.stop()
    assert {row["request_id"] for row in b.archived} == {"old"}
    b.clock.time = START + 50 + WINDOW
    b.start().stop()
    assert len(b.archived) == 5
