"""The monitor's memory: one SQLite file that is right after a SIGKILL at any moment.

Holds every record from before its acknowledgement until its row lies in a sealed archive file; the newest matured rows,
from which the windows are rebuilt; counters; and the small documents of policy and retraining. One method is one
transaction, flushed to disk when it returns. What the records mean is left to `monitoring.memory.join`, writing archive
files to `monitoring.memory.archive`.

A request goes through: prediction stored -> matured (labels known) -> in an intended file -> sealed (payload let go).
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts.errors import TemporaryError
from components.contracts.records import CLICK, OutcomeBatch, PredictionBatch

_SCHEMA = """
CREATE TABLE IF NOT EXISTS predictions (
    request_id TEXT PRIMARY KEY, time REAL NOT NULL, model_version INTEGER NOT NULL, num_rows INTEGER NOT NULL,
    stored_at REAL NOT NULL, matured INTEGER NOT NULL DEFAULT 0, payload BLOB);
CREATE INDEX IF NOT EXISTS waiting ON predictions (time) WHERE matured = 0;
CREATE TABLE IF NOT EXISTS outcome_batches (batch_id TEXT PRIMARY KEY, stored_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS set_aside (message_id TEXT PRIMARY KEY, reason TEXT NOT NULL);
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


class Waiting(NamedTuple):
    """A stored prediction whose attribution window has closed, and the clicks that arrived for it."""

    request_id: str
    payload: bytes
    clicks: list[tuple[int, float]]


class MaturedRequest(NamedTuple):
    """The rows of one request with their final labels."""

    request_id: str
    time: float
    model_version: int
    labels: NDArray[np.uint8]
    scores: NDArray[np.float32]


class ArchiveRow(NamedTuple):
    """A matured request on its way to the archive: the stored message and its labels."""

    number: int
    time: float
    num_rows: int
    payload: bytes
    labels: NDArray[np.uint8]


class Store:
    """The memory in `path`; one process at a time holds it."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the memory.

        Raises:
            TemporaryError: another monitor holds it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        # Freed by the kernel with the process, whatever ends it.
        self._lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise TemporaryError(f"state {path.parent} is held by another monitor") from error
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.executescript(_SCHEMA)
        self.counters: dict[str, float] = dict(self._connection.execute("SELECT name, value FROM counters"))
        """Everything counted since the state folder was created."""

    def close(self) -> None:
        """Lets the memory go."""
        self._connection.close()
        self._lock.close()

    # -- intake

    def add(
        self,
        predictions: Sequence[tuple[PredictionBatch, bytes]],
        outcomes: Sequence[OutcomeBatch],
        unusable: Sequence[tuple[str, str]],
        *,
        now: float,
    ) -> None:
        """Stores the records of one pull; those stored before only count as duplicates.

        Args:
            predictions: Batches with their messages.
            outcomes: Outcome batches.
            unusable: (message id, reason) of messages to be set aside; counted here, kept by the log.
            now: Seconds since the epoch.
        """
        counts: dict[str, float] = {}
        with self._transaction(counts) as connection:
            for bad in unusable:
                new = connection.execute("INSERT OR IGNORE INTO set_aside VALUES (?, ?)", bad).rowcount
                _count(counts, "set_aside", new)
            for batch, payload in predictions:
                row = (batch.request_id, batch.time, batch.model_version, len(batch), now, payload)
                new = connection.execute(
                    "INSERT OR IGNORE INTO predictions (request_id, time, model_version, num_rows, stored_at, payload)"
                    " VALUES (?, ?, ?, ?, ?, ?)",
                    row,
                ).rowcount
                _count(counts, "predicted" if new else "duplicate", len(batch) if new else 1)
            for outcome in outcomes:
                new = connection.execute(
                    "INSERT OR IGNORE INTO outcome_batches VALUES (?, ?)", (outcome.batch_id, now)
                ).rowcount
                if not new:
                    _count(counts, "duplicate", 1)
                else:
                    self._add_outcome(connection, outcome, counts, now)

    def _add_outcome(
        self, connection: sqlite3.Connection, outcome: OutcomeBatch, counts: dict[str, float], now: float
    ) -> None:
        _count(counts, "outcome", len(outcome))
        if outcome.event != CLICK:
            return
        ids = tuple(set(outcome.request_ids))
        closed = {
            found[0]
            for chunk in _chunks(ids, 500)
            for found in connection.execute(
                f"SELECT request_id FROM predictions WHERE matured = 1 AND request_id IN ({_marks(chunk)})", chunk
            )
        }
        triples = zip(outcome.request_ids, outcome.rows.tolist(), outcome.times.tolist())
        clicks = [(request_id, row, time, now) for request_id, row, time in triples if request_id not in closed]
        _count(counts, "late_outcome", len(outcome) - len(clicks))
        connection.executemany(
            "INSERT INTO clicks VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET time = min(time, excluded.time)", clicks
        )

    # -- join

    def waiting(self, predicted_before: float, limit: int) -> list[Waiting]:
        """Up to `limit` predictions made at or before this time and not matured, oldest first, with their clicks."""
        rows = self._connection.execute(
            "SELECT request_id, payload FROM predictions WHERE matured = 0 AND time <= ? ORDER BY time, request_id"
            " LIMIT ?",
            (predicted_before, limit),
        ).fetchall()
        clicks: dict[str, list[tuple[int, float]]] = {request_id: [] for request_id, _ in rows}
        for chunk in _chunks(tuple(clicks), 500):
            found = self._connection.execute(
                f"SELECT request_id, row, time FROM clicks WHERE request_id IN ({_marks(chunk)})", chunk
            )
            for request_id, row, time in found:
                clicks[request_id].append((row, time))
        return [Waiting(request_id, payload, clicks[request_id]) for request_id, payload in rows]

    def newest_waiting(self) -> tuple[float, int] | None:
        """Time and model version of the newest prediction that has not matured; None where all have."""
        query = "SELECT time, model_version FROM predictions WHERE matured = 0 ORDER BY time DESC LIMIT 1"
        row = self._connection.execute(query).fetchone()
        return None if row is None else (float(row[0]), int(row[1]))

    def mature(self, requests: Sequence[MaturedRequest], counts: dict[str, float], *, now: float) -> None:
        """Makes these labels final."""
        ids = [(r.request_id,) for r in requests]
        rows = [
            (r.request_id, r.time, r.model_version, len(r.labels), now, r.labels.tobytes(), r.scores.tobytes())
            for r in requests
        ]
        _count(counts, "matured", sum(len(r.labels) for r in requests))
        _count(counts, "matured_click", sum(int(r.labels.sum()) for r in requests))
        with self._transaction(counts) as connection:
            connection.executemany(
                "INSERT INTO matured (request_id, time, model_version, num_rows, matured_at, labels, scores)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
            connection.executemany("UPDATE predictions SET matured = 1 WHERE request_id = ?", ids)
            connection.executemany("DELETE FROM clicks WHERE request_id = ?", ids)

    @property
    def num_pending_rows(self) -> int:
        """Rows whose label is not final. From the counters: summing the waiting rows each tick would read them all."""
        return int(self.counters.get("predicted", 0) - self.counters.get("matured", 0))

    def newest_rows(self) -> Iterator[MaturedRequest]:
        """The matured requests still held, oldest first: enough to fill the window of the version that serves."""
        query = "SELECT request_id, time, model_version, labels, scores FROM matured ORDER BY number"
        for request_id, time, version, labels, scores in self._connection.execute(query):
            yield MaturedRequest(
                request_id, time, version, np.frombuffer(labels, np.uint8), np.frombuffer(scores, np.float32)
            )

    # -- archive

    @property
    def num_unarchived_rows(self) -> int:
        """Matured rows in no sealed file."""
        return int(self.counters.get("matured", 0) - self.counters.get("archived", 0))

    def oldest_unarchived_at(self) -> float | None:
        """When the first matured row that is in no file matured; None where all are in files."""
        query = "SELECT matured_at FROM matured WHERE file IS NULL ORDER BY number LIMIT 1"
        row = self._connection.execute(query).fetchone()
        return None if row is None else float(row[0])

    def oldest_unarchived(self, max_rows: int) -> list[ArchiveRow]:
        """Matured requests in no file yet, oldest first: at least one, then as many as fit into `max_rows` rows."""
        chosen: list[ArchiveRow] = []
        num_rows = 0
        for row in self._archive_rows("m.file IS NULL", ()):
            num_rows += row.num_rows
            if chosen and num_rows > max_rows:
                break
            chosen.append(row)
        return chosen

    def intend_file(self, name: str, numbers: Iterable[int], num_rows: int) -> None:
        """Gives these matured requests to the file `name`, which is written next."""
        with self._transaction({}) as connection:
            connection.execute("INSERT INTO files (name, num_rows) VALUES (?, ?)", (name, num_rows))
            connection.executemany("UPDATE matured SET file = ? WHERE number = ?", [(name, n) for n in numbers])

    def rows_of_file(self, name: str) -> list[ArchiveRow]:
        """The requests that were given to the file `name`."""
        return list(self._archive_rows("m.file = ?", (name,)))

    def seal_file(self, name: str, *, keep_rows: int) -> None:
        """Notes that the file is whole on disk; lets its payloads go, and matured rows that no window needs."""
        with self._transaction({}) as connection:
            (num_rows,) = connection.execute("SELECT num_rows FROM files WHERE name = ?", (name,)).fetchone()
            connection.execute("UPDATE files SET state = 'sealed' WHERE name = ?", (name,))
            connection.execute(
                "UPDATE predictions SET payload = NULL WHERE request_id IN"
                " (SELECT request_id FROM matured WHERE file = ?)",
                (name,),
            )
            # A request has at least one row, so the newest `keep_rows` requests fill any window.
            connection.execute(
                "DELETE FROM matured WHERE number <= (SELECT max(number) FROM matured) - ?"
                " AND file IN (SELECT name FROM files WHERE state != 'intended')",
                (keep_rows,),
            )
            self._add_counts(connection, {"archived": num_rows, "archived_file": 1})

    def files(self, state: str) -> list[str]:
        """Names of the archive files in `state`: `intended`, `sealed` or `uploaded`."""
        query = "SELECT name FROM files WHERE state = ? ORDER BY rowid"
        return [name for (name,) in self._connection.execute(query, (state,))]

    def mark_uploaded(self, names: Iterable[str]) -> None:
        """Notes that the uploader has moved these files."""
        with self._transaction({}) as connection:
            connection.executemany("UPDATE files SET state = 'uploaded' WHERE name = ?", [(n,) for n in names])

    def forget(self, *, before: float) -> None:
        """Lets go of ids stored before this time, of archived requests only, and of clicks on unknown requests."""
        counts: dict[str, float] = {}
        with self._transaction(counts) as connection:
            connection.execute("DELETE FROM predictions WHERE payload IS NULL AND stored_at < ?", (before,))
            connection.execute("DELETE FROM outcome_batches WHERE stored_at < ?", (before,))
            orphans = connection.execute(
                "DELETE FROM clicks WHERE stored_at < ? AND request_id NOT IN (SELECT request_id FROM predictions)",
                (before,),
            ).rowcount
            _count(counts, "unmatched_outcome", orphans)

    # -- documents

    def read_document(self, name: str) -> dict[str, Any] | None:
        """The JSON object kept under `name`; None where there is none."""
        row = self._connection.execute("SELECT content FROM documents WHERE name = ?", (name,)).fetchone()
        return None if row is None else dict(json.loads(row[0]))

    def write_documents(self, documents: dict[str, dict[str, Any]], counts: dict[str, float] | None = None) -> None:
        """Keeps these JSON objects, all or none, and adds to counters in the same transaction."""
        with self._transaction(counts or {}) as connection:
            connection.executemany(
                "INSERT OR REPLACE INTO documents VALUES (?, ?)",
                [(name, json.dumps(document)) for name, document in documents.items()],
            )

    def _archive_rows(self, condition: str, values: tuple[Any, ...]) -> Iterator[ArchiveRow]:
        query = (
            "SELECT m.number, m.time, m.num_rows, p.payload, m.labels FROM matured m"
            f" JOIN predictions p USING (request_id) WHERE {condition} ORDER BY m.number"
        )
        for number, time, num_rows, payload, labels in self._connection.execute(query, values):
            yield ArchiveRow(number, time, num_rows, payload, np.frombuffer(labels, np.uint8))

    @contextmanager
    def _transaction(self, counts: dict[str, float]) -> Iterator[sqlite3.Connection]:
        """One transaction; `counts` as they are at its end are added in it."""
        self._connection.execute("BEGIN IMMEDIATE")
        before = dict(self.counters)
        try:
            yield self._connection
            self._add_counts(self._connection, counts)
            self._connection.execute("COMMIT")
        except BaseException:
            self.counters = before
            # A full disk has ended the transaction already.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _add_counts(self, connection: sqlite3.Connection, counts: dict[str, float]) -> None:
        for name, number in counts.items():
            self.counters[name] = self.counters.get(name, 0) + number
            connection.execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (name, self.counters[name]))


def _count(counts: dict[str, float], name: str, number: float) -> None:
    counts[name] = counts.get(name, 0) + number


def _chunks(values: tuple[str, ...], size: int) -> Iterator[tuple[str, ...]]:
    return (values[i : i + size] for i in range(0, len(values), size))


def _marks(values: tuple[str, ...]) -> str:
    return ", ".join("?" * len(values))
