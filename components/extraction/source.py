"""What the step reads from: rows in time order, each once. The lake is one source, Criteo's own files are another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from components.contracts.criteo import DAY_PARTITION, OUTCOME_PARTITION
from components.extraction.criteo_files import CriteoFiles
from components.extraction.lake import Lake
from components.extraction.late_clicks import LateClicks
from components.extraction.pieces import Piece
from components.extraction.seen_files import SeenFiles
from components.extraction.set_aside import SetAside
from components.extraction.times import Span
from components.extraction.versions import DayState
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

    def state_of(self, day: date, window: Span) -> DayState:
        """What a reader of the window reads of a day that has rows in it, or late rows: version and digest.

        Raises:
            ContractError: a file of the day is damaged.
        """

    def tables(self, window: Span, set_aside: SetAside) -> Iterator[tuple[Any, int]]:
        """The window's rows as tables in the raw schema, each with how many duplicates were left out of it.

        Rows are sorted by event time, within a table and from one to the next.

        Raises:
            ContractError: a file is damaged or too malformed.
        """

    def late_tables(self, window: Span, set_aside: SetAside) -> Iterator[tuple[Any, int]]:
        """The late rows (see `seen_files`) as `tables` gives rows; none where no row can come late.

        A row that lies at its time in a file of its day that is not late, too, counts as a duplicate.

        Args:
            window: What `tables` is asked for; malformed rows without a time are set aside once.
            set_aside: Takes the malformed rows.

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

    def read(self, piece: Piece, set_aside: SetAside) -> tuple[Any, int]:
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
