"""The monitor's memory: one SQLite file that is right after a SIGKILL at any moment.

Holds every record from before its acknowledgement until its row lies in a sealed archive file; the newest matured rows,
from which the windows are rebuilt; counters; and the small documents of policy and retraining. One method is one
transaction, flushed to disk when it returns. Here: what comes in and what is forgotten. What the records mean is left
to `monitoring.memory.join`, labels to `label_tables`, files to `file_tables`.

A request goes through: prediction stored -> matured (click labels final) -> in an intended file -> sealed (payload let
go); beside that, where conversions are awaited: unsettled -> settled. An outcome that comes too late for its row:
stored as late -> in an intended file -> sealed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence

from components.contracts.records import CLICK, CONVERSION, OutcomeBatch, PredictionBatch
from monitoring.memory.database import count
from monitoring.memory.file_tables import FileTables
from monitoring.memory.label_tables import KEEP_EARLIEST, LabelTables, late_counter
from monitoring.memory.rows import ArchiveRow, LateOutcome, MaturedRequest, OpenRows, Settled, Waiting

__all__ = ["ArchiveRow", "LateOutcome", "MaturedRequest", "OpenRows", "Settled", "Store", "Waiting"]

_OPEN, _UNSETTLED, _CLOSED = range(3)


class Store(LabelTables, FileTables):
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
                count(counts, "dead_letter", new)
            added = self._add_predictions(connection, predictions, counts, now)
            for outcome in outcomes:
                new = connection.execute(
                    "INSERT OR IGNORE INTO outcome_batches VALUES (?, ?)", (outcome.batch_id, now)
                ).rowcount
                if not new:
                    count(counts, "duplicate", 1)
                else:
                    self._add_outcomes(connection, outcome, counts, now, outcome.event in joined)
        return added

    def _add_predictions(
        self,
        connection: sqlite3.Connection,
        predictions: Sequence[tuple[PredictionBatch, bytes]],
        counts: dict[str, float],
        now: float,
    ) -> list[PredictionBatch]:
        ids = [batch.request_id for batch, _ in predictions]
        query = "SELECT request_id FROM predictions WHERE request_id IN ({ids})"
        known = {request_id for (request_id,) in self._select_by_id(query, ids)}
        added, rows, messages = [], [], []
        number = self.prediction_mark()
        for batch, payload in predictions:
            if batch.request_id in known:
                count(counts, "duplicate", 1)
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
        count(counts, "predicted", sum(len(batch) for batch in added))
        return added

    def _add_outcomes(
        self,
        connection: sqlite3.Connection,
        outcome: OutcomeBatch,
        counts: dict[str, float],
        now: float,
        is_joined: bool,
    ) -> None:
        """Keeps each outcome where its request is waited for, else among the late ones, or in both."""
        is_click = outcome.event == CLICK
        count(counts, "outcome" if is_click else "conversion", len(outcome))
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
            count(counts, late_counter(outcome.event), len(late))
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
                    f" SELECT request_id, row, ?, time, NULL, stored_at FROM {table} WHERE {condition} {KEEP_EARLIEST}",
                    (event, orphaned),
                )
                orphans = connection.execute(f"DELETE FROM {table} WHERE {condition}", (orphaned,)).rowcount
                count(counts, "unmatched_outcome", orphans)
