"""The SQLite file of the memory: its tables, who holds it, its transactions, counters and small documents.

One process at a time holds it. One transaction is flushed to disk when it returns. What goes into the tables is left to
`monitoring.memory.store` and `monitoring.memory.file_tables`.
"""

import fcntl
import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from components.runtime.errors import PermanentError, TemporaryError

M = TypeVar("M")

VERSION = 5
"""Kept as SQLite's `user_version`. A state folder of another version is refused: its monitor must drain it."""
PAGE_BYTES = 16_384
"""Of new files. A message of 64 rows takes 17 kB: on SQLite's 4 kB pages it lies on a chain of five, and the whole
monitor takes 18 % more processor time (138k rows/s against 163k; 64 kB: 168k, and a file of twice the size)."""

_TABLES = """
CREATE TABLE predictions (
    request_id TEXT PRIMARY KEY, time REAL NOT NULL, model_version INTEGER NOT NULL, num_rows INTEGER NOT NULL,
    stored_at REAL NOT NULL, matured INTEGER NOT NULL DEFAULT 0,
    canary INTEGER NOT NULL DEFAULT 0, scores BLOB, positions BLOB, users BLOB);
CREATE TABLE messages (number INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE INDEX waiting ON predictions (time) WHERE matured = 0;
CREATE TABLE outcome_batches (batch_id TEXT PRIMARY KEY, stored_at REAL NOT NULL);
CREATE TABLE dead_letters (message_id TEXT PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE clicks (
    request_id TEXT NOT NULL, row INTEGER NOT NULL, time REAL NOT NULL, stored_at REAL NOT NULL,
    PRIMARY KEY (request_id, row));
CREATE TABLE matured (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE, time REAL NOT NULL,
    model_version INTEGER NOT NULL, num_rows INTEGER NOT NULL, matured_at REAL NOT NULL,
    labels BLOB NOT NULL, scores BLOB NOT NULL, file TEXT, positions BLOB, delays BLOB, users BLOB);
CREATE INDEX unarchived ON matured (number) WHERE file IS NULL;
CREATE INDEX archived_in ON matured (file);
CREATE TABLE late_outcomes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL, row INTEGER NOT NULL, event TEXT NOT NULL,
    time REAL NOT NULL, predicted_at REAL, stored_at REAL NOT NULL, file TEXT,
    UNIQUE (request_id, row, event));
CREATE INDEX unarchived_outcomes ON late_outcomes (number) WHERE file IS NULL;
CREATE INDEX outcomes_in ON late_outcomes (file) WHERE file IS NOT NULL;
CREATE TABLE files (
    name TEXT PRIMARY KEY,
    state TEXT NOT NULL DEFAULT 'intended' CHECK (state IN ('intended', 'sealed', 'uploaded')));
CREATE INDEX unfinished ON files (state) WHERE state != 'uploaded';
CREATE TABLE counters (name TEXT PRIMARY KEY, value REAL NOT NULL);
CREATE TABLE documents (name TEXT PRIMARY KEY, content TEXT NOT NULL);
CREATE INDEX predicted ON predictions (time, model_version, canary);
CREATE INDEX of_version ON matured (model_version, number, num_rows);
"""


class Database:
    """The open file in `path`."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the memory.

        Raises:
            TemporaryError: another monitor holds it, or the folder cannot be written now.
            PermanentError: the file is no memory of ours, or of another version.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Freed by the kernel with the process, whatever ends it.
            self._lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115
        except OSError as error:
            raise TemporaryError(f"state {path.parent} cannot be written: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise TemporaryError(f"state {path.parent} is held by another monitor") from error
        try:
            self._open()
        except BaseException:
            self._lock.close()
            raise

    def _open(self) -> None:
        with self._database_errors():
            self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            try:
                self._connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
                self._prepare_tables()
                self.counters: dict[str, float] = dict(self._connection.execute("SELECT name, value FROM counters"))
                """Everything counted since the state folder was created."""
            except BaseException:
                self._connection.close()
                raise

    def _prepare_tables(self) -> None:
        """Makes the tables of a new file in one transaction: killed midway, the file is empty."""
        (found,) = self._connection.execute("PRAGMA user_version").fetchone()
        if found == VERSION:
            return
        if found or self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() != (0,):
            raise PermanentError(f"state {self._path.parent} has version {found}, expected {VERSION}")
        self._connection.execute("BEGIN IMMEDIATE")
        # One by one: `executescript` would commit before it begins.
        for statement in _TABLES.split(";\n"):
            self._connection.execute(statement)
        self._connection.execute(f"PRAGMA user_version = {VERSION}")
        self._connection.execute("COMMIT")

    def close(self) -> None:
        """Releases the memory."""
        self._connection.close()
        self._lock.close()

    def read_document(self, name: str) -> dict[str, Any] | None:
        """The JSON object kept under `name`; None where there is none."""
        row = self._connection.execute("SELECT content FROM documents WHERE name = ?", (name,)).fetchone()
        return None if row is None else dict(json.loads(row[0]))

    def write_documents(self, documents: dict[str, dict[str, Any]], counts: dict[str, float] | None = None) -> None:
        """Keeps these JSON objects, all or none, and adds to counters in the same transaction.

        Raises:
            TemporaryError: the disk is full; nothing was kept.
        """
        with self._transaction(counts or {}) as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO documents VALUES (?, ?)",
                [(name, json.dumps(document)) for name, document in documents.items()],
            )

    @contextmanager
    def _transaction(self, counts: dict[str, float]) -> Iterator[sqlite3.Connection]:
        """One transaction; `counts` as they are at its end are added in it. On an error everything is as before."""
        before = dict(self.counters)
        with self._database_errors():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._add_counts(self._connection, counts)
                self._connection.execute("COMMIT")
            except BaseException:
                self.counters = before
                # A full disk has ended the transaction already.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _database_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise TemporaryError(f"state {self._path.parent}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise PermanentError(f"state {self._path.parent}: {error}") from error

    def _add_counts(self, connection: sqlite3.Connection, counts: dict[str, float]) -> None:
        for name, number in counts.items():
            self.counters[name] = self.counters.get(name, 0) + number
            connection.execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (name, self.counters[name]))

    def _select_by_id(self, query: str, ids: Iterable[str]) -> Iterator[tuple[Any, ...]]:
        """Rows of `query`, whose `{ids}` stands for the list of ids, 500 at a time."""
        every = list(ids)
        for start in range(0, len(every), 500):
            chunk = every[start : start + 500]
            yield from self._connection.execute(query.format(ids=", ".join("?" * len(chunk))), chunk)


def add_to(counts: dict[str, float], name: str, number: float) -> None:
    """Adds to one of `counts`."""
    counts[name] = counts.get(name, 0) + number


def read_memory(documents: Database, name: str, kind: type[M]) -> M:
    """The dataclass `kind` kept under `name` as `dataclasses.asdict` gave it; its defaults if there is none."""
    kept = documents.read_document(name) or {}
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in kept.items()})
