"""Tests of the archive: schema, complete files, and no loss after any crash."""

import dataclasses
import errno
import sqlite3

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evergreen.contracts.raw_rows import CANARY_TYPES, raw_types
from evergreen.contracts.records import Predictions
from evergreen.rows.archived_rows import arrow_schema
from evergreen.runtime.errors import PermanentError, TemporaryError
from monitoring.state import archive
from monitoring.state.archive import Archive, build_row_table
from monitoring.state.database import VERSION
from monitoring.state.join import attribute
from monitoring.state.store import StateStore
from testing.recommenders import SHOP
from tests.support.archives import archived_rows, expected_rows, values_of
from tests.support.errors import raises
from tests.support.monitors import START, WINDOW, clicks, prediction, publish

FEATURES = SHOP.features
SCHEMA = arrow_schema(raw_types(FEATURES))


def test_rows_are_archived_in_raw_schema_with_their_values(started):
    b = started()
    batches = [prediction("a", 5, time=START + 0.25), prediction("b", 3, version=2)]
    b.tick(*batches, clicks("o", [("a", 4, START + 1)]), at=START + WINDOW + 1)
    b.monitor.stop()
    (path,) = b.settings.archive.glob("day=2025-11-13/part-*.parquet")
    table = pq.ParquetFile(path).read()
    assert table.schema.equals(SCHEMA)
    spelled = {"float32": "float", "float64": "double", "list<int64>": "list<element: int64>"}
    expected = [(name, spelled.get(text, text)) for name, text in raw_types(FEATURES).items()]
    assert [(field.name, str(field.type)) for field in table.schema] == expected
    rows = {(row["request_id"], row["row"]): row for row in table.to_pylist()}
    assert archived_rows(rows.values()) == expected_rows(batches, {("a", 4)})
    for batch in batches:
        for i in range(len(batch)):
            row = rows[batch.request_id, i]
            assert row["event_time"].timestamp() == batch.time
            assert row["model_version"] == batch.model_version
            dense, categorical = values_of(row, FEATURES)
            np.testing.assert_array_equal(np.float32(dense), batch.dense[i])
            assert categorical == batch.categorical[i].tolist()


def test_file_is_durable_before_its_name_and_name_before_rows_are_deleted(started, monkeypatch):
    """The test checks the order of calls, because only a power cut would show a wrong order."""
    calls = []

    def record_call(module, name, describe):
        real = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *args, **more: (calls.append(describe(*args)), real(*args, **more))[1],
        )

    record_call(
        archive,
        "fsync_path",
        lambda path: "fsync file" if path.suffix == ".aside" else f"fsync {path.name}",
    )
    record_call(archive.os, "rename", lambda *_: "rename")
    record_call(StateStore, "seal_file", lambda *_: "seal")
    b = started()
    assert b.store._connection.execute("PRAGMA synchronous").fetchone() == (2,)  # 2 means FULL
    publish(b.log, prediction("a", 3))
    b.clock.now = START + WINDOW
    b.monitor.stop()
    assert calls == ["fsync file", "rename", "fsync day=2025-11-13", "fsync archive", "seal"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied"),
    ],
)
@pytest.mark.parametrize("where", ["write_parquet", "fsync_path"])
def test_archive_that_cannot_be_written_is_clear_error_and_loses_nothing(
    started, monkeypatch, error, where
):
    b = started(archive_roll_rows=4)
    publish(b.log, prediction("a", 4), prediction("b", 5))
    b.clock.now = START + WINDOW

    def refuse(*args):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(archive, where, refuse)
        for _ in range(2):
            with raises(TemporaryError, "archive", error.strerror):
                b.monitor.tick()
    assert b.monitor.windows[1].labels.shape == (9,)  # metrics do not wait for the archive
    assert b.archived == []
    assert list(b.settings.archive.glob("day=*/.*")) == []  # no partial file remains
    b.monitor.tick()
    b.monitor.stop()
    assert archived_rows(b.archived) == expected_rows([prediction("a", 4), prediction("b", 5)])
    assert b.store.counters["archived"] == 9


def test_rows_that_fit_no_file_are_abandoned_and_others_are_archived(started, monkeypatch):
    b = started(archive_roll_rows=64)
    build = archive.build_row_table

    def refuse(requests, labels, features):
        if "r13" in requests.ids.tolist():
            raise pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes")
        return build(requests, labels, features)

    monkeypatch.setattr(archive, "build_row_table", refuse)
    names = [f"r{number:02d}" for number in range(24)]
    b.tick(*(prediction(name, 8, time=START + number / 100) for number, name in enumerate(names)))
    b.tick(at=b.clock.now + 2 * WINDOW)
    b.monitor.stop()
    assert sorted({row["request_id"] for row in b.archived}) == [
        name for name in names if name != "r13"
    ]
    counters = b.store.counters
    assert (counters["matured"], counters["archived"], counters["set_apart"]) == (192, 184, 8)
    (event,) = [each for each in b.events if each["kind"] == "set_apart"]
    assert "8 rows of day=" in event["text"]
    assert "cannot be archived" in event["text"]
    assert "2147483646 bytes" in event["text"]
    assert sum(each["rows"] for each in b.events if each["kind"] == "archived") == 184
    # The cause of the error is removed. After a restart, the monitor archives the remaining rows.
    monkeypatch.setattr(archive, "build_row_table", build)
    b.start().tick()
    assert sorted(row["request_id"] for row in b.archived if row["row"] == 0) == names
    assert (b.store.counters["archived"], b.store.counters["set_apart"]) == (192, 0)
    assert b.store.num_unarchived_rows == 0


def test_folders_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "a file").write_text("")
    with raises(TemporaryError, "state", "a file", "written"):
        StateStore(tmp_path / "a file" / "state" / "monitor.db")
    store = StateStore(tmp_path / "monitor.db")
    with raises(TemporaryError, "archive", "a file", "written"):
        Archive(
            tmp_path / "a file" / "archive",
            store,
            features=FEATURES,
            roll_rows=1,
            roll_seconds=1,
            keep_rows=1,
        )
    store.close()


def mature_and_seal(
    store: StateStore, number: int, rows_of: dict[int, int], keep_after: float
) -> set[str]:
    """Seal one file of matured requests, with one request of each version.

    Returns:
        Ids of the requests that are still stored.
    """
    batches = [
        prediction(f"{v}-{number}", rows, time=START + number, version=v)
        for v, rows in rows_of.items()
    ]
    store.add(Predictions.of(batches), [], [], now=START)
    requests = attribute(store.waiting(START + number, 9), [], window_seconds=0.0).requests
    store.mature(requests, {}, now=START, part_rows=100)
    store.intend_file(batches[0].request_id, [row.number for row in store.oldest_unarchived(100)])
    store.seal_file(batches[0].request_id, keep_rows=4, keep_after=keep_after)
    return set(store.newest_rows().ids)


def test_rows_are_kept_for_each_version_and_for_evaluation(tmp_path):
    store = StateStore(tmp_path / "monitor.db")
    mature_and_seal(store, 0, {7: 2}, START - 1)
    for number in range(9):
        held = mature_and_seal(store, number, {1: 2}, START - 1)
    assert held == {"7-0", *(f"1-{number}" for number in range(9))}, (
        "without decisions, all rows must remain"
    )
    assert mature_and_seal(store, 9, {1: 2}, START + 5) == {"7-0", "1-6", "1-7", "1-8", "1-9"}
    assert mature_and_seal(store, 10, {1: 2}, START + 10) == {"7-0", "1-9", "1-10"}
    for version in range(11, 19):
        held = mature_and_seal(store, 11, {version: 2}, START + 11)
    assert held == {f"{version}-11" for version in range(11, 19)}, (
        "rows of the newest eight versions must remain"
    )
    for number in range(12, 16):  # One row in twenty is of version 20.
        held = mature_and_seal(store, number, {1: 19, 20: 1}, START + number)
    assert held == {"1-14", "20-14", "1-15", "20-15"}, (
        "in total eight times four rows must remain, rounded up to files of twenty"
    )
    store.close()


def test_optional_columns_are_in_files_whose_rows_need_them(tmp_path):
    plain, ranked, canary = prediction("plain", 2), prediction("ranked", 3), prediction("canary", 1)
    positions, odds = np.array([3, 1, 2], np.int32), np.array([0.9, 0.8, 0.9])
    ranked = dataclasses.replace(ranked, positions=positions, propensities=odds)
    canary = dataclasses.replace(canary, canary=True)

    def table(*batches):
        requests = Predictions.of(batches)
        return build_row_table(requests, np.zeros(requests.num_rows, np.uint8), FEATURES)

    raw = list(raw_types(FEATURES))
    assert table(plain).column_names == raw
    assert table(plain, canary).column_names == [*raw, "canary"]
    found = table(plain, ranked)
    assert found.column_names == raw
    assert found["position"].to_pylist() == [None, None, 3, 1, 2]
    assert found["propensity"].to_pylist() == [None, None, 0.9, 0.8, 0.9]
    every = table(plain, ranked, canary)
    assert [(f.name, str(f.type)) for f in every.schema][len(raw) :] == list(CANARY_TYPES.items())
    assert every["canary"].to_pylist() == [False] * 5 + [True]


def test_file_holds_rows_of_one_utc_day(started):
    midnight = 1_763_078_400.0  # 2025-11-14
    b = started()
    b.tick(
        prediction("before", 2, time=midnight - 0.001),
        prediction("after", 2, time=midnight),
        at=midnight + WINDOW,
    )
    b.monitor.stop()
    found = {
        p.parent.name: pq.ParquetFile(p).read()["request_id"][0].as_py()
        for p in b.settings.archive.glob("*/*")
    }
    assert found == {"day=2025-11-13": "before", "day=2025-11-14": "after"}


def test_files_roll_by_rows_and_by_seconds(started):
    b = started(archive_roll_rows=10, archive_roll_seconds=30.0)
    b.tick(*[prediction(f"r{i}", 4) for i in range(7)], at=START + WINDOW)
    assert len(b.archived) == 24  # three files of 8 rows, and 4 rows that wait
    b.tick(at=b.clock.now + 29)
    assert len(b.archived) == 24
    b.tick(at=b.clock.now + 1)
    assert len(b.archived) == 28
    b.tick(prediction("r7", 4, time=b.clock.now), at=b.clock.now + 86_400.0)
    b.tick(at=b.clock.now - 86_000.0)
    assert len(b.archived) == 32, "the files must also be sealed after the clock is set back"


def test_windows_are_rebuilt_after_restart_from_archived_and_waiting_rows(started):
    b = started(archive_roll_rows=8, window_rows=24, min_clicks=12)
    b.tick(
        *[prediction(f"r{i}", 4, time=START + i) for i in range(11)],
        clicks("o", [("r9", 2, START + 10)]),
        at=START + 11 + WINDOW,
    )
    before = (b.monitor.windows[1].labels.tolist(), b.monitor.windows[1].scores.tolist())
    b.start()
    assert (b.monitor.windows[1].labels.tolist(), b.monitor.windows[1].scores.tolist()) == before
    assert len(before[0]) == 24
    assert b.monitor.serving_version == 1


def test_state_of_another_version_is_refused_and_not_changed(tmp_path):
    path = tmp_path / "monitor.db"
    StateStore(path).close()
    for version in (99, 0):
        connection = sqlite3.connect(path)
        connection.execute(f"PRAGMA user_version = {version}")
        connection.close()
        with raises(PermanentError, f"version {version}", f"expected {VERSION}"):
            StateStore(path)


def test_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "monitor.db").write_bytes(b"this is no database" * 100)
    with raises(PermanentError, "state", "not a database"):
        StateStore(tmp_path / "monitor.db")
