"""The monitor's memory: one SQLite file that is right after a SIGKILL at any moment.

Holds every record from before its acknowledgement until its row lies in a sealed archive file; the newest matured rows,
from which the windows are rebuilt; counters; and the small documents of policy and retraining. One method is one
transaction, flushed to disk when it returns. Here: what comes in, what matures and what is forgotten; all of it lies in
SQLite, so memory does not grow with what is open. What the records mean is left to `monitoring.memory.join`, which rows
lie in which file to `database`.

A request goes through: prediction stored -> matured (click labels final) -> in an intended file -> sealed (payload
deleted). A conversion, and a click that comes too late for its row: stored as late -> in an intended file -> sealed.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.features import MISSING_CATEGORY
from components.contracts.raw_rows import microseconds
from components.contracts.records import CLICK, CONVERSION, OutcomeBatch, PredictionBatch
from components.runtime.errors import ContractError
from monitoring.memory.database import FileTables, add_to
from monitoring.rows import Event, LateOutcome, MaturedRequest, OpenRows, Waiting

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


class Store(FileTables):
    """The memory in `path`; one process at a time holds it."""

    def add(
        self,
        predictions: Sequence[tuple[PredictionBatch, bytes]],
        outcomes: Sequence[OutcomeBatch],
        unusable: Sequence[tuple[str, str]],
        *,
        now: float,
        user_place: int | None = None,
    ) -> list[PredictionBatch]:
        """Stores the records of one pull; those stored before only count as duplicates.

        `unusable` are (message id, reason) of future dead letters, which are counted here and kept by the log;
        `user_place` is the user's among the categories of a row, None = the recommender names none.

        Returns:
            The batches that were not stored before.

        Raises:
            ContractError: one of them is nothing that SQLite takes; nothing was stored.
            TemporaryError: the disk is full; nothing was stored.
        """
        counts: dict[str, float] = {}
        with self._transaction(counts) as connection, _records_errors():
            for bad in unusable:
                new = connection.execute("INSERT OR IGNORE INTO dead_letters VALUES (?, ?)", bad).rowcount
                add_to(counts, "dead_letter", new)
            added = self._add_predictions(connection, predictions, counts, now=now, user_place=user_place)
            for outcome in outcomes:
                new = connection.execute(
                    "INSERT OR IGNORE INTO outcome_batches VALUES (?, ?)", (outcome.batch_id, now)
                ).rowcount
                if not new:
                    add_to(counts, "duplicate", 1)
                else:
                    self._add_outcomes(connection, outcome, counts, now=now)
        return added

    def _add_predictions(
        self,
        connection: sqlite3.Connection,
        predictions: Sequence[tuple[PredictionBatch, bytes]],
        counts: dict[str, float],
        *,
        now: float,
        user_place: int | None,
    ) -> list[PredictionBatch]:
        ids = [batch.request_id for batch, _ in predictions]
        query = "SELECT request_id FROM predictions WHERE request_id IN ({ids})"
        known = {request_id for (request_id,) in self._select_by_id(query, ids)}
        added = []
        rows = []
        messages = []
        number = self.prediction_mark()
        for batch, payload in predictions:
            if batch.request_id in known:
                add_to(counts, "duplicate", 1)
                continue
            known.add(batch.request_id)
            added.append(batch)
            positions = None if batch.positions is None else batch.positions.tobytes()
            users = None if user_place is None else batch.categorical[:, user_place].tobytes()
            number += 1
            key = (number, batch.request_id, batch.time, batch.model_version, len(batch), now)
            rows.append((*key, int(batch.canary), batch.scores.tobytes(), positions, users))
            messages.append((number, payload))
        connection.executemany(
            "INSERT INTO predictions (rowid, request_id, time, model_version, num_rows, stored_at, canary, scores,"
            " positions, users) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        connection.executemany("INSERT INTO messages VALUES (?, ?)", messages)
        add_to(counts, "predicted", sum(len(batch) for batch in added))
        return added

    def _add_outcomes(
        self, connection: sqlite3.Connection, outcome: OutcomeBatch, counts: dict[str, float], *, now: float
    ) -> None:
        """Keeps each click where its request is waited for; every other outcome goes among the late ones."""
        is_click = outcome.event == CLICK
        add_to(counts, "outcome" if is_click else "conversion", len(outcome))
        query = "SELECT request_id, time, matured IS NOT NULL FROM predictions WHERE request_id IN ({ids})"
        known = {name: (time, matured) for name, time, matured in self._select_by_id(query, {*outcome.request_ids})}
        waiting, late = [], []
        for request_id, row, time in zip(outcome.request_ids, outcome.rows.tolist(), outcome.times.tolist()):
            predicted_at, is_matured = known.get(request_id, (None, False))
            if is_click and not is_matured:
                waiting.append((request_id, row, time, now))
            else:
                late.append(LateOutcome(request_id, row, outcome.event, time, predicted_at))
        if is_click:
            add_to(counts, "late_outcome", len(late))
        connection.executemany(
            "INSERT INTO clicks VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET time = min(time, excluded.time)", waiting
        )
        self._keep_late(connection, late, now)

    # -- from open to matured

    def waiting(self, predicted_before: float, limit: int) -> list[Waiting]:
        """Up to `limit` predictions made at or before this time and not matured, oldest first, with their outcomes."""
        rows = self._connection.execute(
            "SELECT request_id, time, model_version, scores, positions, users FROM predictions"
            " WHERE matured IS NULL AND time <= ? ORDER BY time, request_id LIMIT ?",
            (predicted_before, limit),
        ).fetchall()
        clicks = self._clicks_on([row[0] for row in rows])
        return [
            Waiting(
                request_id,
                time,
                version,
                np.frombuffer(scores, np.float32),
                _array_or_none(positions, np.int32),
                clicks.get(request_id, []),
                _array_or_none(users, np.int64),
            )
            for request_id, time, version, scores, positions, users in rows
        ]

    def newest_prediction(self) -> tuple[float, int] | None:
        """Time and model version of the newest prediction held that no canary made; None where there is none."""
        query = (
            "SELECT time, model_version FROM predictions WHERE canary = 0"
            " ORDER BY time DESC, model_version DESC LIMIT 1"
        )
        row = self._connection.execute(query).fetchone()
        return None if row is None else (float(row[0]), int(row[1]))

    def predictions_after(self, time: float | None) -> Iterator[tuple[float, int, bool]]:
        """Time, model version and whether by a canary, of the predictions held made after `time`; None = of all."""
        query = "SELECT time, model_version, canary FROM predictions WHERE time > ?"
        for predicted_at, version, canary in self._connection.execute(query, (-1.0 if time is None else time,)):
            yield predicted_at, version, bool(canary)

    def num_rows_of(self, version: int) -> int:
        """Rows that a model version has scored, of the requests held."""
        query = "SELECT coalesce(sum(num_rows), 0) FROM predictions WHERE model_version = ?"
        return int(self._connection.execute(query, (version,)).fetchone()[0])

    def prediction_mark(self) -> int:
        """Number of the prediction stored last; 0 = none. Numbers only grow."""
        return int(self._connection.execute("SELECT coalesce(max(rowid), 0) FROM predictions").fetchone()[0])

    def payloads_after(self, mark: int) -> Iterator[bytes]:
        """Messages of the predictions stored after the one numbered `mark` and not archived yet, in this order."""
        query = "SELECT payload FROM messages WHERE number > ? ORDER BY number"
        return (payload for (payload,) in self._connection.execute(query, (mark,)))

    def payloads_since(self, time: float) -> Iterator[bytes]:
        """Messages of the predictions made at `time` or later and not archived yet, in order of time."""
        query = (
            "SELECT x.payload FROM predictions p JOIN messages x ON x.number = p.rowid"
            " WHERE p.time >= ? ORDER BY p.time, p.request_id"
        )
        # Times are kept as they came; a bucket begins at a whole microsecond.
        return (payload for (payload,) in self._connection.execute(query, (time - 1e-6,)))

    def open_rows(self, *, now: float, window_seconds: float, limit: int = 200_000) -> dict[int, OpenRows]:
        """The rows of each model version whose labels are not final.

        Ages are taken from `now`; a click later than `window_seconds` is none. At most `limit` rows are handed out,
        those of the newest requests, each whole or not at all.
        """
        taken: dict[int, list[tuple[str, float, bytes]]] = {}
        num_rows = 0
        for request_id, time, version, n, scores in self._connection.execute(
            "SELECT request_id, time, model_version, num_rows, scores FROM predictions WHERE matured IS NULL"
            " ORDER BY time DESC, request_id"
        ):
            if num_rows + n > limit:
                break
            num_rows += n
            taken.setdefault(version, []).append((request_id, time, scores))
        clicks = self._clicks_on([each[0] for requests in taken.values() for each in requests])
        return {
            version: _open_rows(requests, clicks, now, window_seconds=window_seconds)
            for version, requests in taken.items()
        }

    def mature(
        self,
        requests: Sequence[MaturedRequest],
        counts: dict[str, float],
        *,
        now: float,
        late: Sequence[LateOutcome] = (),
    ) -> None:
        """Makes these click labels final.

        `requests` are in the order in which they are to be archived; `late` are outcomes of them that made no label.
        """
        ids, mark = [r.request_id for r in requests], self.matured_mark()
        add_to(counts, "matured_request", len(requests))
        add_to(counts, "matured", sum(len(r.labels) for r in requests))
        add_to(counts, "matured_click", sum(int(r.labels.sum()) for r in requests))
        with self._transaction(counts) as connection:
            connection.executemany(
                "UPDATE predictions SET matured = ?, matured_at = ?, labels = ?, delays = ? WHERE request_id = ?",
                [
                    (place, now, request.labels.tobytes(), _delays(request), request.request_id)
                    for place, request in enumerate(requests, start=mark + 1)
                ],
            )
            clicked = self._select_by_id("SELECT DISTINCT request_id FROM clicks WHERE request_id IN ({ids})", ids)
            connection.executemany("DELETE FROM clicks WHERE request_id = ?", list(clicked))
            self._keep_late(connection, late, now)

    def matured_mark(self) -> int:
        """Place of the request that matured last in the order of maturing, from 1; 0 = none has."""
        return int(self.counters.get("matured_request", 0))

    def num_matured_after(self, mark: int) -> int:
        """Requests held that matured after the one at the place `mark`."""
        return int(
            self._connection.execute("SELECT count(*) FROM predictions WHERE matured > ?", (mark,)).fetchone()[0]
        )

    @property
    def num_pending_rows(self) -> int:
        """Rows whose label is not final. From the counters: summing the waiting rows each tick would read them all."""
        return int(self.counters.get("predicted", 0) - self.counters.get("matured", 0))

    def newest_rows(self) -> Iterator[MaturedRequest]:
        """The matured requests still held, oldest first: enough to fill the window of the version that serves."""
        columns = "request_id, time, model_version, labels, scores, positions, delays, users"
        rows = self._connection.execute(f"SELECT {columns} FROM predictions WHERE matured > 0 ORDER BY matured")
        for request_id, time, version, labels, scores, positions, delays, users in rows:
            clicked = np.frombuffer(labels, np.uint8)
            yield MaturedRequest(
                request_id,
                time,
                version,
                clicked,
                np.frombuffer(scores, np.float32),
                _array_or_none(positions, np.int32),
                _spread(clicked, delays),
                _array_or_none(users, np.int64),
            )

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

    def _clicks_on(self, ids: Sequence[str]) -> dict[str, list[Event]]:
        """The clicks that wait for these requests' labels."""
        found: dict[str, list[Event]] = {}
        query = "SELECT request_id, row, time FROM clicks WHERE request_id IN ({ids})"
        for request_id, row, time in self._select_by_id(query, ids):
            found.setdefault(request_id, []).append((row, time))
        return found

    def forget_user(self, category: int) -> None:
        """Makes the user of this category an unknown one in the rows that are held for the windows."""
        with self._transaction({}) as connection:
            held = connection.execute(
                "SELECT rowid, users FROM predictions WHERE matured > 0 AND users IS NOT NULL"
            ).fetchall()
            for number, blob in held:
                users = np.frombuffer(blob, np.int64)
                if (users == category).any():
                    left = np.where(users == category, MISSING_CATEGORY, users)
                    connection.execute("UPDATE predictions SET users = ? WHERE rowid = ?", (left.tobytes(), number))

    def forget(self, *, before: float, orphans_before: float | None = None) -> None:
        """Lets go of what was stored before this time and has no use any more.

        These are ids of requests whose rows are held no more, ids of outcome batches, and outcomes in sealed files if
        the rows of their request are not held. Clicks on requests that stayed unknown become late outcomes.
        `orphans_before` is the same for clicks on unknown requests; None = `before`.
        """
        orphaned = before if orphans_before is None else orphans_before
        is_orphan = "stored_at < ? AND request_id NOT IN (SELECT request_id FROM predictions)"
        counts: dict[str, float] = {}
        with self._transaction(counts) as connection:
            connection.execute(
                "DELETE FROM predictions WHERE stored_at < ? AND matured = 0"
                # The newest stays, or its number would be given again.
                " AND rowid < (SELECT max(rowid) FROM predictions)",
                (before,),
            )
            connection.execute("DELETE FROM outcome_batches WHERE stored_at < ?", (before,))
            connection.execute(
                "DELETE FROM late_outcomes WHERE stored_at < ?"
                " AND file IN (SELECT name FROM files WHERE state != 'intended')"
                # The conversion rate counts a request as long as its rows are held, so its outcomes stay as long.
                " AND NOT EXISTS (SELECT 1 FROM predictions p WHERE p.request_id = late_outcomes.request_id"
                " AND p.matured IS NOT 0)",
                (before,),
            )
            connection.execute(
                "INSERT INTO late_outcomes (request_id, row, event, time, predicted_at, stored_at)"
                f" SELECT request_id, row, ?, time, NULL, stored_at FROM clicks WHERE {is_orphan} {_KEEP_EARLIEST}",
                (CLICK, orphaned),
            )
            counts["unmatched_outcome"] = connection.execute(
                f"DELETE FROM clicks WHERE {is_orphan}", (orphaned,)
            ).rowcount


@contextmanager
def _records_errors() -> Iterator[None]:
    """Sorts what is wrong with a record's values from what is wrong with the file."""
    try:
        yield
    except _OF_RECORDS as error:
        raise ContractError(f"record cannot be stored: {error!r}") from error


def _open_rows(
    requests: Sequence[tuple[str, float, bytes]], clicks: dict[str, list[Event]], now: float, *, window_seconds: float
) -> OpenRows:
    scores = np.frombuffer(b"".join(blob for _, _, blob in requests), np.float32)
    sizes = [len(blob) // scores.itemsize for _, _, blob in requests]
    clicked = np.zeros(len(scores), np.bool_)
    for (request_id, time, _), size, end in zip(requests, sizes, np.cumsum(sizes)):
        for row, clicked_at in clicks.get(request_id, ()):
            if 0 <= row < size and microseconds(clicked_at) <= microseconds(time) + microseconds(window_seconds):
                clicked[end - size + row] = True
    ages = np.repeat(now - np.array([time for _, time, _ in requests]), sizes)
    return OpenRows(scores, ages, clicked)


def _delays(request: MaturedRequest) -> bytes | None:
    """Of the clicked rows alone; `_spread` puts them back."""
    return None if request.click_delays is None else request.click_delays[request.labels == 1].tobytes()


def _array_or_none(blob: bytes | None, dtype: type[Any]) -> NDArray[Any] | None:
    return None if blob is None else np.frombuffer(blob, dtype)


def _spread(labels: NDArray[np.uint8], delays: bytes | None) -> NDArray[np.float32] | None:
    """The stored delays, of clicked rows alone, at their rows."""
    if delays is None:
        return None
    spread = np.full(len(labels), np.nan, np.float32)
    spread[labels == 1] = np.frombuffer(delays, np.float32)
    return spread
