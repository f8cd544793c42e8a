"""A state folder as the first monitor left it, before late outcomes were archived: its tables, and rows at each stage.

The tables are a copy on purpose: what was once on users' disks does not change with the code.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from components.contracts.records import PredictionBatch, encode

TABLES = """
CREATE TABLE IF NOT EXISTS predictions (
    request_id TEXT PRIMARY KEY, time REAL NOT NULL, model_version INTEGER NOT NULL, num_rows INTEGER NOT NULL,
    stored_at REAL NOT NULL, matured INTEGER NOT NULL DEFAULT 0, payload BLOB);
CREATE INDEX IF NOT EXISTS waiting ON predictions (time) WHERE matured = 0;
CREATE TABLE IF NOT EXISTS outcome_batches (batch_id TEXT PRIMARY KEY, stored_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS dead_letters (message_id TEXT PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS clicks (
    request_id TEXT NOT NULL, row INTEGER NOT NULL, time REAL NOT NULL, stored_at REAL NOT NULL,
    PRIMARY KEY (request_id, row));
CREATE TABLE IF NOT EXISTS matured (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE, time REAL NOT NULL,
    model_version INTEGER NOT NULL, num_rows INTEGER NOT NULL, matured_at REAL NOT NULL,
    labels BLOB NOT NULL, scores BLOB NOT NULL, file TEXT);
CREATE INDEX IF NOT EXISTS unarchived ON matured (number) WHERE file IS NULL;
CREATE INDEX IF NOT EXISTS archived_in ON matured (file);
CREATE TABLE IF NOT EXISTS files (
    name TEXT PRIMARY KEY, num_rows INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'intended' CHECK (state IN ('intended', 'sealed', 'uploaded')));
CREATE INDEX IF NOT EXISTS unfinished ON files (state) WHERE state != 'uploaded';
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value REAL NOT NULL);
CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, content TEXT NOT NULL);
"""


def write_first_state(
    path: Path,
    *,
    open_requests: list[PredictionBatch],
    matured: list[PredictionBatch],
    intended: list[PredictionBatch],
    sealed: list[PredictionBatch],
    clicks: list[tuple[str, int, float]],
) -> None:
    """Writes `path` as the first monitor did; every request holds a name of its own, matured rows have no click."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.executescript(TABLES)
    for batch in [*open_requests, *matured, *intended, *sealed]:
        is_open, is_sealed = batch in open_requests, batch in sealed
        connection.execute(
            "INSERT INTO predictions VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                batch.request_id,
                batch.time,
                batch.model_version,
                len(batch),
                batch.time,
                int(not is_open),
                None if is_sealed else encode(batch),
            ),
        )
        if is_open:
            continue
        file = "day=2025-11-13/part-s.parquet" if is_sealed else "day=2025-11-13/part-i.parquet"
        labels = np.zeros(len(batch), np.uint8)
        connection.execute(
            "INSERT INTO matured (request_id, time, model_version, num_rows, matured_at, labels, scores, file)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                batch.request_id,
                batch.time,
                batch.model_version,
                len(batch),
                batch.time,
                labels.tobytes(),
                batch.scores.tobytes(),
                None if batch in matured else file,
            ),
        )
    connection.executemany("INSERT INTO clicks VALUES (?, ?, ?, ?)", [(*click, click[2]) for click in clicks])
    for name, state, batches in (("s", "sealed", sealed), ("i", "intended", intended)):
        num_rows = sum(map(len, batches))
        connection.execute(
            "INSERT INTO files VALUES (?, ?, ?)", (f"day=2025-11-13/part-{name}.parquet", num_rows, state)
        )
    total, done = sum(map(len, [*open_requests, *matured, *intended, *sealed])), sum(map(len, sealed))
    counters = {"predicted": total, "matured": total - sum(map(len, open_requests)), "archived": done}
    connection.executemany("INSERT INTO counters VALUES (?, ?)", counters.items())
    connection.commit()
    connection.close()
