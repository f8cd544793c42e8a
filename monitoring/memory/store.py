"""The monitor's memory: one SQLite file that is right after a SIGKILL at any moment.

Holds every record from before its acknowledgement until its row lies in a sealed archive file; the newest matured rows,
from which the windows are rebuilt; counters; and the small documents of policy and retraining. One method is one
transaction, flushed to disk when it returns. Here: what comes in, what matures and what is forgotten; all of it lies in
SQLite, so memory does not grow with what is open. What the records mean is left to `monitoring.memory.join`, which rows
lie in which file to `file_tables`.

A request goes through: prediction stored -> matured (click labels final) -> in an intended file -> sealed (payload
deleted); beside that, where conversions are awaited: unsettled -> settled. An outcome that comes too late for its row:
stored as late -> in an intended file -> sealed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.contracts.criteo import microseconds
from components.contracts.records import CLICK, CONVERSION, OutcomeBatch, PredictionBatch
from monitoring.memory.database import add_to
from monitoring.memory.file_tables import FileTables
from monitoring.rows import Event, LateOutcome, MaturedRequest, OpenRows, Settled, Waiting

_MATURED = "request_id, time, model_version, labels, scores, converted, session_id, positions, delays"

_KEEP_EARLIEST = (
    "ON CONFLICT DO UPDATE SET time = excluded.time, stored_at = excluded.stored_at, file = NULL"
    " WHERE excluded.time < late_outcomes.time"
)
"""The earliest says whether the row had an outcome of its kind within the window."""
_OPEN, _UNSETTLED, _CLOSED = range(3)


class Store(FileTables):
    """The memory in `path`; one process at a time holds it."""

    def add(
        self,
        predictions: Sequence[tuple[PredictionBatch, bytes]],
        outcomes: Sequence[OutcomeBatch],
        unusable: Sequence[tuple[str, str]],
        *,
        now: float,
        joined: Collection[str] = (CLICK,),
    ) -> list[PredictionBatch]:
        """Stores the records of one pull; those stored before only count as duplicates.

        Args:
            predictions: Batches with their messages.
            outcomes: Outcome batches.
            unusable: (message id, reason) of future dead letters; counted here, kept by the log.
            now: Seconds since the epoch.
            joined: Events that wait for their request; others are late at once.

        Returns:
            The batches that were not stored before.

        Raises:
            TemporaryError: the disk is full; nothing was stored.
        """
        counts: dict[str, float] = {}
        with self._transaction(counts) as connection:
            for bad in unusable:
                new = connection.execute("INSERT OR IGNORE INTO dead_letters VALUES (?, ?)", bad).rowcount
                add_to(counts, "dead_letter", new)
            added = self._add_predictions(connection, predictions, counts, now=now)
            for outcome in outcomes:
                new = connection.execute(
                    "INSERT OR IGNORE INTO outcome_batches VALUES (?, ?)", (outcome.batch_id, now)
                ).rowcount
                if not new:
                    add_to(counts, "duplicate", 1)
                else:
                    self._add_outcomes(connection, outcome, counts, now=now, is_joined=outcome.event in joined)
        return added

    def _add_predictions(
        self,
        connection: sqlite3.Connection,
        predictions: Sequence[tuple[PredictionBatch, bytes]],
        counts: dict[str, float],
        *,
        now: float,
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
            number += 1
            key = (number, batch.request_id, batch.time, batch.model_version, len(batch), now)
            rows.append((*key, int(batch.canary), batch.scores.tobytes(), batch.session_id, positions))
            messages.append((number, payload))
        connection.executemany(
            "INSERT INTO predictions (rowid, request_id, time, model_version, num_rows, stored_at, canary, scores,"
            " session_id, positions) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        connection.executemany("INSERT INTO messages VALUES (?, ?)", messages)
        add_to(counts, "predicted", sum(len(batch) for batch in added))
        return added

    def _add_outcomes(
        self,
        connection: sqlite3.Connection,
        outcome: OutcomeBatch,
        counts: dict[str, float],
        *,
        now: float,
        is_joined: bool,
    ) -> None:
        """Keeps each outcome where its request is waited for, else among the late ones, or in both."""
        is_click = outcome.event == CLICK
        add_to(counts, "outcome" if is_click else "conversion", len(outcome))
        states = self._states(list(set(outcome.request_ids)))
        kept, late = [], []
        for request_id, row, time in zip(outcome.request_ids, outcome.rows.tolist(), outcome.times.tolist()):
            predicted_at, state = states.get(request_id, (None, _OPEN))
            # An unsettled request's conversion still counts, but its row may be in a file without it.
            if is_joined and (state == _OPEN or (state == _UNSETTLED and not is_click)):
                kept.append((request_id, row, time, now))
            if not is_joined or state != _OPEN:
                late.append(LateOutcome(request_id, row, outcome.event, time, predicted_at))
        if is_joined:
            add_to(counts, _late_counter(outcome.event), len(late))
        connection.executemany(
            f"INSERT INTO {'clicks' if is_click else 'conversions'} VALUES (?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET time = min(time, excluded.time)",
            kept,
        )
        self._keep_late(connection, late, now)

    def _states(self, ids: Sequence[str]) -> dict[str, tuple[float, int]]:
        """Prediction time and state of the known ones among these requests."""
        query = (
            "SELECT p.request_id, p.time, p.matured, a.request_id IS NOT NULL FROM predictions p"
            " LEFT JOIN awaiting_conversion a USING (request_id) WHERE p.request_id IN ({ids})"
        )
        return {
            request_id: (time, (_UNSETTLED if awaits else _CLOSED) if matured else _OPEN)
            for request_id, time, matured, awaits in self._select_by_id(query, ids)
        }

    # -- from open to matured

    def waiting(self, predicted_before: float, limit: int) -> list[Waiting]:
        """Up to `limit` predictions made at or before this time and not matured, oldest first, with their outcomes."""
        rows = self._connection.execute(
            "SELECT request_id, time, model_version, scores, session_id, positions FROM predictions"
            " WHERE matured = 0 AND time <= ? ORDER BY time, request_id LIMIT ?",
            (predicted_before, limit),
        ).fetchall()
        ids = [row[0] for row in rows]
        clicks, conversions = self._events("clicks", ids), self._events("conversions", ids)
        return [
            Waiting(
                request_id,
                time,
                version,
                np.frombuffer(scores, np.float32),
                session_id,
                _array_or_none(positions, np.int32),
                clicks.get(request_id, []),
                conversions.get(request_id, []),
            )
            for request_id, time, version, scores, session_id, positions in rows
        ]

    def newest_waiting(self) -> tuple[float, int] | None:
        """Time and model version of the newest prediction that has not matured; None where all have."""
        query = "SELECT time, model_version FROM predictions WHERE matured = 0 ORDER BY time DESC LIMIT 1"
        row = self._connection.execute(query).fetchone()
        return None if row is None else (float(row[0]), int(row[1]))

    def newest_prediction_at(self) -> float | None:
        """Time of the newest prediction held, matured or not; None where there is none."""
        (time,) = self._connection.execute("SELECT max(time) FROM predictions").fetchone()
        return None if time is None else float(time)

    def predictions_after(self, time: float | None) -> Iterator[tuple[float, int, bool]]:
        """Time, model version and whether by a canary, of the predictions held made after `time`; None = of all."""
        query = "SELECT time, model_version, canary FROM predictions WHERE time > ?"
        for predicted_at, version, canary in self._connection.execute(query, (-1.0 if time is None else time,)):
            yield predicted_at, version, bool(canary)

    def prediction_mark(self) -> int:
        """Number of the prediction stored last; 0 = none. Numbers only grow."""
        return int(self._connection.execute("SELECT coalesce(max(rowid), 0) FROM predictions").fetchone()[0])

    def payloads_after(self, mark: int) -> Iterator[bytes]:
        """Messages of the predictions stored after the one numbered `mark` and not archived yet, in this order."""
        query = "SELECT payload FROM messages WHERE number > ? ORDER BY number"
        return (payload for (payload,) in self._connection.execute(query, (mark,)))

    def open_rows(self, *, now: float, window_seconds: float, limit: int = 200_000) -> tuple[dict[int, OpenRows], int]:
        """The rows of each model version whose labels are not final, and how many older rows were left out.

        Args:
            now: Seconds since the epoch, from which ages are taken.
            window_seconds: The attribution window; a click later than this is none.
            limit: Most rows handed out, those of the newest requests; a request is handed out whole or not at all.
        """
        taken: dict[int, list[tuple[str, float, bytes]]] = {}
        num_rows = 0
        for request_id, time, version, n, scores in self._connection.execute(
            "SELECT request_id, time, model_version, num_rows, scores FROM predictions WHERE matured = 0"
            " ORDER BY time DESC, request_id"
        ):
            if num_rows + n > limit:
                break
            num_rows += n
            taken.setdefault(version, []).append((request_id, time, scores))
        clicks = self._events("clicks", [each[0] for requests in taken.values() for each in requests])
        found = {
            version: _open_rows(requests, clicks, now, window_seconds=window_seconds)
            for version, requests in taken.items()
        }
        return found, self.num_pending_rows - num_rows

    def mature(
        self,
        requests: Sequence[MaturedRequest],
        counts: dict[str, float],
        *,
        now: float,
        late: Sequence[LateOutcome] = (),
        awaits_conversions: bool = False,
    ) -> None:
        """Makes these click labels final.

        Args:
            requests: In the order in which they are to be archived.
            counts: Counters to add to.
            now: Seconds since the epoch.
            late: Outcomes of these requests that made no label.
            awaits_conversions: Whether the requests wait on for `settle_conversions`.
        """
        ids = [(r.request_id,) for r in requests]
        add_to(counts, "matured", sum(len(r.labels) for r in requests))
        add_to(counts, "matured_click", sum(int(r.labels.sum()) for r in requests))
        with self._transaction(counts) as connection:
            connection.executemany(
                "INSERT INTO matured (request_id, time, model_version, num_rows, matured_at, labels, scores,"
                " converted, session_id, positions, delays) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [_matured_row(request, now) for request in requests],
            )
            connection.executemany("UPDATE predictions SET matured = 1 WHERE request_id = ?", ids)
            connection.executemany("DELETE FROM clicks WHERE request_id = ?", ids)
            self._keep_late(connection, late, now)
            if awaits_conversions:
                connection.executemany(
                    "INSERT OR IGNORE INTO awaiting_conversion VALUES (?, ?, ?, ?)",
                    [(r.request_id, r.time, r.model_version, len(r.labels)) for r in requests],
                )
            else:
                connection.executemany("DELETE FROM conversions WHERE request_id = ?", ids)

    def matured_mark(self) -> int:
        """Number of the request that matured last; 0 = none. Numbers only grow, and the newest one is held on."""
        return int(self._connection.execute("SELECT coalesce(max(number), 0) FROM matured").fetchone()[0])

    def num_matured_after(self, mark: int) -> int:
        """Requests held that matured after the one numbered `mark`."""
        return int(self._connection.execute("SELECT count(*) FROM matured WHERE number > ?", (mark,)).fetchone()[0])

    @property
    def num_pending_rows(self) -> int:
        """Rows whose label is not final. From the counters: summing the waiting rows each tick would read them all."""
        return int(self.counters.get("predicted", 0) - self.counters.get("matured", 0))

    def newest_rows(self) -> Iterator[MaturedRequest]:
        """The matured requests still held, oldest first: enough to fill the window of the version that serves."""
        for (
            request_id,
            time,
            version,
            labels,
            scores,
            converted,
            session_id,
            positions,
            delays,
        ) in self._connection.execute(f"SELECT {_MATURED} FROM matured ORDER BY number"):
            clicked = np.frombuffer(labels, np.uint8)
            yield MaturedRequest(
                request_id,
                time,
                version,
                clicked,
                np.frombuffer(scores, np.float32),
                _array_or_none(converted, np.uint8),
                session_id,
                _array_or_none(positions, np.int32),
                _spread(clicked, delays),
            )

    # -- conversions

    def unsettled(self, predicted_before: float, limit: int) -> list[tuple[Settled, list[Event]]]:
        """Matured requests predicted at or before this time, oldest first, and the conversions known of each.

        Their `num_converted` is still 0.
        """
        rows = self._connection.execute(
            "SELECT request_id, time, model_version, num_rows FROM awaiting_conversion WHERE time <= ?"
            " ORDER BY time, request_id LIMIT ?",
            (predicted_before, limit),
        ).fetchall()
        events = self._events("conversions", [row[0] for row in rows])
        return [(Settled(name, time, version, n, 0), events.get(name, [])) for name, time, version, n in rows]

    def settle(
        self, requests: Sequence[Settled], *, now: float, late: Sequence[LateOutcome] = (), keep: int = 20_000
    ) -> None:
        """Makes these requests' conversions final; only the newest `keep` are held on.

        Args:
            requests: With their `num_converted`.
            now: Seconds since the epoch.
            late: Their conversions after the window.
            keep: Settled requests held for `newest_settled`.
        """
        ids = [(r.request_id,) for r in requests]
        counts = {
            "settled": float(sum(r.num_rows for r in requests)),
            "settled_conversion": float(sum(r.num_converted for r in requests)),
        }
        with self._transaction(counts) as connection:
            connection.executemany(
                "INSERT INTO settled (request_id, time, model_version, num_rows, num_converted) VALUES (?, ?, ?, ?, ?)",
                requests,
            )
            connection.executemany("DELETE FROM awaiting_conversion WHERE request_id = ?", ids)
            connection.executemany("DELETE FROM conversions WHERE request_id = ?", ids)
            connection.execute("DELETE FROM settled WHERE number <= (SELECT max(number) FROM settled) - ?", (keep,))
            counts[_late_counter(CONVERSION)] = self._keep_late(connection, late, now)

    def newest_settled(self) -> list[Settled]:
        """The settled requests still held, oldest first."""
        query = "SELECT request_id, time, model_version, num_rows, num_converted FROM settled ORDER BY number"
        return list(map(Settled._make, self._connection.execute(query)))

    # -- late outcomes and events

    def _keep_late(self, connection: sqlite3.Connection, late: Sequence[LateOutcome], now: float) -> int:
        """Stores outcomes for the archive's outcome files; of several with one (request, row, event), the earliest.

        How many were new, or earlier than the one known: such a one goes into a file also where that lies in one.
        """
        if not late:
            return 0
        return connection.executemany(
            "INSERT INTO late_outcomes (request_id, row, event, time, predicted_at, stored_at)"
            f" VALUES (?, ?, ?, ?, ?, ?) {_KEEP_EARLIEST}",
            [(*outcome, now) for outcome in late],
        ).rowcount

    def _events(self, table: str, ids: Sequence[str]) -> dict[str, list[Event]]:
        events: dict[str, list[Event]] = {}
        query = f"SELECT request_id, row, time FROM {table} WHERE request_id IN ({{ids}})"
        for request_id, row, time in self._select_by_id(query, ids):
            events.setdefault(request_id, []).append((row, time))
        return events

    def forget(self, *, before: float, orphans_before: float | None = None) -> None:
        """Lets go of what was stored before this time and has no use any more.

        These are ids of archived requests and of outcome batches, and outcomes in sealed files. Outcomes of requests
        that stayed unknown become late ones.

        Args:
            before: Seconds since the epoch.
            orphans_before: The same for outcomes of unknown requests; None = `before`.
        """
        orphaned = before if orphans_before is None else orphans_before
        counts: dict[str, float] = {}
        with self._transaction(counts) as connection:
            # A prediction whose conversions are open is what tells a late one from one of an unknown request.
            connection.execute(
                "DELETE FROM predictions WHERE stored_at < ? AND rowid NOT IN (SELECT number FROM messages)"
                " AND request_id NOT IN (SELECT request_id FROM awaiting_conversion)"
                # The newest stays, or its number would be given again.
                " AND rowid < (SELECT max(rowid) FROM predictions)",
                (before,),
            )
            connection.execute("DELETE FROM outcome_batches WHERE stored_at < ?", (before,))
            connection.execute(
                "DELETE FROM late_outcomes WHERE stored_at < ?"
                " AND file IN (SELECT name FROM files WHERE state != 'intended')",
                (before,),
            )
            for event, table in ((CLICK, "clicks"), (CONVERSION, "conversions")):
                condition = "stored_at < ? AND request_id NOT IN (SELECT request_id FROM predictions)"
                connection.execute(
                    "INSERT INTO late_outcomes (request_id, row, event, time, predicted_at, stored_at)"
                    f" SELECT request_id, row, ?, time, NULL, stored_at FROM {table}"
                    f" WHERE {condition} {_KEEP_EARLIEST}",
                    (event, orphaned),
                )
                orphans = connection.execute(f"DELETE FROM {table} WHERE {condition}", (orphaned,)).rowcount
                add_to(counts, "unmatched_outcome", orphans)


def _late_counter(event: str) -> str:
    """The counter of outcomes of this kind that came too late."""
    return "late_outcome" if event == CLICK else "late_conversion"


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


def _matured_row(request: MaturedRequest, now: float) -> tuple[Any, ...]:
    delays = request.click_delays
    return (
        request.request_id,
        request.time,
        request.model_version,
        len(request.labels),
        now,
        request.labels.tobytes(),
        request.scores.tobytes(),
        None if request.converted is None else request.converted.tobytes(),
        request.session_id,
        None if request.positions is None else request.positions.tobytes(),
        None if delays is None else delays[request.labels == 1].tobytes(),
    )


def _array_or_none(blob: bytes | None, dtype: type[Any]) -> NDArray[Any] | None:
    return None if blob is None else np.frombuffer(blob, dtype)


def _spread(labels: NDArray[np.uint8], delays: bytes | None) -> NDArray[np.float32] | None:
    """The stored delays, of clicked rows alone, at their rows."""
    if delays is None:
        return None
    spread = np.full(len(labels), np.nan, np.float32)
    spread[labels == 1] = np.frombuffer(delays, np.float32)
    return spread
