"""The lake: `day=YYYY-MM-DD/*.parquet` in the raw schema, read in pieces of bounded size.

Days do not overlap in time, so reading days in order gives rows in order. A day with more rows than
fit in memory is divided into intervals, which are sorted separately. `_PIECE_ROWS` limits the rows
of an interval as far as the statistics of the row groups allow. Rows with the same time cannot be
divided, even if there are many.

Clicks that arrived after their rows were archived are in `outcomes/day=*/`
(`evergreen.contracts.raw_rows.OUTCOME_TYPES`). Late clicks are joined to the rows when the rows are
read. A row with such a click gets label 1 if the click happened within the attribution window that
the file states. The time at which the click was reported does not matter. Labels therefore mean the
same as in the monitor. A click after the window, other events, outcomes of other rows, and
repetitions change nothing.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.extraction.copies import KEY, Copies, newest_copies, without_known
from components.extraction.lake_files import LakeFiles, base_name, version_of_folder
from components.extraction.window import SeenFiles
from evergreen.config.features import Features
from evergreen.contracts.raw_rows import (
    EVENT,
    EVENT_TIME,
    LABEL,
    OUTCOME_TIME,
    OUTCOME_TYPES,
    REQUEST_ID,
    WINDOW_SECONDS,
)
from evergreen.contracts.records import CLICK
from evergreen.contracts.words import WordCounts
from evergreen.rows.archived_rows import arrow_schema, bounded_batches, reading_parquet
from evergreen.rows.parquet import GroupTimes, RawParquet, group_times, within
from evergreen.rows.raw_schema import (
    BATCH_ROWS,
    TIME_TYPE,
    MalformedRows,
    lake_schema,
    open_parquet,
    raw_schema,
)
from evergreen.rows.times import TimeSpan, day_span, to_iso
from evergreen.rows.unfit import UnfitFiles, read_each
from evergreen.runtime.durable import sha256_file
from evergreen.runtime.errors import ContractError
from evergreen.storage.objects import ObjectInfo

logger = logging.getLogger(__name__)

_PIECE_ROWS = 250_000
_SCHEMA = arrow_schema(OUTCOME_TYPES)
_COUNTS_FROM = "counts_from"
"""Name of a column. A click counts for a row if the row's event time is at least this value. The
value is the click's time minus the attribution window, in microseconds since the epoch as float64,
which is exact to the year 2255."""
_MICROS = pa.timestamp("us", tz="UTC")
_CLOCKS = timedelta(days=1)
"""Tolerance for clock skew. With skewed clocks, a click can be stored under the day before its
prediction's day."""


@dataclass
class LateClicks:
    """The late clicks of one lake.

    Clicks are read from the day of the oldest row on.
    """

    files: LakeFiles
    num_joined: int = 0
    """Number of rows so far whose label a late click changed from 0 to 1."""
    _hashes: dict[str, str] = field(default_factory=dict)
    _clicks: dict[date, Any] = field(default_factory=dict)
    """Clicks by partition. Each clicked (request, row) occurs once, with the smallest
    `_COUNTS_FROM` of its clicks."""

    def join(self, table: Any, day: date) -> Any:
        """Set the label to 1 in rows that have a late click. All rows are of the UTC day `day`.

        Raises:
            UnfitFiles: files of outcomes are corrupt, or lack a column.
        """
        # If the monitor no longer had the prediction, the click is stored under the click's own
        # day. The click's day can be any number of days after the day of the prediction.
        late = [
            clicks for of_day, clicks in self.read_since(day).items() if of_day >= day - _CLOCKS
        ]
        if not late or not table.num_rows:
            return table
        requests = table.column(REQUEST_ID)
        clicks = pa.concat_tables(late)
        clicks = clicks.filter(
            pc.is_in(clicks.column(REQUEST_ID), value_set=requests.combine_chunks())
        )
        if not clicks.num_rows:
            return table
        keys = table.select(KEY).append_column("position", pa.array(np.arange(table.num_rows)))
        keys = keys.filter(pc.is_in(requests, value_set=clicks.column(REQUEST_ID).combine_chunks()))
        found = keys.join(clicks, KEY, join_type="inner")
        clicked = found.column("position").to_numpy()
        times = table.column(EVENT_TIME).cast(_MICROS).cast(pa.int64()).to_numpy()
        labels = table.column(LABEL).to_numpy().copy()
        counts = (times[clicked] >= found.column(_COUNTS_FROM).to_numpy()) & (labels[clicked] == 0)
        positions = np.unique(clicked[counts])  # a row may have clicks in several partitions
        self.num_joined += len(positions)
        labels[positions] = 1
        at = table.schema.get_field_index(LABEL)
        return table.set_column(at, table.schema.field(LABEL), pa.array(labels))

    @property
    def num_files(self) -> int:
        """Number of files that were read so far."""
        return len(self._hashes)

    def add_files_of(self, other: "LateClicks") -> None:
        """Add the files that another instance has read."""
        self._hashes.update(other._hashes)

    def digest(self) -> str | None:
        """Hash the names and bytes of all files that were read. Return None if no file was read."""
        if not self._hashes:
            return None
        lines = "".join(f"{name}\0{content}\n" for name, content in sorted(self._hashes.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def read_since(self, first: date) -> dict[date, Any]:
        """Read the clicks on rows of `first` and later days, and return all clicks by partition."""
        wanted = [
            day for day in self.files.outcomes if day >= first - _CLOCKS and day not in self._clicks
        ]
        self.files.paths(
            file for day in wanted for file in self.files.outcomes[day]
        )  # fetch all at once
        for day in wanted:
            files = self.files.outcomes[day]
            read = read_each(self.files.paths(files), self._read_clicks)
            clicks = _with_first_time(pa.concat_tables([_SCHEMA.empty_table(), *read]))
            self._hashes.update(
                {file.name: sha256_file(path) for file, path in zip(files, self.files.paths(files))}
            )
            earliest = (
                clicks.group_by(KEY)
                .aggregate([(_COUNTS_FROM, "min")])
                .select([*KEY, f"{_COUNTS_FROM}_min"])
            )
            self._clicks[day] = earliest.rename_columns([*KEY, _COUNTS_FROM])
            logger.info(
                "late clicks on rows of %s: %d in %d files",
                day,
                self._clicks[day].num_rows,
                len(files),
            )
        return self._clicks

    def _read_clicks(self, path: Path) -> Any:
        file = open_parquet(path)
        if missing := [name for name in _SCHEMA.names if name not in file.schema_arrow.names]:
            raise ContractError(f"{path} lacks the columns {missing}, expected late outcomes")
        tables = [_SCHEMA.empty_table()]
        with reading_parquet(path):
            for group in range(file.num_row_groups):
                for batch in bounded_batches(
                    path, _SCHEMA.names, group=group, batch_rows=BATCH_ROWS
                ):
                    tables.append(
                        pa.Table.from_batches([batch]).select(_SCHEMA.names).cast(_SCHEMA)
                    )
        table = pa.concat_tables(tables)
        return table.filter(pc.equal(table.column(EVENT), CLICK)).drop_null()


def _with_first_time(clicks: Any) -> Any:
    windows = np.round(clicks.column(WINDOW_SECONDS).to_numpy() * 1e6)
    times = clicks.column(OUTCOME_TIME).cast(pa.int64()).to_numpy()
    return clicks.select(KEY).append_column(_COUNTS_FROM, pa.array(times - windows))


class Piece(NamedTuple):
    """A part of one day, which is read as a unit."""

    day: date
    files: list[Path]
    """Files of the day in which the statistics of the row groups allow rows of the interval. The
    first piece of a day has all files, so that rows without a time or of another day are found."""
    span: TimeSpan
    num_rows: float
    """Approximate number of rows in the interval, from the statistics of the row groups."""


class AheadFile(NamedTuple):
    """A file with rows that are ahead of the clock."""

    file: str
    """Path relative to the lake."""
    num_rows: int
    """Number of rows that are ahead."""
    reason: str


class LeftFile(NamedTuple):
    """An unseen file whose rows this run leaves out, entirely or partly."""

    day: date
    name: str
    """Path relative to the lake."""
    num_rows: int | None
    """Number of rows that are left out. None if the file is not on this machine or cannot be
    read."""
    counts_as_seen: bool
    """Whether the file counts as seen by the lineage after this run. The file counts as seen if the
    run reads other rows of the file, or starts a new record."""


class WindowPiece(NamedTuple):
    """A piece of a window."""

    piece: Piece
    with_strays: bool
    """Whether the piece is the first of its day, see `RawParquet`."""


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


def _may_hold_rows(path: Path, span: TimeSpan) -> bool:
    """Return whether the statistics of a raw file's row groups allow a row within `span`.

    Returns True if there are no statistics.

    Raises:
        ContractError: the file is not complete Parquet.
    """
    metadata = open_parquet(path).metadata
    times = [group_times(metadata.row_group(group)) for group in range(metadata.num_row_groups)]
    return any(time is None or span.overlaps(time.first, time.last) for time in times)


def _cut_evenly(day: date, files: list[Path], span: TimeSpan, *, piece_rows: int) -> list[Piece]:
    """Divide `span` into consecutive pieces of about `piece_rows` rows each.

    There is at least one piece.

    A piece has at most 50 % more rows than `piece_rows`, as estimated from the statistics. The
    estimate assumes that rows are spread evenly over their row group, or over `span` if a group has
    no statistics. Bursts of traffic are therefore divided by rows, and not by time.

    Args:
        day: Day of the files.
        files: Raw files of the day.
        span: Interval with a start and an end.
        piece_rows: Rows of a piece.

    Raises:
        UnfitFiles: files are not complete Parquet.
    """
    assert span.start is not None
    assert span.end is not None
    paths, firsts, lasts, counts = [], [], [], []
    for path, groups in zip(files, read_each(files, _groups)):
        for times, num_rows in groups:
            paths.append(path)
            firsts.append(times.first if times else span.start)
            lasts.append(times.last + 1 if times else span.end)
            counts.append(num_rows)
    edges = np.unique(np.clip([span.start, span.end, *firsts, *lasts], span.start, span.end))
    # Number of rows before each edge. Microseconds since the epoch are exact in float64.
    before = np.zeros(len(edges))
    for first, last, count in zip(firsts, lasts, counts):
        before += count * np.clip((edges - first) / max(last - first, 1), 0, 1)
    num_pieces = max(1, int(-(-(before[-1] - before[0]) // piece_rows)))
    wanted = before[0] + (before[-1] - before[0]) * np.arange(1, num_pieces) / num_pieces
    after = np.searchsorted(before, wanted)
    nearest = after - (wanted - before[after - 1] < before[after] - wanted)
    # Prefer a cut between two row groups, because a group is decoded twice if two pieces share it.
    is_near = np.abs(before[nearest] - wanted) <= piece_rows / 4
    inner = np.where(
        is_near, edges[nearest], np.interp(wanted, before, edges).astype(np.int64)
    ).tolist()
    bounds = sorted({span.start, *inner, span.end})
    sizes = np.diff(np.interp(bounds, edges, before)).tolist()
    pieces: list[Piece] = []
    for part, size in zip(map(TimeSpan, bounds, bounds[1:]), sizes):
        holding = {
            path
            for path, first, last in zip(paths, firsts, lasts)
            if part.overlaps(first, last - 1)
        }
        own = [path for path in files if path in holding] if pieces else files
        pieces.append(Piece(day, own, part, size))
    return pieces


def _groups(path: Path) -> list[tuple[GroupTimes | None, int]]:
    """Return the event times and the number of rows of each row group.

    Unknown event times are None.
    """
    file = open_parquet(path)
    is_time = (
        EVENT_TIME in file.schema_arrow.names
        and str(file.schema_arrow.field(EVENT_TIME).type)[:4] == "time"
    )
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    return [(group_times(each) if is_time else None, each.num_rows) for each in groups]


@dataclass(frozen=True, kw_only=True)
class Lake:
    """A lake whose rows are read in the order of time."""

    files: LakeFiles
    features: Features
    """Features of the rows."""
    weighted: bool = False
    """Whether the rows have weights."""
    piece_rows: int = _PIECE_ROWS
    """Approximate number of rows that are sorted at a time."""
    unread: frozenset[str] = frozenset()
    """See `RawParquet.unread`."""
    seen: SeenFiles | None = None
    """Files that the parent's lineage has seen. If None, no row is late."""
    ahead_from: int | None = None
    """Time in microseconds since the epoch. Rows at or after this time are ahead of the clock and
    are not read. None reads all rows."""
    late: LateClicks = field(init=False, repr=False)
    """Clicks that arrived after their rows were written. Late clicks are joined to the rows when
    the rows are read."""

    words: WordCounts = field(init=False, repr=False, default_factory=WordCounts)
    """Counts of the string categories of the rows that were read."""

    def __post_init__(self) -> None:
        """Prepare the late clicks of the same lake."""
        object.__setattr__(self, "late", LateClicks(self.files))

    def of_part(self) -> "Lake":
        """Return a copy that reads a part of the rows and has its own counters.

        `add_part` adds these counters to those of the whole lake.
        """
        part = replace(self)
        part.late._clicks.update(self.late._clicks)
        return part

    def add_part(self, part: "Lake") -> None:
        """Add the string categories and the files of late outcomes that a part has read."""
        self.words.merge(part.words)
        self.late.add_files_of(part.late)

    def without(self, error: UnfitFiles) -> "Lake":
        """Return the same lake without unfit files and with new counters."""
        self.files.leave_out(error)
        return replace(self)

    def version_of(self, day: date) -> int:
        """Return the back-filled version of a day, or 0 if it was never back-filled."""
        return self.files.of_day(day).version

    def digest_of(self, day: date, window: TimeSpan) -> str:
        """Return the SHA-256 of the day's files that may have rows of the window or late rows.

        The digest covers names, sizes and contents of the files.

        Raises:
            ContractError: a file of the day is corrupt.
        """
        hashes, digest = self.files.of_day(day).sha256, hashlib.sha256()
        for file, path in self._read_files(day, window):
            content = hashes.get(file.name) or sha256_file(path)
            digest.update(f"{path.name}\0{file.size}\0{content}\n".encode())
        return digest.hexdigest()

    def num_read_files(self, window: TimeSpan) -> int:
        """Return the number of files that have late rows or may have rows of the window.

        Raises:
            UnfitFiles: the footer of one of these files is corrupt.
        """
        days = [
            day
            for day in self.files.days
            if day in self._late_files or not self._due(window).clipped(day_span(day)).is_empty
        ]
        return sum(len(self._read_files(day, window)) for day in days)

    def _read_files(self, day: date, window: TimeSpan) -> list[tuple[ObjectInfo, Path]]:
        late, span = self._late_files.get(day, []), self._due(day_span(day)).clipped(window)
        files = self.files.of_day(day).files if late or not span.is_empty else []
        paths = self.files.paths(files)
        holds = (
            read_each(paths, partial(_may_hold_rows, span=span))
            if not span.is_empty
            else [False] * len(files)
        )
        return [
            (file, path) for file, path, held in zip(files, paths, holds) if held or file in late
        ]

    def files_of(self, day: date) -> dict[str, int]:
        """Return the version 0 files of the day that the lineage will have seen after this run.

        The result maps names to sizes in bytes.
        """
        here = {name: file.size for name, file in self.files.own_files(day).items()}
        before = {} if self.seen is None or self.seen.begins_anew else self.seen.record.get(day, {})
        unread = {base_name(each) for each in self._unread(day)}
        return {
            name: size for name, size in sorted({**before, **here}.items()) if name not in unread
        }

    def unread_files_of(self, day: date, window: TimeSpan) -> dict[str, str]:
        """Return the day's version 0 files that this run or an earlier one left out as unfit.

        Args:
            day: The day.
            window: Window of the run.

        Returns:
            For each file name, the ISO 8601 time up to which the lineage was trained on rows of the
            file. The time is an empty string if no row of the file was used for training.
        """
        continues = self.seen is not None and not self.seen.begins_anew
        learned = self.seen.learned.get(day, {}) if self.seen is not None and continues else {}
        record = self.seen.record.get(day, {}) if self.seen is not None and continues else {}
        settled = window.start - 1 if window.start is not None and not continues else None
        found = {}
        for file in self._unread(day):
            name = base_name(file)
            if name in learned or file.name in self.files.unfit:
                seen_until = (
                    self.seen.watermark if self.seen is not None and name in record else settled
                )
                until = learned.get(name, seen_until)
                found[name] = to_iso(until) if until is not None else ""
        return found

    def _unread(self, day: date) -> list[ObjectInfo]:
        """Return the day's version 0 files that are unfit or deferred to a later run."""
        names = {each.name for each in self.left_files if not each.counts_as_seen} | set(
            self.files.unfit
        )
        return [file for file in self.files.own_files(day).values() if file.name in names]

    @cached_property
    def _late_files(self) -> dict[date, list[ObjectInfo]]:
        """Files with late rows by day. Days without late rows are absent."""
        if self.seen is None:
            return {}
        days = [day for day in self.files.days if day in self.seen.by_day]
        late = {day: self.seen.late(day, self.files.of_day(day).appended) for day in days}
        return {day: files for day, files in late.items() if files}

    @cached_property
    def left_files(self) -> list[LeftFile]:
        """Return the unseen files whose rows this run leaves out, by day and name.

        A file is unseen if no run of the lineage has seen it. If the run does not read the day, a
        bucket's file is not downloaded just to count its rows.
        """
        if self.seen is None:
            return []
        found = []
        for day in self.files.days:
            if not (unseen := self.seen.left(day, self.files.own_files(day).values())):
                continue
            is_read = day_span(day).end > self.seen.left_before  # type: ignore[operator]
            for file in [each for each in self.files.of_day(day).appended if each in unseen]:
                span = self.seen.not_learned(day, file).clipped(
                    TimeSpan(None, self.seen.left_before)
                )
                num_rows = self._count(file, span) if is_read or self.files.is_folder else None
                if num_rows != 0:
                    found.append(
                        LeftFile(day, file.name, num_rows, is_read or self.seen.begins_anew)
                    )
        return found

    def ahead_files(self) -> list[AheadFile]:
        """Return the files with rows that are ahead of the clock, by day and name.

        Raises:
            UnfitFiles: such files are corrupt.
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
                AheadFile(file.name, num_rows, reason)
                for file, num_rows in zip(files, counts)
                if num_rows
            ]
        return found

    def _count(self, file: ObjectInfo, span: TimeSpan) -> int | None:
        """Return the number of rows of a file within `span`, or None if it is not readable."""
        try:
            return _count_rows(self.files.paths([file])[0], span)
        except ContractError as error:
            logger.warning("rows that were not learned cannot be counted: %s", error)
            return None

    def describe(self) -> str:
        """Return a phrase for messages: the lake's name and its first and last day."""
        days = self.files.days
        return f"lake {self.files.name} holds " + (
            f"days {days[0]} to {days[-1]}" if days else "no rows"
        )

    def tables(self, window: TimeSpan, malformed: MalformedRows) -> Iterator[tuple[Any, Copies]]:
        """Yield the window's rows as tables in the raw schema, with the counts of left-out copies.

        Rows are sorted by event time, within a table and across tables.

        Raises:
            ContractError: a file is corrupt or too malformed.
        """
        yield from self.tables_of(self.pieces(window), malformed)

    def tables_of(
        self, pieces: Iterable[WindowPiece], malformed: MalformedRows
    ) -> Iterator[tuple[Any, Copies]]:
        """Yield the rows of some of the window's pieces, see `tables`."""
        for piece, with_strays in pieces:
            table, copies = self.read(piece, malformed, with_strays=with_strays)
            if table.num_rows:
                yield table, copies

    def pieces(self, window: TimeSpan) -> list[WindowPiece]:
        """Return the pieces with the window's rows in order.

        The files of the pieces are fetched, and the late clicks are read into memory.

        Raises:
            ContractError: a file is corrupt.
        """
        window = self._due(window)
        days = [day for day in self.files.days if not window.clipped(day_span(day)).is_empty]
        self.files.paths(
            file for day in days for file in self.files.of_day(day).files
        )  # fetch all at once
        if days:
            self.late.read_since(days[0])
        found = []
        for day in days:
            files, span = self.files.of_day(day).files, day_span(day).clipped(window)
            logger.info("day %s: version %d, %d files", day, self.version_of(day), len(files))
            cut = _cut_evenly(day, self.files.paths(files), span, piece_rows=self.piece_rows)
            found += [WindowPiece(piece, i == 0) for i, piece in enumerate(cut)]
        return found

    def late_tables(
        self, window: TimeSpan, malformed: MalformedRows
    ) -> Iterator[tuple[Any, Copies]]:
        """Yield the late rows (see `seen_files`) in the same form as `tables` does.

        If a file of the day that is not late contains the same row, the late row is left out,
        because the lineage was already trained on it. A warning reports how many of these rows
        differ in content.

        Args:
            window: Window of `tables`. Malformed rows without a time are recorded only once.
            malformed: Record of malformed rows.

        Raises:
            ContractError: a file is corrupt or too malformed.
        """
        if self.seen is None:
            return
        self.seen.warn(
            {
                day: self.files.of_day(day).appended
                for day in self.files.days
                if day in self.seen.by_day
            }
        )
        for day, files in self._late_files.items():
            logger.info("reading late rows of day %s: %d files", day, len(files))
            others = self._paths_without_late(day)
            in_window = not window.clipped(day_span(day)).is_empty
            for piece, is_first in self._late_pieces(day, files):
                found, copies = self._sorted(
                    piece, malformed, with_strays=is_first and not in_window
                )
                if not found.num_rows:
                    continue
                table, known = self._without_known(found, piece._replace(files=others), malformed)
                if num_changed := known.num_updated + known.num_conflicting:
                    logger.warning(
                        "%d late rows of day %s came with another label or other features after "
                        "they had been "
                        "learned: what was learned stays",
                        num_changed,
                        day,
                    )
                copies.add(known)
                yield self.late.join(table, day), copies

    def _late_pieces(self, day: date, files: list[ObjectInfo]) -> Iterator[tuple[Piece, bool]]:
        """Yield the pieces of a day's late rows.

        The flag is True for the first piece of a group of files.
        """
        assert self.seen is not None
        for span in dict.fromkeys(self.seen.not_learned(day, file) for file in files):
            own = self.files.paths(
                file for file in files if self.seen.not_learned(day, file) == span
            )
            clipped = span.clipped(self.seen.read)
            for i, piece in enumerate(_cut_evenly(day, own, clipped, piece_rows=self.piece_rows)):
                yield piece, i == 0

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
            if (span := self._due(day_span(day))).is_empty:
                continue
            files = self.files.paths(self.files.of_day(day).files)
            found = read_each(files, partial(_newest_time, span=span))
            times = [time for time in found if time is not None]
            if times:
                return max(times)
        return None

    def pieces_before(self, end: int, *, num_days: int, piece_rows: int) -> list[Piece]:
        """Return the rows before `end` as pieces in time order, without late rows.

        Only the footers of the files are read.

        Args:
            end: Time in microseconds since the epoch.
            num_days: Number of the newest days to read. If `end` is within a day, the hours before
                it count as a day.
            piece_rows: Approximate rows of a piece.
        """
        found: list[list[Piece]] = []
        for day in reversed(self.files.days):
            span = day_span(day).clipped(TimeSpan(None, end))
            if len(found) == num_days:
                break
            if not span.is_empty:
                cut = _cut_evenly(day, self._paths_without_late(day), span, piece_rows=piece_rows)
                pieces = [piece for piece in cut if piece.num_rows > 0]
                found += [pieces] if pieces else []
        return [piece for pieces in reversed(found) for piece in pieces]

    def read(
        self, piece: Piece, malformed: MalformedRows, *, with_strays: bool = False
    ) -> tuple[Any, Copies]:
        """Return the rows of a piece without duplicates, and the counts of dropped duplicates.

        The labels include late clicks. See `RawParquet` for `with_strays`.
        """
        table, copies = self._sorted(piece, malformed, with_strays=with_strays)
        return self.late.join(table, piece.day), copies

    def _due(self, span: TimeSpan) -> TimeSpan:
        """Return the part of `span` that is not ahead of the clock."""
        return span.clipped(TimeSpan(None, self.ahead_from))

    def _paths_without_late(self, day: date) -> list[Path]:
        late = self._late_files.get(day, [])
        return self.files.paths(file for file in self.files.of_day(day).files if file not in late)

    def _sorted(
        self, piece: Piece, malformed: MalformedRows, *, with_strays: bool
    ) -> tuple[Any, Copies]:
        corrected = [path for path in piece.files if version_of_folder(path.parent.name)]
        if not corrected or corrected == piece.files:
            batches = self._batches(piece, malformed, with_strays=with_strays)
            return newest_copies(self._table(batches), self.features)
        others = [path for path in piece.files if path not in corrected]
        of_version, copies = self._sorted(
            piece._replace(files=corrected), malformed, with_strays=with_strays
        )
        appended, of_appended = self._sorted(
            piece._replace(files=others), malformed, with_strays=with_strays
        )
        appended, known = without_known(appended, of_version, self.features)
        copies.add(of_appended)
        copies.add(known)
        return newest_copies(pa.concat_tables([of_version, appended]), self.features)[0], copies

    def _table(self, batches: Iterable[Any]) -> Any:
        return pa.Table.from_batches(batches, raw_schema(self.features, weighted=self.weighted))

    def _batches(
        self, piece: Piece, malformed: MalformedRows, *, with_strays: bool
    ) -> Iterator[Any]:
        day = day_span(piece.day)
        for path in piece.files:
            reader = RawParquet(
                path=path,
                features=self.features,
                weighted=self.weighted,
                span=piece.span,
                day=day,
                with_strays=with_strays,
                unread=self.unread,
                words=self.words,
            )
            try:
                yield from reader.batches(malformed)
            except ContractError as error:
                malformed.add_unfit(path, error)

    def _without_known(
        self, table: Any, piece: Piece, malformed: MalformedRows
    ) -> tuple[Any, Copies]:
        """Leave out the rows whose key also occurs in a valid row of `piece`.

        The rows of `piece` are read one batch at a time.
        """
        requests = table.column(REQUEST_ID).combine_chunks()
        # The malformed rows of these files were checked by the runs that trained on the files.
        with MalformedRows(
            Path(os.devnull), max_fraction=1.0, collects_unfit=malformed.collects_unfit
        ) as ignored:
            batches = self._batches(piece, ignored, with_strays=False)
            known = [
                batch.filter(pc.is_in(batch.column(REQUEST_ID), value_set=requests))
                for batch in batches
            ]
        malformed.add_unfit_of(ignored)
        return without_known(table, self._table(known), self.features)


def sorted_day(
    files: list[Path],
    day: date,
    *,
    features: Features,
    malformed: MalformedRows,
    weighted: bool = False,
) -> Iterator[tuple[Any, Copies]]:
    """Yield the rows of one day's raw files as `Lake.tables` does, but with string categories.

    Rows of other days are malformed.

    Raises:
        ContractError: a file is corrupt or too malformed.
    """
    span = day_span(day)
    for i, piece in enumerate(_cut_evenly(day, files, span, piece_rows=_PIECE_ROWS)):
        readers = [
            RawParquet(
                path=path,
                features=features,
                weighted=weighted,
                span=piece.span,
                day=span,
                with_strays=i == 0,
                with_words=True,
            )
            for path in piece.files
        ]
        batches = [batch for reader in readers for batch in reader.batches(malformed)]
        yield newest_copies(
            pa.Table.from_batches(batches, lake_schema(features, weighted=weighted)), features
        )
