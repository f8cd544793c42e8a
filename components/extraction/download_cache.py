"""Objects of one lake on this machine's disk, by name and generation, so that none is downloaded twice.

`objects/<name>/<generation>` is whole and never changed; `objects/<name>/<generation>.part` is an unfinished download.
One process at a time fills the cache, holding `lock`. Objects that no run needs are pruned above a bound; a run that
still reads one has its own hard link (`lake_folder.View`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from components.runtime.errors import PermanentError
from components.storage.checksums import file_crc32c
from components.storage.downloads import NUM_TRANSFERS, Download, download_all
from components.storage.objects import ObjectInfo, Objects

logger = logging.getLogger(__name__)

SPARE_BYTES = 8 << 30
"""Of what the newest run did not need, this much stays, the most recently used first: for a round that looks further
back."""
PROGRESS_SECONDS = 10.0
"""Least time between two log lines."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PART = ".part"


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write on the folder's disk."""
    return shutil.disk_usage(folder).free


class DownloadProgress:
    """Counts what arrives, for several threads, and logs it.

    Args:
        name: What is downloaded.
        num_files: To download.
        num_bytes: To download.
        clock: Seconds from any start.
    """

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
    """The objects of one lake."""

    folder: Path
    spare_bytes: int = SPARE_BYTES
    num_transfers: int = NUM_TRANSFERS
    free: Callable[[Path], int] = free_bytes
    clock: Callable[[], float] = time.monotonic
    _proven: set[Path] = field(default_factory=set, repr=False, compare=False)
    """Files whose checksum this process has verified."""

    def path(self, wanted: ObjectInfo) -> Path:
        """Where the object lies once it is whole."""
        return self.folder / "objects" / wanted.name / str(wanted.generation)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from changing the cache; waits for the one that does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another run that fills %s", self.folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def fill(self, objects: Objects, wanted: list[ObjectInfo]) -> None:
        """Downloads those of the objects that are not here; must be `locked`.

        Raises:
            Changed, TemporaryError: see `Objects.fetch`; what arrived is kept, and the next call asks for the rest.
            PermanentError: also if the disk has no room, before or during the download. What is whole is kept.
        """
        missing = [each for each in wanted if not self._is_proven(each)]
        if not missing:
            return
        paths = [self.path(each) for each in missing]
        downloads = [Download(each, path.with_name(path.name + _PART), path) for each, path in zip(missing, paths)]
        num_bytes = self._make_room(objects.uri, downloads, wanted)
        progress = DownloadProgress(objects.uri, num_files=len(downloads), num_bytes=num_bytes, clock=self.clock)
        try:
            download_all(
                objects,
                downloads,
                arrived=progress.arrived,
                finished=progress.finish_file,
                num_transfers=self.num_transfers,
            )
        except PermanentError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL):
                raise
            # Nothing can continue on a full disk: the unfinished downloads give their room back.
            for download in downloads:
                download.part.unlink(missing_ok=True)
            needed = sum(each.wanted.size for each in downloads if not self.holds(each.wanted))
            problem = self._lack_of_room(objects.uri, downloads, needed)
            raise PermanentError(f"the disk became full; {problem}") from error
        finally:
            logger.info("%s", progress.line())
        self._proven.update(paths)

    def prune(self, needed: Iterable[ObjectInfo], spare_bytes: int | None = None) -> None:
        """Removes what is not needed except `spare_bytes` of whole objects, recently used ones; must be `locked`."""
        kept = {self.path(each) for each in needed}
        now = time.time()
        for path in kept:
            if path.exists():
                os.utime(path, (now, now))
        others = [p for p in (self.folder / "objects").rglob("*") if p.is_file() and p not in kept]
        others = [p for p in others if p.suffix != _PART or p.with_suffix("") not in kept]
        room = self.spare_bytes if spare_bytes is None else spare_bytes
        for path in sorted(others, key=lambda p: (p.suffix == _PART, -p.stat().st_mtime)):
            room -= path.stat().st_size
            if room < 0 or path.suffix == _PART:
                path.unlink()
                folder = path.parent
                while folder != self.folder and not any(folder.iterdir()):
                    folder.rmdir()
                    folder = folder.parent

    def holds(self, wanted: ObjectInfo) -> bool:
        """Whether this very write of the object is here, judged by its size."""
        path = self.path(wanted)
        return path.is_file() and path.stat().st_size == wanted.size

    def _is_proven(self, wanted: ObjectInfo) -> bool:
        """Whether the object is here with the bytes that were listed; one that the disk damaged is removed."""
        path = self.path(wanted)
        if not self.holds(wanted):
            return False
        if path not in self._proven and wanted.crc32c is not None:
            with open(path, "rb") as file:
                found = file_crc32c(file)
            if found != wanted.crc32c:
                logger.warning("%s has CRC32C %s, expected %s: it is fetched again", path, found, wanted.crc32c)
                path.unlink()
                return False
        self._proven.add(path)
        return True

    def _make_room(self, uri: str, downloads: list[Download], wanted: list[ObjectInfo]) -> int:
        """The bytes that are still to be downloaded, for which there is room."""
        parts = [each.part.stat().st_size if each.part.exists() else 0 for each in downloads]
        needed = sum(each.wanted.size for each in downloads) - sum(parts)
        if self.free(self.folder) < needed:
            self.prune(wanted, 0)
        if self.free(self.folder) < needed:
            raise PermanentError(self._lack_of_room(uri, downloads, needed))
        return needed

    def _lack_of_room(self, uri: str, downloads: list[Download], needed: int) -> str:
        free = self.free(self.folder)
        return f"{self.folder}: {len(downloads)} files of {uri} need {needed} bytes more, {free} are free on the disk"
