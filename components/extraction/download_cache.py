"""Objects of one lake on this machine's disk, by name and generation, so that none is downloaded twice.

`objects/<generation>/<name>` is whole and never changed; with `.part` behind its name it is an unfinished download,
which the next run continues. One run at a time uses the cache, holding `lock`; what it did not need is pruned.
"""

import fcntl
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from components.runtime.errors import PermanentError
from components.storage.downloads import Download, download_all
from components.storage.objects import ObjectInfo, Objects, file_crc32c

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
