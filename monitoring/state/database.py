"""SQLite file of the monitor's state: tables, lock, transactions, counters and documents.

Only one process at a time opens the file. A transaction is on disk when its call returns. The
module tracks the matured rows and late outcomes of each archive file. The state of a file is
`intended`, then `sealed`, then `uploaded`. If a file cannot be written, its state is `set apart`.
This module defines all tables. `monitoring.state.store` writes most of the tables, and
`monitoring.state.archive` writes the archive's files.
"""

import fcntl
import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from evergreen.contracts.raw_rows import OUTCOME_PARTITION
from evergreen.contracts.records import Predictions, R, Requests
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from monitoring.metrics.window import MAX_VERSIONS
from monitoring.rows import ArchiveOutcome, LateOutcome, MaturedRequests, Unarchived

M = TypeVar("M")

logger = logging.getLogger(__name__)

VERSION = 9
"""Schema version, stored as SQLite's `user_version`. A state folder with another version is
rejected and must be drained by the monitor that wrote it."""
_PAGE_BYTES = 16_384
"""Page size of new files. With SQLite's default of 4 kB, a block becomes a chain of thousands of
pages. Requests of 64 rows then take 28 % more processor time."""

_TABLES = """
CREATE TABLE predictions (
    request_id TEXT PRIMARY KEY, time REAL NOT NULL, model_version INTEGER NOT NULL,
    num_rows INTEGER NOT NULL, stored_at REAL NOT NULL, canary INTEGER NOT NULL);
CREATE TABLE blocks (
    last INTEGER PRIMARY KEY, first INTEGER NOT NULL, matured_to INTEGER NOT NULL,
    waiting_from REAL, newest REAL NOT NULL, unarchived INTEGER NOT NULL, needed INTEGER NOT NULL,
    requests BLOB NOT NULL);
CREATE INDEX waiting ON blocks (waiting_from) WHERE waiting_from IS NOT NULL;
CREATE TABLE block_rows (last INTEGER PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE matured (
    last INTEGER PRIMARY KEY, num_requests INTEGER NOT NULL, num_rows INTEGER NOT NULL,
    time REAL NOT NULL, newest REAL NOT NULL, matured_at REAL NOT NULL, versions TEXT NOT NULL,
    requests BLOB NOT NULL, file TEXT);
CREATE INDEX unarchived ON matured (last) WHERE file IS NULL;
CREATE INDEX archived_in ON matured (file) WHERE file IS NOT NULL;
CREATE TABLE outcome_batches (batch_id TEXT PRIMARY KEY, stored_at REAL NOT NULL);
CREATE TABLE dead_letters (message_id TEXT PRIMARY KEY, stored_at REAL NOT NULL);
CREATE TABLE clicks (
    request_id TEXT NOT NULL, row INTEGER NOT NULL, time REAL NOT NULL, stored_at REAL NOT NULL,
    number INTEGER, PRIMARY KEY (request_id, row));
CREATE INDEX clicked ON clicks (number);
CREATE TABLE late_outcomes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL, row INTEGER NOT NULL,
    event TEXT NOT NULL, time REAL NOT NULL, predicted_at REAL, stored_at REAL NOT NULL, file TEXT,
    UNIQUE (request_id, row, event));
CREATE INDEX unarchived_outcomes ON late_outcomes (number) WHERE file IS NULL;
CREATE INDEX outcomes_in ON late_outcomes (file) WHERE file IS NOT NULL;
CREATE TABLE files (
    name TEXT PRIMARY KEY,
    state TEXT NOT NULL DEFAULT 'intended'
        CHECK (state IN ('intended', 'sealed', 'uploaded', 'set apart')));
CREATE INDEX unfinished ON files (state) WHERE state != 'uploaded';
CREATE TABLE counters (name TEXT PRIMARY KEY, value REAL NOT NULL);
CREATE TABLE documents (name TEXT PRIMARY KEY, content TEXT NOT NULL);
"""
"""Schema of the file.

- `predictions`: the rowid is the prediction's number.
- `blocks`: the predictions numbered `first` to `last`, ordered by time. Predictions up to
  `matured_to` have matured. `waiting_from` is the time of the first open prediction, and `newest`
  is the time of the newest open prediction. `unarchived` counts the predictions that are in no
  sealed file, and `needed` counts the predictions that are still needed.
- `matured`: each database row is a part, which is a group of matured requests. Requests are
  numbered in the order in which they mature. `last` is the number of the part's last request.
  `versions` is the number of rows of each model version.
- `clicks`: `number` is the number of the prediction, or NULL while it is unknown.
"""


_CHECKSUM_BYTES = 4


class CorruptBlock(ContractError):
    """A block of the state whose bytes changed on disk."""

    def __init__(self, number: int, num_bytes: int) -> None:
        super().__init__(
            f"block {number} of the state, {num_bytes} bytes, does not match its checksum"
        )
        self.number = number


def pack(requests: Requests) -> bytes:
    """Serialize the arrays, preceded by their checksum (CRC-32)."""
    arrays = {
        each.name: getattr(requests, each.name) for each in fields(requests) if each.name != "ids"
    }
    content = {
        name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()
    }
    packed = msgspec.msgpack.encode((requests.ids.tolist(), content))
    return crc32(packed).to_bytes(_CHECKSUM_BYTES, "big") + packed


def unpack(kind: type[R], content: bytes, number: int = 0) -> R:
    """Deserialize requests that `pack` serialized. The arrays of the result are read-only.

    Args:
        kind: Type of the requests, such as `Predictions`.
        content: Bytes that `pack` returned.
        number: Number of the block, for the error message.

    Raises:
        CorruptBlock: The bytes do not match their checksum.
    """
    packed = memoryview(content)[_CHECKSUM_BYTES:]
    if crc32(packed).to_bytes(_CHECKSUM_BYTES, "big") != content[:_CHECKSUM_BYTES]:
        raise CorruptBlock(number, len(content))
    ids, arrays = msgspec.msgpack.decode(packed)
    return kind(
        ids=np.array(ids, object),
        **{
            name: np.frombuffer(array, dtype).reshape(shape)
            for name, (dtype, shape, array) in arrays.items()
        },
    )


class Database:
    """The monitor's SQLite database at `path`."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            TemporaryError: Another monitor has the file open, or the folder cannot be written now.
            PermanentError: The file is not a monitor's state, or has another version.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make_private(path)
            # The kernel releases the lock when the process ends for any reason.
            self._lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115
        except OSError as error:
            raise TemporaryError(f"state {path.parent} cannot be written: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise TemporaryError(f"state {path.parent} is open in another monitor") from error
        try:
            self._open()
        except BaseException:
            self._lock.close()
            raise

    def _open(self) -> None:
        with self._database_errors():
            self._connection = sqlite3.connect(
                self._path, isolation_level=None, check_same_thread=False
            )
            try:
                self._connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
                self._prepare_tables()
                self.counters: dict[str, float] = dict(
                    self._connection.execute("SELECT name, value FROM counters")
                )
                """Counters since the state folder was created."""
            except BaseException:
                self._connection.close()
                raise

    def _prepare_tables(self) -> None:
        """Create the tables of a new file in one transaction, so that a kill leaves it empty."""
        (found,) = self._connection.execute("PRAGMA user_version").fetchone()
        if found == VERSION:
            return
        if found or self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() != (
            0,
        ):
            raise PermanentError(
                f"state {self._path.parent} has version {found}, expected {VERSION}"
            )
        self._connection.execute("BEGIN IMMEDIATE")
        # Execute one statement at a time, because `executescript` commits the transaction first.
        for statement in _TABLES.split(";\n"):
            self._connection.execute(statement)
        self._connection.execute(f"PRAGMA user_version = {VERSION}")
        self._connection.execute("COMMIT")

    def close(self) -> None:
        """Close the file and release the lock."""
        self._connection.close()
        self._lock.close()

    def read_document(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object stored under `name`, or None."""
        row = self._connection.execute(
            "SELECT content FROM documents WHERE name = ?", (name,)
        ).fetchone()
        return None if row is None else dict(json.loads(row[0]))

    def write_documents(
        self, documents: dict[str, dict[str, Any]], counts: dict[str, float] | None = None
    ) -> None:
        """Store JSON objects, all or none, and add to counters in the same transaction.

        Raises:
            TemporaryError: The disk is full. Nothing was stored.
        """
        with self._transaction(counts or {}) as connection:
            self._write_documents(connection, documents)

    @staticmethod
    def _write_documents(
        connection: sqlite3.Connection, documents: Mapping[str, Mapping[str, Any]]
    ) -> None:
        connection.executemany(
            "INSERT OR REPLACE INTO documents VALUES (?, ?)",
            [(name, json.dumps(document)) for name, document in documents.items()],
        )

    @contextmanager
    def _transaction(self, counts: dict[str, float]) -> Iterator[sqlite3.Connection]:
        """Run one transaction, and add `counts` to the counters at its end.

        An error rolls the transaction back.
        """
        before = dict(self.counters)
        with self._database_errors():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._add_counts(self._connection, counts)
                self._connection.execute("COMMIT")
            except BaseException:
                self.counters = before
                # SQLite has already rolled the transaction back if the disk is full.
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
            connection.execute(
                "INSERT OR REPLACE INTO counters VALUES (?, ?)", (name, self.counters[name])
            )

    def _select_by_id(self, query: str, ids: Iterable[str]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of `query`, whose placeholder `{ids}` is filled with 500 ids at a time."""
        every = list(ids)
        for start in range(0, len(every), 500):
            chunk = every[start : start + 500]
            yield from self._connection.execute(
                query.format(ids=", ".join("?" * len(chunk))), chunk
            )


def _make_private(path: Path) -> None:
    """Remove the access rights of other users, also from a folder of an earlier monitor."""
    for each in (path.parent, *path.parent.glob(f"{path.stem}*")):
        with suppress(PermissionError):  # the folder belongs to another user, who sets its rights
            each.chmod(each.stat().st_mode & ~0o077)


def add_to(counts: dict[str, float], name: str, number: float) -> None:
    """Add `number` to the counter `name` in `counts`."""
    counts[name] = counts.get(name, 0) + number


def read_dataclass(documents: Database, name: str, kind: type[M]) -> M:
    """Return the dataclass stored under `name`, or its defaults.

    The fields were stored with `dataclasses.asdict`.
    """
    saved = documents.read_document(name) or {}
    return kind(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
    )


OUTCOME_FOLDER = OUTCOME_PARTITION.split("/")[0]
DAY_MICROS = 86_400_000_000


def holds_outcomes(name: str) -> bool:
    """Return whether the archive file `name` contains late outcomes instead of matured rows.

    >>> holds_outcomes("outcomes/day=2025-11-13/part-1.parquet")
    True
    >>> holds_outcomes("day=2025-11-13/part-1.parquet")
    False
    """
    return name.startswith(f"{OUTCOME_FOLDER}/")


class FileTables(Database):
    """Tables that assign matured rows and late outcomes to archive files.

    Programs use the subclass `monitoring.state.store.StateStore`.
    """

    # -- matured rows and late outcomes that no file contains

    @property
    def num_unarchived_rows(self) -> int:
        """Number of matured rows that are in no sealed file.

        Rows that are set apart are not included.
        """
        ended = self.counters.get("archived", 0) + self.counters.get("set_apart", 0)
        return int(self.counters.get("matured", 0) - ended)

    def oldest_unarchived_at(self) -> float | None:
        """Return the time at which the oldest unarchived row matured, or None."""
        return self._first_number(
            "SELECT matured_at FROM matured WHERE file IS NULL ORDER BY last LIMIT 1"
        )

    def oldest_unarchived(self, max_rows: int) -> list[Unarchived]:
        """Return the oldest parts of matured requests that are in no archive file.

        Returns as many parts as fit into `max_rows`, but at least one part if there is any.
        """
        chosen: list[Unarchived] = []
        num_rows = 0
        query = "SELECT last, time, num_rows FROM matured WHERE file IS NULL ORDER BY last"
        for part in map(Unarchived._make, self._connection.execute(query)):
            num_rows += part.num_rows
            if chosen and num_rows > max_rows:
                break
            chosen.append(part)
        return chosen

    def num_late(self, at_most: int) -> int:
        """Count late outcomes that are in no archive file, up to `at_most`."""
        query = "SELECT count(*) FROM (SELECT 1 FROM late_outcomes WHERE file IS NULL LIMIT ?)"
        return int(self._connection.execute(query, (at_most,)).fetchone()[0])

    def oldest_late_at(self) -> float | None:
        """Return the time at which the oldest unarchived late outcome was stored, or None."""
        return self._first_number(
            "SELECT stored_at FROM late_outcomes WHERE file IS NULL ORDER BY number LIMIT 1"
        )

    def oldest_late(self, max_rows: int) -> list[Unarchived]:
        """Return up to `max_rows` late outcomes that are in no archive file, oldest first."""
        # A prediction more than a day in the future had a wrong clock. The outcomes of a prediction
        # with a wrong clock must not create an archive file for a day in the future.
        columns = "number, min(coalesce(predicted_at, time), stored_at + 86400.0), 1"
        query = f"SELECT {columns} FROM late_outcomes WHERE file IS NULL ORDER BY number LIMIT ?"
        return list(map(Unarchived._make, self._connection.execute(query, (max_rows,))))

    # -- archive files

    def intend_file(self, name: str, numbers: Iterable[int]) -> None:
        """Assign parts of matured requests, or late outcomes, to a file that is written next."""
        with self._transaction({}) as connection:
            self._intend(connection, name, numbers)

    def split_file(self, name: str, parts: Mapping[str, Iterable[int]]) -> None:
        """Assign the contents of the intended file `name` to other intended files.

        Args:
            name: Name of the intended file.
            parts: For each new file, some of the numbers that `numbers_of_file` returned.
        """
        with self._transaction({}) as connection:
            connection.execute("DELETE FROM files WHERE name = ?", (name,))
            for part, numbers in parts.items():
                self._intend(connection, part, numbers)

    def _intend(self, connection: sqlite3.Connection, name: str, numbers: Iterable[int]) -> None:
        connection.execute("INSERT INTO files (name) VALUES (?)", (name,))
        query = f"UPDATE {self._table_of(name)} SET file = ? WHERE rowid = ?"
        connection.executemany(query, [(name, number) for number in numbers])

    def numbers_of_file(self, name: str) -> list[int]:
        """Return the row ids of the parts or late outcomes that belong to a file."""
        query = f"SELECT rowid FROM {self._table_of(name)} WHERE file = ? ORDER BY rowid"
        return [number for (number,) in self._connection.execute(query, (name,))]

    def split_part(self, number: int) -> bool:
        """Split a part of matured requests into two parts of the same file.

        Returns:
            False if the part has only one request or is corrupt.
        """
        query = "SELECT matured_at, file, requests FROM matured WHERE last = ? AND num_requests > 1"
        if (found := self._connection.execute(query, (number,)).fetchone()) is None:
            return False
        matured_at, file, packed = found
        try:
            part = unpack(MaturedRequests, packed, number)
        except CorruptBlock:
            return False
        half = len(part) // 2
        with self._transaction({}) as connection:
            connection.execute("DELETE FROM matured WHERE last = ?", (number,))
            for start, stop in ((0, half), (half, len(part))):
                last = number - len(part) + stop
                self._insert_part(
                    connection, part.between(start, stop), last, matured_at=matured_at, file=file
                )
        return True

    @staticmethod
    def _insert_part(
        connection: sqlite3.Connection,
        part: MaturedRequests,
        last: int,
        *,
        matured_at: float,
        file: str | None,
    ) -> None:
        """Store matured requests as one part of an archive file.

        `last` is the number of the part's last request. Requests are numbered in the order in which
        they mature.
        """
        versions = {version: of.num_rows for version, of in reversed(list(part.by_version()))}
        times = (float(part.times[0]), float(part.times.max()))
        connection.execute(
            "INSERT INTO matured VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                last,
                len(part),
                part.num_rows,
                *times,
                matured_at,
                json.dumps(versions),
                pack(part),
                file,
            ),
        )

    def set_apart(self, name: str) -> int:
        """Set an intended file apart, because it cannot be written.

        The rows of the file stay in the state.

        Returns:
            The number of rows or late outcomes.
        """
        with self._transaction({}) as connection:
            return self._move_apart(connection, name, 1)

    def retry_file(self, name: str) -> None:
        """Change the status of a file from `set apart` back to `intended`."""
        with self._transaction({}) as connection:
            self._move_apart(connection, name, -1)

    def _move_apart(self, connection: sqlite3.Connection, name: str, sign: int) -> int:
        state = "set apart" if sign > 0 else "intended"
        connection.execute("UPDATE files SET state = ? WHERE name = ?", (state, name))
        kind = "set_apart_outcome" if holds_outcomes(name) else "set_apart"
        counted = "count(*)" if holds_outcomes(name) else "coalesce(sum(num_rows), 0)"
        query = f"SELECT {counted} FROM {self._table_of(name)} WHERE file = ?"
        (number,) = connection.execute(query, (name,)).fetchone()
        self._add_counts(connection, {kind: sign * number})
        return int(number)

    @staticmethod
    def _table_of(name: str) -> str:
        return "late_outcomes" if holds_outcomes(name) else "matured"

    def rows_of_file(self, name: str) -> tuple[Predictions, NDArray[np.uint8]]:
        """Return the requests of the file `name` in their order, and the label of each row."""
        matured = self._matured_of_file(name)
        found, order = [], []
        for last, of_block in self._by_block(matured.numbers):
            block = self._block_rows(last)
            found.append(block.select(of_block - (last + 1 - len(block))))
            order.append(of_block)
        in_order = np.searchsorted(np.concatenate(order), matured.numbers)
        return Predictions.joined(found).select(in_order), matured.labels

    def _matured_of_file(self, name: str) -> MaturedRequests:
        parts = self._connection.execute(
            "SELECT requests, last FROM matured WHERE file = ? ORDER BY last", (name,)
        )
        return MaturedRequests.joined([unpack(MaturedRequests, *part) for part in parts])

    def _block_rows(self, last: int) -> Predictions:
        """Return the rows of a block that is not archived."""
        (content,) = self._connection.execute(
            "SELECT content FROM block_rows WHERE last = ?", (last,)
        ).fetchone()
        return unpack(Predictions, content, last)

    def _by_block(self, numbers: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Group `numbers` by block.

        Yield for each block the number of its last prediction, and those of `numbers` that it
        contains.

        Blocks that contain none of the `numbers` are skipped.
        """
        ordered = np.sort(numbers)
        while len(ordered):
            query = "SELECT last FROM blocks WHERE last >= ? ORDER BY last LIMIT 1"
            (last,) = self._connection.execute(query, (int(ordered[0]),)).fetchone()
            end = int(np.searchsorted(ordered, last, "right"))
            yield last, ordered[:end]
            ordered = ordered[end:]

    def outcomes_of_file(self, name: str) -> list[ArchiveOutcome]:
        """Return the late outcomes assigned to the file `name`."""
        columns = "request_id, row, event, time, predicted_at, stored_at"
        found = self._connection.execute(
            f"SELECT {columns} FROM late_outcomes WHERE file = ? ORDER BY number", (name,)
        )
        return [ArchiveOutcome(LateOutcome(*outcome), stored_at) for *outcome, stored_at in found]

    def seal_file(self, name: str, *, keep_rows: int, keep_after: float = np.inf) -> int:
        """Mark a file as complete on disk, and delete payloads and rows that are no longer needed.

        `StateStore.forget` deletes the outcomes in sealed files.

        Args:
            name: Name of the archive file.
            keep_rows: Number of the newest matured rows that stay for each version.
            keep_after: Only requests up to this event time are deleted.

        Returns:
            The number of rows or late outcomes in the file.
        """
        kind, count = ("archived", "SELECT sum(num_rows) FROM matured WHERE file = ?")
        if holds_outcomes(name):
            kind, count = ("archived_outcome", "SELECT count(*) FROM late_outcomes WHERE file = ?")
        with self._transaction({}) as connection:
            connection.execute("UPDATE files SET state = 'sealed' WHERE name = ?", (name,))
            (num_rows,) = connection.execute(count, (name,)).fetchone()
            if not holds_outcomes(name):
                for last, numbers in self._by_block(self._matured_of_file(name).numbers):
                    count_down = (
                        "UPDATE blocks SET unarchived = unarchived - ? WHERE last = ? "
                        "RETURNING unarchived"
                    )
                    if connection.execute(count_down, (len(numbers), last)).fetchone() == (0,):
                        connection.execute("DELETE FROM block_rows WHERE last = ?", (last,))
                self._delete_old_matured(connection, keep_rows, keep_after)
            self._add_counts(connection, {kind: num_rows, "archived_file": 1})
        return int(num_rows)

    def _delete_old_matured(
        self, connection: sqlite3.Connection, keep_rows: int, keep_after: float
    ) -> None:
        """Delete archived requests, but keep the newest rows of each of the newest versions.

        Ids of deleted requests are not deleted. A part is deleted completely or not at all. At most
        `MAX_VERSIONS * keep_rows` rows stay. A part can contain rows of several versions. Without
        this limit, many rows of other versions would stay, because they share parts with a rare
        version.
        """
        is_sealed = "file IN (SELECT name FROM files WHERE state IN ('sealed', 'uploaded'))"
        query = (
            f"SELECT last, versions, newest <= ? AND {is_sealed} FROM matured ORDER BY last DESC"
        )
        seen: dict[str, int] = {}
        num_newer = 0
        for last, versions, may_go in connection.execute(query, (keep_after,)).fetchall():
            is_needed, rows_of = False, json.loads(versions)
            for version, num_rows in rows_of.items():
                if version in seen or len(seen) < MAX_VERSIONS:
                    is_needed |= seen.setdefault(version, 0) < keep_rows
                    seen[version] += num_rows
            is_needed &= num_newer < MAX_VERSIONS * keep_rows
            num_newer += sum(rows_of.values())
            if may_go and not is_needed:
                self._delete_part(connection, last)

    def _delete_part(self, connection: sqlite3.Connection, last: int) -> None:
        """Delete one part, and the blocks that no request needs any more.

        A part is a group of matured requests.
        """
        (packed,) = connection.execute(
            "DELETE FROM matured WHERE last = ? RETURNING requests", (last,)
        ).fetchone()
        try:
            numbers = unpack(MaturedRequests, packed, last).numbers
        except CorruptBlock as error:
            # The part is archived, so no row is lost. The counters of this part's blocks stay too
            # high, so these blocks are never deleted.
            logger.error("archived rows are deleted: %s", error)
            return
        for block, of_block in self._by_block(numbers):
            connection.execute(
                "UPDATE blocks SET needed = needed - ? WHERE last = ?", (len(of_block), block)
            )
            connection.execute("DELETE FROM blocks WHERE last = ? AND needed = 0", (block,))

    def files(self, state: str) -> list[str]:
        """Return the names of the archive files in `state`.

        `state` is `intended`, `sealed`, `uploaded` or `set apart`.
        """
        query = "SELECT name FROM files WHERE state = ? ORDER BY rowid"
        return [name for (name,) in self._connection.execute(query, (state,))]

    def mark_uploaded(self, names: Iterable[str]) -> None:
        """Mark files as moved by the uploader."""
        with self._transaction({}) as connection:
            connection.executemany(
                "UPDATE files SET state = 'uploaded' WHERE name = ?", [(n,) for n in names]
            )

    def _first_number(self, query: str) -> float | None:
        row = self._connection.execute(query).fetchone()
        return None if row is None else float(row[0])
