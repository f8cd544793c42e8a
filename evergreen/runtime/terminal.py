"""Tables, local times and progress bars of the commands.

Rich renders the tables and bars, and is imported when a command prints. A table is cut to the width
of the terminal. If the output is not a terminal, the whole table is printed. Colors appear only on
a terminal, and not if the environment variable NO_COLOR is set. Progress bars are written to
standard error.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol

from evergreen.runtime.plain_text import printable

ABSENT = "-"
"""Text of a cell without a value."""
_MIN_CUT_WIDTH = 12
"""Minimum width of a column that is cut in the middle."""
UNLIMITED = 10_000
"""Width in characters of a table that is not cut to the width of a terminal."""


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """Column of a table."""

    name: str
    is_flexible: bool = False
    """Whether cells are cut with an ellipsis to make the table fit."""
    is_cut_in_middle: bool = False
    """Whether long cells are cut in the middle. Their ends stay visible, because similar names
    differ at the ends. At most one column of a table is cut in the middle. The cells of this column
    are cut before the cells of flexible columns."""
    is_number: bool = False
    """Whether cells are aligned to the right."""
    is_wide_only: bool = False
    """Whether the column is omitted if the table does not fit."""


def add_listing_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--json` and `--wide`, which every command that prints a table has."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--wide", action="store_true", help="do not cut the table to the terminal's width"
    )


def print_table(
    columns: Sequence[TableColumn], rows: Iterable[Sequence[str | None]], *, wide: bool = False
) -> None:
    """Print a table to standard output.

    Args:
        columns: The columns.
        rows: Cells of each row. None and "" are shown as `ABSENT`.
        wide: Whether all columns are printed whole, whatever the width of the terminal is.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[printable(cell) if cell else ABSENT for cell in row] for row in rows]
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=UNLIMITED if wide or not has_width else None, highlight=False)
    shown = range(len(columns))
    if _natural_width(columns, cells) > console.width:
        shown = [at for at in shown if not columns[at].is_wide_only]  # type: ignore[assignment]
        _cut_in_middle(columns, cells, shown, width=console.width)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in (columns[at] for at in shown):
        table.add_column(
            column.name,
            no_wrap=not (column.is_flexible or column.is_cut_in_middle),
            justify="right" if column.is_number else "left",
        )
    for row in cells:
        table.add_row(*(Text(row[at], no_wrap=True, overflow="ellipsis") for at in shown))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def _natural_width(columns: Sequence[TableColumn], cells: Sequence[Sequence[str]]) -> int:
    widths = (
        max(len(column.name), *(len(row[at]) for row in cells), 0)
        for at, column in enumerate(columns)
    )
    return sum(widths) + 2 * len(columns)


def _cut_in_middle(
    columns: Sequence[TableColumn], cells: list[list[str]], shown: Sequence[int], *, width: int
) -> None:
    """Cut the cells of the column with `is_cut_in_middle`, so that the shown columns fit."""
    for at in shown:
        if columns[at].is_cut_in_middle and cells:
            of_shown = [[row[each] for each in shown] for row in cells]
            excess = _natural_width([columns[each] for each in shown], of_shown) - width
            kept = max(max(len(row[at]) for row in cells) - max(excess, 0), _MIN_CUT_WIDTH)
            for row in cells:
                row[at] = middle_cut(row[at], kept)


def middle_cut(text: str, width: int) -> str:
    """Return `text`. If the text has more than `width` characters, an ellipsis replaces its middle.

    >>> middle_cut("manual-20261129T161234567890Z", 18)
    'manual-…234567890Z'
    """
    if len(text) <= width:
        return text
    head = 2 * (width - 1) // 5
    return f"{text[: head + 1]}…{text[len(text) - (width - 2 - head) :]}"


def local_time(time: str | float | None) -> str | None:
    """Return a time to the second in the zone of this machine, such as `2026-03-01 12:00:05 CET`.

    Args:
        time: ISO 8601, in UTC if it has no zone, or seconds since the epoch. The result is None if
            `time` is None.
    """
    if time is None:
        return None
    if isinstance(time, str):
        moment = datetime.fromisoformat(time.replace("Z", "+00:00"))
    else:
        moment = datetime.fromtimestamp(time, timezone.utc)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S %Z}"


class Advance(Protocol):
    """Function that moves a progress bar."""

    def __call__(self, amount: int = 1) -> None:
        """Add `amount` to the finished amount."""
        ...


@contextmanager
def progress(title: str, *, total: int | None = None) -> Iterator[Advance]:
    """Show a progress bar on standard error while the block runs.

    Nothing is shown if standard error is not a terminal, or if Rich is not installed, as in the
    environments of some steps.

    Args:
        title: Text beside the bar. The text describes what the command does, and names the unit of
            the amounts.
        total: Expected amount. None if the total is unknown.

    Yields:
        The function that moves the bar.
    """
    if not sys.stderr.isatty():
        yield _ignore
        return
    try:
        from rich import progress as bars
        from rich.console import Console
    except ImportError:
        yield _ignore
        return
    end = bars.TimeElapsedColumn() if total is None else bars.TimeRemainingColumn()
    text = bars.TextColumn("{task.fields[done]}")
    # Output of the command goes above the bar while the bar is shown. A redirected output stays
    # redirected.
    with bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        text,
        end,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ) as shown:
        task = shown.add_task(printable(title), total=total, done="")
        done = 0

        def advance(amount: int = 1) -> None:
            nonlocal done
            done += amount
            of = "" if total is None else f" of {total:,}"
            shown.update(task, completed=done, done=f"{done:,}{of}")

        yield advance


def _ignore(amount: int = 1) -> None:
    """Do nothing, because no bar is shown."""
