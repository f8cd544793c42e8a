"""What the step reads from: rows in time order, each once. The lake is one source, Criteo's own files are another.

Criteo publishes no times. The rows of `day_N` belong to day N, those of other files to the day of their position in the
folder; day 0 is 1970-01-01, since no calendar date is known. Within a day rows follow each other by `ROW_MICROS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from components.contracts.criteo import DAY_PARTITION, OUTCOME_PARTITION
from components.extraction.assigned_times import with_origin
from components.extraction.columns import without_columns
from components.extraction.day_versions import DayFiles, DayState
from components.extraction.lake import Lake, Piece
from components.extraction.late_clicks import LateClicks
from components.extraction.malformed_rows import MalformedRows
from components.extraction.readers.forms import click_log_files, find_reader
from components.extraction.readers.parquet import RawParquet
from components.extraction.times import DAY_MICROS, TimeSpan, to_iso
from components.extraction.window import SeenFiles
from components.runtime.errors import ContractError


class Source(Protocol):
    """Rows on a time axis."""

    @property
    def late(self) -> LateClicks | None:
        """Clicks that came after their rows were written, joined to the rows as they are read; None: never any."""

    def describe(self) -> str:
        """What it holds, first and last day included; for messages."""

    def newest(self) -> int | None:
        """Event time of the newest row, microseconds since the epoch; None where there is none.

        Criteo's own files are not read for it: theirs is the end of the newest day.
        """

    def version_of(self, day: date) -> int:
        """The back-filled version of a day that has rows; 0 where it was never back-filled."""

    def state_of(self, day: date, window: TimeSpan) -> DayState:
        """What a reader of the window reads of a day that has rows in it, or late rows: version and digest.

        Raises:
            ContractError: a file of the day is damaged.
        """

    def tables(self, window: TimeSpan, malformed: MalformedRows) -> Iterator[tuple[Any, int]]:
        """The window's rows as tables in the raw schema, each with how many duplicates were left out of it.

        Rows are sorted by event time, within a table and from one to the next.

        Raises:
            ContractError: a file is damaged or too malformed.
        """

    def late_tables(self, window: TimeSpan, malformed: MalformedRows) -> Iterator[tuple[Any, int]]:
        """The late rows (see `seen_files`) as `tables` gives rows; none where no row can come late.

        A row that lies at its time in a file of its day that is not late, too, counts as a duplicate.

        Args:
            window: What `tables` is asked for; malformed rows without a time are set aside once.
            malformed: Takes the malformed rows.

        Raises:
            ContractError: a file is damaged or too malformed.
        """

    def files_of(self, day: date) -> dict[str, int] | None:
        """Bytes by name of all files that are version 0 of a day, or were; None where files are no part of a day."""

    def pieces_before(self, end: int, *, num_days: int, piece_rows: int) -> list[Piece] | None:
        """The rows before `end` of the newest `num_days` days that have any, late rows aside, as pieces in time order.

        Args:
            end: Microseconds since the epoch.
            num_days: Most days; the earlier hours of the day that `end` lies in are one of them.
            piece_rows: Rows of a piece, about.

        Returns:
            None where a part of such a day cannot be found without reading all of it.
        """

    def read(self, piece: Piece, malformed: MalformedRows) -> tuple[Any, int]:
        """The rows of a piece of `pieces_before`, as `tables` gives them."""


def find_source(
    path: Path,
    *,
    unread: frozenset[str] = frozenset(),
    seen: SeenFiles | None = None,
    listed: Mapping[date, Mapping[str, int]] | None = None,
) -> Source:
    """The source that lies at `path`: a lake if it has partitions or nothing visible, else Criteo's files.

    Args:
        path: Folder or file.
        unread: Features that are null in every row, whatever the files hold.
        seen: What the champion's line has seen of a lake; None = no row is late.
        listed: See `Lake.listed`.

    Raises:
        ContractError: nothing is there.
    """
    partitions = (DAY_PARTITION.format(day="*"), OUTCOME_PARTITION.format(day="*"))
    if path.is_dir() and (any(any(path.glob(each)) for each in partitions) or not any(path.glob("[!.]*"))):
        return Lake(folder=path, unread=unread, seen=seen, listed=listed)
    if not path.exists():
        raise ContractError(f"lake {path} does not exist, expected day partitions or Criteo files")
    return CriteoFiles(path=path, unread=unread)


ROW_MICROS = 400
"""A day has room for 216 million rows; Criteo 1TB's largest has 196 million."""
MAX_DAYS = date.max.toordinal() - date(1970, 1, 1).toordinal()
"""Days that the calendar has from 1970 on, but for its last: a date such as 20260101 is no number of a day."""
_DAY = re.compile(r"day_(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class CriteoFiles:
    """A Criteo file, or a folder of them."""

    path: Path
    unread: frozenset[str] = frozenset()
    """Features that are null in every row; text is parsed as a whole all the same."""
    late = None
    """See `Source.late`: Criteo's labels are final."""

    def describe(self) -> str:
        """See `Source.describe`."""
        days = [to_iso(day * DAY_MICROS)[:10] for day, _ in self.numbered()]
        return f"{self.path} holds days {days[0]} to {days[-1]}"

    def newest(self) -> int | None:
        """See `Source.newest`."""
        return (self.numbered()[-1][0] + 1) * DAY_MICROS - 1

    def version_of(self, day: date) -> int:
        """See `Source.version_of`: nothing is back-filled here."""
        return 0

    def state_of(self, day: date, window: TimeSpan) -> DayState:
        """See `Source.state_of`: over the day's whole file."""
        number = day.toordinal() - date(1970, 1, 1).toordinal()
        files = [path for each, path in self.numbered() if each == number]
        return DayState.of_files(DayFiles(0, files), files)

    def tables(self, window: TimeSpan, malformed: MalformedRows) -> Iterator[tuple[Any, int]]:
        """See `Source.tables`; nothing is a duplicate, since every row is its own request's."""
        for day, path in self.numbered():
            start = day * DAY_MICROS
            if not window.overlaps(start, start + DAY_MICROS - 1):
                continue
            reader = find_reader(path)
            if isinstance(reader, RawParquet):
                raise ContractError(f"{path} has event times of its own, expected it in a lake's day=YYYY-MM-DD folder")
            row = 0
            for batch in reader.batches(malformed):
                if start + row * ROW_MICROS >= (window.end or start + DAY_MICROS):
                    break
                if (row + batch.num_rows) * ROW_MICROS > DAY_MICROS:
                    raise ContractError(f"{path} has more than {DAY_MICROS // ROW_MICROS} rows, expected one day's")
                times = start + (row + np.arange(batch.num_rows, dtype=np.int64)) * ROW_MICROS
                inside = np.array([window.holds(int(times[0])), window.holds(int(times[-1]))])
                dated = with_origin(batch, source=path.name, first_row=row, times=times)
                row += batch.num_rows
                if not inside.all():
                    mask = (times >= (window.start or times[0])) & (times < (window.end or times[-1] + 1))
                    dated = dated.filter(pa.array(mask))
                if dated.num_rows:
                    yield without_columns(pa.Table.from_batches([dated]), self.unread), 0

    def late_tables(self, window: TimeSpan, malformed: MalformedRows) -> Iterator[tuple[Any, int]]:
        """See `Source.late_tables`: a file is a day here and nothing is appended to a day, so none comes late."""
        return iter(())

    def files_of(self, day: date) -> dict[str, int] | None:
        """See `Source.files_of`: late rows are not asked for."""
        return None

    def pieces_before(self, end: int, *, num_days: int, piece_rows: int) -> list[Piece] | None:
        """See `Source.pieces_before`: a packed text file cannot be entered in its middle."""
        return None if num_days and any(day * DAY_MICROS < end for day, _ in self.numbered()) else []

    def read(self, piece: Piece, malformed: MalformedRows) -> tuple[Any, int]:
        """See `Source.read`; there is no piece to read."""
        raise ContractError(f"{self.path} is read as a whole, expected no piece of day {piece.day}")

    def numbered(self) -> list[tuple[int, Path]]:
        """Day number and path, by day.

        Raises:
            ContractError: two files claim one day, or a day lies beyond the calendar.
        """
        numbered = []
        for place, path in enumerate(click_log_files(self.path)):
            match = _DAY.match(path.name)
            numbered.append((int(match[1]) if match else place, path))
            if numbered[-1][0] >= MAX_DAYS:
                raise ContractError(f"{path} is of day {numbered[-1][0]}, expected a number below {MAX_DAYS}")
        numbered.sort(key=lambda pair: pair[0])
        for (day, path), (next_day, next_path) in zip(numbered, numbered[1:]):
            if day == next_day:
                raise ContractError(f"{path.name} and {next_path.name} in {self.path} are both day {day}, expected one")
        return numbered
