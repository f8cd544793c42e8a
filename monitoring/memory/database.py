"""The SQLite file of the memory: its tables, who holds it, its transactions, counters and small documents.

One process at a time holds it. One transaction is flushed to disk when it returns. What goes into the tables is left to
`monitoring.memory.store`, but for the tables of which matured rows and late outcomes lie in which archive file: a file
goes intended -> sealed -> uploaded. Writing it is left to `monitoring.memory.archive`.
"""

import fcntl
import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from components.contracts.raw_rows import OUTCOME_PARTITION
from components.runtime.errors import PermanentError, TemporaryError
from monitoring.measures.window import MAX_VERSIONS
from monitoring.rows import ArchiveOutcome, ArchiveRow, LateOutcome, Unarchived

M = TypeVar("M")

VERSION = 6
"""Kept as SQLite's `user_version`. A state folder of another version is refused: its monitor must drain it."""
PAGE_BYTES = 16_384
"""Of new files. A message of 64 rows takes 17 kB: on SQLite's 4 kB pages it lies on a chain of five, and the whole
monitor takes 18 % more processor time (138k rows/s against 163k; 64 kB: 168k, and a file of twice the size)."""

_TABLES = """
CREATE TABLE predictions (
    request_id TEXT PRIMARY KEY, time REAL NOT NULL, model_version INTEGER NOT NULL, num_rows INTEGER NOT NULL,
    stored_at REAL NOT NULL, canary INTEGER NOT NULL, scores BLOB, positions BLOB, users BLOB,
    matured INTEGER, matured_at REAL, labels BLOB, delays BLOB, file TEXT);
CREATE TABLE messages (number INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE INDEX waiting ON predictions (time) WHERE matured IS NULL;
CREATE INDEX unarchived ON predictions (matured) WHERE matured > 0 AND file IS NULL;
CREATE INDEX archived_in ON predictions (file) WHERE file IS NOT NULL;
CREATE INDEX of_version ON predictions (model_version, matured, num_rows) WHERE matured > 0;
CREATE INDEX predicted ON predictions (time, model_version, canary);
CREATE TABLE outcome_batches (batch_id TEXT PRIMARY KEY, stored_at REAL NOT NULL);
CREATE TABLE dead_letters (message_id TEXT PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE clicks (
    request_id TEXT NOT NULL, row INTEGER NOT NULL, time REAL NOT NULL, stored_at REAL NOT NULL,
    PRIMARY KEY (request_id, row));
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
"""
"""`predictions.matured`: NULL until the labels are final; then the place in the order of maturing, from 1; and 0 once
only the request's id is held. A message has the number of its prediction's row."""


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


OUTCOME_FOLDER = OUTCOME_PARTITION.split("/")[0]
_AFTER_ALL = 2**63 - 1
_UNARCHIVED = "matured > 0 AND file IS NULL ORDER BY matured"


def holds_outcomes(name: str) -> bool:
    """Whether the archive file `name` holds late outcomes, not matured rows.

    >>> holds_outcomes("outcomes/day=2025-11-13/part-1.parquet"), holds_outcomes("day=2025-11-13/part-1.parquet")
    (True, False)
    """
    return name.startswith(f"{OUTCOME_FOLDER}/")


class FileTables(Database):
    """See the module; what is opened is `monitoring.memory.store.Store`."""

    # -- matured rows and late outcomes in no file

    @property
    def num_unarchived_rows(self) -> int:
        """Matured rows in no sealed file."""
        return int(self.counters.get("matured", 0) - self.counters.get("archived", 0))

    def oldest_unarchived_at(self) -> float | None:
        """When the first matured row that is in no file matured; None where all are in files."""
        return self._first_number(f"SELECT matured_at FROM predictions WHERE {_UNARCHIVED} LIMIT 1")

    def oldest_unarchived(self, max_rows: int) -> list[Unarchived]:
        """Matured requests in no file yet, oldest first: at least one, then as many as fit into `max_rows` rows."""
        chosen: list[Unarchived] = []
        num_rows = 0
        query = f"SELECT rowid, time, num_rows FROM predictions WHERE {_UNARCHIVED}"
        for request in map(Unarchived._make, self._connection.execute(query)):
            num_rows += request.num_rows
            if chosen and num_rows > max_rows:
                break
            chosen.append(request)
        return chosen

    def num_late(self, at_most: int) -> int:
        """Late outcomes in no file; counted up to `at_most`."""
        query = "SELECT count(*) FROM (SELECT 1 FROM late_outcomes WHERE file IS NULL LIMIT ?)"
        return int(self._connection.execute(query, (at_most,)).fetchone()[0])

    def oldest_late_at(self) -> float | None:
        """When the first late outcome that is in no file was stored; None where all are in files."""
        return self._first_number("SELECT stored_at FROM late_outcomes WHERE file IS NULL ORDER BY number LIMIT 1")

    def oldest_late(self, max_rows: int) -> list[Unarchived]:
        """Up to `max_rows` late outcomes in no file, oldest first."""
        columns = "number, coalesce(predicted_at, time), 1"
        query = f"SELECT {columns} FROM late_outcomes WHERE file IS NULL ORDER BY number LIMIT ?"
        return list(map(Unarchived._make, self._connection.execute(query, (max_rows,))))

    # -- files

    def intend_file(self, name: str, numbers: Iterable[int]) -> None:
        """Gives these matured requests, or late outcomes, to the file `name`, which is written next."""
        table = "late_outcomes" if holds_outcomes(name) else "predictions"
        with self._transaction({}) as connection:
            connection.execute("INSERT INTO files (name) VALUES (?)", (name,))
            connection.executemany(f"UPDATE {table} SET file = ? WHERE rowid = ?", [(name, n) for n in numbers])

    def rows_of_file(self, name: str) -> list[ArchiveRow]:
        """The requests that were given to the file `name`."""
        query = (
            "SELECT x.payload, p.labels FROM predictions p JOIN messages x ON x.number = p.rowid"
            " WHERE p.file = ? ORDER BY p.matured"
        )
        found = self._connection.execute(query, (name,))
        return [ArchiveRow(payload, np.frombuffer(labels, np.uint8)) for payload, labels in found]

    def outcomes_of_file(self, name: str) -> list[ArchiveOutcome]:
        """The late outcomes that were given to the file `name`."""
        columns = "request_id, row, event, time, predicted_at, stored_at"
        found = self._connection.execute(f"SELECT {columns} FROM late_outcomes WHERE file = ? ORDER BY number", (name,))
        return [ArchiveOutcome(LateOutcome(*outcome), stored_at) for *outcome, stored_at in found]

    def seal_file(self, name: str, *, keep_rows: int, keep_after: float = np.inf) -> None:
        """Notes that the file is whole on disk; lets its payloads go, and matured rows that nobody needs.

        The outcomes in a sealed file are let go by `Store.forget`. The newest `keep_rows` matured rows of a version are
        held on, and requests predicted after `keep_after`.
        """
        kind, count = ("archived", "SELECT sum(num_rows) FROM predictions WHERE file = ?")
        if holds_outcomes(name):
            kind, count = ("archived_outcome", "SELECT count(*) FROM late_outcomes WHERE file = ?")
        with self._transaction({}) as connection:
            connection.execute("UPDATE files SET state = 'sealed' WHERE name = ?", (name,))
            (num_rows,) = connection.execute(count, (name,)).fetchone()
            if not holds_outcomes(name):
                sealed = "SELECT rowid FROM predictions WHERE file = ?"
                connection.execute(f"DELETE FROM messages WHERE number IN ({sealed})", (name,))
                self._let_old_matured_go(connection, keep_rows, keep_after)
            self._add_counts(connection, {kind: num_rows, "archived_file": 1})

    def _let_old_matured_go(self, connection: sqlite3.Connection, keep_rows: int, keep_after: float) -> None:
        """Holds only the ids of archived requests beyond the newest rows of each of the newest versions."""
        newest = (
            "SELECT model_version FROM predictions WHERE matured > 0 GROUP BY model_version ORDER BY max(matured) DESC"
        )
        for place, (version,) in enumerate(connection.execute(newest).fetchall()):
            connection.execute(
                "UPDATE predictions SET matured = 0, scores = NULL, positions = NULL, users = NULL, labels = NULL,"
                " delays = NULL, file = NULL WHERE model_version = ? AND matured > 0 AND matured < ? AND time <= ?"
                " AND file IN (SELECT name FROM files WHERE state != 'intended')",
                (version, self._first_kept(connection, version, keep_rows if place < MAX_VERSIONS else 0), keep_after),
            )

    @staticmethod
    def _first_kept(connection: sqlite3.Connection, version: int, keep_rows: int) -> int:
        """Place of the oldest request among the newest `keep_rows` rows of `version`."""
        first, num_rows = _AFTER_ALL, 0
        query = (
            "SELECT matured, num_rows FROM predictions WHERE model_version = ? AND matured > 0 ORDER BY matured DESC"
        )
        newest = connection.execute(query, (version,))
        while num_rows < keep_rows and (found := newest.fetchone()):
            first, num_rows = found[0], num_rows + found[1]
        return first

    def files(self, state: str) -> list[str]:
        """Names of the archive files in `state`: `intended`, `sealed` or `uploaded`."""
        query = "SELECT name FROM files WHERE state = ? ORDER BY rowid"
        return [name for (name,) in self._connection.execute(query, (state,))]

    def mark_uploaded(self, names: Iterable[str]) -> None:
        """Notes that the uploader has moved these files."""
        with self._transaction({}) as connection:
            connection.executemany("UPDATE files SET state = 'uploaded' WHERE name = ?", [(n,) for n in names])

    def _first_number(self, query: str) -> float | None:
        row = self._connection.execute(query).fetchone()
        return None if row is None else float(row[0])
