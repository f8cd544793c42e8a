"""Late outcomes as Parquet files beside the archive's rows, each outcome in exactly one.

In: outcomes of `monitoring.memory.store` that came after their window closed, or whose request is unknown. Out:
`<archive>/outcomes/day=YYYY-MM-DD/part-<unique>.parquet` of `contracts.criteo.OUTCOME_TYPES`; the day is that of the
prediction, in UTC, or where it is unknown that of the outcome. Joining them to their rows is left to extraction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
import pyarrow as pa

from components.contracts import criteo
from components.contracts.criteo import microseconds
from components.store.archived_rows import arrow_schema
from monitoring.memory.days import utc_day
from monitoring.memory.rows import ArchiveOutcome
from monitoring.memory.sealing import SealedFiles
from monitoring.memory.store import Store

logger = logging.getLogger(__name__)

SCHEMA = arrow_schema(criteo.OUTCOME_TYPES)
FOLDER = criteo.OUTCOME_PARTITION.split("/")[0]


class OutcomeArchive:
    """The outcome files of one archive."""

    def __init__(
        self,
        files: SealedFiles,
        store: Store,
        *,
        roll_rows: int,
        roll_seconds: float,
        windows: Mapping[str, float],
        unique: Callable[[], str],
    ) -> None:
        """Finishes what an interrupted predecessor had begun.

        Args:
            files: Writes them.
            store: Where the outcomes are.
            roll_rows: Outcomes that fill a file.
            roll_seconds: Longest wait of an outcome.
            windows: Attribution window of each event in seconds, written beside its outcomes; 0 where absent.
            unique: A name never used before.
        """
        self._files, self._store, self._unique = files, store, unique
        self._roll_rows, self._roll_seconds, self._windows = roll_rows, roll_seconds, windows
        self.finish_intended()

    def finish_intended(self) -> None:
        """Writes and seals what was begun."""
        for name in self._store.files("intended"):
            if name.startswith(f"{FOLDER}/"):
                self._finish(name)

    def roll(self, now: float) -> list[tuple[str, int]]:
        """Writes the files that are full or overdue; (name, outcomes) of each."""
        oldest = self._store.oldest_late_at()
        if oldest is None:
            return []
        is_due = now - oldest >= self._roll_seconds or self._store.num_late(self._roll_rows) >= self._roll_rows
        return self.flush() if is_due else []

    def flush(self) -> list[tuple[str, int]]:
        """Writes every late outcome; (name, outcomes) of each file."""
        written = []
        while outcomes := self._store.oldest_late(self._roll_rows):
            by_day = sorted(outcomes, key=lambda each: (_day(each), each.number))
            for day, group in groupby(by_day, key=_day):
                of_day = list(group)
                name = f"{criteo.OUTCOME_PARTITION.format(day=day)}/part-{self._unique()}.parquet"
                self._store.intend_outcome_file(name, [each.number for each in of_day], len(of_day))
                self._files.reached("intended")
                self._finish(name, of_day)
                written.append((name, len(of_day)))
        return written

    def _finish(self, name: str, outcomes: Sequence[ArchiveOutcome] | None = None) -> None:
        self._files.make(
            name,
            lambda: build_table(self._store.outcomes_of_file(name) if outcomes is None else outcomes, self._windows),
        )
        self._store.seal_outcome_file(name)
        self._files.reached("sealed")
        logger.info("sealed %s", name)


def build_table(outcomes: Sequence[ArchiveOutcome], windows: Mapping[str, float]) -> pa.Table:
    """These outcomes in the schema of the contract, in the order given; `windows` as `OutcomeArchive` takes them."""
    columns = {
        criteo.REQUEST_ID: [each.outcome.request_id for each in outcomes],
        criteo.ROW: [each.outcome.row for each in outcomes],
        criteo.EVENT: [each.outcome.event for each in outcomes],
        criteo.OUTCOME_TIME: np.array([microseconds(each.outcome.time) for each in outcomes], np.int64),
        criteo.STORED_AT: np.array([microseconds(each.stored_at) for each in outcomes], np.int64),
        criteo.WINDOW_SECONDS: np.array([windows.get(each.outcome.event, 0.0) for each in outcomes], np.float64),
    }
    return pa.table([pa.array(columns[field.name]).cast(field.type) for field in SCHEMA], schema=SCHEMA)


def _day(each: ArchiveOutcome) -> str:
    outcome = each.outcome
    return utc_day(outcome.time if outcome.predicted_at is None else outcome.predicted_at)
