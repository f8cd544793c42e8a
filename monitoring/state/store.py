"""The monitor's memory: one SQLite file that is right after a SIGKILL at any moment.

Holds every record from before its acknowledgement until its row lies in a sealed archive file; the newest matured rows,
from which the windows are rebuilt; counters; and the small documents of policy and retraining. One method is one
transaction, flushed to disk when it returns. Here: what comes in, what matures and what is forgotten; all of it lies in
SQLite, so memory does not grow with what is open. What the records mean is left to `monitoring.state.join`, which rows
lie in which file to `database`.

Requests are kept in blocks, as they came: those of one pull, by time, so that the ones that have matured are the first
of their block. A request goes through: in a block -> in a part of matured requests (click labels final) -> in an
intended file -> sealed; the rows of a block are deleted when all of them are. A conversion, and a click that comes too
late for its row: stored as late -> in an intended file -> sealed.
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
from evergreen.contracts.records import CLICK, CONVERSION, MAX_ID_CHARACTERS, OutcomeBatch, Predictions, R
from evergreen.contracts.serving import ColumnMap
from evergreen.runtime.errors import ContractError
from monitoring.rows import Click, LateOutcome, MaturedRequests, Waiting
from monitoring.state.database import DAY_MICROS, CorruptBlock, FileTables, add_to, pack, unpack
from monitoring.state.repeated import KnownRequest, ToldApart, batch_key, tell_apart

logger = logging.getLogger(__name__)

_KEEP_EARLIEST = (
    "ON CONFLICT DO UPDATE SET time = excluded.time, stored_at = excluded.stored_at, file = NULL"
    " WHERE excluded.time < late_outcomes.time"
)
"""The earliest says whether the row had an outcome of its kind within the window."""
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
"""In the state folder."""
RATED_REQUESTS = 20_000
"""Newest requests whose conversion window has closed that the conversion rate is taken over, of all versions."""
_BLOCK_BYTES = 16 << 20
"""Of a block's numbers at most, but for a larger request: one block is read whole."""
MAX_DEAD_LETTERS = 100_000
"""Newest dead letters whose ids are remembered, so that one that is delivered again is counted once."""
AHEAD_FOLDER = "ahead"
"""Begins the names of files that stand for rows whose times lie far ahead; such files are never written."""
_NOT_APART = "(file IS NULL OR file NOT IN (SELECT name FROM files WHERE state = 'set apart'))"
_IS_HELD = "predictions.rowid >= (SELECT first FROM blocks WHERE last >= predictions.rowid ORDER BY last LIMIT 1)"
"""Of a prediction: its block is there, so more than its id is known. NULL where no later block is."""


class Store(FileTables):
    """The memory in `path`; one process at a time holds it."""

    def __init__(self, path: Path) -> None:
        """See `Database`."""
        super().__init__(path)
        self._corrupt: set[int] = set()
        """Parts of matured requests that `newest_rows` passed over."""

    user_place: int | None = None
    """The user's among the categories of a row, None = the recommender names none. Set before anything is read."""

    def add(
        self,
        predictions: Predictions | None,
        outcomes: Sequence[OutcomeBatch],
        unusable: Sequence[str],
        *,
        now: float,
    ) -> "AddedPredictions":
        """Store the records of one pull; those stored before only count as duplicates (`state.repeated`).

        `unusable` are the message ids of future dead letters, which are counted here and kept by the log.

        Raises:
            ContractError: one of them is nothing that SQLite takes; nothing was stored.
            TemporaryError: the disk is full; nothing was stored.
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
        """Count future dead letters under the ids of other requests, each key once."""
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
        first = self.prediction_mark() + 1
        connection.execute("SAVEPOINT ids")
        try:
            _insert_ids(connection, added, first, now=now)
        except sqlite3.IntegrityError:  # some are known: rare, and to look first would take as long as to insert
            connection.execute("ROLLBACK TO ids")
            apart = self._tell_apart(added)
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
        # Of one minute each: one request from a clock that is ahead must not keep the rows of all others.
        for start, stop in cuts(added.sizes, _BLOCK_BYTES // row_bytes, added.micros // 60_000_000):
            _insert_block(connection, added.between(start, stop), first + start, user_place=self.user_place)
        return AddedPredictions(added, reused)

    def _tell_apart(self, predictions: Predictions) -> ToldApart:
        """Which of them are new, delivered again, or other requests under a known id."""
        query = (
            "SELECT request_id, rowid, time, model_version, num_rows, canary FROM predictions"
            " WHERE request_id IN ({ids})"
        )
        known = {name: KnownRequest(*rest) for name, *rest in self._select_by_id(query, {*predictions.ids.tolist()})}
        return tell_apart(predictions, known, self._block_of)

    def _block_of(self, number: int) -> tuple[int, Predictions] | None:
        """The rows of the block of a prediction, with the number of its first one; None if they are archived."""
        query = (
            "SELECT first, content FROM blocks JOIN block_rows USING (last)"
            " WHERE last >= ? AND first <= ? ORDER BY last LIMIT 1"
        )
        row = self._connection.execute(query, (number, number)).fetchone()
        return None if row is None else (int(row[0]), unpack(Predictions, row[1]))

    def _add_outcomes(
        self, connection: sqlite3.Connection, outcome: OutcomeBatch, counts: dict[str, float], *, now: float
    ) -> None:
        """Keeps each click where its request is waited for; every other outcome goes among the late ones."""
        is_click = outcome.event == CLICK
        add_to(counts, "outcome" if is_click else "conversion", len(outcome))
        block = "SELECT matured_to FROM blocks WHERE last >= predictions.rowid ORDER BY last LIMIT 1"
        query = (
            f"SELECT request_id, time, rowid, rowid <= coalesce(({block}), rowid) FROM predictions"
            " WHERE request_id IN ({ids})"
        )
        known = {name: rest for name, *rest in self._select_by_id(query, {*outcome.request_ids})}
        waiting, late = [], []
        for request_id, row, time in zip(outcome.request_ids, outcome.rows.tolist(), outcome.times.tolist()):
            predicted_at, number, is_matured = known.get(request_id, (None, None, False))
            if is_click and not is_matured:
                waiting.append((request_id, row, time, now, number))
            else:
                late.append(LateOutcome(request_id, row, outcome.event, time, predicted_at))
        if is_click:
            add_to(counts, "late_outcome", len(late))
        connection.executemany(
            "INSERT INTO clicks VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET time = min(time, excluded.time)",
            waiting,
        )
        self._keep_late(connection, late, now)

    def arrange_columns(self, columns: dict[str, list[str]], arranged: ColumnMap) -> None:
        """Keeps the rows that are not archived by these columns, and what they are called as document `features`.

        A block is read at a time.
        """
        with self._transaction({}) as connection:
            for (last,) in connection.execute("SELECT last FROM block_rows").fetchall():
                try:
                    block = self._block_rows(last)
                except CorruptBlock as error:
                    logger.error("left as it is: %s", error)
                    continue
                dense, categorical = arranged.rows(block.dense, block.categorical)
                content = pack(replace(block, dense=dense, categorical=categorical))
                connection.execute("UPDATE block_rows SET content = ? WHERE last = ?", (content, last))
            self._write_documents(connection, {"features": columns})

    # -- from open to matured

    def waiting(self, predicted_before: float, limit: int, max_rows: int = 1_000_000) -> Waiting | None:
        """The first predictions made at or before this time and not matured, by time and id; None = there is none.

        Up to `limit`, of `max_rows` rows or a single one; in memory are at most twice as many and a block.

        Raises:
            CorruptBlock: neither what maturing reads of a block nor its rows are as they were stored; see `give_up`.
        """
        found: list[Waiting] = []
        num_new, until = np.zeros(2, np.int64), np.inf
        columns = "first, matured_to, waiting_from, requests"
        query = f"SELECT {columns} FROM blocks WHERE waiting_from <= ? ORDER BY waiting_from"
        for first, matured_to, waiting_from, packed in self._connection.execute(query, (predicted_before,)):
            if waiting_from > until:
                break
            block = self._waiting_block(first, packed)
            due = block.between(matured_to + 1 - first, int(np.searchsorted(block.times, predicted_before, "right")))
            found.append(due)
            num_new += len(due), due.num_rows
            if (num_new >= (limit, max_rows)).any():
                found, num_new[:] = [_first_of(found, limit, max_rows, beyond=1)], 0
                until = found[0].times[-1]
        return _first_of(found, limit, max_rows) if found else None

    def _waiting_block(self, first: int, packed: bytes) -> Waiting:
        """Return a block as maturing reads it; made of the block's rows where it is corrupt itself."""
        try:
            return unpack(Waiting, packed, first)
        except CorruptBlock as error:
            query = "SELECT last, content FROM blocks JOIN block_rows USING (last) WHERE first = ?"
            found = self._connection.execute(query, (first,)).fetchone()
            if found is None:
                raise
            last, content = found
            rows = unpack(Predictions, content, first)
            logger.warning("%s; made again of its rows", error)
            return _waiting_of(rows, last - len(rows) + 1, self.user_place)

    def give_up(self, block: int) -> int:
        """Wait no more for the labels of a corrupt block; what is left of it stays in the file.

        Args:
            block: The number of its first prediction, `CorruptBlock.number`.

        Returns:
            The rows whose labels are lost.
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
        """Predictions whose labels are not final: those of the newest blocks, of at most so many rows; None = none."""
        found: list[Waiting] = []
        query = "SELECT first, matured_to, requests FROM blocks WHERE waiting_from NOT NULL ORDER BY newest DESC"
        for first, matured_to, packed in self._connection.execute(query):
            try:
                block = self._waiting_block(first, packed)
            except CorruptBlock:
                continue  # `waiting` meets it when it is due, and its caller sets it apart
            block = block.between(matured_to + 1 - first, len(block))
            fit = int((np.cumsum(block.sizes[::-1]) <= max_rows).sum())
            found.append(block.between(len(block) - fit, len(block)))
            max_rows -= block.num_rows
            if max_rows <= 0:
                break
        return Waiting.joined(found) if any(map(len, found)) else None

    def clicks_on(self, numbers: NDArray[np.int64]) -> list[Click]:
        """The clicks that wait for the labels of the predictions of these numbers."""
        query = "SELECT number, row, time FROM clicks WHERE number BETWEEN ? AND ?"
        return [click for run in _runs(numbers) for click in self._connection.execute(query, run)]

    def waiting_ahead(self, after: float) -> Waiting | None:
        """Return a block of predictions made after this time whose labels are not final; None if there is none."""
        query = "SELECT first, matured_to, requests FROM blocks WHERE waiting_from > ? ORDER BY waiting_from LIMIT 1"
        if (found := self._connection.execute(query, (after,)).fetchone()) is None:
            return None
        first, matured_to, packed = found
        block = self._waiting_block(first, packed)
        return block.between(matured_to + 1 - first, len(block))

    def newest_prediction(self, *, until: float = np.inf) -> tuple[float, int] | None:
        """Return time and model version of the newest prediction held that no canary made; None if there is none.

        Predictions made after the time `until` do not count.
        """
        query = (
            "SELECT time, model_version FROM predictions WHERE canary = 0 AND time <= ?"
            " ORDER BY time DESC, model_version DESC LIMIT 1"
        )
        row = self._connection.execute(query, (until,)).fetchone()
        return None if row is None else (float(row[0]), int(row[1]))

    def predictions_after(self, time: float | None) -> tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.bool_]]:
        """Times, model versions, and which a canary made, of the predictions held made after `time`; None = of all."""
        query = "SELECT time, model_version, canary FROM predictions WHERE time > ?"
        found = self._connection.execute(query, (-1.0 if time is None else time,)).fetchall()
        times, versions, canary = zip(*found) if found else ((), (), ())
        return np.array(times, np.float64), np.array(versions, np.int32), np.array(canary, np.bool_)

    def num_rows_of(self, version: int) -> int:
        """Rows that a model version has scored, of the requests held."""
        query = "SELECT coalesce(sum(num_rows), 0) FROM predictions WHERE model_version = ?"
        return int(self._connection.execute(query, (version,)).fetchone()[0])

    def prediction_mark(self) -> int:
        """Number of the prediction stored last; 0 = none. Numbers only grow."""
        return int(self._connection.execute("SELECT coalesce(max(rowid), 0) FROM predictions").fetchone()[0])

    def stored_after(self, mark: int) -> Iterator[Predictions]:
        """The predictions stored after the one numbered `mark` and not archived yet, in this order."""
        query = "SELECT content, last FROM block_rows WHERE last > ? ORDER BY last"
        return _sound(Predictions, self._connection.execute(query, (mark,)))

    def made_since(self, time: float) -> Iterator[Predictions]:
        """The predictions of the blocks with one made at `time` or later, of those not archived yet."""
        query = "SELECT content, last FROM block_rows JOIN blocks USING (last) WHERE newest >= ? ORDER BY last"
        # Times are kept as they came; a bucket begins at a whole microsecond.
        return _sound(Predictions, self._connection.execute(query, (time - 1e-6,)))

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
        """Makes these click labels final.

        `requests` are in the order in which they are to be archived, those that `waiting` gave; `late` are outcomes of
        them that made no label. They are kept in parts of at most `part_rows` rows, or of one request, and of one UTC
        day each: the least that an archive file takes. With `apart` none takes them: they are set apart for good.
        """
        place = self.matured_mark()
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
                    is_over = "UPDATE blocks SET matured_to = last, waiting_from = NULL, requests = x'' WHERE last = ?"
                    connection.execute(is_over, (last,))
                else:
                    query = (
                        "UPDATE blocks SET matured_to = ?, waiting_from = (SELECT time FROM predictions"
                        " WHERE rowid = ?) WHERE last = ?"
                    )
                    connection.execute(query, (matured_to, matured_to + 1, last))
                connection.execute("DELETE FROM clicks WHERE number BETWEEN ? AND ?", (matured_from, matured_to))
            for start, stop in cuts(requests.sizes, part_rows, requests.micros // DAY_MICROS):
                self._insert_part(connection, requests.between(start, stop), place + stop, matured_at=now, file=file)
            self._keep_late(connection, late, now)

    def matured_mark(self) -> int:
        """Place of the request that matured last in the order of maturing, from 1; 0 = none has."""
        return int(self.counters.get("matured_request", 0))

    def num_matured_after(self, mark: int) -> int:
        """Return how many of `newest_rows` matured after the request at the place `mark`."""
        query = f"SELECT last, min(num_requests, last - ?) FROM matured WHERE last > ? AND {_NOT_APART}"
        found = self._connection.execute(query, (mark, mark))
        return sum(number for last, number in found if last not in self._corrupt)

    @property
    def num_pending_rows(self) -> int:
        """Rows whose label is not final. From the counters: summing the waiting rows each tick would read them all."""
        ended = self.counters.get("matured", 0) + self.counters.get("given_up", 0)
        return int(self.counters.get("predicted", 0) - ended)

    def newest_rows(self) -> MaturedRequests | None:
        """The matured requests still held, oldest first: enough to fill the window of the version that serves.

        Those that are set apart are left out.
        """
        query = f"SELECT requests, last FROM matured WHERE {_NOT_APART} ORDER BY last"
        found = []
        for packed, last in self._connection.execute(query):
            try:
                found.append(unpack(MaturedRequests, packed, last))
            except CorruptBlock as error:
                logger.error("the windows lack rows: %s", error)
                self._corrupt.add(last)
        return MaturedRequests.joined(found) if found else None

    def prepare_conversion_rates(self) -> None:
        """Makes `conversion_rates` fast; its index takes 5 % of all that the monitor does for a request of one row."""
        with self._transaction({}) as connection:
            connection.execute("CREATE INDEX IF NOT EXISTS predicted ON predictions (time)")

    def conversion_rates(self, predicted_before: float, *, window_seconds: float) -> dict[int, float]:
        """By model version: converted rows per row, of the newest `RATED_REQUESTS` requests predicted by this time.

        The conversion windows of these requests have closed.
        """
        newest = "SELECT * FROM predictions WHERE time <= ? ORDER BY time DESC LIMIT ?"
        converted = (
            "SELECT count(*) FROM late_outcomes o WHERE o.request_id = p.request_id AND o.event = ?"
            " AND o.row BETWEEN 0 AND p.num_rows - 1 AND round(1e6 * (o.time - p.time)) <= ?"
        )
        query = f"SELECT model_version, sum(({converted})), sum(num_rows) FROM ({newest}) p GROUP BY model_version"
        values = (CONVERSION, microseconds(window_seconds), predicted_before, RATED_REQUESTS)
        return {version: count / rows for version, count, rows in self._connection.execute(query, values)}

    # -- late outcomes and events

    @staticmethod
    def _keep_late(connection: sqlite3.Connection, late: Sequence[LateOutcome], now: float) -> None:
        """Stores outcomes for the archive's outcome files; of several with one (request, row, event), the earliest.

        One that is earlier than the one known goes into a file also where that lies in one.
        """
        connection.executemany(
            "INSERT INTO late_outcomes (request_id, row, event, time, predicted_at, stored_at)"
            f" VALUES (?, ?, ?, ?, ?, ?) {_KEEP_EARLIEST}",
            [(*outcome, now) for outcome in late],
        )

    def forget_user(self, category: int) -> None:
        """Makes the user of this category an unknown one in the rows that are held for the windows."""
        with self._transaction({}) as connection:
            held = connection.execute("SELECT last, requests FROM matured").fetchall()
            for last, packed in held:
                requests = unpack(MaturedRequests, packed)
                if (requests.users == category).any():
                    users = np.where(requests.users == category, MISSING_CATEGORY, requests.users)
                    left = pack(replace(requests, users=users))
                    connection.execute("UPDATE matured SET requests = ? WHERE last = ?", (left, last))

    def forget(self, *, before: float, orphans_before: float | None = None, ahead: float = np.inf) -> None:
        """Lets go of what was stored before this time and has no use any more.

        These are ids of requests whose rows are held no more, ids of outcome batches and of dead letters, and outcomes
        in sealed files if the rows of their request are not held. Clicks on requests that stayed unknown become late
        outcomes. `orphans_before` is the same for clicks on unknown requests; None = `before`.
        What was stored after `ahead` was stored under a clock that was wrong, and counts as old.
        """
        orphaned = before if orphans_before is None else orphans_before
        is_orphan = "stored_at NOT BETWEEN ? AND ? AND number IS NULL"
        counts: dict[str, float] = {}
        with self._transaction(counts) as connection:
            connection.execute(
                f"DELETE FROM predictions WHERE stored_at NOT BETWEEN ? AND ? AND coalesce({_IS_HELD}, 0) = 0"
                # The newest stays, or its number would be given again.
                " AND rowid < (SELECT max(rowid) FROM predictions)",
                (before, ahead),
            )
            connection.execute("DELETE FROM outcome_batches WHERE stored_at < ?", (before,))
            connection.execute(
                "DELETE FROM dead_letters WHERE stored_at < ? OR rowid <= (SELECT max(rowid) FROM dead_letters) - ?",
                (before, MAX_DEAD_LETTERS),
            )
            connection.execute(
                "DELETE FROM late_outcomes WHERE stored_at < ?"
                " AND file IN (SELECT name FROM files WHERE state IN ('sealed', 'uploaded'))"
                # The conversion rate counts a request as long as its rows are held, so its outcomes stay as long.
                " AND NOT EXISTS (SELECT 1 FROM predictions WHERE predictions.request_id = late_outcomes.request_id"
                f" AND {_IS_HELD})",
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
    """What became of the predictions of one pull."""

    added: Predictions | None
    """Those that were not stored before, by time and id; None = none."""
    reused: NDArray[np.int64]
    """Places of those that were not stored, because their ids name other requests."""


def _new_dead_letters(connection: sqlite3.Connection, keys: Sequence[str], *, now: float) -> int:
    """Keep the keys of dead letters, and return how many were not known."""
    query = "INSERT OR IGNORE INTO dead_letters VALUES (?, ?)"
    return sum(connection.execute(query, (_short_id(key), now)).rowcount for key in keys)


def matured_rows_of(memory: sqlite3.Connection, user: int) -> int:
    """Rows of the user of this category among those that a memory, opened by anyone, holds for the windows."""
    held = (unpack(MaturedRequests, packed) for (packed,) in memory.execute("SELECT requests FROM matured"))
    return sum(int(np.count_nonzero(requests.users == user)) for requests in held)


def waiting_requests_of(
    memory: sqlite3.Connection, user: int, *, columns: dict[str, list[str]], places: Sequence[int]
) -> int:
    """Requests that are not archived yet and have the user in one of the `places` of rows with these columns."""
    kept = memory.execute("SELECT content FROM documents WHERE name = 'features'").fetchone()
    found, arranged = 0, ColumnMap(json.loads(kept[0]) if kept else columns, columns)
    for (content,) in memory.execute("SELECT content FROM block_rows"):
        block = unpack(Predictions, content)
        _, categorical = arranged.rows(block.dense, block.categorical)
        is_users = (categorical[:, list(places)] == user).any(axis=1)
        found += int(np.count_nonzero(np.add.reduceat(is_users, block.starts)))
    return found


def _short_id(message_id: str) -> str:
    """Return what stands for a message's id, which may be of any length where another program published it."""
    return (
        message_id if len(message_id) <= MAX_ID_CHARACTERS else sha256(message_id.encode(errors="replace")).hexdigest()
    )


@contextmanager
def _records_errors() -> Iterator[None]:
    """Sorts what is wrong with a record's values from what is wrong with the file."""
    try:
        yield
    except _OF_RECORDS as error:
        raise ContractError(f"record cannot be stored: {error!r}") from error


def _insert_ids(connection: sqlite3.Connection, predictions: Predictions, first: int, *, now: float) -> None:
    connection.executemany(
        "INSERT INTO predictions (rowid, request_id, time, model_version, num_rows, stored_at, canary)"
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


def _waiting_of(block: Predictions, first: int, user_place: int | None) -> Waiting:
    """Return what maturing reads of a block whose first prediction has the number `first`."""
    users = np.full(block.num_rows, MISSING_CATEGORY) if user_place is None else block.categorical[:, user_place]
    return block.to(Waiting, numbers=np.arange(first, first + len(block)), users=users)


def _sound(kind: type[R], found: Iterable[tuple[bytes, int]]) -> Iterator[R]:
    """Yield the stored requests, without corrupt blocks, which are reported."""
    for content, number in found:
        try:
            yield unpack(kind, content, number)
        except CorruptBlock as error:
            logger.error("passed over: %s", error)


def _insert_block(connection: sqlite3.Connection, block: Predictions, first: int, *, user_place: int | None) -> None:
    """Keeps the rows, and apart from them what maturing reads."""
    waiting = _waiting_of(block, first, user_place)
    last, num = first + len(block) - 1, len(block)
    times = (float(block.times[0]), float(block.times[-1]))
    connection.execute(
        "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (last, first, first - 1, *times, num, num, pack(waiting))
    )
    connection.execute("INSERT INTO block_rows VALUES (?, ?)", (last, pack(block)))


def _first_of(found: Sequence[Waiting], limit: int, max_rows: int, *, beyond: int = 0) -> Waiting:
    """See `Store.waiting`; with `beyond` 1 also the first that is too much, which keeps later ones out.

    Of each block these are its first ones, as within a block they are in this order.
    """
    joined = Waiting.joined(found)
    joined = joined.ordered(joined.times)
    num_fit = int(np.searchsorted(np.cumsum(joined.sizes), max_rows, "right")) + beyond
    return joined.between(0, min(limit, max(num_fit, 1)))


def bytes_of_row(num_numeric: int, num_categorical: int) -> int:
    """Return the bytes of a row's numbers in memory."""
    return 32 + 4 * num_numeric + 8 * num_categorical


def cuts(sizes: NDArray[np.int64], at_most: int, periods: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Start and stop of parts whose sizes add up to `at_most`, or of one, in one of the `periods` each, which ascend.

    >>> list(cuts(np.array([2, 2, 5, 1, 1]), 4, np.array([0, 0, 0, 0, 1])))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    ends, start = np.cumsum(sizes), 0
    while start < len(sizes):
        stop = int(np.searchsorted(ends, ends[start] - sizes[start] + at_most, "right"))
        yield start, (stop := min(max(stop, start + 1), int(np.searchsorted(periods, periods[start], "right"))))
        start = stop


def _runs(numbers: NDArray[np.int64]) -> Iterable[tuple[int, int]]:
    """First and last of each run of numbers without a gap.

    >>> list(_runs(np.array([4, 5, 6, 9])))
    [(4, 6), (9, 9)]
    """
    ordered = np.sort(numbers)
    ends = np.flatnonzero(np.diff(ordered, append=-1) != 1)
    return zip(ordered[np.r_[0, ends[:-1] + 1]].tolist(), ordered[ends].tolist())
