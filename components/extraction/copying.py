"""Copy a window's rows and late rows out of the lake.

Several workers copy the rows. The rows are divided into tasks independently of the workers, so that
the files do not depend on the workers.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from components.extraction.copies import Copies
from components.extraction.lake import LakeChunk, WindowPlan
from components.extraction.reader import RowReader, SortedRows
from evergreen.config.extraction import ExtractionSettings
from evergreen.contracts.category_texts import TextCounts
from evergreen.contracts.raw_rows import EVENT_TIME
from evergreen.rows.raw_schema import FILE_ROWS, MalformedRows, Named, PartFile, PartWriter
from evergreen.rows.times import DAY_MICROS
from evergreen.runtime import forked
from evergreen.runtime.workers import Workers

logger = logging.getLogger(__name__)

WINDOW, LATE = "all", "late"
"""Temporary folders of the copied rows. Files of late rows have the prefix `LATE`, so that these
files sort before `part` files."""
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
    """Number of rows whose label was changed by a late click."""
    num_changed: Counter[date] = field(default_factory=Counter)
    """Number of late rows that were left out, by day. The lineage was trained on copies of these
    rows with another label or other features."""
    days: Counter[int] = field(default_factory=Counter)
    """Number of rows of each day. Days are numbered since 1970."""
    first_time: int = 0
    """Time of the oldest row, microseconds since the epoch. 0 if there are no rows."""
    last_time: int = 0
    """Time of the newest row, microseconds since the epoch. 0 if there are no rows."""

    @classmethod
    def of(cls, rows: SortedRows) -> "CopiedRows":
        """Return the counts of the rows of one chunk."""
        times = rows.table.column(EVENT_TIME).cast(pa.int64()).to_numpy()
        numbers, counts = np.unique(times // DAY_MICROS, return_counts=True)
        return cls(
            num_rows=len(times),
            copies=rows.copies,
            num_late_clicks=rows.num_late_clicks,
            num_changed=Counter({rows.day: rows.num_changed}),
            days=Counter(dict(zip(numbers.tolist(), counts.tolist()))),
            first_time=int(times[0]) if len(times) else 0,
            last_time=int(times[-1]) if len(times) else 0,
        )

    def merge(self, other: "CopiedRows") -> None:
        """Add the files and the counts of `other` to this object."""
        if not self.num_rows:
            self.first_time, self.last_time = other.first_time, other.last_time
        elif other.num_rows:
            self.first_time = min(self.first_time, other.first_time)
            self.last_time = max(self.last_time, other.last_time)
        self.parts += other.parts
        self.num_rows += other.num_rows
        self.copies.add(other.copies)
        self.num_late_clicks += other.num_late_clicks
        self.num_changed.update(other.num_changed)
        self.days.update(other.days)


class Copied(NamedTuple):
    """Everything that was copied out of the lake for one window."""

    window: CopiedRows
    """Rows of the window, sorted by time."""
    late: CopiedRows
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
        reader: Reader of the rows. The late clicks on these rows must have been read.
        folder: Existing folder.
        settings: Limits of malformed and conflicting rows.
        named: See `MalformedRows`.
        workers: Workers that copy the rows.

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
        tasks = _divide(plan)
        copy = partial(_copy_task, reader=reader, malformed=malformed, folder=folder)
        window, late = CopiedRows(), CopiedRows()
        for task, copied in zip(tasks, workers.run_all(copy, tasks)):
            (late if task.is_late else window).merge(copied.rows)
            malformed.merge(copied.malformed)
            reader.text_counts.merge(copied.text_counts)
        malformed.check()
    for day, num_changed in sorted(late.num_changed.items()):
        if num_changed:
            logger.warning(
                "%d late rows of day %s were left out, because the lineage was trained on copies "
                "with another label or other features",
                num_changed,
                day,
            )
    copies = Copies()
    copies.add(window.copies)
    copies.add(late.copies)
    if copies.num_rows:
        logger.info(
            "%s: duplicate rows were left out: %d equal copies, %d older copies with another "
            "label or time, and %d copies with other features",
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


class _CopyTask(NamedTuple):
    """Chunks that one worker copies."""

    number: int
    chunks: list[LakeChunk]
    is_late: bool = False


class _CopiedTask(NamedTuple):
    """Result of copying the chunks of a task."""

    rows: CopiedRows
    malformed: MalformedRows
    text_counts: TextCounts


def _divide(plan: WindowPlan) -> list[_CopyTask]:
    """Divide the window's chunks into tasks. One more task copies the late rows."""
    chunks, late_chunks = plan.chunks, plan.late_chunks
    num_tasks = max(1, round(sum(chunk.num_rows for chunk in chunks) / _TASK_ROWS))
    shares = (
        forked.shares(chunks, num_tasks, weight=lambda chunk: chunk.num_rows + 1) if chunks else []
    )
    tasks = [_CopyTask(number, share) for number, share in enumerate(shares)]
    return [*tasks, _CopyTask(len(tasks), late_chunks, is_late=True)] if late_chunks else tasks


def _copy_task(
    task: _CopyTask, *, reader: RowReader, malformed: MalformedRows, folder: Path
) -> _CopiedTask:
    copied, part = CopiedRows(), reader.copy()
    own = malformed.of_part(task.number)
    writer = (
        PartWriter(folder / LATE, prefix=LATE)
        if task.is_late
        else PartWriter(folder / WINDOW, prefix=f"task-{task.number:06d}")
    )
    with own, writer:
        for rows in part.tables(task.chunks, own):
            writer.write(rows.table)
            copied.merge(CopiedRows.of(rows))
    copied.parts = writer.parts
    return _CopiedTask(copied, own, part.text_counts)
