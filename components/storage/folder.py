"""Objects as files of one folder of this machine.

A write is a rename of a finished file; an object's generation is made of what a rename changes. Conditional writes take
the kernel's lock of the folder, so that looking and writing are one step among the processes of this machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.contracts.durable import fsync_path, whole_file, write_whole
from components.contracts.errors import ContractError, PermanentError
from components.storage.objects import ABSENT, Changed, ObjectInfo, Stored

_LOCK_FILE = ".objects.lock"


class FolderObjects:
    """See `objects.Objects`; the folder is made at the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.uri = self.root.as_uri()

    def read(self, name: str) -> Stored | None:
        """See `Objects.read`."""
        path = self.local(name)
        try:
            with open(path, "rb") as file:
                return Stored(file.read(), _generation(os.fstat(file.fileno())))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _translated(error, path) from error

    def download(self, name: str, path: Path) -> int:
        """See `Objects.download`."""
        source = self.local(name)
        try:
            with open(source, "rb") as file, whole_file(path) as copy:
                shutil.copyfileobj(file, copy, 1 << 20)
                return _generation(os.fstat(file.fileno()))
        except FileNotFoundError as error:
            raise ContractError(f"{source} is absent, expected an object") from error
        except OSError as error:
            raise _translated(error, source) from error

    def write(self, name: str, content: bytes | Path, *, if_generation: int | None = None) -> int:
        """See `Objects.write`."""
        path = self.local(name)
        try:
            with self._exclusive():
                self._expect(path, if_generation)
                if isinstance(content, Path):
                    with open(content, "rb") as file, whole_file(path) as copy:
                        shutil.copyfileobj(file, copy, 1 << 20)
                else:
                    write_whole(path, content)
                return _generation(path.stat())
        except OSError as error:
            raise _translated(error, path) from error

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See `Objects.list`; files whose names start with a dot are unfinished or locks, not objects."""
        found = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = [each for each in folders if not each.startswith(".")]
            for each in names:
                path = Path(folder, each)
                name = path.relative_to(self.root).as_posix()
                if not each.startswith(".") and name.startswith(prefix):
                    try:
                        status = path.stat()
                    except FileNotFoundError:
                        continue
                    found.append(ObjectInfo(name, status.st_size, _generation(status)))
        return sorted(found)

    def delete(self, name: str, *, if_generation: int | None = None) -> None:
        """See `Objects.delete`."""
        path = self.local(name)
        try:
            with self._exclusive():
                self._expect(path, if_generation)
                path.unlink(missing_ok=True)
                if path.parent.exists():
                    fsync_path(path.parent)
        except OSError as error:
            raise _translated(error, path) from error

    def move(self, source: str, target: str) -> None:
        """See `Objects.move`."""
        before, after = self.local(source), self.local(target)
        if not before.is_dir():
            raise ContractError(f"{before} is absent, expected a folder to move to {after}")
        if after.exists():
            raise ContractError(f"{after} exists already, expected nothing there")
        try:
            after.parent.mkdir(parents=True, exist_ok=True)
            os.rename(before, after)
            fsync_path(after.parent)
            fsync_path(before.parent)
        except OSError as error:
            raise _translated(error, after) from error

    def local(self, name: str) -> Path:
        """See `Objects.local`."""
        if not name or name.startswith("/") or ".." in name.split("/"):
            raise ContractError(f"object is {name!r}, expected a name below {self.uri}")
        return self.root / name

    def _expect(self, path: Path, generation: int | None) -> None:
        if generation is None:
            return
        found = _generation(path.stat()) if path.exists() else ABSENT
        if found != generation:
            raise Changed(f"{path} is at generation {found}, expected {generation}: another writer came first")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _generation(status: os.stat_result) -> int:
    """A number that a rename of a new file over an old one changes; never `ABSENT`."""
    told = f"{status.st_dev} {status.st_ino} {status.st_mtime_ns} {status.st_size}"
    return 1 + int.from_bytes(hashlib.blake2b(told.encode(), digest_size=7).digest(), "big")


def _translated(error: OSError, path: Path) -> PermanentError:
    return PermanentError(f"{path}: {error.strerror}")
