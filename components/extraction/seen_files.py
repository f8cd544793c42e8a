"""The lake's files that a lineage of models has seen, and the late rows in unseen files.

Late rows are rows at or before the watermark in a file that the parent's lineage has not seen. The
parent's manifest names the files of the newest days (`Model.files`). Therefore every row is newer
than the watermark, or it is in a seen file, or it is late. A file belongs to one day. If a file was
not seen, all of its rows up to the watermark are late. Back-filled versions are not late, because a
later window or replay reads them again. Unseen files of days older than `late_days` are counted and
named. Unseen files of older days stay unseen, so that a later run can train on these files.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import NamedTuple

from components.extraction.lake_files import base_name
from components.extraction.window import watermark
from evergreen.config.extraction import MAX_LATE_DAYS
from evergreen.contracts.manifests import Model
from evergreen.contracts.raw_rows import DAY_PARTITION
from evergreen.rows.times import DAY_MICROS, TimeSpan, day_span, parse_day, parse_time, to_iso
from evergreen.storage.objects import ObjectInfo

logger = logging.getLogger(__name__)


class LineageRecord(NamedTuple):
    """The files of version 0 that a lineage has seen after a run, by day and name."""

    seen: dict[date, dict[str, int]]
    """Sizes in bytes of the seen files."""
    unread: dict[date, dict[str, int | None]]
    """Files that this run or an earlier one left out as unfit.

    The value is the time up to which the lineage was trained on the file's rows, in microseconds
    since the epoch. The value is None if the lineage was trained on no row of the file.
    """

    def seen_up_to(self, newest: int) -> dict[str, dict[str, int]]:
        """Return `RawDataset.files`. `newest` is the time of the newest training row."""
        days = days_up_to(newest, MAX_LATE_DAYS)
        found = {day: self.seen.get(day, {}) for day in days}
        # The first day is always recorded. If a later day is absent, the day had no files.
        return {str(day): files for day, files in found.items() if files or day == days[0]}

    def unread_up_to(self, newest: int) -> dict[str, dict[str, str]]:
        """Return `RawDataset.unread_files`. `newest` is the time of the newest training row."""
        found = {day: self.unread.get(day, {}) for day in days_up_to(newest, MAX_LATE_DAYS)}
        return {
            str(day): {
                name: "" if until is None else to_iso(until) for name, until in files.items()
            }
            for day, files in found.items()
            if files
        }


class LeftOutFile(NamedTuple):
    """An unseen file whose rows this run leaves out, entirely or partly."""

    day: date
    name: str
    """Path relative to the lake."""
    num_rows: int | None
    """Number of rows that are left out. None if the file is not on this machine or cannot be
    read."""
    counts_as_seen: bool
    """Whether the next run of the lineage treats the file as seen. The file is seen if this run
    reads other rows of the file, or starts a new record of seen files."""


@dataclass(frozen=True, kw_only=True)
class SeenFiles:
    """Files that a lineage has seen, for each day up to the watermark."""

    watermark: int
    """Time of the newest training row, microseconds since the epoch."""
    searched: Mapping[date, Mapping[str, int]] = field(default_factory=dict)
    """Sizes in bytes by file name, for each day that is searched for late rows. Days whose files
    are not recorded are absent. Rows of other days are never late."""
    late_days: int = 0
    """Number of days to search for late rows, before the day of the watermark."""
    recorded: Mapping[date, Mapping[str, int]] = field(default_factory=dict)
    """Sizes in bytes by file name, for all recorded days. If a day after the first recorded day is
    absent, the day had no files."""
    left_out_before: int
    """Time in microseconds since the epoch. Rows before this time are left out of this run."""
    trained_until: Mapping[date, Mapping[str, int | None]] = field(default_factory=dict)
    """Files that the lineage left out as unfit, by day and name. For each file, the value is the
    time of its newest row that was used for training, in microseconds since the epoch. The value is
    None if no row was used."""
    starts_new_record: bool = False
    """Whether this run ignores the parent's record of seen files and starts a new record, for
    example after an explicit window."""

    def was_quarantined(self, name: str) -> bool:
        """Return whether the lineage left out the file of this name before."""
        folder, _, base = name.rpartition("/")
        return any(
            DAY_PARTITION.format(day=day) == folder and base in names
            for day, names in self.trained_until.items()
        )

    def late_files(
        self, day: date, files: Iterable[ObjectInfo]
    ) -> dict[TimeSpan, list[ObjectInfo]]:
        """Return a day's unseen files, grouped by the span of their late rows.

        A file that was changed after the lineage had seen it is not returned.
        """
        found: dict[TimeSpan, list[ObjectInfo]] = defaultdict(list)
        until_watermark = TimeSpan(None, self.watermark + 1)
        for file in files if day in self.searched else ():
            if base_name(file) not in self.searched[day]:
                found[self._untrained_span(day, file).clipped(until_watermark)].append(file)
        return dict(found)

    def left_out_files(self, day: date, files: Iterable[ObjectInfo]) -> dict[str, TimeSpan]:
        """Return a day's unseen files whose rows this run leaves out, entirely or partly, by name.

        The value is the span of the rows that are left out.
        """
        before = TimeSpan(None, self.left_out_before)
        if not self.recorded or day < min(self.recorded) or day_span(day).clipped(before).is_empty:
            return {}
        return {
            file.name: self._untrained_span(day, file).clipped(before)
            for file in files
            if base_name(file) not in self.recorded.get(day, {})
        }

    def reads_part_of(self, day: date) -> bool:
        """Return whether this run reads at least some rows of the day."""
        end = day_span(day).end
        assert end is not None
        return end > self.left_out_before

    def record_after(
        self,
        files: Mapping[date, Mapping[str, ObjectInfo]],
        *,
        left_out: Collection[str],
        unfit: Collection[str],
        window: TimeSpan,
    ) -> LineageRecord:
        """Return the files that the lineage has seen after this run.

        Args:
            files: Files of version 0 of each day, by name within the day's folder.
            left_out: Names of files that do not count as seen. The names are relative to the lake.
            unfit: Names of files that this run leaves out as unfit. The names are relative to the
                lake.
            window: Window of the run.
        """
        continues = not self.starts_new_record
        before_window = None if continues or window.start is None else window.start - 1
        record = LineageRecord({}, {})
        for day in sorted({*files, *self.recorded}):
            before = self.recorded.get(day, {}) if continues else {}
            trained_until = self.trained_until.get(day, {}) if continues else {}
            own = files.get(day, {})
            sizes = {**before, **{name: file.size for name, file in own.items()}}
            unread = {
                name for name, file in own.items() if file.name in left_out or file.name in unfit
            }
            record.seen[day] = {
                name: size for name, size in sorted(sizes.items()) if name not in unread
            }
            record.unread[day] = {}
            for name in sorted(unread):
                if name in trained_until or own[name].name in unfit:
                    until = self.watermark if name in before else before_window
                    record.unread[day][name] = trained_until.get(name, until)
        return record

    def _untrained_span(self, day: date, file: ObjectInfo) -> TimeSpan:
        """Return the part of the day in which the lineage was not trained on rows of the file.

        The file counts as unseen, but an earlier run may have read its older rows
        (`trained_until`).
        """
        newest = self.trained_until.get(day, {}).get(base_name(file))
        return day_span(day).clipped(TimeSpan(None if newest is None else newest + 1, None))

    def warn_of_changed(self, day: date, files: Iterable[ObjectInfo]) -> None:
        """Log files of a day that were changed after the lineage had seen them."""
        for file in files:
            size = self.searched.get(day, {}).get(base_name(file), file.size)
            if size != file.size:
                logger.warning(
                    "%s has %d bytes, expected %d: the file changed after the lineage was "
                    "trained on rows up to %s. Changed rows are not read. Write new rows to "
                    "new files",
                    file.name,
                    file.size,
                    size,
                    to_iso(self.watermark),
                )

    def warn_of_left_out(self, files: Sequence[LeftOutFile]) -> None:
        """Log how many files this run leaves out, and how a run can read them."""
        if not files:
            return
        counted = [each.num_rows for each in files if each.num_rows is not None]
        rows = f"with about {sum(counted):,} rows " if len(counted) == len(files) else ""
        first, last = min(each.day for each in files), max(each.day for each in files)
        bound, way = "older than window_start", f"a window_start of {first}"
        if not self.starts_new_record:
            bound = f"older than late_days={self.late_days}"
            needed = (days_up_to(self.watermark, 0)[0] - first).days
            if needed <= MAX_LATE_DAYS:
                way += f" or --set extraction.late_days={needed}"
        logger.warning(
            "%d files %sof the days %s to %s are not read, because the lineage has not seen "
            "them and they are %s. To read them, use %s. First file: %s",
            len(files),
            rows,
            first,
            last,
            bound,
            way,
            files[0].name,
        )


NOTHING_SEEN = SeenFiles(watermark=0, left_out_before=0, starts_new_record=True)
"""The files that a run without a parent has seen. No row is late, and none is left out."""


def days_up_to(newest: int, num_before: int) -> list[date]:
    """Return `num_before` days and then the day that contains the time `newest`, in order.

    `newest` is in microseconds since the epoch.

    >>> [str(day) for day in days_up_to(3 * 86_400_000_000, 1)]
    ['1970-01-03', '1970-01-04']
    """
    last = date(1970, 1, 1) + timedelta(days=newest // DAY_MICROS)
    return [last - timedelta(days=back) for back in range(num_before, -1, -1)]


def seen_files(parent: Model | None, late_days: int, *, start: str = "") -> SeenFiles:
    """Return the files that the parent's lineage has seen, or `NOTHING_SEEN` without a parent.

    Args:
        parent: Model that the run continues.
        late_days: Number of days to search for late rows, before the day of the watermark. With
            0, no day before the watermark's day is searched.
        start: Requested start of the window. If `start` is given, no row is late. If it is empty,
            the window starts after the watermark.

    Raises:
        ContractError: the model's manifest contains an invalid time or day.
    """
    if parent is None:
        return NOTHING_SEEN
    newest = watermark(parent)
    source = f"files of model {parent.model_id}"
    recorded = {parse_day(source, day): files for day, files in parent.files.items()}
    trained_until = {
        parse_day(source, day): {
            name: parse_time(source, time) if time else None for name, time in files.items()
        }
        for day, files in parent.unread_files.items()
    }
    wanted = days_up_to(newest, late_days) if late_days and not start else []
    known = [day for day in wanted if recorded and day >= min(recorded)]
    left_out_before = (
        day_span(wanted[0]).start
        if wanted
        else parse_time("window_start", start)
        if start
        else newest + 1
    )
    assert left_out_before is not None
    if unknown := [day for day in wanted if day not in known]:
        logger.warning(
            "the files of %s that the parent's lineage has seen were not recorded, so no row "
            "of these days counts as late",
            ", ".join(map(str, unknown)),
        )
    return SeenFiles(
        watermark=newest,
        searched={day: recorded.get(day, {}) for day in known},
        late_days=late_days,
        recorded=recorded,
        trained_until=trained_until,
        left_out_before=left_out_before,
        starts_new_record=bool(start),
    )
