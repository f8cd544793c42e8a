"""Which files the champion's line has seen, and so which rows come late.

The watermark is a time: a row at or before it lies in no later window. Where such a row comes to the lake after its
watermark was drawn, it comes in a file that was not there then. The champion's manifest names the files that were
(`Model.files`), of the newest days before the watermark; so a round that failed or was refused changes nothing, and
every row is either newer than the watermark, or in a file of the champion's line, or late.

Days are whole: a file is of one day, and all its rows up to the watermark are late, or none. Back-filled versions are
not asked about: they are learnt again by a window or by replay. Reading the rows is left to `lake`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

from components.contracts.manifests import Model
from components.extraction.times import DAY_MICROS, Span, parse_day, to_iso
from components.extraction.window import watermark

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SeenFiles:
    """What one line of models saw of the days before its watermark."""

    watermark: int
    """Newest row that it read, microseconds since the epoch."""
    by_day: Mapping[date, Mapping[str, int]]
    """Bytes by name, of the days that are asked about and whose files are known; no row of another day is late."""
    unknown: tuple[date, ...] = ()
    """Days that are asked about, and of which nobody noted the files."""

    @property
    def read(self) -> Span:
        """The times up to the watermark."""
        return Span(None, self.watermark + 1)

    def late(self, day: date, files: Iterable[Path]) -> list[Path]:
        """Those of a day's files that the line has not seen. One that was changed since is not among them."""
        return [path for path in files if path.name not in self.by_day[day]] if day in self.by_day else []

    def warn(self, days: Mapping[date, Iterable[Path]]) -> None:
        """Tells the log what cannot be known, and which of the files of `days` were changed since they were seen."""
        if self.unknown:
            logger.warning(
                "which files of %s the champion's line has seen is not known: no row of them counts as late",
                ", ".join(map(str, self.unknown)),
            )
        for day, seen in self.by_day.items():
            for path in days.get(day, ()):
                size = path.stat().st_size
                if seen.get(path.name, size) != size:
                    logger.warning(
                        "%s has %d bytes, expected the %d that it had when rows up to %s were learnt: what was changed "
                        "is not learnt, new rows belong in new files",
                        path, size, seen[path.name], to_iso(self.watermark),
                    )  # fmt: skip


def days_asked(newest: int, late_days: int) -> list[date]:
    """The days of which late rows are learnt: that of the row at `newest` (microseconds), and `late_days` before it.

    >>> [str(day) for day in days_asked(3 * 86_400_000_000, 1)]
    ['1970-01-03', '1970-01-04']
    """
    last = date(1970, 1, 1) + timedelta(days=newest // DAY_MICROS)
    return [last - timedelta(days=back) for back in range(late_days, -1, -1)]


def seen_files(accepted: Model | None, late_days: int) -> SeenFiles | None:
    """What the champion's line saw of the days that a round asks about; None where it asks about none.

    Args:
        accepted: The champion's model, whose watermark the window begins after; None = there is none, or another
            window was asked for.
        late_days: Days before the watermark's; 0 = late rows are not learnt.

    Raises:
        ContractError: the model's manifest names no time, or something else than days.
    """
    if accepted is None or not late_days:
        return None
    newest = watermark(accepted)
    known = {parse_day(f"files of model {accepted.model_id}", day): files for day, files in accepted.files.items()}
    asked = days_asked(newest, late_days)
    return SeenFiles(
        watermark=newest,
        by_day={day: known[day] for day in asked if day in known},
        unknown=tuple(day for day in asked if day not in known),
    )
