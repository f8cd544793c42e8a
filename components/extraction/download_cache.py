"""Objects of one lake on this machine's disk, by name and generation, so that none is downloaded twice.

`objects/<name>/<generation>` is whole and never changed; `objects/<name>/<generation>.part` is an unfinished download.
One process at a time fills the cache, holding `lock`. Objects that no run needs are pruned above a bound; a run that
still reads one has its own hard link (`lake_folder.MirrorView`).
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

SECONDS = 10.0
"""Between two lines."""


class DownloadProgress:
    """Counts what arrives; safe for several threads.

    Args:
        name: What is transferred.
        num_files: To bring.
        num_bytes: To bring.
        seconds: Least time between two lines.
        clock: Seconds from any start.
    """

    def __init__(
        self,
        name: str,
        *,
        num_files: int,
        num_bytes: int,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._num_files, self._num_bytes = name, num_files, num_bytes
        self._seconds, self._clock = seconds, clock
        self._lock = threading.Lock()
        self._began = self._told = clock()
        self.num_done = 0
        """Files that are whole."""
        self.num_arrived = 0
        """Bytes that arrived and were not given up."""

    def arrived(self, num_bytes: int) -> None:
        """Counts bytes; less than 0 where they were given up."""
        with self._lock:
            self.num_arrived += num_bytes
            if (now := self._clock()) - self._told >= self._seconds:
                self._told = now
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

    def close(self) -> None:
        """Says how it ended."""
        logger.info("%s", self.line())


logger = logging.getLogger(__name__)

SPARE_BYTES = 8 << 30
"""Of what the newest run did not need, so much stays, the latest used first: for a round that looks further back."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PART = ".part"


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write on the folder's disk."""
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, kw_only=True)
class DownloadCache:
    """The objects of one lake."""

    folder: Path
    spare_bytes: int = SPARE_BYTES
    num_transfers: int = NUM_TRANSFERS
    free: Callable[[Path], int] = free_bytes
    clock: Callable[[], float] = time.monotonic
    _proven: set[Path] = field(default_factory=set, repr=False, compare=False)
    """Files whose bytes this process has held against their checksum."""

    def path(self, wanted: ObjectInfo) -> Path:
        """Where the object is once it is whole."""
        return self.folder / "objects" / wanted.name / str(wanted.generation)

    def holds(self, wanted: ObjectInfo) -> bool:
        """Whether this very write of the object is here, by its size."""
        path = self.path(wanted)
        return path.is_file() and path.stat().st_size == wanted.size

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
        """Brings those of the objects that are not here; `locked`.

        Raises:
            Changed, TemporaryError: see `Objects.fetch`; what came is kept, and the next call asks for the rest.
            PermanentError: also where the disk has no room, before or during the transfer. What is whole is kept.
        """
        downloads = [self._download(each) for each in wanted if not self._proves(each)]
        if not downloads:
            return
        self._make_room(objects.uri, downloads, wanted)
        missing = sum(download.wanted.size - _size(download.part) for download in downloads)
        progress = DownloadProgress(objects.uri, num_files=len(downloads), num_bytes=missing, clock=self.clock)
        try:
            download_all(
                objects,
                downloads,
                arrived=progress.arrived,
                finished=progress.finish_file,
                num_transfers=self.num_transfers,
            )
        except PermanentError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
                raise self._full(objects.uri, downloads) from error
            raise
        finally:
            progress.close()
        self._proven.update(download.path for download in downloads)

    def prune(self, needed: Iterable[ObjectInfo], spare_bytes: int | None = None) -> None:
        """Removes what is not needed, but `spare_bytes` of the whole objects, the latest used; `locked`."""
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
                self._tidy(path.parent)

    def _proves(self, wanted: ObjectInfo) -> bool:
        """Whether the object is here with the bytes that were listed; one that the disk spoilt is removed."""
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

    def _download(self, wanted: ObjectInfo) -> Download:
        path = self.path(wanted)
        return Download(wanted, path.with_name(path.name + _PART), path)

    def _make_room(self, uri: str, downloads: list[Download], wanted: list[ObjectInfo]) -> None:
        needed = sum(download.wanted.size - _size(download.part) for download in downloads)
        if self.free(self.folder) < needed:
            self.prune(wanted, 0)
        if (free := self.free(self.folder)) < needed:
            raise PermanentError(self._told(uri, downloads, needed, free))

    def _full(self, uri: str, downloads: list[Download]) -> PermanentError:
        """Gives back the room of what was under way: nothing can go on where the disk is full."""
        for download in downloads:
            download.part.unlink(missing_ok=True)
        needed = sum(download.wanted.size for download in downloads if not self.holds(download.wanted))
        return PermanentError("the disk became full; " + self._told(uri, downloads, needed, self.free(self.folder)))

    def _told(self, uri: str, downloads: list[Download], needed: int, free: int) -> str:
        return f"{self.folder}: {len(downloads)} files of {uri} need {needed} bytes more, {free} are free on the disk"

    def _tidy(self, folder: Path) -> None:
        """Removes `folder` and those above it while they are empty."""
        while folder != self.folder and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
