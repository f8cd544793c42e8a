"""The lake: `day=YYYY-MM-DD/*.parquet` in the raw schema, read a bounded piece at a time.

Days are disjoint in time, so days in order are rows in order; a day with more rows than fit is cut into spans of time,
each sorted by itself. Memory is bounded by `PIECE_ROWS` as far as the row groups' statistics tell where a day's rows
lie; many rows at one instant cannot be cut.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from components.contracts.criteo import DAY_PARTITION, EVENT_TIME, REQUEST_ID, ROW
from components.extraction.late_clicks import LateClicks
from components.extraction.pieces import Piece, cut_evenly, may_hold_rows, newest_time
from components.extraction.raw_schema import RAW_SCHEMA
from components.extraction.readers.raw_parquet import RawParquet
from components.extraction.set_aside import SetAside
from components.extraction.times import Span, day_span, parse_day
from components.extraction.versions import DayFiles, DayState, files_of_day

logger = logging.getLogger(__name__)

PARTITION = DAY_PARTITION.format(day="")
PIECE_ROWS = 250_000


@dataclass(frozen=True, kw_only=True)
class Lake:
    """The day partitions below one folder, as they are when they are first looked at.

    What an uploader or a back-fill adds later is another lake's: rows, versions and digests of a run are of one state.
    """

    folder: Path
    piece_rows: int = PIECE_ROWS
    """Rows sorted at a time, about."""
    unread: frozenset[str] = frozenset()
    """See `RawParquet.unread`."""
    late: LateClicks = field(init=False, repr=False)
    """See `Source.late`."""

    def __post_init__(self) -> None:
        """Looks for late clicks in the same folder."""
        object.__setattr__(self, "late", LateClicks(self.folder))

    def days(self) -> dict[date, list[Path]]:
        """The Parquet files that are each day that has any (see `versions`), in order.

        Names that start with a dot or underscore are someone's unfinished work.

        Raises:
            ContractError: a partition's name holds no date, or a back-filled version is damaged.
        """
        return {day: read.files for day, read in self._days.items()}

    def version_of(self, day: date) -> int:
        """See `Source.version_of`."""
        return self._days[day].version

    def state_of(self, day: date, window: Span) -> DayState:
        """See `Source.state_of`: over the day's files that may hold a row of the window."""
        read = self._days[day]
        span = day_span(day).clipped(window)
        return DayState.of_files(read, [path for path in read.files if may_hold_rows(path, span)])

    @cached_property
    def _days(self) -> dict[date, DayFiles]:
        found: dict[date, DayFiles] = {}
        for partition in sorted(self.folder.glob(f"{PARTITION}*")):
            read = files_of_day(partition)
            if read.files:
                found[parse_day(f"lake partition {partition}", partition.name.removeprefix(PARTITION))] = read
        return found

    def describe(self) -> str:
        """See `Source.describe`."""
        days = list(self.days())
        return f"lake {self.folder} holds " + (f"days {days[0]} to {days[-1]}" if days else "no rows")

    def tables(self, window: Span, set_aside: SetAside) -> Iterator[tuple[Any, int]]:
        """See `Source.tables`."""
        for day, found in self._days.items():
            span = day_span(day)
            if not window.clipped(span).is_empty:
                logger.info("reading day %s: version %d, %d files", day, found.version, len(found.files))
                found.warn(self.folder / DAY_PARTITION.format(day=day))
                for i, piece in enumerate(cut_evenly(day, found.files, span.clipped(window), self.piece_rows)):
                    table, num_duplicates = self.read(piece, set_aside, with_strays=i == 0)
                    if table.num_rows:
                        yield table, num_duplicates

    def newest(self) -> int | None:
        """See `Source.newest`; only footers are read, and times where they do not tell."""
        for day, files in reversed(self.days().items()):
            times = [time for time in (newest_time(path, day_span(day)) for path in files) if time is not None]
            if times:
                return max(times)
        return None

    def pieces_before(self, end: int, *, num_days: int, piece_rows: int) -> list[Piece]:
        """See `Source.pieces_before`; only the footers of those days' files are read."""
        found: list[list[Piece]] = []
        for day, files in reversed(self.days().items()):
            span = day_span(day).clipped(Span(None, end))
            if len(found) == num_days:
                break
            if not span.is_empty:
                pieces = [piece for piece in cut_evenly(day, files, span, piece_rows) if piece.num_rows > 0]
                found += [pieces] if pieces else []
        return [piece for pieces in reversed(found) for piece in pieces]

    def read(self, piece: Piece, set_aside: SetAside, *, with_strays: bool = False) -> tuple[Any, int]:
        """See `Source.read`: as `sorted_once` leaves the rows, with their late clicks.

        Args:
            piece: What is read.
            set_aside: Takes the malformed rows.
            with_strays: See `RawParquet.with_strays`.
        """
        day = day_span(piece.day)
        batches = [
            batch
            for path in piece.files
            for batch in RawParquet(
                path=path, span=piece.span, day=day, with_strays=with_strays, unread=self.unread
            ).batches(set_aside)
        ]
        table, num_duplicates = sorted_once(pa.Table.from_batches(batches, RAW_SCHEMA))
        return self.late.join(table, piece.day), num_duplicates


def sorted_once(table: Any) -> tuple[Any, int]:
    """The rows by event time, then request and row, each (request id, row) once; and how many were left out.

    Of rows with one identity the earliest stays.
    """
    table = table.sort_by([(EVENT_TIME, "ascending"), (REQUEST_ID, "ascending"), (ROW, "ascending")])
    keyed = table.select([REQUEST_ID, ROW]).append_column("position", pa.array(np.arange(table.num_rows)))
    first = keyed.group_by([REQUEST_ID, ROW]).aggregate([("position", "min")]).column("position_min")
    num_duplicates = table.num_rows - len(first)
    return (table.take(np.sort(first.to_numpy())) if num_duplicates else table), num_duplicates
