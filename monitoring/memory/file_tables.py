"""Which matured rows and late outcomes lie in which archive file, and how far each file is.

A file goes through: intended -> sealed -> uploaded. Writing it is left to `monitoring.memory.archive`.
"""

import sqlite3
from collections.abc import Iterable

import numpy as np

from components.contracts.raw_rows import OUTCOME_PARTITION
from monitoring.measures.window import MAX_VERSIONS
from monitoring.memory.database import Database
from monitoring.rows import ArchiveOutcome, ArchiveRow, LateOutcome, Unarchived

OUTCOME_FOLDER = OUTCOME_PARTITION.split("/")[0]
_AFTER_ALL = 2**63 - 1


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
        return self._first_number("SELECT matured_at FROM matured WHERE file IS NULL ORDER BY number LIMIT 1")

    def oldest_unarchived(self, max_rows: int) -> list[Unarchived]:
        """Matured requests in no file yet, oldest first: at least one, then as many as fit into `max_rows` rows."""
        chosen: list[Unarchived] = []
        num_rows = 0
        query = "SELECT number, time, num_rows FROM matured WHERE file IS NULL ORDER BY number"
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
        table = "late_outcomes" if holds_outcomes(name) else "matured"
        with self._transaction({}) as connection:
            connection.execute("INSERT INTO files (name) VALUES (?)", (name,))
            connection.executemany(f"UPDATE {table} SET file = ? WHERE number = ?", [(name, n) for n in numbers])

    def rows_of_file(self, name: str) -> list[ArchiveRow]:
        """The requests that were given to the file `name`."""
        query = (
            "SELECT x.payload, m.labels FROM matured m"
            " JOIN predictions p USING (request_id) JOIN messages x ON x.number = p.rowid"
            " WHERE m.file = ? ORDER BY m.number"
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
        kind, count = ("archived", "SELECT sum(num_rows) FROM matured WHERE file = ?")
        if holds_outcomes(name):
            kind, count = ("archived_outcome", "SELECT count(*) FROM late_outcomes WHERE file = ?")
        with self._transaction({}) as connection:
            connection.execute("UPDATE files SET state = 'sealed' WHERE name = ?", (name,))
            (num_rows,) = connection.execute(count, (name,)).fetchone()
            if not holds_outcomes(name):
                self._delete_payloads(connection, name)
                self._delete_old_matured(connection, keep_rows, keep_after)
            self._add_counts(connection, {kind: num_rows, "archived_file": 1})

    @staticmethod
    def _delete_payloads(connection: sqlite3.Connection, name: str) -> None:
        sealed = "SELECT p.rowid FROM matured m JOIN predictions p USING (request_id) WHERE m.file = ?"
        connection.execute(f"DELETE FROM messages WHERE number IN ({sealed})", (name,))
        connection.execute(
            f"UPDATE predictions SET scores = NULL, positions = NULL, users = NULL WHERE rowid IN ({sealed})", (name,)
        )

    def _delete_old_matured(self, connection: sqlite3.Connection, keep_rows: int, keep_after: float) -> None:
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
        first, num_rows = _AFTER_ALL, 0
        query = "SELECT number, num_rows FROM matured WHERE model_version = ? ORDER BY number DESC"
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
