"""The embedded log: `contracts.event_log` in one SQLite file, the default on a laptop.

Joins the inference client and the monitor, which open the same file from two processes. WAL mode lets both work at
once; `synchronous=FULL` makes a returned `publish` durable. Not for a network drive.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from components.contracts.errors import ContractError, PermanentError, TemporaryError
from components.contracts.event_log import MAX_MESSAGE_BYTES, Delivery, SetAside

_SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
    number INTEGER PRIMARY KEY,
    message_id TEXT NOT NULL UNIQUE,
    payload BLOB,
    state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'acknowledged', 'set aside')),
    leased_until REAL NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    reason TEXT,
    set_aside_at REAL
);
CREATE INDEX IF NOT EXISTS waiting ON messages (number) WHERE state = 'waiting';
"""

_FORGOTTEN_AT_ONCE = 2000


class SqliteLog:
    """Publisher and subscriber of one log file.

    An acknowledged message gives up its payload and keeps its id for `keep_ids_seconds`, by which a publisher's
    repetition is recognised. Threads may share one.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        lease_seconds: float = 30.0,
        clock: Callable[[], float] = time.time,
        busy_timeout_seconds: float = 10.0,
        keep_ids_seconds: float = 86_400.0,
    ) -> None:
        """Opens or creates the log.

        Args:
            path: The file; its folder must exist.
            lease_seconds: How long a pulled message is kept from other readers; then it is delivered again.
            clock: Seconds since the epoch, the same for all openers.
            busy_timeout_seconds: How long to wait for another writer.
            keep_ids_seconds: How long ids of acknowledged messages are remembered; far longer than a publisher repeats.

        Raises:
            TemporaryError: the file cannot be opened.
            PermanentError: the file is no log.
        """
        self._lease_seconds, self._clock, self._keep_ids_seconds = lease_seconds, clock, keep_ids_seconds
        self._lock = threading.Lock()
        with _translated(path):
            self._connection = sqlite3.connect(
                str(path), timeout=busy_timeout_seconds, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(time.monotonic() + busy_timeout_seconds)
            except BaseException:
                self._connection.close()
                raise
        self._path = path

    def _prepare(self, deadline: float) -> None:
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
                self._connection.executescript(_SCHEMA)
                return
            except sqlite3.OperationalError as error:
                # Where two openers switch a new file to WAL at once, SQLite fails one without its busy timeout.
                if "locked" not in str(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """See `event_log.Publisher`."""
        for message_id, payload in messages:
            if len(payload) > MAX_MESSAGE_BYTES:
                raise ContractError(
                    f"message {message_id} has {len(payload)} bytes, expected at most {MAX_MESSAGE_BYTES}"
                )
        with self._transaction() as connection:
            connection.executemany("INSERT OR IGNORE INTO messages (message_id, payload) VALUES (?, ?)", messages)

    def pull(self, max_messages: int) -> list[Delivery]:
        """See `event_log.Subscriber`."""
        now = self._clock()
        with self._transaction() as connection:
            rows = connection.execute(
                "SELECT number, message_id, payload, attempts + 1 FROM messages "
                "WHERE state = 'waiting' AND leased_until <= ? ORDER BY number LIMIT ?",
                (now, max_messages),
            ).fetchall()
            connection.executemany(
                "UPDATE messages SET leased_until = ?, attempts = ? WHERE number = ?",
                [(now + self._lease_seconds, attempt, number) for number, _, _, attempt in rows],
            )
        return [Delivery(name, payload, f"{number}/{attempt}", attempt) for number, name, payload, attempt in rows]

    def acknowledge(self, tokens: Iterable[str]) -> None:
        """See `event_log.Subscriber`."""
        with self._transaction() as connection:
            connection.executemany(
                "UPDATE messages SET state = 'acknowledged', payload = NULL "
                "WHERE number = ? AND attempts = ? AND state = 'waiting'",
                [tuple(map(int, token.split("/"))) for token in tokens],
            )
            # A few of the oldest each time, more than came in: the file stops growing, and no call takes long.
            connection.execute(
                "DELETE FROM messages WHERE leased_until < ? AND number IN"
                " (SELECT number FROM messages WHERE state = 'acknowledged' ORDER BY number LIMIT ?)",
                (self._clock() - self._keep_ids_seconds, _FORGOTTEN_AT_ONCE),
            )

    def set_aside(self, token: str, reason: str) -> None:
        """See `event_log.Subscriber`."""
        number, attempt = map(int, token.split("/"))
        with self._transaction() as connection:
            connection.execute(
                "UPDATE messages SET state = 'set aside', reason = ?, set_aside_at = ? "
                "WHERE number = ? AND attempts = ? AND state = 'waiting'",
                (reason, self._clock(), number, attempt),
            )

    def list_set_aside(self) -> list[SetAside]:
        """See `event_log.Subscriber`."""
        with self._lock, _translated(self._path):
            rows = self._connection.execute(
                "SELECT message_id, payload, reason, set_aside_at FROM messages "
                "WHERE state = 'set aside' ORDER BY number"
            ).fetchall()
        return [SetAside(*row) for row in rows]

    def backlog(self) -> int:
        """See `event_log.Subscriber`."""
        with self._lock, _translated(self._path):
            row = self._connection.execute("SELECT count(*) FROM messages WHERE state = 'waiting'").fetchone()
        return int(row[0])

    def close(self) -> None:
        """See `event_log.Publisher`."""
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        # One connection has one transaction: without the lock, threads would join each other's.
        with self._lock, _translated(self._path):
            # IMMEDIATE takes the write lock at once: two readers never lease the same message.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # A full disk has ended the transaction already.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


@contextmanager
def _translated(path: str | Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise TemporaryError(f"log {path}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise PermanentError(f"log {path}: {error}") from error
