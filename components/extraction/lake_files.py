"""The files of a lake by day, on this machine: in place in a folder, fetched when they are needed from a bucket.

A lake is listed once, and all that a run reads is of that listing: what an uploader or a back-fill adds later is
another run's. Objects of a bucket are fetched at the generations listed, into a cache, so that none is fetched twice;
one that was replaced or removed since ends the run with an error that a retry mends. Names, bytes and order are the
bucket's, so a window's rows and digest are those that the same lake in a folder gives.

In the cache `objects/<generation>/<name>` is whole and never changed; with `.part` behind its name it is an unfinished
download, which the next run continues. One run at a time uses it, holding `lock`; what it did not need is pruned.
"""

import fcntl
import functools
import hashlib
import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from components.contracts.raw_rows import DAY_PARTITION, OUTCOME_PARTITION, VERSION_COMPLETE
from components.extraction.day_versions import DayFiles, base_name, files_of_day, objects_by_day
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError, PermanentError
from components.storage.downloads import Download, download_all
from components.storage.locations import open_objects
from components.storage.objects import ObjectInfo, Objects, file_crc32c
from components.storage.uris import is_bucket_uri, local_path

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
"""Least time between two log lines."""
_PART = ".part"


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write on the folder's disk."""
    return shutil.disk_usage(folder).free


class DownloadProgress:
    """Counts what arrives, for several threads, and logs it."""

    def __init__(
        self, name: str, *, num_files: int, num_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._num_files, self._num_bytes, self._clock = name, num_files, num_bytes, clock
        self._lock = threading.Lock()
        self._began = self._logged = clock()
        self.num_done = 0
        """Files that are whole."""
        self.num_arrived = 0
        """Bytes that arrived and were not discarded."""

    def arrived(self, num_bytes: int) -> None:
        """Counts bytes; less than 0 if they were discarded."""
        with self._lock:
            self.num_arrived += num_bytes
            if (now := self._clock()) - self._logged >= PROGRESS_SECONDS:
                self._logged = now
                logger.info("%s", self.line())

    def finish_file(self) -> None:
        """Counts one file."""
        with self._lock:
            self.num_done += 1

    def line(self) -> str:
        """Files, bytes, speed (MB/s, 10^6 bytes) since the beginning, and seconds left at that speed."""
        seconds = self._clock() - self._began
        left = self._num_bytes - self.num_arrived
        speed = self.num_arrived / seconds if seconds > 0 else 0.0
        rest = f", {left / speed:.0f} s left" if left > 0 and speed > 0 else ""
        return (
            f"{self._name}: {self.num_done} of {self._num_files} files, {self.num_arrived / 1e6:.1f} of "
            f"{self._num_bytes / 1e6:.1f} MB in {seconds:.1f} s, {speed / 1e6:.1f} MB/s{rest}"
        )


@dataclass(frozen=True, kw_only=True)
class DownloadCache:
    """The objects of one lake; used by one run at a time."""

    folder: Path
    free: Callable[[Path], int] = free_bytes
    _used: set[Path] = field(default_factory=set, repr=False, compare=False)
    """Files that this run reads, whose checksum it has verified."""

    @property
    def objects_folder(self) -> Path:
        """Below it, each generation has a folder in which the object lies under its own name."""
        return self.folder / "objects"

    def path(self, wanted: ObjectInfo) -> Path:
        """Where the object lies once it is whole."""
        return self.objects_folder / str(wanted.generation) / wanted.name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs from the cache; waits for the one that uses it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another run that reads through %s", self.folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def fill(self, objects: Objects, wanted: list[ObjectInfo]) -> None:
        """Downloads those of the objects that are not here; must be `locked`.

        Raises:
            Changed, TemporaryError: see `Objects.fetch`; what arrived is kept, and the next call asks for the rest.
            PermanentError: also if the disk has no room. What is whole is kept.
        """
        missing = [each for each in wanted if self.path(each) not in self._used and not self._is_whole(each)]
        self._used.update(map(self.path, wanted))
        if not missing:
            return
        paths = [self.path(each) for each in missing]
        downloads = [Download(each, path.with_name(path.name + _PART), path) for each, path in zip(missing, paths)]
        num_bytes = self._make_room(objects.uri, downloads)
        progress = DownloadProgress(objects.uri, num_files=len(downloads), num_bytes=num_bytes)
        try:
            download_all(objects, downloads, arrived=progress.arrived, finished=progress.finish_file)
        finally:
            logger.info("%s", progress.line())

    def prune(self) -> None:
        """Removes what this run did not use, and the folders that are empty then."""
        for path in sorted(self.objects_folder.rglob("*"), reverse=True):  # what a folder holds comes before it
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in self._used and path.with_suffix("") not in self._used:
                path.unlink()

    def _is_whole(self, wanted: ObjectInfo) -> bool:
        """Whether the object is here with the bytes that were listed; one that the disk damaged is removed."""
        path = self.path(wanted)
        if not path.is_file() or path.stat().st_size != wanted.size:
            return False
        with open(path, "rb") as file:
            found = file_crc32c(file)
        if found != wanted.crc32c:
            logger.warning("%s has CRC32C %s, expected %s: it is fetched again", path, found, wanted.crc32c)
            path.unlink()
        return found == wanted.crc32c

    def _make_room(self, uri: str, downloads: list[Download]) -> int:
        """The bytes that are still to be downloaded, for which there is room."""
        parts = [each.part.stat().st_size if each.part.exists() else 0 for each in downloads]
        needed = sum(each.wanted.size for each in downloads) - sum(parts)
        if self.free(self.folder) < needed:
            self.prune()
        if (free := self.free(self.folder)) < needed:
            problem = f"{len(downloads)} files of {uri} need {needed} bytes more, {free} are free on the disk"
            raise PermanentError(f"{self.folder}: {problem}")
        return needed


CACHE_FOLDER = ".lake-cache"


class LakeFiles:
    """The objects of one lake.

    `cache` keeps those of a bucket on this machine; None for a folder. Objects written after `until`, seconds since the
    epoch, do not count; None = all do.

    Raises:
        ContractError: there is no day, or a partition's name holds no date.
    """

    def __init__(self, objects: Objects, cache: DownloadCache | None = None, until: float | None = None) -> None:
        self._objects, self._cache = objects, cache
        self.uri = objects.uri
        self.name = objects.uri if cache else str(local_path(objects.uri))
        """For people."""
        listed = [each for each in objects.list() if until is None or each.written_at <= until]
        self._rows = objects_by_day(self.uri, listed, DAY_PARTITION)
        outcomes = objects_by_day(self.uri, listed, OUTCOME_PARTITION)
        if not self._rows and not outcomes:
            raise ContractError(
                f"lake {self.name} holds no rows, expected folders day=YYYY-MM-DD of Parquet files; `evergreen ingest` "
                "brings files of rows into a lake"
            )
        self.outcomes = {
            day: [each for name, each in sorted(names.items()) if "/" not in name and name.endswith(".parquet")]
            for day, names in outcomes.items()
        }
        """Files of late outcomes, by day in order."""
        self.of_day: Callable[[date], DayFiles] = functools.cache(self._files_of_day)
        """What is read of a day; see `files_of_day`."""

    @property
    def days(self) -> list[date]:
        """Days that have files of rows, in order."""
        return list(self._rows)

    def paths(self, wanted: Iterable[ObjectInfo]) -> list[Path]:
        """The files of these objects.

        Raises:
            TemporaryError, PermanentError: see `DownloadCache.fill`.
        """
        found = list(wanted)
        if self._cache is None:
            return [path for each in found if (path := self._objects.local(each.name))]
        self._cache.fill(self._objects, found)
        return [self._cache.path(each) for each in found]

    def named(self, text: object) -> str:
        """`text`, an error or a path, with objects of the lake in place of the cache's copies of them."""
        if self._cache is None:
            return str(text)
        return re.sub(rf"{re.escape(str(self._cache.objects_folder))}/\d+", self.uri, str(text))

    def _files_of_day(self, day: date) -> DayFiles:
        found = files_of_day(self._objects, day, self._rows.get(day, {}))
        if found.incomplete:
            logger.warning(
                "ignored versions %s of %s: they have no %s; if no back-fill of the day is running, remove them",
                found.incomplete, day, VERSION_COMPLETE,
            )  # fmt: skip
        if found.version and found.appended:
            logger.warning(
                "%s: %d files came after version %d was back-filled and are read beside it: %s",
                day, len(found.appended), found.version, [base_name(each) for each in found.appended[:5]],
            )  # fmt: skip
        return found


@contextmanager
def opened_lake(
    uri: str,
    *,
    work: Path,
    until: float | None = None,
    open_storage: Callable[[str], Objects] = open_objects,
    **settings: Any,
) -> Iterator[LakeFiles]:
    """Opens the lake at `uri`. A `ContractError` from the body names the lake's own files, not copies of them.

    The URI is `gs://bucket/prefix`, `file://` or an absolute path; copies of a bucket's files lie in
    `work/.lake-cache/`, by the `settings` of its `DownloadCache`. `until`: see `LakeFiles`.

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
        if not folder.is_dir():
            raise ContractError(f"lake {folder} does not exist, expected a folder of day partitions")
        yield LakeFiles(open_objects(uri), until=until)
        return
    uri = uri.rstrip("/")
    cache = DownloadCache(folder=work / CACHE_FOLDER / hashlib.sha256(uri.encode()).hexdigest()[:16], **settings)
    with cache.locked():
        write_whole(cache.folder / "uri", uri + "\n")
        files = LakeFiles(open_storage(uri), cache, until)
        try:
            yield files
        except ContractError as error:
            raise ContractError(files.named(error)) from error
        cache.prune()
