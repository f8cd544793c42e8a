"""Objects as files of one local folder.

Each write first creates a temporary file and then renames it. Every change locks a file of the
folder. Therefore no other process of this machine can write between the check of a condition and
the write. Under the lock, each write gets a unique time. The generation of an object is derived
from the time of its write. A new file can have the same inode, size and clock tick as the old file.
Empty folders are removed, because a bucket has no empty folders either. Before its first change, a
process removes unfinished files of a killed writer. No other program may write below the root.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from evergreen.runtime.durable import (
    READABLE,
    UNFINISHED,
    flushed_to_disk,
    fsync_path,
    own_umask,
    whole_file,
)
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from evergreen.storage.objects import (
    ABSENT,
    Changed,
    Differs,
    ObjectInfo,
    Stored,
    check_name,
    opened,
)

_LOCK_FILE = ".objects.lock"
_CHUNK_BYTES = 1 << 20
_TEMPORARY = (
    errno.EINTR,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EMFILE,
    errno.ENFILE,
)
"""Errors that can end without a change of the input, for example errors of a network file
system."""


class FolderObjects:
    """Objects of a folder, which the first write creates. See `objects.Objects`."""

    def __init__(self, root: Path, *, readable: bool = False) -> None:
        """Use the folder `root` as object storage. Nothing is written yet.

        Args:
            root: The folder.
            readable: Whether other users of the machine, or of a network share, can read new files.
                If False, the umask of the process decides.
        """
        self._readable = readable
        self.root = root.absolute()
        self.uri = self.root.as_uri()
        self._is_cleaned = False

    def read(self, name: str) -> Stored | None:
        """See `Objects.read`."""
        path = self.local(name)
        try:
            with open(path, "rb") as file:
                return Stored(file.read(), _generation(os.fstat(file.fileno())))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except OSError as error:
            raise _translated(error, path) from error

    def fetch(self, wanted: ObjectInfo, part: Path) -> None:
        """See `Objects.fetch`."""
        source = self.local(wanted.name)
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(source, "rb") as file, flushed_to_disk(open(part, "wb")) as copy:
                if (found := _generation(os.fstat(file.fileno()))) != wanted.generation:
                    raise Changed(
                        f"{source} is at generation {found}, expected {wanted.generation}: it was "
                        "replaced"
                    )
                shutil.copyfileobj(file, copy, _CHUNK_BYTES)
            if not _are_equal(source, part):
                raise TemporaryError(f"{part} does not match {source} after the copy")
        except OSError as error:
            if not source.is_file():
                raise Changed(
                    f"{source} is absent, expected the listed object: it was removed"
                ) from error
            raise _translated(error, Path(error.filename or part)) from error

    def write(self, name: str, content: bytes | Path, *, if_generation: int | None = None) -> int:
        """See `Objects.write`."""
        path = self.local(name)
        with self._changing(path) as now:
            self._expect(path, if_generation)
            with opened(content) as source, whole_file(path) as copy:
                _fill(copy, source, now)
            return _generation(path.stat())

    def upload(self, name: str, path: Path) -> bool:
        """See `Objects.upload`."""
        final = self.local(name)
        with self._changing(final) as now:
            is_new = not final.is_file()
            if is_new:
                with open(path, "rb") as source, whole_file(final) as copy:
                    _fill(copy, source, now)
                    os.fsync(copy.fileno())
                    if not _are_equal(Path(copy.name), path):
                        raise TemporaryError(f"{final} does not match {path} after the write")
            elif not _are_equal(final, path):
                raise Differs(f"{final} exists with other bytes than {path}")
            # Flush the parent folders too. A killed writer may have created these folders without
            # flushing them.
            for folder in (final.parent, *final.parent.parents):
                fsync_path(folder)
                if folder == self.root:
                    break
            return is_new

    def copy(self, source: str, target: str) -> int:
        """See `Objects.copy`.

        The copy is a hard link, which is safe because no writer changes a file in place.
        """
        before, after = self.local(source), self.local(target)
        with self._changing(after) as now:
            if not before.is_file():
                raise ContractError(f"{before} is absent, expected an object to copy to {after}")
            self._expect(after, ABSENT)
            after.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(before, after)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                    raise
                # The file system has no hard links, or the file already has too many of them.
                with open(before, "rb") as file, whole_file(after) as copy:
                    _fill(copy, file, now)
            fsync_path(after.parent)
            return _generation(after.stat())

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """See `Objects.list`.

        Files whose names start with a dot are unfinished files or locks, not objects.
        """
        found = []
        # Walk only folders that can contain a matching object. A repository of many versions is
        # listed one version at a time.
        start = self.root / prefix.rpartition("/")[0]
        for folder, folders, names in os.walk(start, onerror=_raise_unless_absent):
            folders[:] = [each for each in folders if not each.startswith(".")]
            for each in names:
                path = Path(folder, each)
                name = path.relative_to(self.root).as_posix()
                if not each.startswith(".") and name.startswith(prefix):
                    try:
                        status = path.stat()
                    except OSError as error:
                        _raise_unless_absent(error)
                        continue
                    found.append(
                        ObjectInfo(name, status.st_size, _generation(status), None, status.st_mtime)
                    )
        return sorted(found)

    def delete(self, name: str, *, if_generation: int | None = None) -> None:
        """See `Objects.delete`."""
        path = self.local(name)
        with self._changing(path):
            if not path.is_file():
                return
            self._expect(path, if_generation)
            path.unlink()
            self._remove_empty_folders(path.parent)

    def move(self, source: str, target: str) -> None:
        """See `Objects.move`."""
        before, after = self.local(source), self.local(target)
        with self._changing(after):
            if not self.list(f"{source}/"):
                raise ContractError(
                    f"{before} cannot be moved to {after}: the folder does not exist"
                )
            if self.list(f"{target}/") or after.is_file():
                raise ContractError(f"{after} exists already, expected nothing there")
            if after.is_dir():
                # The folder contains only unfinished files. Move the folder away in one rename,
                # then delete it.
                aside = after.with_name(f".{after.name}.{uuid4().hex}")
                os.rename(after, aside)
                shutil.rmtree(aside, ignore_errors=True)
            after.parent.mkdir(parents=True, exist_ok=True)
            os.rename(before, after)
            fsync_path(after.parent)
            self._remove_empty_folders(before.parent)

    def local(self, name: str) -> Path:
        """See `Objects.local`."""
        return self.root / check_name(name, self.uri)

    def _expect(self, path: Path, generation: int | None) -> None:
        if generation is None:
            return
        found = _generation(path.stat()) if path.is_file() else ABSENT
        if found != generation:
            raise Changed(
                f"{path} is at generation {found}, expected {generation}: another writer came first"
            )

    def _remove_unfinished(self) -> None:
        """Remove the unfinished files that a killed writer left.

        Only the holder of the lock may call this method.
        """
        if not self._is_cleaned:
            for path in [
                p for p in self.root.rglob(".*") if UNFINISHED.fullmatch(p.name) and p.is_file()
            ]:
                path.unlink()
                self._remove_empty_folders(path.parent)
            self._is_cleaned = True

    def _remove_empty_folders(self, folder: Path) -> None:
        """Remove `folder` and its parents below the root while they are empty.

        The first folder that is not removed is flushed to disk.
        """
        while folder != self.root and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent
        fsync_path(folder)

    @contextmanager
    def _changing(self, path: Path) -> Iterator[int]:
        """Lock the folder for one change, and yield a unique time for this change.

        System errors are translated to errors of `evergreen.runtime.errors`. If an error names no
        file, the translated error names `path`.
        """
        descriptor = None
        before = own_umask(READABLE) if self._readable else None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            last = os.pread(descriptor, 20, 0)
            now = max(time.time_ns(), 1 + int(last) if last.isdigit() else 0)
            os.pwrite(descriptor, b"%020d" % now, 0)
            self._remove_unfinished()
            yield now
        except OSError as error:
            raise _translated(error, Path(error.filename or path)) from error
        finally:
            if before is not None:
                own_umask(before)
            if descriptor is not None:
                os.close(descriptor)


def _fill(copy: BinaryIO, source: BinaryIO, now: int) -> None:
    """Copy `source` to `copy`, and set the time of `copy` to `now` (nanoseconds)."""
    shutil.copyfileobj(source, copy, _CHUNK_BYTES)
    copy.flush()
    os.utime(copy.fileno(), ns=(now, now))


def _are_equal(one: Path, other: Path) -> bool:
    with open(one, "rb") as first, open(other, "rb") as second:
        while True:
            here, there = first.read(_CHUNK_BYTES), second.read(_CHUNK_BYTES)
            if here != there:
                return False
            if not here:
                return True


def _generation(status: os.stat_result) -> int:
    """Return a number that changes when a new file is renamed over an old one.

    The result is never `ABSENT`.
    """
    identity = f"{status.st_dev} {status.st_ino} {status.st_mtime_ns} {status.st_size}"
    return 1 + int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=7).digest(), "big")


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise _translated(error, Path(error.filename))


def _translated(error: OSError, path: Path) -> TemporaryError | PermanentError:
    kind = TemporaryError if error.errno in _TEMPORARY else PermanentError
    return kind(f"{path}: {error.strerror or error}")
