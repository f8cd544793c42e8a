"""Which objects of a lake a window needs, told by their names alone, as `Lake` and `LateClicks` choose files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import date

from components.contracts.criteo import DAY_PARTITION, OUTCOME_PARTITION, is_visible
from components.extraction.late_clicks import CLOCKS
from components.extraction.seen_files import SeenFiles
from components.extraction.times import Span, day_span, parse_day
from components.extraction.versions import newest_complete
from components.runtime.errors import ContractError
from components.storage.objects import ObjectInfo

DAYS = DAY_PARTITION.format(day="")
OUTCOMES = OUTCOME_PARTITION.format(day="")


def is_lake(objects: Iterable[ObjectInfo]) -> bool:
    """Whether there are day partitions, of rows or of outcomes; else these are Criteo's own files."""
    return any(name.startswith((DAYS, OUTCOMES)) and "/" in name.removeprefix(OUTCOMES) for name, *_ in objects)


class LakeObjects:
    """The objects of a lake, by day.

    Args:
        uri: Of the lake, for messages.
        objects: As they were listed.

    Raises:
        ContractError: a partition's name holds no date.
    """

    def __init__(self, uri: str, objects: list[ObjectInfo]) -> None:
        self._uri = uri
        by_day = _by_day(uri, objects, DAYS)
        self._rows = {day: _read_of_day(found) for day, found in by_day.items()}
        self.appended = {day: _appended(found) for day, found in by_day.items()}
        """Files of version 0 of each day, bytes by name."""
        self._outcomes = {day: list(found.values()) for day, found in _by_day(uri, objects, OUTCOMES).items()}

    @property
    def days(self) -> list[date]:
        """Days that have files of rows, in order."""
        return sorted(day for day, found in self._rows.items() if found)

    def in_window(self, window: Span) -> list[date]:
        """The days that a row of the window may lie in, in order.

        Raises:
            ContractError: there is none.
        """
        days = [day for day in self.days if not window.clipped(day_span(day)).is_empty]
        if not days:
            held = f"days {self.days[0]} to {self.days[-1]}" if self.days else "no rows"
            raise ContractError(f"window {window} holds no rows, expected some; lake {self._uri} holds {held}")
        return days

    def before(self, window: Span) -> list[date]:
        """The days that end before the window begins, newest first; none where it has no beginning."""
        start = window.start
        return [] if start is None else [day for day in reversed(self.days) if (day_span(day).end or 0) <= start]

    def late(self, seen: SeenFiles) -> list[date]:
        """The days with files that were not seen, in order. Their other files tell which of the rows are known."""
        return [day for day in self.days if self.appended[day].keys() - seen.by_day.get(day, self.appended[day]).keys()]

    def files(self, days: Iterable[date], *, with_outcomes: bool = True) -> list[ObjectInfo]:
        """The objects that reading these days takes, late outcomes of their rows included.

        A click may be told any number of days after its row, and by another clock the day before.
        """
        wanted = sorted(days)
        found = [each for day in wanted for each in self._rows[day]]
        if with_outcomes and wanted:
            since = wanted[0] - CLOCKS
            found += [each for day, late in sorted(self._outcomes.items()) if day >= since for each in late]
        return found


def _by_day(uri: str, objects: list[ObjectInfo], partition: str) -> dict[date, dict[str, ObjectInfo]]:
    """The objects of each day's partition, by name within it; partitions without Parquet files do not count."""
    found: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
    for each in objects:
        day, _, name = each.name.removeprefix(partition).partition("/")
        if each.name.startswith(partition) and name:
            found[day][name] = each
    days = {day: names for day, names in found.items() if any(name.endswith(".parquet") for name in names)}
    return {parse_day(f"lake partition {uri}/{partition}{day}", day): names for day, names in days.items()}


def _appended(names: dict[str, ObjectInfo]) -> dict[str, int]:
    """Of one day's objects those that lie directly in its folder, as `versions.visible_files` sees them."""
    own = {name: each.size for name, each in names.items() if "/" not in name and name.endswith(".parquet")}
    return {name: size for name, size in own.items() if is_visible(name)}


def _read_of_day(names: dict[str, ObjectInfo]) -> list[ObjectInfo]:
    """Of one day's objects those that a reader opens: the newest complete version's, and those beside the versions."""
    version = newest_complete(names)
    folder = f"version={version}/"
    return [
        each
        for name, each in sorted(names.items())
        if (name.endswith(".parquet") if "/" not in name else version and name.startswith(folder))
        and not name.startswith("_")
    ]
