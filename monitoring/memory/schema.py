"""Tables of the memory, and how a state folder of an older monitor becomes one of this.

In: an open connection. Out: the same with every table and column. Nothing is taken away, and what older rows lack is
read from their stored messages, once.
"""

from __future__ import annotations

import sqlite3

from components.contracts.records import PredictionBatch, decode
from components.runtime.errors import PermanentError

VERSION = 2
"""Kept as SQLite's `user_version`; 0 is the first, which had no number, in use until late outcomes were archived."""
PAGE_BYTES = 16_384
"""Of new files. A message of 64 rows takes 17 kB: on SQLite's 4 kB pages it lies on a chain of five, and the whole
monitor takes 18 % more processor time (138k rows/s against 163k; 64 kB: 168k, and a file of twice the size)."""

TABLES = """
CREATE TABLE IF NOT EXISTS predictions (
    request_id TEXT PRIMARY KEY, time REAL NOT NULL, model_version INTEGER NOT NULL, num_rows INTEGER NOT NULL,
    stored_at REAL NOT NULL, matured INTEGER NOT NULL DEFAULT 0,
    canary INTEGER NOT NULL DEFAULT 0, scores BLOB, session_id TEXT, positions BLOB);
CREATE TABLE IF NOT EXISTS messages (number INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS waiting ON predictions (time) WHERE matured = 0;
CREATE TABLE IF NOT EXISTS outcome_batches (batch_id TEXT PRIMARY KEY, stored_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS dead_letters (message_id TEXT PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS clicks (
    request_id TEXT NOT NULL, row INTEGER NOT NULL, time REAL NOT NULL, stored_at REAL NOT NULL,
    PRIMARY KEY (request_id, row));
CREATE TABLE IF NOT EXISTS conversions (
    request_id TEXT NOT NULL, row INTEGER NOT NULL, time REAL NOT NULL, stored_at REAL NOT NULL,
    PRIMARY KEY (request_id, row));
CREATE TABLE IF NOT EXISTS matured (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE, time REAL NOT NULL,
    model_version INTEGER NOT NULL, num_rows INTEGER NOT NULL, matured_at REAL NOT NULL,
    labels BLOB NOT NULL, scores BLOB NOT NULL, file TEXT,
    converted BLOB, session_id TEXT, positions BLOB, delays BLOB);
CREATE INDEX IF NOT EXISTS unarchived ON matured (number) WHERE file IS NULL;
CREATE INDEX IF NOT EXISTS archived_in ON matured (file);
CREATE TABLE IF NOT EXISTS awaiting_conversion (
    request_id TEXT PRIMARY KEY, time REAL NOT NULL, model_version INTEGER NOT NULL, num_rows INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS unsettled ON awaiting_conversion (time);
CREATE TABLE IF NOT EXISTS settled (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL, time REAL NOT NULL,
    model_version INTEGER NOT NULL, num_rows INTEGER NOT NULL, num_converted INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS late_outcomes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL, row INTEGER NOT NULL, event TEXT NOT NULL,
    time REAL NOT NULL, predicted_at REAL, stored_at REAL NOT NULL, file TEXT,
    UNIQUE (request_id, row, event));
CREATE INDEX IF NOT EXISTS unarchived_outcomes ON late_outcomes (number) WHERE file IS NULL;
CREATE INDEX IF NOT EXISTS outcomes_in ON late_outcomes (file) WHERE file IS NOT NULL;
CREATE TABLE IF NOT EXISTS files (
    name TEXT PRIMARY KEY, num_rows INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'intended' CHECK (state IN ('intended', 'sealed', 'uploaded')));
CREATE INDEX IF NOT EXISTS unfinished ON files (state) WHERE state != 'uploaded';
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value REAL NOT NULL);
CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, content TEXT NOT NULL);
"""

_INDEXES_ON_ADDED = """
CREATE INDEX IF NOT EXISTS predicted ON predictions (time, model_version, canary);
CREATE INDEX IF NOT EXISTS of_version ON matured (model_version, number, num_rows);
"""

_ADDED = {
    "predictions": {
        "canary": "INTEGER NOT NULL DEFAULT 0",
        "scores": "BLOB",
        "session_id": "TEXT",
        "positions": "BLOB",
    },
    "matured": {"converted": "BLOB", "session_id": "TEXT", "positions": "BLOB", "delays": "BLOB"},
}
"""Columns that the first version did not have."""


def prepare(connection: sqlite3.Connection, name: str) -> None:
    """Makes all tables, or what lacks of them, in one transaction: killed midway, the folder is what it was.

    Args:
        connection: In autocommit mode.
        name: Of the state, for errors.

    Raises:
        PermanentError: a newer monitor wrote it.
    """
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found > VERSION:
        raise PermanentError(f"state {name} has version {found}, expected at most {VERSION}: a newer monitor wrote it")
    connection.execute("BEGIN IMMEDIATE")
    try:
        _run(connection, TABLES)
        for table, columns in _ADDED.items():
            present = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
            for column in columns.keys() - present:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {columns[column]}")
        _run(connection, _INDEXES_ON_ADDED)
        _move_messages(connection)
        _read_scores(connection)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _run(connection: sqlite3.Connection, script: str) -> None:
    """Runs the statements one by one: `executescript` would commit."""
    for statement in script.split(";\n"):
        connection.execute(statement)


def _move_messages(connection: sqlite3.Connection) -> None:
    """Gives messages a table of their own, numbered as their predictions are.

    In one table with the ids, which stay for days, each id kept 2 kB of the pages that its message had filled.
    """
    if any(row[1] == "payload" for row in connection.execute("PRAGMA table_info(predictions)")):
        connection.execute(
            "INSERT OR IGNORE INTO messages SELECT rowid, payload FROM predictions WHERE payload IS NOT NULL"
        )
        connection.execute("UPDATE predictions SET payload = NULL WHERE payload IS NOT NULL")


def _read_scores(connection: sqlite3.Connection) -> None:
    """Gives open predictions their scores, which the first version left in the message."""
    open_rows = (
        "SELECT p.request_id, m.payload FROM predictions p JOIN messages m ON m.number = p.rowid"
        " WHERE p.matured = 0 AND p.scores IS NULL"
    )
    for request_id, payload in connection.execute(open_rows).fetchall():
        batch = decode(payload)
        assert isinstance(batch, PredictionBatch)
        positions = None if batch.positions is None else batch.positions.tobytes()
        connection.execute(
            "UPDATE predictions SET canary = ?, scores = ?, session_id = ?, positions = ? WHERE request_id = ?",
            (int(batch.canary), batch.scores.tobytes(), batch.session_id, positions, request_id),
        )
