"""The folder that a lake is read from: itself if it is mounted, a mirror if it is in a bucket.

A bucket is listed once and fetched at the generations of that listing: `download_cache` keeps the objects, a view shows
one run a folder with the lake's own names, and `Lake` and `CriteoFiles` read it like any other folder. An object that
was replaced or removed meanwhile is noticed, and the lake is listed again, a bounded number of times. Names, bytes and
order are the bucket's, so a window's rows and digest are those that the same lake in a folder gives.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import Any
from uuid import uuid4

from components.contracts.criteo import DAY_PARTITION, OUTCOME_PARTITION, is_visible
from components.extraction.day_versions import newest_complete
from components.extraction.download_cache import DownloadCache
from components.extraction.lake import PIECE_ROWS, Lake
from components.extraction.late_clicks import CLOCKS
from components.extraction.source import CriteoFiles
from components.extraction.times import DAY_MICROS, TimeSpan, day_span, parse_day
from components.extraction.window import SeenFiles
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError, TemporaryError
from components.storage.locations import open_objects
from components.storage.objects import Changed, ObjectInfo, Objects
from components.storage.uris import is_bucket_uri, local_path

logger = logging.getLogger(__name__)

CACHE_FOLDER = ".lake-cache"
MAX_LISTINGS = 3
"""How often the lake is listed if objects change while they are fetched."""
DAYS = DAY_PARTITION.format(day="")
OUTCOMES = OUTCOME_PARTITION.format(day="")
_LOCK = ".lock"


@contextmanager
def opened_lake(
    uri: str, *, work: Path, open_storage: Callable[[str], Objects] = open_objects, **settings: Any
) -> Iterator[MountedLake]:
    """Opens the lake at `uri`; what was made for this run alone is removed afterwards, the cache stays.

    A `ContractError` from the body names the lake's own files, not those of the mirror.

    Args:
        uri: `gs://bucket/prefix`, `file://` or an absolute path.
        work: Folder for big data; the cache is `work/.lake-cache/`.
        open_storage: Opens a bucket's objects.
        settings: Of the `DownloadCache`, for a lake in a bucket.

    Raises:
        ContractError: `uri` is none of these, or nothing is there.
        TemporaryError, PermanentError: the bucket cannot be listed.
    """
    if not is_bucket_uri(uri):
        try:
            folder = local_path(uri)
        except ContractError as error:
            expected = "expected gs://bucket/prefix, file:///... or an absolute path"
            raise ContractError(f"lake is {uri!r}, {expected}") from error
        yield MountedLake(folder)
        return
    uri = uri.rstrip("/")
    cache = DownloadCache(folder=work / CACHE_FOLDER / hashlib.sha256(uri.encode()).hexdigest()[:16], **settings)
    mirror = Mirror(uri, open_storage, cache)
    with ExitStack() as stack:
        with cache.locked():
            write_whole(cache.folder / "uri", uri + "\n")
            view = stack.enter_context(new_view(cache.folder / "views"))
        mirror.show_in(view)
        try:
            yield mirror
        except ContractError as error:
            raise ContractError(str(error).replace(str(mirror.path), mirror.uri)) from error


class MountedLake:
    """A lake that is a folder of this machine: all of it is there. `Mirror` is one in a bucket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """What `find_source` takes."""
        self.uri = path.as_uri()
        """Where the lake itself lies: `file://` or `gs://`."""

    def named(self, path: Path) -> str:
        """The name for people of a file below `path`: itself, or the object that it is a copy of."""
        return str(path)

    def fetch(self, window: TimeSpan, *, replay_days: int, seen: SeenFiles | None = None) -> None:
        """Brings all that `extract` reads for this window: its days, older ones to replay, and late outcomes.

        If `seen` is given, the days that have other files than those as well: late rows.

        Raises:
            ContractError: the lake holds nothing, or no day of the window.
            TemporaryError: the bucket cannot be reached, or objects change faster than they are read.
            PermanentError: no permission, no bucket, or no room on the disk.
        """

    def fetch_newest(self) -> None:
        """Brings the newest day that has rows, for a caller who needs the lake's end before the window is known.

        Of Criteo's own files it brings the names, which state their days. Raises as `fetch` does.
        """

    def listed(self) -> Mapping[date, Mapping[str, int]] | None:
        """Files of version 0 of each day, bytes by name, fetched or not; None if `path` shows all there are."""
        return None


class Mirror(MountedLake):
    """A lake in a bucket.

    Args:
        uri: The lake's; below it are its objects, or it is the one object (a Criteo file) that is the lake.
        open_storage: Opens a bucket's objects.
        cache: Where they are kept.

    Raises:
        ContractError: nothing is there.
    """

    def __init__(self, uri: str, open_storage: Callable[[str], Objects], cache: DownloadCache) -> None:
        self.uri, self._cache = uri, cache
        self._objects, self._file = open_storage(uri), ""
        self._listing: list[ObjectInfo] | None = self._objects.list()
        folder, _, name = uri.rpartition("/")
        if not self._listing and folder.count("/") > 1:
            self._objects, self._file, self._listing = open_storage(folder), name, None
        self._listing = self._listed()
        self._newest: set[date] = set()

    def show_in(self, view: View) -> None:
        """Sets the view that the run reads."""
        self._view = view
        self.path = view.folder / self._file

    def named(self, path: Path) -> str:
        """See `MountedLake.named`."""
        return str(path).replace(str(self.path), self.uri, 1)

    def fetch(self, window: TimeSpan, *, replay_days: int, seen: SeenFiles | None = None) -> None:
        """See `MountedLake.fetch`."""
        with self._cache.locked():
            self._cache.prune(self._until_stable(lambda listing: self._fetch(listing, window, replay_days, seen)))

    def fetch_newest(self) -> None:
        """See `MountedLake.fetch_newest`."""
        with self._cache.locked():
            self._until_stable(self._fetch_newest)

    def listed(self) -> Mapping[date, Mapping[str, int]] | None:
        """See `MountedLake.listed`: of the listing at whose generations the files were fetched."""
        listing = self._listed()
        return LakeObjects(self.uri, listing).appended if is_lake(listing) else None

    def _listed(self) -> list[ObjectInfo]:
        if not self._listing:
            found = self._objects.list(self._file)
            self._listing = [each for each in found if self._file in ("", each.name)]
            if not self._listing:
                raise ContractError(f"lake {self.uri} holds no object, expected day partitions or Criteo files")
            num_bytes = sum(each.size for each in self._listing)
            logger.info("%s: %d objects, %.1f MB in all", self.uri, len(self._listing), num_bytes / 1e6)
        return self._listing

    def _until_stable(self, bring: Callable[[list[ObjectInfo]], list[ObjectInfo]]) -> list[ObjectInfo]:
        """Calls `bring`, which returns what the view shows, with a listing that holds until all is fetched."""
        for _ in range(MAX_LISTINGS):
            try:
                return bring(self._listed())
            except Changed as error:
                logger.warning("listing the lake again: %s", error)
                self._listing, last = None, error
        raise TemporaryError(f"lake {self.uri} changed while it was read, {MAX_LISTINGS} times: {last}") from last

    def _fetch(
        self, listing: list[ObjectInfo], window: TimeSpan, replay_days: int, seen: SeenFiles | None
    ) -> list[ObjectInfo]:
        if not is_lake(listing):
            return self._fetch_criteo(listing, window)
        lake = LakeObjects(self.uri, listing)
        days, older = {*lake.in_window(window), *self._newest.intersection(lake.days)}, lake.before(window)
        late, num_older = lake.late(seen) if seen else [], replay_days
        while True:
            near = {*days, *older[:num_older]}
            shown = self._show(lake.files({*near, *late}))
            # A day may have files and no row before the window to replay, which only their footers say.
            if num_older >= len(older):
                return shown
            lacking = replay_days - self._num_replayable(window, replay_days, near, seen)
            if lacking <= 0:
                return shown
            num_older += lacking

    def _num_replayable(
        self, window: TimeSpan, num_days: int, days: Collection[date], seen: SeenFiles | None = None
    ) -> int:
        """How many of `days` have rows to replay, at most `num_days`; other days may be here for their late rows."""
        assert window.start is not None
        lake = Lake(folder=self.path, seen=seen)
        try:
            pieces = lake.pieces_before(window.start, num_days=num_days, piece_rows=PIECE_ROWS)
        except ContractError:
            return num_days  # A damaged file: the draw will meet it too, and says what it means.
        return len({piece.day for piece in pieces} & {*days})

    def _fetch_newest(self, listing: list[ObjectInfo]) -> list[ObjectInfo]:
        if not is_lake(listing):
            self._days_of_files(listing)
            return []
        lake, shown = LakeObjects(self.uri, listing), list[ObjectInfo]()
        for day in reversed(lake.days):
            self._newest.add(day)
            shown = self._show(lake.files(self._newest & {*lake.days}, with_outcomes=False))
            end = day_span(day).end
            if end and self._num_replayable(TimeSpan(end), 1, self._newest):
                break
        return shown

    def _fetch_criteo(self, listing: list[ObjectInfo], window: TimeSpan) -> list[ObjectInfo]:
        """Brings the files of the window's days, and an empty file for each other one: a file's position is its day."""
        days = [(day * DAY_MICROS, path.name) for day, path in self._days_of_files(listing)]
        names = {name for start, name in days if window.overlaps(start, start + DAY_MICROS - 1)}
        wanted = [each for each in listing if each.name in names]
        return self._show(wanted, empty=[n for each in listing if "/" not in (n := each.name) and n not in names])

    def _days_of_files(self, listing: list[ObjectInfo]) -> list[tuple[int, Path]]:
        self._view.show({}, empty=[each.name for each in listing if "/" not in each.name])
        return CriteoFiles(path=self.path).numbered()

    def _show(self, wanted: list[ObjectInfo], *, empty: Iterable[str] = ()) -> list[ObjectInfo]:
        self._cache.fill(self._objects, wanted)
        self._view.show({each.name: self._cache.path(each) for each in wanted}, empty=empty)
        return wanted


class View:
    """A folder that one run reads: the lake's own names, each a hard link to a file of the cache.

    The cache may thus remove a file while a run reads it. A view lives as long as its process, which holds a lock
    beside it; the view of a killed process is removed by the next run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def show(self, files: Mapping[str, Path], *, empty: Iterable[str] = ()) -> None:
        """Shows exactly these: names to files of the cache, and names of files without content."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for name, source in files.items():
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                    raise
                # A file system without hard links, or with too many of this file.
                shutil.copyfile(source, target)
        for name in empty:
            (self.folder / name).touch()


@contextmanager
def new_view(views: Path) -> Iterator[View]:
    """Makes a view below `views`, which is removed afterwards. Must be entered while the cache is locked."""
    views.mkdir(parents=True, exist_ok=True)
    _remove_dead_views(views)
    folder = views / uuid4().hex
    lock = folder.with_suffix(_LOCK)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield View(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _remove_dead_views(views: Path) -> None:
    for folder in {path.with_suffix("") for path in views.iterdir()}:
        lock = folder.with_suffix(_LOCK)
        with open(lock, "w") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def is_lake(objects: Iterable[ObjectInfo]) -> bool:
    """Whether there are day partitions, of rows or of outcomes; else these are Criteo's own files."""
    return any(name.startswith((DAYS, OUTCOMES)) and "/" in name.removeprefix(OUTCOMES) for name, *_ in objects)


class LakeObjects:
    """The objects of a lake by day, chosen by their names alone, as `Lake` and `LateClicks` choose files.

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

    def in_window(self, window: TimeSpan) -> list[date]:
        """The days that a row of the window may lie in, in order.

        Raises:
            ContractError: there is none.
        """
        days = [day for day in self.days if not window.clipped(day_span(day)).is_empty]
        if not days:
            held = f"days {self.days[0]} to {self.days[-1]}" if self.days else "no rows"
            raise ContractError(f"window {window} holds no rows, expected some; lake {self._uri} holds {held}")
        return days

    def before(self, window: TimeSpan) -> list[date]:
        """The days that end before the window begins, newest first; none if it has no beginning."""
        start = window.start
        return [] if start is None else [day for day in reversed(self.days) if (day_span(day).end or 0) <= start]

    def late(self, seen: SeenFiles) -> list[date]:
        """The days with files that were not seen, in order. Their other files decide which of the rows are known."""
        return [day for day in self.days if self.appended[day].keys() - seen.by_day.get(day, self.appended[day]).keys()]

    def files(self, days: Iterable[date], *, with_outcomes: bool = True) -> list[ObjectInfo]:
        """The objects that reading these days takes, late outcomes of their rows included.

        A click may be reported any number of days after its row, and by another clock on the day before.
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
    """Of one day's objects those that lie directly in its folder, as `day_versions.visible_files` sees them."""
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
