"""The lake: `day=YYYY-MM-DD/*.parquet` in the raw schema, read a bounded piece at a time.

Days are disjoint in time, so days in order are rows in order; a day with more rows than fit is cut into spans of time,
each sorted by itself. Memory is bounded by `PIECE_ROWS` as far as the row groups' statistics tell where a day's rows
lie; many rows at one instant cannot be cut.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.contracts.criteo import DAY_PARTITION, EVENT_TIME, REQUEST_ID, ROW
from components.extraction.late_clicks import LateClicks
from components.extraction.pieces import Piece, cut_evenly, may_hold_rows, newest_time
from components.extraction.raw_schema import RAW_SCHEMA
from components.extraction.readers.raw_parquet import RawParquet
from components.extraction.seen_files import SeenFiles
from components.extraction.set_aside import SetAside, Unkept
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
    seen: SeenFiles | None = None
    """What the champion's line saw; None = no row is late."""
    listed: Mapping[date, Mapping[str, int]] | None = None
    """Files of version 0 of each day, bytes by name, where the folder shows only some of the days; None = all of them.
    """
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
        """See `Source.state_of`: over the day's files that may hold a row of the window, and its late ones."""
        read, late = self._days[day], {*self._late_files.get(day, [])}
        span = day_span(day).clipped(window)
        in_window = not span.is_empty
        files = [path for path in read.files if path in late or (in_window and may_hold_rows(path, span))]
        return DayState.of_files(read, files)

    def files_of(self, day: date) -> dict[str, int]:
        """See `Source.files_of`; what the champion's line saw of the day stays seen, whatever was removed since."""
        read = self._days.get(day, DayFiles(0, []))
        here = {path.name: path.stat().st_size for path in [*read.appended, *read.replaced]}
        if self.listed is not None:
            here = dict(self.listed.get(day, {}))
        return dict(sorted({**(self.seen.by_day.get(day, {}) if self.seen else {}), **here}.items()))

    @cached_property
    def _late_files(self) -> dict[date, list[Path]]:
        """Of each day that has any."""
        if self.seen is None:
            return {}
        late = {day: self.seen.late(day, read.appended) for day, read in self._days.items()}
        return {day: files for day, files in late.items() if files}

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

    def _without_late(self, day: date) -> list[Path]:
        late = {*self._late_files.get(day, [])}
        return [path for path in self._days[day].files if path not in late]

    def late_tables(self, window: Span, set_aside: SetAside) -> Iterator[tuple[Any, int]]:
        """See `Source.late_tables`."""
        if self.seen is None:
            return
        self.seen.warn({day: read.appended for day, read in self._days.items()})
        for day, files in self._late_files.items():
            logger.info("reading late rows of day %s: %d files", day, len(files))
            others = self._without_late(day)
            in_window = not window.clipped(day_span(day)).is_empty
            pieces = cut_evenly(day, files, day_span(day).clipped(self.seen.read), self.piece_rows)
            for i, piece in enumerate(pieces):
                found, num_duplicates = self._sorted(piece, set_aside, with_strays=i == 0 and not in_window)
                table = self._without_known(found, piece._replace(files=others))
                if found.num_rows:
                    yield self.late.join(table, day), num_duplicates + found.num_rows - table.num_rows

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
        for day in reversed(self._days):
            span = day_span(day).clipped(Span(None, end))
            if len(found) == num_days:
                break
            if not span.is_empty:
                cut = cut_evenly(day, self._without_late(day), span, piece_rows)
                pieces = [piece for piece in cut if piece.num_rows > 0]
                found += [pieces] if pieces else []
        return [piece for pieces in reversed(found) for piece in pieces]

    def read(self, piece: Piece, set_aside: SetAside, *, with_strays: bool = False) -> tuple[Any, int]:
        """See `Source.read`: as `sorted_once` leaves the rows, with their late clicks.

        Args:
            piece: What is read.
            set_aside: Takes the malformed rows.
            with_strays: See `RawParquet.with_strays`.
        """
        table, num_duplicates = self._sorted(piece, set_aside, with_strays=with_strays)
        return self.late.join(table, piece.day), num_duplicates

    def _sorted(self, piece: Piece, set_aside: SetAside, *, with_strays: bool) -> tuple[Any, int]:
        batches = list(self._batches(piece, set_aside, with_strays=with_strays))
        return sorted_once(pa.Table.from_batches(batches, RAW_SCHEMA))

    def _batches(self, piece: Piece, set_aside: SetAside, *, with_strays: bool) -> Iterator[Any]:
        day = day_span(piece.day)
        for path in piece.files:
            yield from RawParquet(
                path=path, span=piece.span, day=day, with_strays=with_strays, unread=self.unread
            ).batches(set_aside)

    def _without_known(self, table: Any, piece: Piece) -> Any:
        """The rows whose identity no sound row of `piece` has, of which one batch is in memory at a time."""
        requests = table.column(REQUEST_ID).combine_chunks()
        known: set[tuple[str, int]] = set()
        for batch in self._batches(piece, Unkept(), with_strays=False) if table.num_rows else ():
            shared = batch.filter(pc.is_in(batch.column(REQUEST_ID), value_set=requests))
            known.update(zip(shared.column(REQUEST_ID).to_pylist(), shared.column(ROW).to_pylist()))
        if not known:
            return table
        identities = zip(table.column(REQUEST_ID).to_pylist(), table.column(ROW).to_pylist())
        return table.filter(pa.array([identity not in known for identity in identities], pa.bool_()))


def sorted_once(table: Any) -> tuple[Any, int]:
    """The rows by event time, then request and row, each (request id, row) once; and how many were left out.

    Of rows with one identity the earliest stays.
    """
    table = table.sort_by([(EVENT_TIME, "ascending"), (REQUEST_ID, "ascending"), (ROW, "ascending")])
    keyed = table.select([REQUEST_ID, ROW]).append_column("position", pa.array(np.arange(table.num_rows)))
    first = keyed.group_by([REQUEST_ID, ROW]).aggregate([("position", "min")]).column("position_min")
    num_duplicates = table.num_rows - len(first)
    return (table.take(np.sort(first.to_numpy())) if num_duplicates else table), num_duplicates
