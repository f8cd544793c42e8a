"""A disk that loses unflushed data at a power cut.

A test with SIGKILL alone does not detect a missing fsync.

POSIX makes two promises only. A file's bytes are durable after a flush of the file. A new, renamed
or removed name is durable after a flush of the name's folder. After a crash, the disk may contain
any prefix of the later changes of each folder. Changes are calls of `os.mkdir`, `rename`, `replace`
and `unlink`. A file is tracked from its first rename on.
"""

import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from tests.support.crashes import Kill


class Disk(Kill):
    """Watches changes below `root`, and simulates a crash.

    The crash happens before the change or flush with the number `crash_at`.
    """

    def __init__(self, root: Path, crash_at: int | None) -> None:
        super().__init__(crash_at)
        self.root = root
        self._pending: list[tuple[Path, Callable[[], None]]] = []
        """Changes that are not flushed yet, in order: the changed folder, and a function that
        undoes the change."""
        self._flushed: set[int] = set()
        self._torn: list[Path] = []
        self.watch(os, "mkdir", "rename", "replace", "unlink", "fsync")

    def around(self, name, real, **more):
        note = getattr(self, f"_{name}")

        def change(*args, **more):
            undo = note(*args)
            real(*args, **more)
            if undo:
                self._pending.append(undo)

        return super().around(name, change, **more)

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
        return (
            None
            if content is None
            else (Path(path).parent, lambda: Path(path).write_bytes(content))
        )

    def _fsync(self, descriptor):
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            folder = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self._pending = [each for each in self._pending if each[0] != folder]
        else:
            self._flushed.add(status.st_ino)

    def cut_power(self, source: random.Random) -> None:
        """Restore one of the states in which the power cut may leave the disk."""
        for path in self._torn:
            if path.exists():
                os.truncate(path, source.randrange(path.stat().st_size))
        remaining = {
            folder: source.randint(0, sum(f == folder for f, _ in self._pending))
            for folder, _ in self._pending
        }
        undone = []
        for folder, undo in self._pending:
            remaining[folder] -= 1
            if remaining[folder] < 0:
                undone.append((folder, undo))
        for folder, undo in reversed(undone):
            if folder.exists():
                undo()


real_rename = os.rename
