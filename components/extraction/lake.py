"""Plan of what a run reads from a lake: which parts of which files, in which order.

A lake consists of files `day=YYYY-MM-DD/*.parquet` in the raw schema. Days do not overlap in time,
so reading days in order gives rows in order. A day with more rows than fit in memory is divided
into chunks, which are sorted separately. `CHUNK_ROWS` limits the rows of a chunk as far as the
statistics of the row groups allow. Rows with the same time cannot be divided, even if there are
many.

`Lake.plan` lists the chunks of a window, and all files that the run leaves out. The plan reads only
footers and event times. `components.extraction.reader` reads the rows of the chunks.
"""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.extraction.lake_files import DayFiles, LakeFiles
from components.extraction.late_clicks import LateClicks
from components.extraction.seen_files import NOTHING_SEEN, LeftOutFile, LineageRecord, SeenFiles
from evergreen.contracts.raw_rows import EVENT_TIME
from evergreen.rows.archived_rows import reading_parquet
from evergreen.rows.parquet import GroupTimes, group_times, within
from evergreen.rows.raw_schema import TIME_TYPE, open_parquet
from evergreen.rows.times import TimeSpan, day_span, to_iso
from evergreen.rows.unfit import UnfitFiles, expect_few, read_each
from evergreen.runtime.durable import sha256_file
from evergreen.runtime.errors import ContractError
from evergreen.storage.objects import ObjectInfo

logger = logging.getLogger(__name__)

CHUNK_ROWS = 250_000
"""Approximate number of rows that are sorted at a time."""


class RowGroup(NamedTuple):
    """A row group, from the footer of its file."""

    times: GroupTimes | None
    """Range of the event times. None if the range is unknown."""
    num_rows: int


class LakeChunk(NamedTuple):
    """A part of one day, which is read as a unit."""

    day: date
    files: list[Path]
    """Files of the day that may have rows of the interval, by the statistics of their row groups.
    The first chunk of a day has all files, so that rows without a time or of another day are found.
    """
    corrected: frozenset[Path]
    """Subset of `files` that a back-fill wrote. Back-filled rows replace copies in the other
    files."""
    span: TimeSpan
    num_rows: float
    """Approximate number of rows in the interval, from the statistics of the row groups."""
    reports_strays: bool
    """Whether rows without a time and rows of another day are reported
    (`RawParquet.with_strays`)."""
    trained_files: tuple[Path, ...] = ()
    """Files of the day on which earlier runs of the lineage were trained. If a row of `files` has a
    copy in these files, the row is left out. Empty unless the chunk has late rows."""


class PlannedFile(NamedTuple):
    """One file of a `PlannedDay`."""

    path: Path
    size: int
    """Size in bytes."""
    sha256: str | None
    """SHA-256 of the content. None if the hash is not known before the file is read."""


class PlannedDay(NamedTuple):
    """Files and chunks of one day that a run reads."""

    day: date
    version: int
    """Back-filled version, or 0 if the day was never back-filled."""
    files: list[PlannedFile]
    """Files with late rows, and files that may have rows of the window."""
    chunks: list[LakeChunk]
    """Chunks with the window's rows, in the order of time."""
    late_chunks: list[LakeChunk]
    """Chunks with late rows."""

    def digest(self) -> str:
        """Return the SHA-256 of the names, sizes and contents of `files`."""
        digest = hashlib.sha256()
        for path, size, sha256 in self.files:
            digest.update(f"{path.name}\0{size}\0{sha256 or sha256_file(path)}\n".encode())
        return digest.hexdigest()


class FutureFile(NamedTuple):
    """A file with rows whose time is in the future, ahead of the clock."""

    file: str
    """Path relative to the lake."""
    num_rows: int
    """Number of rows that are ahead."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """Parts of the lake that a run reads for one window, and parts that it leaves out."""

    source_uri: str
    """URI of the lake."""
    window: TimeSpan
    days: list[PlannedDay]
    """Days with rows of the window or with late rows, in order."""
    late_clicks: LateClicks
    """Late clicks on rows of these days."""
    ahead_files: list[FutureFile]
    """Files with rows that are ahead of the clock, by day and name."""
    left_out_files: list[LeftOutFile]
    """Unseen files whose rows the run leaves out, by day and name. A file is unseen if no run of
    the lineage has seen it."""
    record: LineageRecord
    """Files that the lineage has seen after this run. Files that are found unfit while old rows are
    sampled still count as seen."""

    @property
    def chunks(self) -> list[LakeChunk]:
        """Return the chunks with the window's rows, in the order of time."""
        return [chunk for day in self.days for chunk in day.chunks]

    @property
    def late_chunks(self) -> list[LakeChunk]:
        """Return the chunks with late rows, by day."""
        return [chunk for day in self.days for chunk in day.late_chunks]


def _newest_time(path: Path, span: TimeSpan) -> int | None:
    """Return the event time of the newest row of a raw file within `span`, or None.

    The time is in microseconds since the epoch.

    Raises:
        ContractError: the file is not complete Parquet, or has no event times.
    """
    newest: int | None = pc.max(_times_within(path, span).cast(pa.int64())).as_py()
    return newest


def _num_rows(path: Path) -> int:
    num_rows: int = open_parquet(path).metadata.num_rows
    return num_rows


def _count_rows(path: Path, span: TimeSpan) -> int:
    """Return the number of rows of a raw file within `span`.

    Only row groups that overlap `span` are read.

    Raises:
        ContractError: see `_newest_time`.
    """
    return len(_times_within(path, span))


def _times_within(path: Path, span: TimeSpan) -> Any:
    file = open_parquet(path)
    if EVENT_TIME not in file.schema_arrow.names:
        raise ContractError(f"{path} lacks the column {EVENT_TIME}, expected the raw schema")
    found = [pa.array([], TIME_TYPE)]
    with reading_parquet(path):
        for group in range(file.num_row_groups):
            known = group_times(file.metadata.row_group(group))
            if known is None or span.overlaps(known.first, known.last):
                times = file.read_row_group(group, columns=[EVENT_TIME]).column(0).cast(TIME_TYPE)
                found += times.filter(within(times, span)).chunks
    return pa.chunked_array(found, TIME_TYPE)


def read_footers(paths: Sequence[Path]) -> dict[Path, list[RowGroup]]:
    """Return the row groups of each file.

    Raises:
        UnfitFiles: files are not complete Parquet.
    """
    return dict(zip(paths, read_each(paths, _row_groups)))


def _row_groups(path: Path) -> list[RowGroup]:
    file = open_parquet(path)
    is_time = (
        EVENT_TIME in file.schema_arrow.names
        and str(file.schema_arrow.field(EVENT_TIME).type)[:4] == "time"
    )
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    return [RowGroup(group_times(each) if is_time else None, each.num_rows) for each in groups]


def _may_contain_rows(groups: Iterable[RowGroup], span: TimeSpan) -> bool:
    """Return whether a file may have rows within `span`, by the statistics of its row groups."""
    return any(times is None or span.overlaps(times.first, times.last) for times, _ in groups)


def split_into_chunks(
    day: date,
    footers: Mapping[Path, Sequence[RowGroup]],
    span: TimeSpan,
    *,
    chunk_rows: int,
    corrected: frozenset[Path] = frozenset(),
) -> list[LakeChunk]:
    """Divide `span` into consecutive chunks of about `chunk_rows` rows each.

    There is at least one chunk, unless `span` is empty.

    A chunk has at most 50 % more rows than `chunk_rows`, as estimated from the statistics. The
    estimate assumes that rows are spread evenly over their row group, or over `span` if a group has
    no statistics. Bursts of traffic are therefore divided by rows, and not by time.

    Args:
        day: Day of the files.
        footers: Row groups of each file of the day.
        span: Interval with a start and an end.
        chunk_rows: Rows of a chunk.
        corrected: See `LakeChunk.corrected`.
    """
    assert span.start is not None
    assert span.end is not None
    paths, firsts, lasts, counts = [], [], [], []
    for path, groups in footers.items():
        for times, num_rows in groups:
            paths.append(path)
            firsts.append(times.first if times else span.start)
            lasts.append(times.last + 1 if times else span.end)
            counts.append(num_rows)
    edges = np.unique(np.clip([span.start, span.end, *firsts, *lasts], span.start, span.end))
    # Number of rows before each point in time. Microseconds since the epoch are exact in float64.
    before = np.zeros(len(edges))
    for first, last, count in zip(firsts, lasts, counts):
        before += count * np.clip((edges - first) / max(last - first, 1), 0, 1)
    num_chunks = max(1, int(-(-(before[-1] - before[0]) // chunk_rows)))
    wanted = before[0] + (before[-1] - before[0]) * np.arange(1, num_chunks) / num_chunks
    after = np.searchsorted(before, wanted)
    nearest = after - (wanted - before[after - 1] < before[after] - wanted)
    # Prefer a split between two row groups. A group that two chunks share is decoded twice.
    is_near = np.abs(before[nearest] - wanted) <= chunk_rows / 4
    inner = np.where(
        is_near, edges[nearest], np.interp(wanted, before, edges).astype(np.int64)
    ).tolist()
    bounds = sorted({span.start, *inner, span.end})
    sizes = np.diff(np.interp(bounds, edges, before)).tolist()
    chunks: list[LakeChunk] = []
    for part, size in zip(map(TimeSpan, bounds, bounds[1:]), sizes):
        holding = {
            path
            for path, first, last in zip(paths, firsts, lasts)
            if part.overlaps(first, last - 1)
        }
        is_first = not chunks
        own = [path for path in footers if is_first or path in holding]
        chunks.append(
            LakeChunk(day, own, corrected & frozenset(own), part, size, reports_strays=is_first)
        )
    return chunks


@dataclass(frozen=True, kw_only=True)
class Lake:
    """A lake from which one run reads."""

    files: LakeFiles
    seen: SeenFiles = NOTHING_SEEN
    """Files that the parent's lineage has seen."""
    ahead_from: int | None = None
    """Time in microseconds since the epoch. Rows at or after this time are ahead of the clock and
    are not read. If None, all rows are read."""
    chunk_rows: int = CHUNK_ROWS
    """Approximate number of rows that are sorted at a time."""

    def plan(self, window: TimeSpan, *, max_unfit_fraction: float = 1.0) -> WindowPlan:
        """List what is read for a window, and what is left out.

        The files are fetched, and the late clicks on their rows are read.

        Args:
            window: The window. Rows of the window that are ahead of the clock are not read.
            max_unfit_fraction: Maximum share of unfit files, in [0, 1]. The share among files of
                rows and the share among files of late clicks are checked separately. Files that an
                earlier run of the lineage left out are in neither share.

        Raises:
            UnfitFiles: files are corrupt.
            ContractError: the share of unfit files is too large.
        """
        ahead_files, left_out = self._ahead_files(), self._left_out_files()
        for day, searched in self._searched_files().items():
            self.seen.warn_of_changed(day, searched)
        due = window.clipped(TimeSpan(None, self.ahead_from))
        spans = {day: day_span(day).clipped(due) for day in self.files.days}
        late = self._late_files()
        days = {
            day: self.files.of_day(day)
            for day, span in spans.items()
            if day in late or not span.is_empty
        }
        listed = [file for each in days.values() for file in each.files]
        paths = dict(zip(listed, self.files.paths(listed)))  # all files are fetched at once
        planned = [
            self._plan_day(day, files, paths, span=spans[day], late=late.get(day, {}))
            for day, files in days.items()
        ]
        clicks = LateClicks(self.files)
        if planned:  # workers cannot fetch files
            clicks.read_for_rows(planned[0].day)
        record = self.seen.record_after(
            {day: self.files.own_files(day) for day in self.files.days},
            left_out=[each.name for each in left_out if not each.counts_as_seen],
            unfit=self.files.unfit,
            window=window,
        )
        unfit = [each for each in self.files.unfit_rows if not self.seen.was_quarantined(each.file)]
        num_files = sum(len(each.files) for each in planned)
        what = f"with rows of window {window}"
        expect_few(unfit, num_files, what=what, max_fraction=max_unfit_fraction)
        unfit, what = self.files.unfit_outcomes, "of late outcomes"
        expect_few(unfit, clicks.num_files, what=what, max_fraction=max_unfit_fraction)
        return WindowPlan(
            source_uri=self.files.uri,
            window=window,
            days=planned,
            late_clicks=clicks,
            ahead_files=ahead_files,
            left_out_files=left_out,
            record=record,
        )

    def _plan_day(
        self,
        day: date,
        files: DayFiles,
        paths: Mapping[ObjectInfo, Path],
        *,
        span: TimeSpan,
        late: Mapping[TimeSpan, Sequence[ObjectInfo]],
    ) -> PlannedDay:
        """Plan the reading of one day.

        Args:
            day: The day.
            files: Files of the day.
            paths: Local copy of each file.
            span: Part of the window on this day, possibly empty.
            late: Files with late rows, by the span of these rows.

        Raises:
            UnfitFiles: files are corrupt.
        """
        late_files = {file for own in late.values() for file in own}
        footers = read_footers([paths[file] for file in files.files])
        split = partial(split_into_chunks, day, chunk_rows=self.chunk_rows)
        trained_files = tuple(paths[file] for file in files.files if file not in late_files)
        late_chunks = [
            # Rows without a time, or of another day, must be reported only once. If the window has
            # rows of the day, the window's first chunk of the day reports them, and no late chunk
            # does.
            chunk._replace(
                reports_strays=chunk.reports_strays and span.is_empty, trained_files=trained_files
            )
            for late_span, own in late.items()
            for chunk in split({paths[file]: footers[paths[file]] for file in own}, late_span)
        ]
        corrected = frozenset(paths[file] for file in files.corrected)
        chunks = [] if span.is_empty else split(footers, span, corrected=corrected)
        logger.info(
            "day %s: version %d, %d files, %d with late rows",
            day,
            files.version,
            len(files.files),
            len(late_files),
        )
        return PlannedDay(
            day=day,
            version=files.version,
            files=[
                PlannedFile(paths[file], file.size, files.sha256.get(file.name))
                for file in files.files
                if file in late_files
                or (not span.is_empty and _may_contain_rows(footers[paths[file]], span))
            ],
            chunks=chunks,
            late_chunks=late_chunks,
        )

    def _late_files(self) -> dict[date, dict[TimeSpan, list[ObjectInfo]]]:
        """Return the files with late rows, by day and by the span of these rows.

        Days without late rows are absent.
        """
        late = {
            day: self.seen.late_files(day, files) for day, files in self._searched_files().items()
        }
        return {day: groups for day, groups in late.items() if groups}

    def _searched_files(self) -> dict[date, list[ObjectInfo]]:
        """Return the files that are searched for late rows, by day."""
        return {
            day: self.files.of_day(day).appended
            for day in self.files.days
            if day in self.seen.searched
        }

    def _left_out_files(self) -> list[LeftOutFile]:
        """Return the unseen files whose rows this run leaves out, by day and name.

        The rows of a file are not counted if counting would require a download. A download would be
        required if the lake is in a bucket and the run does not read the file's day.
        """
        found = []
        for day in self.files.days:
            spans = self.seen.left_out_files(day, self.files.own_files(day).values())
            is_read = self.seen.reads_part_of(day)
            for file in self.files.of_day(day).appended if spans else ():
                if file.name in spans:
                    span = spans[file.name]
                    num_rows = self._count(file, span) if is_read or self.files.is_folder else None
                    if num_rows != 0:
                        counts_as_seen = is_read or self.seen.starts_new_record
                        found.append(LeftOutFile(day, file.name, num_rows, counts_as_seen))
        self.seen.warn_of_left_out(found)
        return found

    def _count(self, file: ObjectInfo, span: TimeSpan) -> int | None:
        """Return the number of a file's rows within `span`, or None if the file is not readable."""
        try:
            return _count_rows(self.files.paths([file])[0], span)
        except ContractError as error:
            logger.warning("rows that are left out cannot be counted: %s", error)
            return None

    def _ahead_files(self) -> list[FutureFile]:
        """Return the files with rows that are ahead of the clock, by day and name.

        Raises:
            UnfitFiles: files are corrupt.
        """
        if self.ahead_from is None:
            return []
        found = []
        for day in self.files.days:
            span = day_span(day).clipped(TimeSpan(self.ahead_from, None))
            if span.is_empty:
                continue
            is_all = span == day_span(day)
            reason = (
                f"{f'day {day} is' if is_all else 'rows are'} ahead of {to_iso(self.ahead_from)}"
            )
            files = self.files.of_day(day).files
            count = _num_rows if is_all else partial(_count_rows, span=span)
            counts = read_each(self.files.paths(files), count)
            found += [
                FutureFile(file.name, num_rows, reason)
                for file, num_rows in zip(files, counts)
                if num_rows
            ]
        if found:
            logger.warning(
                "%d rows in %d files are not read yet, because their times are ahead of the "
                "clock; the first: %s: %s",
                sum(each.num_rows for each in found),
                len(found),
                found[0].file,
                found[0].reason,
            )
        return found

    def chunks_before(self, end: int, *, num_days: int, chunk_rows: int) -> list[LakeChunk]:
        """Return the rows before `end` as chunks in time order, without late rows.

        Only the footers of the files are read.

        Args:
            end: Time in microseconds since the epoch.
            num_days: Number of the newest days to read. If `end` is within a day, the part of this
                day before `end` counts as one day.
            chunk_rows: Approximate rows of a chunk.
        """
        late = self._late_files()
        found: list[list[LakeChunk]] = []
        for day in reversed(self.files.days):
            span = day_span(day).clipped(TimeSpan(None, end))
            if len(found) == num_days:
                break
            if not span.is_empty:
                late_files = {file for own in late.get(day, {}).values() for file in own}
                of_day = self.files.of_day(day)
                files = [file for file in of_day.files if file not in late_files]
                split = split_into_chunks(
                    day,
                    read_footers(self.files.paths(files)),
                    span,
                    chunk_rows=chunk_rows,
                    corrected=frozenset(self.files.paths(of_day.corrected)),
                )
                chunks = [
                    chunk._replace(reports_strays=False) for chunk in split if chunk.num_rows > 0
                ]
                found += [chunks] if chunks else []
        return [chunk for chunks in reversed(found) for chunk in chunks]

    def newest(self) -> int | None:
        """Return the time of the newest row that is not ahead of the clock, or None.

        The time is in microseconds since the epoch. After this call, the lake leaves out unfit
        files.
        """
        try:
            return self._newest()
        except UnfitFiles as error:
            self.files.leave_out(error)
            return self.newest()

    def _newest(self) -> int | None:
        for day in reversed(self.files.days):
            span = day_span(day).clipped(TimeSpan(None, self.ahead_from))
            if span.is_empty:
                continue
            files = self.files.paths(self.files.of_day(day).files)
            found = read_each(files, partial(_newest_time, span=span))
            times = [time for time in found if time is not None]
            if times:
                return max(times)
        return None

    def quarantined_files(self) -> list[dict[str, Any]]:
        """Return `RawDataset.quarantined_files`: the files that were found unfit until now."""
        return [
            {**each._asdict(), "known": self.seen.was_quarantined(each.file)}
            for _, each in sorted(self.files.unfit.items())
        ]

    def describe(self) -> str:
        """Return a phrase for messages: the lake's name and its first and last day."""
        days = self.files.days
        return f"lake {self.files.name} has " + (
            f"days {days[0]} to {days[-1]}" if days else "no rows"
        )
