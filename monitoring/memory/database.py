"""The SQLite file of the memory: who holds it, its transactions, counters and small documents.

One process at a time holds it. One transaction is flushed to disk when it returns. What the tables are is left to
`monitoring.memory.schema`, what goes into them to `monitoring.memory.store`.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.runtime.errors import PermanentError, TemporaryError
from monitoring.memory import schema


class Database:
    """The open file in `path`."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the memory; brings one of an older monitor up to date.

        Raises:
            TemporaryError: another monitor holds it, or the folder cannot be written now.
            PermanentError: the file is no memory of ours, or a newer monitor's.
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
        with self._translated():
            self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            try:
                self._connection.execute(f"PRAGMA page_size={schema.PAGE_BYTES}")
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
                schema.prepare(self._connection, str(self._path.parent))
                self.counters: dict[str, float] = dict(self._connection.execute("SELECT name, value FROM counters"))
                """Everything counted since the state folder was created."""
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        """Lets the memory go."""
        self._connection.close()
        self._lock.close()

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

    @contextmanager
    def _transaction(self, counts: dict[str, float]) -> Iterator[sqlite3.Connection]:
        """One transaction; `counts` as they are at its end are added in it.

        Raises:
            TemporaryError: the disk is full or refuses; everything is as it was before.
        """
        before = dict(self.counters)
        with self._translated():
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
    def _translated(self) -> Iterator[None]:
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

    def _select_by_id(self, query: str, ids: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Rows of `query`, whose `{ids}` stands for the list of ids, 500 at a time."""
        for start in range(0, len(ids), 500):
            chunk = ids[start : start + 500]
            yield from self._connection.execute(query.format(ids=", ".join("?" * len(chunk))), chunk)


def count(counts: dict[str, float], name: str, number: float) -> None:
    """Adds to one of `counts`."""
    counts[name] = counts.get(name, 0) + number
