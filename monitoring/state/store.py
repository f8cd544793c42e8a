"""State of the monitor in one SQLite file that survives a SIGKILL at any moment.

The file contains:

- every record, from before its acknowledgement until its row is in a sealed archive file
- the newest matured rows, which rebuild the windows after a restart
- counters, and the small documents of policies and retraining

Each method is one transaction that is flushed to disk when it returns. Open records stay in SQLite,
so they take no memory. This module stores, matures and deletes records. `monitoring.state.join`
decodes records, and `monitoring.state.database` assigns rows to files.

Requests are stored in blocks. A block contains the requests of one pull, ordered by time, so that
matured requests come first. A request moves from a block to a part of matured requests. The part is
assigned to an archive file, which is first `intended` and then `sealed`. The click labels of
matured requests are final. The rows of a block are deleted once all of them are in sealed files.
Conversions and late clicks are stored as late outcomes, which are also assigned to archive files.
"""

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from itertools import repeat
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import MISSING_CATEGORY
from evergreen.contracts.raw_rows import microseconds
from evergreen.contracts.records import (
    CLICK,
    CONVERSION,
    MAX_ID_CHARACTERS,
    OutcomeBatch,
    Predictions,
    R,
)
from evergreen.contracts.serving import ColumnMap
from evergreen.runtime.errors import ContractError
from monitoring.rows import Click, LateOutcome, MaturedRequests, Waiting
from monitoring.state.database import DAY_MICROS, CorruptBlock, FileTables, add_to, pack, unpack
from monitoring.state.redelivery import Classified, KnownRequest, batch_key, classify

logger = logging.getLogger(__name__)

_KEEP_EARLIEST = (
    "ON CONFLICT DO UPDATE SET time = excluded.time, stored_at = excluded.stored_at, file = NULL"
    " WHERE excluded.time < late_outcomes.time"
)
"""SQL clause that keeps the earliest outcome. The earliest outcome determines whether the row had
an outcome within the window."""
_OF_RECORDS = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    ArithmeticError,
    TypeError,
    ValueError,
)
STORE_FILE = "monitor.db"
"""File name in the state folder."""
_RATED_REQUESTS = 20_000
"""Maximum number of requests in the conversion rates. The newest requests of all versions together
are used. Requests whose conversion window is still open are not included."""
_BLOCK_BYTES = 16 << 20
"""Maximum bytes of numbers in a block, unless a single request is larger. A block is always read
completely."""
_MAX_DEAD_LETTERS = 100_000
"""Number of newest dead letters with a stored id. A dead letter with a stored id is not counted
again."""
AHEAD_FOLDER = "ahead"
"""First part of the names of files for rows with times far in the future. Rows with times far in
the future are set apart, and their files are never written."""
_NOT_APART = "(file IS NULL OR file NOT IN (SELECT name FROM files WHERE state = 'set apart'))"
_HAS_BLOCK = (
    "predictions.rowid >= (SELECT first FROM blocks WHERE last >= predictions.rowid ORDER "
    "BY last LIMIT 1)"
)
"""SQL condition that the block of a prediction still exists. If all blocks end before the
prediction, the condition is NULL."""


class StateStore(FileTables):
    """State in the file at `path`. Only one process at a time opens the file."""

    def __init__(self, path: Path) -> None:
        """See `Database`."""
        super().__init__(path)
        self._corrupt: set[int] = set()
        """Parts of matured requests that `newest_rows` skipped."""

    user_position: int | None = None
    """Index of the user among the categories of a row, or None if the recommender names no user.
    The caller must set this attribute before the first read."""

    def add(
        self,
        predictions: Predictions | None,
        outcomes: Sequence[OutcomeBatch],
        unusable: Sequence[str],
        *,
        now: float,
    ) -> "AddedPredictions":
        """Store the records of one pull, and count those that are already stored as duplicates.

        Args:
            predictions: Predictions of one pull, or None.
            outcomes: Outcome batches.
            unusable: Ids of the messages that become dead letters. The dead letters are counted
                here, and stored in the event log.
            now: Seconds since the epoch.

        Raises:
            ContractError: SQLite cannot store a value of a record. Nothing was stored.
            TemporaryError: The disk is full. Nothing was stored.
        """
        counts: dict[str, float] = {}
        stored = AddedPredictions(None, np.empty(0, np.int64))
        with self._transaction(counts) as connection, _records_errors():
            add_to(counts, "dead_letter", _new_dead_letters(connection, unusable, now=now))
            if predictions is not None:
                stored = self._add_predictions(connection, predictions, counts, now=now)
            for outcome in outcomes:
                new = connection.execute(
                    "INSERT OR IGNORE INTO outcome_batches VALUES (?, ?)", (batch_key(outcome), now)
                ).rowcount
                if not new:
                    add_to(counts, "duplicate", 1)
                else:
                    self._add_outcomes(connection, outcome, counts, now=now)
        return stored

    def count_reused(self, keys: Sequence[str], *, now: float) -> None:
        """Count messages that become dead letters because their id belongs to another request.

        Each key is counted once.
        """
        counts: dict[str, float] = {}
        with self._transaction(counts) as connection:
            new = _new_dead_letters(connection, keys, now=now)
            add_to(counts, "dead_letter", new)
            add_to(counts, "reused_id", new)

    def _add_predictions(
        self,
        connection: sqlite3.Connection,
        predictions: Predictions,
        counts: dict[str, float],
        *,
        now: float,
    ) -> "AddedPredictions":
        order = predictions.order(predictions.times)
        added, reused = predictions.select(order), np.empty(0, np.int64)
        first = self.prediction_cursor() + 1
        connection.execute("SAVEPOINT ids")
        try:
            _insert_ids(connection, added, first, now=now)
        except (
            sqlite3.IntegrityError
        ):  # no check beforehand: known ids are rare, and a check would take as long as the insert
            connection.execute("ROLLBACK TO ids")
            apart = self._classify(added)
            added, reused = added.select(apart.new), order[apart.reused]
            add_to(counts, "duplicate", len(apart.redelivered))
            _insert_ids(connection, added, first, now=now)
        connection.execute("RELEASE ids")
        if not len(added):
            return AddedPredictions(None, reused)
        add_to(counts, "predicted", added.num_rows)
        if connection.execute("SELECT 1 FROM clicks WHERE number IS NULL LIMIT 1").fetchone():
            connection.executemany(
                "UPDATE clicks SET number = ? WHERE request_id = ?",
                zip(range(first, first + len(added)), added.ids.tolist()),
            )
        row_bytes = bytes_of_row(added.dense.shape[1], added.categorical.shape[1])
        # A block spans at most one minute. All rows of a block stay until its last request has
        # matured. A request with a wrong time in the future must therefore not share a block with
        # earlier requests.
        for start, stop in _chunks(
            added.sizes, _BLOCK_BYTES // row_bytes, added.micros // 60_000_000
        ):
            _insert_block(
                connection,
                added.between(start, stop),
                first + start,
                user_position=self.user_position,
            )
        return AddedPredictions(added, reused)

    def _classify(self, predictions: Predictions) -> Classified:
        """Classify predictions as new, as redelivered, or as reusing the id of another request."""
        query = (
            "SELECT request_id, rowid, time, model_version, num_rows, canary FROM predictions"
            " WHERE request_id IN ({ids})"
        )
        known = {
            name: KnownRequest(*rest)
            for name, *rest in self._select_by_id(query, {*predictions.ids.tolist()})
        }
        return classify(predictions, known, self._block_of)

    def _block_of(self, number: int) -> tuple[int, Predictions] | None:
        """Return the block of a prediction and the number of the block's first prediction.

        Returns None if the block is archived.
        """
        query = (
            "SELECT first, content FROM blocks JOIN block_rows USING (last)"
            " WHERE last >= ? AND first <= ? ORDER BY last LIMIT 1"
        )
        row = self._connection.execute(query, (number, number)).fetchone()
        return None if row is None else (int(row[0]), unpack(Predictions, row[1]))

    def _add_outcomes(
        self,
        connection: sqlite3.Connection,
        outcome: OutcomeBatch,
        counts: dict[str, float],
        *,
        now: float,
    ) -> None:
        """Store clicks on open requests as clicks, and all other outcomes as late outcomes."""
        is_click = outcome.event == CLICK
        add_to(counts, "outcome" if is_click else "conversion", len(outcome))
        block = (
            "SELECT matured_to FROM blocks WHERE last >= predictions.rowid ORDER BY last LIMIT 1"
        )
        query = (
            f"SELECT request_id, time, rowid, rowid <= coalesce(({block}), rowid) FROM predictions"
            " WHERE request_id IN ({ids})"
        )
        known = {name: rest for name, *rest in self._select_by_id(query, {*outcome.request_ids})}
        waiting, late = [], []
        for request_id, row, time in zip(
            outcome.request_ids, outcome.rows.tolist(), outcome.times.tolist()
        ):
            predicted_at, number, is_matured = known.get(request_id, (None, None, False))
            if is_click and not is_matured:
                waiting.append((request_id, row, time, now, number))
            else:
                late.append(LateOutcome(request_id, row, outcome.event, time, predicted_at))
        if is_click:
            add_to(counts, "late_outcome", len(late))
        connection.executemany(
            "INSERT INTO clicks VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET time = "
            "min(time, excluded.time)",
            waiting,
        )
        self._store_late(connection, late, now)

    def arrange_columns(self, columns: dict[str, list[str]], arranged: ColumnMap) -> None:
        """Change the columns of all rows that are not archived yet, one block at a time.

        Args:
            columns: The new column names, stored as the document `features`.
            arranged: Map from the stored columns to the new columns.
        """
        with self._transaction({}) as connection:
            for (last,) in connection.execute("SELECT last FROM block_rows").fetchall():
                try:
                    block = self._block_rows(last)
                except CorruptBlock as error:
                    logger.error("block is not rewritten: %s", error)
                    continue
                dense, categorical = arranged.rows(block.dense, block.categorical)
                content = pack(replace(block, dense=dense, categorical=categorical))
                connection.execute(
                    "UPDATE block_rows SET content = ? WHERE last = ?", (content, last)
                )
            self._write_documents(connection, {"features": columns})

    # -- mature requests

    def waiting(
        self, predicted_before: float, limit: int, max_rows: int = 1_000_000
    ) -> Waiting | None:
        """Return the oldest due predictions whose labels are open, by time and id, or None.

        Args:
            predicted_before: Latest time of a prediction, inclusive, in seconds since the epoch.
            limit: Maximum number of requests.
            max_rows: Maximum number of rows. The function always returns at least one request. Peak
                memory is about twice the memory of `max_rows` rows, plus one block.

        Raises:
            CorruptBlock: Both the label columns and the rows of a block are corrupt. See `give_up`.
        """
        found: list[Waiting] = []
        num_new, until = np.zeros(2, np.int64), np.inf
        columns = "first, matured_to, waiting_from, requests"
        query = f"SELECT {columns} FROM blocks WHERE waiting_from <= ? ORDER BY waiting_from"
        for first, matured_to, waiting_from, packed in self._connection.execute(
            query, (predicted_before,)
        ):
            if waiting_from > until:
                break
            block = self._waiting_block(first, packed)
            due = block.between(
                matured_to + 1 - first, int(np.searchsorted(block.times, predicted_before, "right"))
            )
            found.append(due)
            num_new += len(due), due.num_rows
            if (num_new >= (limit, max_rows)).any():
                found, num_new[:] = [_first_of(found, limit, max_rows, beyond=1)], 0
                until = found[0].times[-1]
        return _first_of(found, limit, max_rows) if found else None

    def _waiting_block(self, first: int, packed: bytes) -> Waiting:
        """Return a block without its features.

        If the block is corrupt, it is rebuilt from its rows.
        """
        try:
            return unpack(Waiting, packed, first)
        except CorruptBlock as error:
            query = "SELECT last, content FROM blocks JOIN block_rows USING (last) WHERE first = ?"
            found = self._connection.execute(query, (first,)).fetchone()
            if found is None:
                raise
            last, content = found
            rows = unpack(Predictions, content, first)
            logger.warning("%s; rebuilt from its rows", error)
            return _waiting_of(rows, last - len(rows) + 1, self.user_position)

    def give_up(self, block: int) -> int:
        """Stop waiting for the labels of a corrupt block. The rest of the block stays in the file.

        Args:
            block: Number of the block's first prediction, from `CorruptBlock.number`.

        Returns:
            The number of rows that now never get a label.
        """
        counts: dict[str, float] = {}
        with self._transaction(counts) as connection:
            query = (
                "SELECT coalesce(sum(num_rows), 0) FROM predictions, blocks"
                " WHERE first = ? AND predictions.rowid > matured_to AND predictions.rowid <= last"
            )
            (rows,) = connection.execute(query, (block,)).fetchone()
            connection.execute("UPDATE blocks SET waiting_from = NULL WHERE first = ?", (block,))
            counts["given_up"] = float(rows)
        return int(rows)

    def newest_waiting(self, max_rows: int = 200_000) -> Waiting | None:
        """Return the newest predictions without final labels, at most `max_rows` rows, or None."""
        found: list[Waiting] = []
        query = (
            "SELECT first, matured_to, requests FROM blocks WHERE waiting_from NOT NULL "
            "ORDER BY newest DESC"
        )
        for first, matured_to, packed in self._connection.execute(query):
            try:
                block = self._waiting_block(first, packed)
            except CorruptBlock:
                continue  # `waiting` raises the error for a corrupt block when the block is due
            block = block.between(matured_to + 1 - first, len(block))
            fit = int((np.cumsum(block.sizes[::-1]) <= max_rows).sum())
            found.append(block.between(len(block) - fit, len(block)))
            max_rows -= block.num_rows
            if max_rows <= 0:
                break
        return Waiting.joined(found) if any(map(len, found)) else None

    def clicks_on(self, numbers: NDArray[np.int64]) -> list[Click]:
        """Return the stored clicks on these predictions."""
        query = "SELECT number, row, time FROM clicks WHERE number BETWEEN ? AND ?"
        return [click for run in _runs(numbers) for click in self._connection.execute(query, run)]

    def waiting_ahead(self, after: float) -> Waiting | None:
        """Return the open predictions of a block, if all of them are later than `after`.

        Returns None if there is no such block.
        """
        query = (
            "SELECT first, matured_to, requests FROM blocks WHERE waiting_from > ? ORDER BY "
            "waiting_from LIMIT 1"
        )
        if (found := self._connection.execute(query, (after,)).fetchone()) is None:
            return None
        first, matured_to, packed = found
        block = self._waiting_block(first, packed)
        return block.between(matured_to + 1 - first, len(block))

    def newest_prediction(self, *, until: float = np.inf) -> tuple[float, int] | None:
        """Return time and model version of the newest stored non-canary prediction, or None.

        Predictions after the time `until` are ignored.
        """
        query = (
            "SELECT time, model_version FROM predictions WHERE canary = 0 AND time <= ?"
            " ORDER BY time DESC, model_version DESC LIMIT 1"
        )
        row = self._connection.execute(query, (until,)).fetchone()
        return None if row is None else (float(row[0]), int(row[1]))

    def predictions_after(
        self, time: float | None
    ) -> tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.bool_]]:
        """Return times, model versions and canary flags of stored predictions after `time`.

        If `time` is None, all stored predictions are included.
        """
        query = "SELECT time, model_version, canary FROM predictions WHERE time > ?"
        found = self._connection.execute(query, (-1.0 if time is None else time,)).fetchall()
        times, versions, canary = zip(*found) if found else ((), (), ())
        return np.array(times, np.float64), np.array(versions, np.int32), np.array(canary, np.bool_)

    def num_rows_of(self, version: int) -> int:
        """Return how many rows of stored predictions this version scored."""
        query = "SELECT coalesce(sum(num_rows), 0) FROM predictions WHERE model_version = ?"
        return int(self._connection.execute(query, (version,)).fetchone()[0])

    def prediction_cursor(self) -> int:
        """Return the number of the prediction stored last, or 0.

        Later predictions have higher numbers.
        """
        return int(
            self._connection.execute("SELECT coalesce(max(rowid), 0) FROM predictions").fetchone()[
                0
            ]
        )

    def stored_after(self, cursor: int) -> Iterator[Predictions]:
        """Yield the unarchived predictions with a number above `cursor`, in ascending order."""
        query = "SELECT content, last FROM block_rows WHERE last > ? ORDER BY last"
        return _valid(Predictions, self._connection.execute(query, (cursor,)))

    def made_since(self, time: float) -> Iterator[Predictions]:
        """Yield unarchived blocks that contain a prediction at `time` or later."""
        query = (
            "SELECT content, last FROM block_rows JOIN blocks USING (last) WHERE newest >= ? "
            "ORDER BY last"
        )
        # Stored times are not rounded, and a bucket begins at a whole microsecond.
        return _valid(Predictions, self._connection.execute(query, (time - 1e-6,)))

    def mature(
        self,
        requests: MaturedRequests,
        counts: dict[str, float],
        *,
        now: float,
        late: Sequence[LateOutcome] = (),
        part_rows: int = 1,
        apart: bool = False,
    ) -> None:
        """Store `requests` as matured, with their final labels.

        Args:
            requests: Requests that `waiting` returned, in the order in which they are archived.
            counts: Counters to add in the same transaction.
            now: Seconds since the epoch.
            late: Outcomes that do not change a label of these requests.
            part_rows: Maximum rows of a part, unless a single request has more. A part has one UTC
                day and is the smallest unit of an archive file.
            apart: Whether the requests are set apart, so that they are never archived.
        """
        place = self.matured_cursor()
        add_to(counts, "matured_request", len(requests))
        add_to(counts, "matured", requests.num_rows)
        add_to(counts, "matured_click", int(requests.labels.sum()))
        file = f"{AHEAD_FOLDER}/{uuid4().hex}" if apart else None
        with self._transaction(counts) as connection:
            if file is not None:
                connection.execute("INSERT INTO files VALUES (?, 'set apart')", (file,))
                add_to(counts, "set_apart", requests.num_rows)
            for last, of_block in self._by_block(requests.numbers):
                matured_from, matured_to = int(of_block[0]), int(of_block[-1])
                if matured_to == last:
                    is_over = (
                        "UPDATE blocks SET matured_to = last, waiting_from = NULL, "
                        "requests = x'' WHERE last = ?"
                    )
                    connection.execute(is_over, (last,))
                else:
                    query = (
                        "UPDATE blocks SET matured_to = ?, waiting_from = (SELECT time FROM "
                        "predictions"
                        " WHERE rowid = ?) WHERE last = ?"
                    )
                    connection.execute(query, (matured_to, matured_to + 1, last))
                connection.execute(
                    "DELETE FROM clicks WHERE number BETWEEN ? AND ?", (matured_from, matured_to)
                )
            for start, stop in _chunks(requests.sizes, part_rows, requests.micros // DAY_MICROS):
                self._insert_part(
                    connection,
                    requests.between(start, stop),
                    place + stop,
                    matured_at=now,
                    file=file,
                )
            self._store_late(connection, late, now)

    def matured_cursor(self) -> int:
        """Return the position of the request that matured last, counted from 1, or 0."""
        return int(self.counters.get("matured_request", 0))

    def num_matured_after(self, cursor: int) -> int:
        """Return how many of `newest_rows` matured later than the request number `cursor`.

        Requests are numbered in the order in which they mature, from 1.
        """
        query = (
            f"SELECT last, min(num_requests, last - ?) FROM matured WHERE last > ? AND {_NOT_APART}"
        )
        found = self._connection.execute(query, (cursor, cursor))
        return sum(number for last, number in found if last not in self._corrupt)

    @property
    def num_pending_rows(self) -> int:
        """Number of rows without a final label.

        The number comes from counters, because a sum over the open rows would read all of them at
        each tick.
        """
        ended = self.counters.get("matured", 0) + self.counters.get("given_up", 0)
        return int(self.counters.get("predicted", 0) - ended)

    def newest_rows(self) -> MaturedRequests | None:
        """Return the stored matured requests that are not set apart, oldest first.

        The matured requests fill the window of the serving version.
        """
        query = f"SELECT requests, last FROM matured WHERE {_NOT_APART} ORDER BY last"
        found = []
        for packed, last in self._connection.execute(query):
            try:
                found.append(unpack(MaturedRequests, packed, last))
            except CorruptBlock as error:
                logger.error("rows are missing in the windows: %s", error)
                self._corrupt.add(last)
        return MaturedRequests.joined(found) if found else None

    def prepare_conversion_rates(self) -> None:
        """Create the index that makes `conversion_rates` fast.

        Maintaining the index takes 5 % of the monitor's time if each request has one row.
        """
        with self._transaction({}) as connection:
            connection.execute("CREATE INDEX IF NOT EXISTS predicted ON predictions (time)")

    def conversion_rates(
        self, predicted_before: float, *, window_seconds: float
    ) -> dict[int, float]:
        """Return the share of rows with a conversion for each model version.

        The rate covers the newest `_RATED_REQUESTS` requests up to `predicted_before`. The
        conversion windows of these requests have closed.
        """
        newest = "SELECT * FROM predictions WHERE time <= ? ORDER BY time DESC LIMIT ?"
        converted = (
            "SELECT count(*) FROM late_outcomes o WHERE o.request_id = p.request_id AND o.event = ?"
            " AND o.row BETWEEN 0 AND p.num_rows - 1 AND round(1e6 * (o.time - p.time)) <= ?"
        )
        query = (
            f"SELECT model_version, sum(({converted})), sum(num_rows) FROM ({newest}) p "
            "GROUP BY model_version"
        )
        values = (CONVERSION, microseconds(window_seconds), predicted_before, _RATED_REQUESTS)
        return {
            version: count / rows
            for version, count, rows in self._connection.execute(query, values)
        }

    # -- store late outcomes

    @staticmethod
    def _store_late(
        connection: sqlite3.Connection, late: Sequence[LateOutcome], now: float
    ) -> None:
        """Insert late outcomes into the table from which the outcome files are written.

        Only the earliest outcome per (request, row, event) is stored.

        If an outcome is earlier than the stored outcome of the same key, it is assigned to a new
        file. If the stored outcome is already archived, the earlier outcome is also assigned to a
        new file.
        """
        connection.executemany(
            "INSERT INTO late_outcomes (request_id, row, event, time, predicted_at, stored_at)"
            f" VALUES (?, ?, ?, ?, ?, ?) {_KEEP_EARLIEST}",
            [(*outcome, now) for outcome in late],
        )

    def forget_user(self, category: int) -> None:
        """Replace this user's category by the missing category in the stored matured rows."""
        with self._transaction({}) as connection:
            parts = connection.execute("SELECT last, requests FROM matured").fetchall()
            for last, packed in parts:
                requests = unpack(MaturedRequests, packed)
                if (requests.users == category).any():
                    users = np.where(requests.users == category, MISSING_CATEGORY, requests.users)
                    left = pack(replace(requests, users=users))
                    connection.execute(
                        "UPDATE matured SET requests = ? WHERE last = ?", (left, last)
                    )

    def forget(
        self, *, before: float, orphans_before: float | None = None, ahead: float = np.inf
    ) -> None:
        """Delete records that were stored before a time and are no longer needed.

        The method deletes ids of requests without stored rows, and ids of outcome batches and dead
        letters. Outcomes in sealed files are deleted if their requests have no stored rows. Clicks
        on requests that remain unknown become late outcomes.

        Args:
            before: Delete records stored before this time, in seconds since the epoch.
            orphans_before: Clicks on unknown requests become late outcomes if they were stored
                before this time, in seconds since the epoch. None means `before`.
            ahead: If a record was stored after this time, the clock was wrong, and the record is
                treated as old.
        """
        orphaned = before if orphans_before is None else orphans_before
        is_orphan = "stored_at NOT BETWEEN ? AND ? AND number IS NULL"
        counts: dict[str, float] = {}
        with self._transaction(counts) as connection:
            connection.execute(
                "DELETE FROM predictions WHERE stored_at NOT BETWEEN ? AND ? AND "
                f"coalesce({_HAS_BLOCK}, 0) = 0"
                # Never delete the newest prediction, because SQLite would then assign its number
                # again.
                " AND rowid < (SELECT max(rowid) FROM predictions)",
                (before, ahead),
            )
            connection.execute("DELETE FROM outcome_batches WHERE stored_at < ?", (before,))
            connection.execute(
                "DELETE FROM dead_letters WHERE stored_at < ? OR rowid <= (SELECT max(rowid) "
                "FROM dead_letters) - ?",
                (before, _MAX_DEAD_LETTERS),
            )
            connection.execute(
                "DELETE FROM late_outcomes WHERE stored_at < ?"
                " AND file IN (SELECT name FROM files WHERE state IN ('sealed', 'uploaded'))"
                # The conversion rate includes a request as long as its rows are stored. The
                # outcomes of a request therefore stay as long as its rows.
                " AND NOT EXISTS (SELECT 1 FROM predictions WHERE predictions.request_id = "
                "late_outcomes.request_id"
                f" AND {_HAS_BLOCK})",
                (before,),
            )
            connection.execute(
                "INSERT INTO late_outcomes (request_id, row, event, time, predicted_at, stored_at)"
                " SELECT request_id, row, ?, time, NULL, min(stored_at, ?) FROM clicks"
                f" WHERE {is_orphan} {_KEEP_EARLIEST}",
                (CLICK, ahead, orphaned, ahead),
            )
            counts["unmatched_outcome"] = connection.execute(
                f"DELETE FROM clicks WHERE {is_orphan}", (orphaned, ahead)
            ).rowcount


class AddedPredictions(NamedTuple):
    """Result of adding the predictions of one pull."""

    added: Predictions | None
    """New predictions, ordered by time and id, or None."""
    reused: NDArray[np.int64]
    """Indexes of predictions that were not stored, because other requests have the same ids."""


def _new_dead_letters(connection: sqlite3.Connection, keys: Sequence[str], *, now: float) -> int:
    """Store the keys of dead letters, and return how many are new."""
    query = "INSERT OR IGNORE INTO dead_letters VALUES (?, ?)"
    return sum(connection.execute(query, (_short_id(key), now)).rowcount for key in keys)


def matured_rows_of(connection: sqlite3.Connection, user: int) -> int:
    """Count the stored matured rows of the user with this category.

    The function also works while another program has the state open.
    """
    matured = (
        unpack(MaturedRequests, packed)
        for (packed,) in connection.execute("SELECT requests FROM matured")
    )
    return sum(int(np.count_nonzero(requests.users == user)) for requests in matured)


def waiting_requests_of(
    connection: sqlite3.Connection,
    user: int,
    *,
    columns: dict[str, list[str]],
    positions: Sequence[int],
) -> int:
    """Count the unarchived requests that contain the user in one of these columns."""
    saved = connection.execute("SELECT content FROM documents WHERE name = 'features'").fetchone()
    found, arranged = 0, ColumnMap(json.loads(saved[0]) if saved else columns, columns)
    for (content,) in connection.execute("SELECT content FROM block_rows"):
        block = unpack(Predictions, content)
        _, categorical = arranged.rows(block.dense, block.categorical)
        is_users = (categorical[:, list(positions)] == user).any(axis=1)
        found += int(np.count_nonzero(np.add.reduceat(is_users, block.starts)))
    return found


def _short_id(message_id: str) -> str:
    """Return a message id, or the hash of the id if it is too long.

    Message ids of our own programs are never too long.
    """
    return (
        message_id
        if len(message_id) <= MAX_ID_CHARACTERS
        else sha256(message_id.encode(errors="replace")).hexdigest()
    )


@contextmanager
def _records_errors() -> Iterator[None]:
    """Raise ContractError for errors that a record's values cause.

    Errors of the database file are not converted.
    """
    try:
        yield
    except _OF_RECORDS as error:
        raise ContractError(f"record cannot be stored: {error!r}") from error


def _insert_ids(
    connection: sqlite3.Connection, predictions: Predictions, first: int, *, now: float
) -> None:
    connection.executemany(
        "INSERT INTO predictions (rowid, request_id, time, model_version, num_rows, stored_at, "
        "canary)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        zip(
            range(first, first + len(predictions)),
            predictions.ids.tolist(),
            predictions.times.tolist(),
            predictions.versions.tolist(),
            predictions.sizes.tolist(),
            repeat(now),
            predictions.canary.tolist(),
        ),
    )


def _waiting_of(block: Predictions, first: int, user_position: int | None) -> Waiting:
    """Return the columns that label attribution needs.

    The block's first prediction has the number `first`.
    """
    users = (
        np.full(block.num_rows, MISSING_CATEGORY)
        if user_position is None
        else block.categorical[:, user_position]
    )
    return block.to(Waiting, numbers=np.arange(first, first + len(block)), users=users)


def _valid(kind: type[R], found: Iterable[tuple[bytes, int]]) -> Iterator[R]:
    """Yield the stored requests, and log and skip corrupt blocks."""
    for content, number in found:
        try:
            yield unpack(kind, content, number)
        except CorruptBlock as error:
            logger.error("skipped: %s", error)


def _insert_block(
    connection: sqlite3.Connection, block: Predictions, first: int, *, user_position: int | None
) -> None:
    """Store a block of predictions.

    The columns for label attribution are also stored separately.
    """
    waiting = _waiting_of(block, first, user_position)
    last, num = first + len(block) - 1, len(block)
    times = (float(block.times[0]), float(block.times[-1]))
    connection.execute(
        "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (last, first, first - 1, *times, num, num, pack(waiting)),
    )
    connection.execute("INSERT INTO block_rows VALUES (?, ?)", (last, pack(block)))


def _first_of(found: Sequence[Waiting], limit: int, max_rows: int, *, beyond: int = 0) -> Waiting:
    """Return the first requests of blocks within both limits, as `StateStore.waiting` does.

    Each element of `found` contains the first requests of one block in order of time. If `beyond`
    is 1, the result contains one request more than `max_rows` allows, but at most `limit` requests.
    """
    joined = Waiting.joined(found)
    joined = joined.ordered(joined.times)
    num_fit = int(np.searchsorted(np.cumsum(joined.sizes), max_rows, "right")) + beyond
    return joined.between(0, min(limit, max(num_fit, 1)))


def bytes_of_row(num_numeric: int, num_categorical: int) -> int:
    """Return the memory size of the numbers of a row, in bytes."""
    return 32 + 4 * num_numeric + 8 * num_categorical


def _chunks(
    sizes: NDArray[np.int64], at_most: int, periods: NDArray[np.int64]
) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each chunk of elements with a total size of at most `at_most`.

    An element larger than `at_most` is its own chunk. All elements of a chunk have the same number
    in `periods`. The numbers in `periods` ascend.

    >>> list(_chunks(np.array([2, 2, 5, 1, 1]), 4, np.array([0, 0, 0, 0, 1])))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    ends, start = np.cumsum(sizes), 0
    while start < len(sizes):
        stop = int(np.searchsorted(ends, ends[start] - sizes[start] + at_most, "right"))
        yield (
            start,
            (
                stop := min(
                    max(stop, start + 1), int(np.searchsorted(periods, periods[start], "right"))
                )
            ),
        )
        start = stop


def _runs(numbers: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
    """Return the first and last number of each series of consecutive numbers.

    >>> list(_runs(np.array([4, 5, 6, 9])))
    [(4, 6), (9, 9)]
    """
    ordered = np.sort(numbers)
    ends = np.flatnonzero(np.diff(ordered, append=-1) != 1)
    return zip(ordered[np.r_[0, ends[:-1] + 1]].tolist(), ordered[ends].tolist())
