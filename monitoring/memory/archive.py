"""Matured rows as Parquet files, each whole or absent, each row in exactly one; late outcomes beside them.

In: matured requests of `monitoring.memory.store`. Out: `<archive>/day=YYYY-MM-DD/part-<unique>.parquet`, whose columns
`monitoring.memory.archive_table` makes, and the files of `monitoring.memory.outcomes`. Here: which rows go into which
file and when. The steps that survive a kill are `monitoring.memory.sealing`'s, moving files to the lake
`monitoring.uploader`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from math import inf
from pathlib import Path
from uuid import uuid4

from components.contracts import criteo
from monitoring.memory.archive_table import build_table
from monitoring.memory.days import utc_day
from monitoring.memory.outcomes import FOLDER, OutcomeArchive
from monitoring.memory.sealing import UPLOADED_FOLDER, SealedFiles, marker_path, no_checkpoint
from monitoring.memory.store import ArchiveRow, Store

__all__ = ["UPLOADED_FOLDER", "Archive", "marker_path", "no_checkpoint"]

logger = logging.getLogger(__name__)


class Archive:
    """The archive in `folder`, whose bookkeeping is in `store`."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        *,
        roll_rows: int,
        roll_seconds: float,
        keep_rows: int,
        windows: Mapping[str, float] | None = None,
        checkpoint: Callable[[str], None] = no_checkpoint,
        unique: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        """Opens the archive and finishes what an interrupted predecessor had begun.

        Args:
            folder: Created if missing.
            store: Where the rows are.
            roll_rows: Rows that fill a file.
            roll_seconds: Longest wait of a matured row or late outcome.
            keep_rows: Archived rows of each version to keep in the store, for the windows. Rows that the judge has not
                judged yet (document `judge`, `judged_until`) are kept beside them.
            windows: Attribution window of each event in seconds, written beside late outcomes; 0 where absent.
            checkpoint: Called with the name of each step that a crash may follow.
            unique: A name never used before, in this process or in a replica of it.

        Raises:
            TemporaryError: the folder cannot be written, or the disk is full.
        """
        self._folder, self._store, self._unique = folder, store, unique
        self._roll_rows, self._roll_seconds, self._keep_rows = roll_rows, roll_seconds, keep_rows
        self._files = SealedFiles(folder, "archive", checkpoint)
        self._outcomes = OutcomeArchive(
            SealedFiles(folder, "outcomes", checkpoint),
            store,
            roll_rows=roll_rows,
            roll_seconds=roll_seconds,
            windows=windows or {},
            unique=unique,
        )
        self._finish_intended()

    def roll(self, now: float) -> list[tuple[str, int]]:
        """Writes the files that are full or overdue; (name, rows) of each.

        Raises:
            TemporaryError: the disk is full or refuses; the next call goes on where this one stopped.
        """
        self._finish_intended()
        written = []
        while self._store.num_unarchived_rows >= self._roll_rows:
            written += self._write_next()
        oldest = self._store.oldest_unarchived_at()
        if oldest is not None and now - oldest >= self._roll_seconds:
            written += self._flush_rows()
        return written + self._outcomes.roll(now)

    def flush(self) -> list[tuple[str, int]]:
        """Writes every matured row and late outcome; (name, rows) of each file.

        Raises:
            TemporaryError: the disk is full or refuses; the next call goes on where this one stopped.
        """
        self._finish_intended()
        return self._flush_rows() + self._outcomes.flush()

    def waiting_for_upload(self) -> list[str]:
        """Sealed files that the uploader has not moved yet."""
        sealed = self._store.files("sealed")
        uploaded = [name for name in sealed if marker_path(self._folder, name).exists()]
        self._store.mark_uploaded(uploaded)
        return [name for name in sealed if name not in set(uploaded)]

    def first_written(self, names: Sequence[str]) -> float | None:
        """When the first of these files was written, seconds since the epoch; None where none is here any more."""
        times = []
        for name in names:
            with suppress(FileNotFoundError):  # the uploader has just moved it
                times.append((self._folder / name).stat().st_mtime)
        return min(times, default=None)

    def _flush_rows(self) -> list[tuple[str, int]]:
        written: list[tuple[str, int]] = []
        while files := self._write_next():
            written += files
        return written

    def _finish_intended(self) -> None:
        """Writes and seals what a predecessor had begun, or this one before the disk refused."""
        for name in self._store.files("intended"):
            if not name.startswith(f"{FOLDER}/"):
                self._finish(name)
        self._outcomes.finish_intended()

    def _write_next(self) -> list[tuple[str, int]]:
        """Files of up to `roll_rows` rows, one for each day among them; empty when nothing is left."""
        written = []
        rows = sorted(self._store.oldest_unarchived(self._roll_rows), key=lambda row: (utc_day(row.time), row.number))
        for day, group in groupby(rows, key=lambda row: utc_day(row.time)):
            of_day = list(group)
            num_rows = sum(row.num_rows for row in of_day)
            name = f"{criteo.DAY_PARTITION.format(day=day)}/part-{self._unique()}.parquet"
            self._store.intend_file(name, [row.number for row in of_day], num_rows)
            self._files.reached("intended")
            self._finish(name, of_day)
            written.append((name, num_rows))
        return written

    def _finish(self, name: str, rows: Sequence[ArchiveRow] | None = None) -> None:
        self._files.make(name, lambda: build_table(self._store.rows_of_file(name) if rows is None else rows))
        judge = self._store.read_document("judge")
        judged_until = -inf if judge is None else judge.get("judged_until", -inf)
        self._store.seal_file(name, keep_rows=self._keep_rows, keep_after=judged_until)
        self._files.reached("sealed")
        logger.info("sealed %s", name)
