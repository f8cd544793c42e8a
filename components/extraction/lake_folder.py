"""The folder that a lake is read from: itself if it is mounted, a mirror if it is in a bucket.

A bucket is listed once and fetched at the generations of that listing: `download_cache` keeps the objects, `MirrorView`
shows one run a folder with the lake's own names, and `Lake` and `CriteoFiles` read it like any other folder. An object
that was replaced or removed meanwhile is noticed, and the lake is listed again, a bounded number of times. Names, bytes
and order are the bucket's, so a window's rows and digest are those that the same lake in a folder gives.
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
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol
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


class LakeFolder(Protocol):
    """A lake, or what is asked for of one, on this machine."""

    @property
    def uri(self) -> str:
        """Where the lake itself lies: `file://` or `gs://`."""

    @property
    def path(self) -> Path:
        """What `find_source` takes."""

    def named(self, path: Path) -> str:
        """What people call a file below `path`: itself, or the object that it is a copy of."""

    def fetch(self, window: TimeSpan, *, replay_days: int, seen: SeenFiles | None = None) -> None:
        """Brings all that `extract` reads for this window: its days, older ones to replay, and late outcomes.

        Where `seen` is given, the days that have files beside those, too: late rows.

        Raises:
            ContractError: the lake holds nothing, or no day of the window.
            TemporaryError: the bucket cannot be reached, or objects change faster than they are read.
            PermanentError: no permission, no bucket, or no room on the disk.
        """

    def fetch_newest(self) -> None:
        """Brings the newest day that has rows, for whoever must know the lake's end before the window; errors alike.

        Of Criteo's own files the names, which tell their days.
        """

    def listed(self) -> Mapping[date, Mapping[str, int]] | None:
        """Files of version 0 of each day, bytes by name, fetched or not; None where `path` shows all there are."""


@dataclass(frozen=True)
class MountedLake:
    """A lake that is a folder of this machine: all of it is there."""

    path: Path

    @property
    def uri(self) -> str:
        """See `LakeFolder.uri`."""
        return self.path.as_uri()

    def named(self, path: Path) -> str:
        """See `LakeFolder.named`."""
        return str(path)

    def fetch(self, window: TimeSpan, *, replay_days: int, seen: SeenFiles | None = None) -> None:
        """See `LakeFolder.fetch`."""

    def fetch_newest(self) -> None:
        """See `LakeFolder.fetch_newest`."""

    def listed(self) -> None:
        """See `LakeFolder.listed`."""


@contextmanager
def opened_lake(uri: str, *, work: Path, **settings: Any) -> Iterator[LakeFolder]:
    """Opens the lake at `uri`; what was made for this run alone is gone afterwards, the cache stays.

    A `ContractError` from inside names the lake's own files, not those of the mirror.

    Args:
        uri: `gs://bucket/prefix`, `file://` or an absolute path.
        work: Folder for big data; the cache is `work/.lake-cache/`.
        settings: Of `Mirror`, where the lake is in a bucket.

    Raises:
        ContractError: `uri` is none of these.
    """
    if not is_bucket_uri(uri):
        yield MountedLake(_mounted(uri))
        return
    from components.extraction.lake_folder import opened_mirror

    with opened_mirror(uri, work, **settings) as mirror:
        try:
            yield mirror
        except ContractError as error:
            raise ContractError(str(error).replace(str(mirror.path), mirror.uri)) from error


def _mounted(uri: str) -> Path:
    try:
        return local_path(uri)
    except ContractError as error:
        raise ContractError(f"lake is {uri!r}, expected gs://bucket/prefix, file:///... or an absolute path") from error


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


logger = logging.getLogger(__name__)


def find_objects(uri: str, open_storage: Callable[[str], Objects]) -> tuple[Objects, list[ObjectInfo], str | None]:
    """The objects below `uri`; where it is an object itself, those beside it, it alone, and its name.

    Raises:
        ContractError: there is neither.
    """
    objects = open_storage(uri)
    folder, _, name = uri.rpartition("/")
    if found := objects.list():
        return objects, _told(uri, found), None
    if folder.count("/") > 1:
        beside = open_storage(folder)
        return beside, list_objects(beside, uri, name), name
    return objects, _told(uri, found), None


def list_objects(objects: Objects, uri: str, file: str | None) -> list[ObjectInfo]:
    """What `objects` hold; where `file` is given, it alone.

    Raises:
        ContractError: nothing; the message names the lake, `uri`.
    """
    return _told(uri, [each for each in objects.list(file or "") if file in (None, each.name)])


def _told(uri: str, listing: list[ObjectInfo]) -> list[ObjectInfo]:
    if not listing:
        raise ContractError(f"lake {uri} holds no object, expected day partitions or Criteo files")
    logger.info("%s: %d objects, %.1f MB in all", uri, len(listing), sum(each.size for each in listing) / 1e6)
    return listing


_LOCK = ".lock"


class MirrorView:
    """What one run sees; made by `new_view`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def show(self, files: Mapping[str, Path], *, empty: Iterable[str] = ()) -> None:
        """Shows exactly these: names to files of the cache, and names of files without content."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for name, source in files.items():
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(source, target)
        for name in empty:
            (self.folder / name).touch()


@contextmanager
def new_view(views: Path) -> Iterator[MirrorView]:
    """Makes a view below `views`, which is gone afterwards. To be entered while the cache is locked."""
    views.mkdir(parents=True, exist_ok=True)
    _sweep(views)
    folder = views / uuid4().hex
    lock = folder.with_suffix(_LOCK)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield MirrorView(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _sweep(views: Path) -> None:
    """Removes the views whose processes are gone."""
    for folder in {path.with_suffix("") for path in views.iterdir()}:
        lock = folder.with_suffix(_LOCK)
        with open(lock, "w") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        # A file system without hard links, or with too many of this file.
        shutil.copyfile(source, target)


logger = logging.getLogger(__name__)

CACHE_FOLDER = ".lake-cache"
MAX_LISTINGS = 3
"""So often the lake is listed where objects change while they are fetched."""


@contextmanager
def opened_mirror(
    uri: str, work: Path, *, open_storage: Callable[[str], Objects] = open_objects, **settings: Any
) -> Iterator[Mirror]:
    """Opens the lake at `uri` (`gs://`) with its cache below `work`.

    Args:
        uri: Of the lake.
        work: Folder for big data.
        open_storage: Opens what lies below a URI.
        settings: Of the `DownloadCache`.

    Raises:
        ContractError: nothing is there.
        TemporaryError, PermanentError: the bucket cannot be listed.
    """
    uri = uri.rstrip("/")
    name = hashlib.sha256(uri.encode()).hexdigest()[:16]
    cache = DownloadCache(folder=work / CACHE_FOLDER / name, **settings)
    objects, listing, file = find_objects(uri, open_storage)
    with ExitStack() as stack:
        with cache.locked():
            write_whole(cache.folder / "uri", uri + "\n")
            view = stack.enter_context(new_view(cache.folder / "views"))
        yield Mirror(uri, objects, cache, view, listing=listing, file=file)


class Mirror:
    """See `lake_folder.LakeFolder`.

    Args:
        uri: The lake's.
        objects: Where it is listed and fetched.
        cache: Where it is kept.
        view: What is read.
        listing: What `objects` hold.
        file: The one object that is the lake; None = all of them.
    """

    def __init__(
        self,
        uri: str,
        objects: Objects,
        cache: DownloadCache,
        view: MirrorView,
        *,
        listing: list[ObjectInfo],
        file: str | None,
    ) -> None:
        self.uri = uri
        self.path = view.folder / file if file else view.folder
        self._objects, self._cache, self._view, self._file = objects, cache, view, file
        self._listing: list[ObjectInfo] | None = listing
        self._newest: set[date] = set()

    def named(self, path: Path) -> str:
        """See `LakeFolder.named`."""
        return str(path).replace(str(self.path), self.uri, 1)

    def fetch(self, window: TimeSpan, *, replay_days: int, seen: SeenFiles | None = None) -> None:
        """See `LakeFolder.fetch`."""
        with self._cache.locked():
            self._cache.prune(self._repeated(lambda listing: self._fetch(listing, window, replay_days, seen)))

    def fetch_newest(self) -> None:
        """See `LakeFolder.fetch_newest`."""
        with self._cache.locked():
            self._repeated(self._fetch_newest)

    def listed(self) -> Mapping[date, Mapping[str, int]] | None:
        """See `LakeFolder.listed`: of the listing at whose generations the files were fetched."""
        listing = self._listed()
        return LakeObjects(self.uri, listing).appended if is_lake(listing) else None

    def _repeated(self, bring: Callable[[list[ObjectInfo]], list[ObjectInfo]]) -> list[ObjectInfo]:
        """Calls `bring`, which says what the view shows, with a listing that holds until all is fetched."""
        for _ in range(MAX_LISTINGS):
            try:
                return bring(self._listed())
            except Changed as error:
                logger.warning("listing the lake anew: %s", error)
                self._listing, last = None, error
        raise TemporaryError(f"lake {self.uri} changed while it was read, {MAX_LISTINGS} times: {last}") from last

    def _listed(self) -> list[ObjectInfo]:
        if self._listing is None:
            self._listing = list_objects(self._objects, self.uri, self._file)
        return self._listing

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
            # A day may have files and no row before the window to replay, which only their footers tell.
            replayable = (
                self._num_replayable(window, replay_days, near, seen) if num_older < len(older) else replay_days
            )
            lacking = replay_days - replayable
            if lacking <= 0:
                return shown
            num_older += lacking

    def _num_replayable(
        self, window: TimeSpan, num_days: int, days: Collection[date], seen: SeenFiles | None = None
    ) -> int:
        """How many of `days` have rows to replay, `num_days` at most; other days may be here for their late rows."""
        assert window.start is not None
        lake = Lake(folder=self.path, seen=seen)
        try:
            pieces = lake.pieces_before(window.start, num_days=num_days, piece_rows=PIECE_ROWS)
        except ContractError:
            return num_days  # A damaged file: the draw will meet it too, and says what it means.
        return len({piece.day for piece in pieces} & {*days})

    def _fetch_newest(self, listing: list[ObjectInfo]) -> list[ObjectInfo]:
        if not is_lake(listing):
            # Days are told by the names there.
            self._numbered(listing)
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
        """Brings the files of the window's days; an empty one stands for each other, for a file's place is its day."""
        days = [(day * DAY_MICROS, path.name) for day, path in self._numbered(listing)]
        names = {name for start, name in days if window.overlaps(start, start + DAY_MICROS - 1)}
        wanted = [each for each in listing if each.name in names]
        return self._show(wanted, empty=[n for each in listing if "/" not in (n := each.name) and n not in names])

    def _numbered(self, listing: list[ObjectInfo]) -> list[tuple[int, Path]]:
        self._view.show({}, empty=[each.name for each in listing if "/" not in each.name])
        return CriteoFiles(path=self.path).numbered()

    def _show(self, wanted: list[ObjectInfo], *, empty: list[str] | None = None) -> list[ObjectInfo]:
        self._cache.fill(self._objects, wanted)
        self._view.show({each.name: self._cache.path(each) for each in wanted}, empty=empty or [])
        return wanted
