"""Event log that is embedded in one SQLite file. SQLite is the default log on a laptop.

The inference client and the monitor open the same file from two processes. In WAL mode, both
processes can work at the same time. With `synchronous=FULL`, messages are durable when `publish`
returns. The file must not be on a network drive.
"""

import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from evergreen.events import event_log
from evergreen.events.event_log import DeadLetter, Delivery, expect_size, is_short
from evergreen.runtime.errors import PermanentError, TemporaryError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
    number INTEGER PRIMARY KEY,
    message_id TEXT NOT NULL,
    digest INTEGER NOT NULL,
    payload BLOB,
    state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'acknowledged', 'dead letter')),
    leased_until REAL NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    reason TEXT,
    dead_lettered_at REAL,
    UNIQUE (message_id, digest)
);
CREATE INDEX IF NOT EXISTS waiting ON messages (number) WHERE state = 'waiting';
"""  # noqa: E501

_FORGOTTEN_AT_ONCE = 2000
_LONGEST_LEASE_SECONDS = 3600.0
"""Longest plausible lease in seconds. A lease with a later end was acquired before the clock was
set back. A lease with an implausibly late end counts as expired. Longer leases are plausible only
if this object itself requests them."""


class SqliteLog:
    """Event log in one file, for publishing and subscribing.

    When a message is acknowledged, its payload is deleted. The id and a digest of the content are
    retained for `keep_ids_seconds`, to recognize a message that is published again. A message with
    a known id and other content counts as another message. Several threads may share one log.
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
        """Open or create the log. The folder must exist.

        Args:
            path: File of the log.
            lease_seconds: Time after which an unacknowledged message is delivered again.
            keep_ids_seconds: Retention of acknowledged ids. The retention must be far longer than
                the time during which a publisher repeats a message.
            busy_timeout_seconds: Longest wait for another process's write.
            clock: Clock in seconds since the epoch. All processes that open the file must use the
                same clock.

        Raises:
            TemporaryError: the file cannot be opened.
            PermanentError: the file is not a log, or has an older format.
        """
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._keep_ids_seconds = keep_ids_seconds
        self._longest_seconds = max(_LONGEST_LEASE_SECONDS, lease_seconds)
        self._lock = threading.Lock()
        with _log_errors(path):
            self._connection = sqlite3.connect(
                str(path),
                timeout=busy_timeout_seconds,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._prepare(time.monotonic() + busy_timeout_seconds)
            except BaseException:
                self._connection.close()
                raise
        self._path, self._opened = path, _inode(path)
        self._pulled: dict[str, float] = {}
        """Open deliveries of this reader. Maps each token to the end of its lease."""
        self._drained_at: float | None = None
        self._read_up_to: float | None = None
        self._inherited_until: float | None = None
        self._settled = False

    def _prepare(self, deadline: float) -> None:
        while True:
            try:
                # Page size of a new file. With SQLite's default of 4 kB, a message of 64 rows would
                # fill a chain of five pages, and reading would take 15 % longer.
                self._connection.execute("PRAGMA page_size=16384")
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
                self._connection.executescript(_SCHEMA)
                break
            except sqlite3.OperationalError as error:
                # If two processes switch a new file to WAL mode at the same time, one of them gets
                # an error from SQLite at once. The busy timeout of SQLite does not apply to the
                # switch to WAL mode.
                if "locked" not in str(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
        columns = [name for _, name, *_ in self._connection.execute("PRAGMA table_info(messages)")]
        if "digest" not in columns:
            raise sqlite3.DatabaseError("the file has an older format version, expected a new file")

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """See `event_log.Publisher`."""
        for message_id, payload in messages:
            expect_size(message_id, payload)
        if problem := self.problem():
            raise TemporaryError(problem)
        with self._transaction() as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO messages (message_id, digest, payload) VALUES (?, ?, ?)",
                [(message_id, zlib.crc32(payload), payload) for message_id, payload in messages],
            )

    def pull(self, max_messages: int) -> list[Delivery]:
        """See `event_log.Subscriber`."""
        now = self._clock()
        with self._transaction() as connection:
            if self._inherited_until is None:
                self._inherited_until = self._longest_lease(connection)
            found = connection.execute(
                "SELECT number, message_id, payload, attempts + 1 FROM messages "
                "WHERE state = 'waiting' AND NOT (leased_until > ? AND leased_until <= ?) ORDER BY "
                "number LIMIT ?",
                (now, now + self._longest_seconds, max_messages),
            )
            pulled, leased, num_bytes = list[Delivery](), list[tuple[float, int, int]](), 0
            for number, name, payload, attempt in found:
                pulled.append(Delivery(name, payload, f"{number}/{attempt}"))
                leased.append((now + self._lease_seconds, attempt, number))
                if (num_bytes := num_bytes + len(payload)) >= event_log.MAX_PULL_BYTES:
                    break
            found.close()
            connection.executemany(
                "UPDATE messages SET leased_until = ?, attempts = ? WHERE number = ?", leased
            )
        if is_short(pulled, max_messages):
            self._drained_at = now
            # If a complete pull does not return a message with an expired lease, another reader has
            # leased this message.
            latest = now + self._longest_seconds
            self._pulled = {
                token: until for token, until in self._pulled.items() if now < until <= latest
            }
        self._pulled.update((delivery.token, now + self._lease_seconds) for delivery in pulled)
        return pulled

    def acknowledge(self, tokens: Iterable[str]) -> None:
        """See `event_log.Subscriber`."""
        ended = list(tokens)
        with self._transaction() as connection:
            connection.executemany(
                "UPDATE messages SET state = 'acknowledged', payload = NULL "
                "WHERE number = ? AND attempts = ? AND state = 'waiting'",
                [tuple(map(int, token.split("/"))) for token in ended],
            )
            # Delete more of the oldest ids than were added. The number of deleted ids is limited,
            # so that no call takes long. A time in the future was recorded before the clock was set
            # back.
            now = self._clock()
            connection.execute(
                "DELETE FROM messages WHERE NOT leased_until BETWEEN ? AND ? AND number IN"
                " (SELECT number FROM messages WHERE state = 'acknowledged' ORDER BY number LIMIT "
                "?)",
                (now - self._keep_ids_seconds, now + self._longest_seconds, _FORGOTTEN_AT_ONCE),
            )
        for token in ended:
            self._pulled.pop(token, None)

    def dead_letter(self, bad: Sequence[tuple[str, str]]) -> None:
        """See `event_log.Subscriber`. All changes are made in one transaction."""
        now = self._clock()
        with self._transaction() as connection:
            connection.executemany(
                "UPDATE messages SET state = 'dead letter', reason = ?, dead_lettered_at = ? "
                "WHERE number = ? AND attempts = ? AND state = 'waiting'",
                [(reason, now, *map(int, token.split("/"))) for token, reason in bad],
            )
        for token, _ in bad:
            self._pulled.pop(token, None)

    def list_dead_letters(self) -> list[DeadLetter]:
        """See `event_log.Subscriber`."""
        with self._lock, _log_errors(self._path):
            rows = self._connection.execute(
                "SELECT message_id, payload, reason, dead_lettered_at FROM messages "
                "WHERE state = 'dead letter' ORDER BY number"
            ).fetchall()
        return [DeadLetter(*row) for row in rows]

    def replay_dead_letters(self) -> int:
        """See `event_log.Subscriber`.

        All messages return to the queue in one transaction, because they are still in the table.
        """
        with self._transaction() as connection:
            return connection.execute(
                "UPDATE messages SET state = 'waiting', leased_until = 0, reason = NULL, "
                "dead_lettered_at = NULL"
                " WHERE state = 'dead letter'"
            ).rowcount

    def read_up_to(self) -> float | None:
        """See `event_log.Subscriber`.

        Returns the start time of the last pull that found fewer messages than requested.

        The watermark does not move while a pulled message waits for its acknowledgement. No pull
        returns a message that is still leased to a killed reader. The watermark therefore does not
        move until such leases have expired.
        """
        if self._drained_at is not None and not self._pulled and self._is_settled(self._drained_at):
            self._read_up_to = self._drained_at
        return self._read_up_to

    def _is_settled(self, now: float) -> bool:
        if not self._settled:
            assert self._inherited_until is not None
            with self._lock, _log_errors(self._path):
                # The remaining leases belong to other readers, because all deliveries of this
                # reader have ended.
                longest = self._longest_lease(self._connection)
            self._settled = now >= min(self._inherited_until, longest)
        return self._settled

    @staticmethod
    def _longest_lease(connection: sqlite3.Connection) -> float:
        row = connection.execute(
            "SELECT max(leased_until) FROM messages WHERE state = 'waiting'"
        ).fetchone()
        return float(row[0] or 0.0)

    def problem(self) -> str | None:
        """See `event_log.Subscriber`.

        If the file was moved away, the open file can still be read, but no new message arrives in
        it.
        """
        if self._opened is not None and _inode(self._path) != self._opened:
            return f"log {self._path} was moved or replaced since it was opened"
        return None

    def backlog(self) -> int:
        """See `event_log.Subscriber`."""
        with self._lock, _log_errors(self._path):
            row = self._connection.execute(
                "SELECT count(*) FROM messages WHERE state = 'waiting'"
            ).fetchone()
        return int(row[0])

    def close(self) -> None:
        """See `event_log.Publisher`."""
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        # A connection has one transaction at a time. Without the lock, two threads would use the
        # same transaction.
        with self._lock, _log_errors(self._path):
            # IMMEDIATE takes the write lock at once, so two readers never lease the same message.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite has already rolled the transaction back if the disk is full.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


def _inode(path: str | Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


@contextmanager
def _log_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise TemporaryError(f"log {path}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise PermanentError(f"log {path}: {error}") from error
