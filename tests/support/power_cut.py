"""A disk that forgets at a power cut what was not flushed: SIGKILL alone shows no missing fsync.

POSIX promises no more than this: a file's bytes are on disk once the file was flushed, and a new, renamed or removed
name once its folder was. Of each folder's later changes any first few may have reached the disk. Changes are those by
`os.mkdir`, `rename`, `replace` and `unlink`; a file counts from when it is renamed into place.
"""

import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from tests.support.crashes import Killed


class Disk:
    """Watches the changes below `root`, and crashes before the `crash_at`th of them or of the flushes."""

    def __init__(self, root: Path, crash_at: int | None) -> None:
        self.root, self.crash_at, self.seen = root, crash_at, 0
        self._pending: list[tuple[Path, Callable[[], None]]] = []
        """Folder and undoing of each change that its folder's flush has not followed, in order."""
        self._flushed: set[int] = set()
        self._torn: list[Path] = []
        self._is_dead = False

    def install(self, monkeypatch) -> None:
        for name in ("mkdir", "rename", "replace", "unlink", "fsync"):
            monkeypatch.setattr(os, name, self._watched(getattr(self, f"_{name}"), getattr(os, name)))

    def _watched(self, note, real):
        def call(*args, **more):
            if self._is_dead or self.seen == self.crash_at:
                self._is_dead = True  # nothing that runs on the way out happens either
                raise Killed
            self.seen += 1
            undo = note(*args)
            real(*args, **more)
            if undo:
                self._pending.append(undo)

        return call

    def _mkdir(self, path, *mode):
        return (Path(path).parent, lambda: shutil.rmtree(path)) if not Path(path).exists() else None

    def _rename(self, source, target):
        source, target = Path(source), Path(target)
        before = target.read_bytes() if target.exists() else None
        if source.stat().st_ino not in self._flushed:
            self._torn.append(target)

        def undo():
            real_rename(target, source)
            if before is not None:
                target.write_bytes(before)

        return target.parent, undo

    _replace = _rename

    def _unlink(self, path):
        content = Path(path).read_bytes() if Path(path).exists() else None
        return None if content is None else (Path(path).parent, lambda: Path(path).write_bytes(content))

    def _fsync(self, descriptor):
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self._pending = [each for each in self._pending if each[0] != folder]
        else:
            self._flushed.add(status.st_ino)

    def cut_power(self, source: random.Random) -> None:
        """Leaves what a disk may hold then."""
        for path in self._torn:
            if path.exists():
                os.truncate(path, source.randrange(path.stat().st_size))
        kept = {folder: source.randint(0, sum(f == folder for f, _ in self._pending)) for folder, _ in self._pending}
        undone = []
        for folder, undo in self._pending:
            kept[folder] -= 1
            if kept[folder] < 0:
                undone.append((folder, undo))
        for folder, undo in reversed(undone):
            if folder.exists():
                undo()


real_rename = os.rename
