"""Which matured rows and late outcomes lie in which archive file, and how far each file is.

A file goes through: intended -> sealed -> uploaded. Writing it is left to `monitoring.memory.archive`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from monitoring.measures.window import MAX_VERSIONS
from monitoring.memory.database import Database
from monitoring.rows import ArchiveOutcome, ArchiveRow, LateOutcome

_AFTER_ALL = 2**63 - 1


class FileTables(Database):
    """See the module; what is opened is `monitoring.memory.store.Store`."""

    @property
    def num_unarchived_rows(self) -> int:
        """Matured rows in no sealed file."""
        return int(self.counters.get("matured", 0) - self.counters.get("archived", 0))

    def oldest_unarchived_at(self) -> float | None:
        """When the first matured row that is in no file matured; None where all are in files."""
        return self._first("SELECT matured_at FROM matured WHERE file IS NULL ORDER BY number LIMIT 1")

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

    def seal_file(self, name: str, *, keep_rows: int, keep_after: float = np.inf) -> None:
        """Notes that the file is whole on disk; lets its payloads go, and matured rows that nobody needs.

        Args:
            name: The file.
            keep_rows: Newest matured rows of a version that are held on, at least.
            keep_after: Requests predicted after this time are held on too.
        """
        with self._transaction({}) as connection:
            (num_rows,) = connection.execute("SELECT num_rows FROM files WHERE name = ?", (name,)).fetchone()
            connection.execute("UPDATE files SET state = 'sealed' WHERE name = ?", (name,))
            sealed = "SELECT p.rowid FROM matured m JOIN predictions p USING (request_id) WHERE m.file = ?"
            connection.execute(f"DELETE FROM messages WHERE number IN ({sealed})", (name,))
            connection.execute(
                f"UPDATE predictions SET scores = NULL, positions = NULL WHERE rowid IN ({sealed})", (name,)
            )
            self._let_go(connection, keep_rows, keep_after)
            self._add_counts(connection, {"archived": num_rows, "archived_file": 1})

    def _let_go(self, connection: sqlite3.Connection, keep_rows: int, keep_after: float) -> None:
        """Deletes archived requests beyond the newest rows of each of the newest versions."""
        newest = "SELECT model_version FROM matured GROUP BY model_version ORDER BY max(number) DESC"
        for place, (version,) in enumerate(connection.execute(newest).fetchall()):
            connection.execute(
                "DELETE FROM matured WHERE model_version = ? AND number < ? AND time <= ?"
                " AND file IN (SELECT name FROM files WHERE state != 'intended')",
                (version, self._first_kept(connection, version, keep_rows if place < MAX_VERSIONS else 0), keep_after),
            )

    @staticmethod
    def _first_kept(connection: sqlite3.Connection, version: int, keep_rows: int) -> int:
        """Number of the oldest request among the newest `keep_rows` rows of `version`."""
        if not keep_rows:
            return _AFTER_ALL
        first, num_rows = _AFTER_ALL, 0
        query = "SELECT number, num_rows FROM matured WHERE model_version = ? ORDER BY number DESC"
        newest = connection.execute(query, (version,))
        while num_rows < keep_rows and (found := newest.fetchone()):
            first, num_rows = found[0], num_rows + found[1]
        return first

    # -- late outcomes

    def oldest_late_at(self) -> float | None:
        """When the first late outcome that is in no file was stored; None where all are in files."""
        return self._first("SELECT stored_at FROM late_outcomes WHERE file IS NULL ORDER BY number LIMIT 1")

    def num_late(self, at_most: int) -> int:
        """Late outcomes in no file; counted up to `at_most`."""
        query = "SELECT count(*) FROM (SELECT 1 FROM late_outcomes WHERE file IS NULL LIMIT ?)"
        return int(self._connection.execute(query, (at_most,)).fetchone()[0])

    def oldest_late(self, max_rows: int) -> list[ArchiveOutcome]:
        """Up to `max_rows` late outcomes in no file, oldest first."""
        return list(self._outcomes("file IS NULL ORDER BY number LIMIT ?", (max_rows,)))

    def intend_outcome_file(self, name: str, numbers: Iterable[int], num_rows: int) -> None:
        """Gives these late outcomes to the file `name`, which is written next."""
        with self._transaction({}) as connection:
            connection.execute("INSERT INTO files (name, num_rows) VALUES (?, ?)", (name, num_rows))
            connection.executemany("UPDATE late_outcomes SET file = ? WHERE number = ?", [(name, n) for n in numbers])

    def outcomes_of_file(self, name: str) -> list[ArchiveOutcome]:
        """The late outcomes that were given to the file `name`."""
        return list(self._outcomes("file = ? ORDER BY number", (name,)))

    def seal_outcome_file(self, name: str) -> None:
        """Notes that the file is whole on disk; `Store.forget` lets its outcomes go."""
        with self._transaction({}) as connection:
            # Not what was intended: while a disk refused the file, an earlier outcome may have taken the place of one.
            query = "SELECT count(*) FROM late_outcomes WHERE file = ?"
            (num_rows,) = connection.execute(query, (name,)).fetchone()
            connection.execute("UPDATE files SET state = 'sealed', num_rows = ? WHERE name = ?", (num_rows, name))
            self._add_counts(connection, {"archived_outcome": num_rows, "archived_file": 1})

    # -- files

    def files(self, state: str) -> list[str]:
        """Names of the archive files in `state`: `intended`, `sealed` or `uploaded`."""
        query = "SELECT name FROM files WHERE state = ? ORDER BY rowid"
        return [name for (name,) in self._connection.execute(query, (state,))]

    def mark_uploaded(self, names: Iterable[str]) -> None:
        """Notes that the uploader has moved these files."""
        with self._transaction({}) as connection:
            connection.executemany("UPDATE files SET state = 'uploaded' WHERE name = ?", [(n,) for n in names])

    def _archive_rows(self, condition: str, values: tuple[Any, ...]) -> Iterator[ArchiveRow]:
        query = (
            "SELECT m.number, m.time, m.num_rows, x.payload, m.labels, m.converted FROM matured m"
            " JOIN predictions p USING (request_id) JOIN messages x ON x.number = p.rowid"
            f" WHERE {condition} ORDER BY m.number"
        )
        for number, time, num_rows, payload, labels, converted in self._connection.execute(query, values):
            yield ArchiveRow(
                number,
                time,
                num_rows,
                payload,
                np.frombuffer(labels, np.uint8),
                None if converted is None else np.frombuffer(converted, np.uint8),
            )

    def _outcomes(self, condition: str, values: tuple[Any, ...]) -> Iterator[ArchiveOutcome]:
        columns = "number, request_id, row, event, time, predicted_at, stored_at"
        query = f"SELECT {columns} FROM late_outcomes WHERE {condition}"
        for number, *outcome, stored_at in self._connection.execute(query, values):
            yield ArchiveOutcome(number, LateOutcome(*outcome), stored_at)

    def _first(self, query: str) -> float | None:
        row = self._connection.execute(query).fetchone()
        return None if row is None else float(row[0])
