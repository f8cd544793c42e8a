"""How much the installation's folders hold, and how much room their disks have left.

In: the monitor's state folder, its archive, the model store, and the folders that lie beside the store where one share
holds all: lake, work folders, model repository. A lake or repository in a bucket has no disk, and is not looked at.
Free space is asked each minute. Counting bytes walks over each file, on a network share perhaps for minutes, so it is
done once an hour beside the loop. What is removed, and when, is `components.store.collect`'s concern.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
"""Between two looks at the disks."""
COUNT_SECONDS = 3600.0
"""Between two counts of the folders' bytes."""
BESIDE_STORE = ("lake", "work", "repository")


@dataclass(frozen=True, kw_only=True)
class FolderSize:
    """One folder and the disk that it lies on, which others may share; bytes."""

    held: int | None
    """Sizes of the folder's files together; None before they were first counted."""
    disk_free: int
    """What may still be written by this user."""
    disk_size: int


def installation_folders(state: Path, archive: Path, store: Path) -> dict[str, Path]:
    """The folders to look at, by the names that metrics give them."""
    return {"state": state, "archive": archive, "store": store, **{name: store.parent / name for name in BESIDE_STORE}}


def count_bytes(folder: Path) -> int:
    """Sizes of the files below `folder` together; files that go meanwhile, and links, count nothing."""
    total, waiting = 0, [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
    return total


def start_thread(work: Callable[[], None]) -> None:
    """Does `work` beside the caller; the process ends without waiting for it."""
    threading.Thread(target=work, name="folder-sizes", daemon=True).start()


class SizeWatcher:
    """Looks at the folders when it is time."""

    def __init__(self, folders: Mapping[str, Path], *, start: Callable[[Callable[[], None]], None] = start_thread):
        """Looks at nothing yet; `start` runs a count beside the loop."""
        self._folders, self._start = folders, start
        self._held: dict[str, int] = {}
        self._newest: dict[str, FolderSize] = {}
        self._looked_at: float | None = None
        self._counted_at: float | None = None
        self._counting = False

    def look(self, now: float) -> Mapping[str, FolderSize]:
        """By name, as of at most a minute ago; without the folders that do not exist or cannot be read."""
        if not self._counting and _is_due(self._counted_at, now, COUNT_SECONDS):
            self._counting, self._counted_at = True, now
            self._start(self._count)
        if _is_due(self._looked_at, now, LOOK_SECONDS):
            self._looked_at = now
            self._newest = {name: size for name, path in self._folders.items() if (size := self._size(name, path))}
        return self._newest

    def _size(self, name: str, path: Path) -> FolderSize | None:
        try:
            disk = shutil.disk_usage(path)
        except OSError:
            return None
        return FolderSize(held=self._held.get(name), disk_free=disk.free, disk_size=disk.total)

    def _count(self) -> None:
        """Replaces the counts one by one, so that a folder of many files holds up none of the others."""
        try:
            for name, path in self._folders.items():
                try:
                    self._held[name] = count_bytes(path)
                except OSError as error:
                    self._held.pop(name, None)
                    logger.warning("the size of folder %s cannot be determined: %s", name, error)
        finally:
            self._counting = False


def _is_due(last: float | None, now: float, seconds: float) -> bool:
    # A clock that was set back is early rather than never.
    return last is None or abs(now - last) >= seconds
