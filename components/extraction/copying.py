"""Copying of a window's rows and of late rows out of the lake.

Several workers copy the window's rows. The division of the rows into tasks depends on the rows and
not on the workers, so that the files do not depend on the workers either.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from components.extraction.copies import Copies
from components.extraction.lake import Piece, PlannedDay, WindowPlan
from components.extraction.reader import RowReader, SortedRows
from evergreen.config.extraction import ExtractionSettings
from evergreen.contracts.raw_rows import EVENT_TIME
from evergreen.contracts.words import WordCounts
from evergreen.rows.raw_schema import FILE_ROWS, MalformedRows, Named, PartFile, PartWriter
from evergreen.rows.times import DAY_MICROS
from evergreen.runtime import forked
from evergreen.runtime.workers import Workers

logger = logging.getLogger(__name__)

WINDOW, LATE = "all", "late"
"""Temporary folders of the copied rows. `LATE` is also the prefix of the late rows' files, so that
they sort before `part`."""
MALFORMED_FILE = "malformed.jsonl"
_TASK_ROWS = 4 * FILE_ROWS
"""Approximate number of rows that a worker copies in one task."""


@dataclass(kw_only=True)
class CopiedRows:
    """Rows that were copied, and counts of them."""

    parts: list[PartFile] = field(default_factory=list)
    """Files with the rows."""
    num_rows: int = 0
    copies: Copies = field(default_factory=Copies)
    """Counts of rows that were left out because another copy was kept."""
    num_late_clicks: int = 0
    """Number of rows whose label a late click changed."""
    days: Counter[int] = field(default_factory=Counter)
    """Number of rows of each day. Days are numbered since 1970."""
    first_time: int = 0
    """Time of the oldest row, microseconds since the epoch. 0 without rows."""
    last_time: int = 0
    """Time of the newest row, microseconds since the epoch. 0 without rows."""

    def add(self, rows: SortedRows) -> None:
        """Count the rows of a table."""
        times = rows.table.column(EVENT_TIME).cast(pa.int64()).to_numpy()
        if len(times):
            self._extend(int(times[0]), int(times[-1]))
        self.num_rows += len(times)
        self.copies.add(rows.copies)
        self.num_late_clicks += rows.num_late_clicks
        numbers, counts = np.unique(times // DAY_MICROS, return_counts=True)
        self.days.update(dict(zip(numbers.tolist(), counts.tolist())))

    def merge(self, other: "CopiedRows") -> None:
        """Add the files and the counts of other rows."""
        if other.num_rows:
            self._extend(other.first_time, other.last_time)
        self.parts += other.parts
        self.num_rows += other.num_rows
        self.copies.add(other.copies)
        self.num_late_clicks += other.num_late_clicks
        self.days.update(other.days)

    def _extend(self, first_time: int, last_time: int) -> None:
        self.first_time = min(first_time, self.first_time) if self.num_rows else first_time
        self.last_time = max(last_time, self.last_time) if self.num_rows else last_time


class Copied(NamedTuple):
    """Everything that was copied out of the lake for one window."""

    window: CopiedRows
    """Rows of the window, sorted by time."""
    late: CopiedRows
    """Late rows."""
    copies: Copies
    """Counts of the duplicate rows that were left out, in the window and among the late rows."""
    malformed: MalformedRows


def copy_rows(
    plan: WindowPlan,
    reader: RowReader,
    *,
    folder: Path,
    settings: ExtractionSettings,
    named: Named,
    workers: Workers,
) -> Copied:
    """Copy the rows of a plan to `folder`/`WINDOW` and `folder`/`LATE`.

    Malformed rows are written to `folder`/`MALFORMED_FILE`.

    Args:
        plan: Rows to copy.
        reader: Reader of the rows.
        folder: Existing folder.
        settings: Limits of malformed and conflicting rows.
        named: See `MalformedRows`.
        workers: Workers that copy the window's rows.

    Raises:
        ContractError: too many rows conflict.
        UnfitFiles: files are unfit to read.
    """
    with MalformedRows(
        folder / MALFORMED_FILE,
        max_fraction=settings.max_malformed_fraction,
        named=named,
        collects_unfit=True,
    ) as malformed:
        window = _copy_window(plan.pieces, reader, malformed, folder=folder, workers=workers)
        late = _copy_late(plan.days, reader, malformed, folder=folder)
        malformed.check()
    copies = Copies()
    copies.add(window.copies)
    copies.add(late.copies)
    if copies.num_rows:
        logger.info(
            "%s: of rows that came more than once %d equal copies were left out, %d older ones "
            "with another label or time, and %d with other features",
            plan.window,
            copies.num_equal,
            copies.num_updated,
            copies.num_conflicting,
        )
    copies.check(
        window.num_rows + late.num_rows,
        max_fraction=settings.max_conflicting_fraction,
        source=f"window {plan.window}",
    )
    return Copied(window, late, copies, malformed)


class _Task(NamedTuple):
    """Consecutive pieces that one worker copies."""

    number: int
    pieces: list[Piece]


class _CopiedTask(NamedTuple):
    """Result of copying the pieces of a task."""

    rows: CopiedRows
    malformed: MalformedRows
    words: WordCounts


def _copy_window(
    pieces: Sequence[Piece],
    reader: RowReader,
    malformed: MalformedRows,
    *,
    folder: Path,
    workers: Workers,
) -> CopiedRows:
    num_tasks = max(1, round(sum(piece.num_rows for piece in pieces) / _TASK_ROWS))
    divided = (
        forked.shares(pieces, num_tasks, weight=lambda piece: piece.num_rows + 1) if pieces else []
    )
    tasks = [_Task(number, share) for number, share in enumerate(divided)]
    copy = partial(_copy_task, reader=reader, malformed=malformed, folder=folder)
    total = CopiedRows()
    for copied in workers.run_all(copy, tasks):
        assert _is_in_order(total, copied.rows), "rows come in time order"
        total.merge(copied.rows)
        malformed.merge(copied.malformed)
        reader.words.merge(copied.words)
    return total


def _copy_task(
    task: _Task, *, reader: RowReader, malformed: MalformedRows, folder: Path
) -> _CopiedTask:
    copied, part = CopiedRows(), reader.copy()
    own = malformed.of_part(task.number)
    with own, PartWriter(folder / WINDOW, prefix=f"task-{task.number:06d}") as writer:
        for rows in part.tables(task.pieces, own):
            of_table = CopiedRows()
            of_table.add(rows)
            assert _is_in_order(copied, of_table), "rows come in time order"
            copied.merge(of_table)
            writer.write(rows.table)
    copied.parts = writer.parts
    return _CopiedTask(copied, own, part.words)


def _is_in_order(older: CopiedRows, newer: CopiedRows) -> bool:
    return not older.num_rows or not newer.num_rows or newer.first_time >= older.last_time


def _copy_late(
    days: Sequence[PlannedDay], reader: RowReader, malformed: MalformedRows, *, folder: Path
) -> CopiedRows:
    copied = CopiedRows()
    with PartWriter(folder / LATE, prefix=LATE) as writer:
        for day in days:
            for rows in reader.late_tables(day, malformed):
                writer.write(rows.table)
                copied.add(rows)
    copied.parts = writer.parts
    return copied
