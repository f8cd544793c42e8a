"""Atomic, durable writes of files and folders, and the hashes that verify them.

A write first goes to a temporary file. The file is flushed, and renamed. After the rename, the
folder of the file is flushed. A reader therefore never sees half a file or half a folder. The
modules that define a format decide how its bytes are interpreted.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4

from evergreen.runtime.errors import ContractError, TemporaryError, UnreadableFile

T = TypeVar("T")

UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{32}")
"""Marker in the name of an unfinished file or folder. If a write is killed, a file or folder with
this marker remains."""


def no_checkpoint(name: str) -> None:
    """Do nothing.

    Tests replace this function to simulate a crash at each named step of a write protocol.
    """


_PRIVATE = 0o027
"""Mode bits that are removed from files of the model registry and of a run: all bits of other
users, and the write bit of the group."""
READABLE = 0o022
"""Mode bits that are removed from a file if programs of another user must read the file. Examples
are the files of a model repository."""


def own_umask(mask: int = _PRIVATE) -> int:
    """Set the umask of this process and its children, and return the previous umask.

    Argo's executor starts every step with umask 0, which would make the step's files writable for
    everybody.
    """
    return os.umask(mask)


def fsync_path(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` atomically, and replace an existing file.

    The parent folder is created. Text is encoded as UTF-8.

    Raises:
        OSError: the file cannot be written. The error names the file. The system's own error for a
            full disk does not name the file.
    """
    with _named_errors(path), whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Add `path` to an OSError that does not name a file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that becomes `path` on success and is removed on error.

    The parent folder is created. An existing file is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with flushed_to_disk(open(aside, "wb")) as file:
            yield file
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_path(path.parent)


@contextmanager
def flushed_to_disk(file: BinaryIO) -> Iterator[BinaryIO]:
    """Flush and close `file` at the end of the `with` block.

    An error of the body is raised unchanged.
    """
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
    except BaseException:
        # Closing the file can repeat the failed write. An error from closing must not hide the
        # error of the write.
        with suppress(OSError):
            file.close()
        raise
    file.close()


def append_line(path: Path, line: str) -> None:
    """Append one line to `path` and flush it to disk. `line` must not contain a newline.

    If a crash left an incomplete last line, that line is removed first. The caller that wrote the
    incomplete line has not received a success. Without the removal, the new line would be appended
    to the incomplete line. Writers in several processes exclude each other by a lock.

    Raises:
        OSError: the line cannot be written. The error names the file.
    """
    assert "\n" not in line
    path.parent.mkdir(parents=True, exist_ok=True)
    with _named_errors(path), open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(_end_of_last_line(file))
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    fsync_path(path.parent)


def append_record(path: Path, record: Any) -> None:
    """Append `record` to `path` as one line of JSON with its checksum, and flush it to disk."""
    append_line(path, _with_checksum(json.dumps(asdict(record))))


def read_records(path: Path, kind: Callable[..., T], *, name: str) -> list[T]:
    """Return the records that `append_record` wrote, or an empty list if there is no file.

    A last line without a newline is an interrupted append and is ignored. The checksum may be
    absent if a person wrote the line.

    Args:
        path: The file.
        kind: Dataclass of the records, or a function that makes a record from its fields.
        name: Name of a record in error messages.

    Raises:
        UnreadableFile: the file cannot be read now.
        ContractError: a complete line is not a record, or a line differs from its checksum. The
            message names file and line.
    """
    records = []
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}") from error
    # If only the newline of the last line is corrupt, the line's checksum is valid, so the line
    # must not be ignored.
    if _has_checksum(torn[:-1]):
        lines.append(torn)
    for number, line in enumerate(lines, start=1):
        try:
            records.append(kind(**json.loads(_without_checksum(line))))
        except (ValueError, TypeError) as error:
            raise ContractError(f"{path} line {number} is not {name}: {error}") from error
    return records


_CHECKSUM, _END = b', "crc32": "', b"}"
"""Texts around the eight hexadecimal digits of a line's checksum: the key before the digits, and
the closing brace after the digits."""


def _with_checksum(document: str) -> str:
    """Append a key to a JSON object. The value of the key is the CRC-32 of the object's text."""
    head = document.encode().removesuffix(_END)
    return (head + _CHECKSUM + _digits(head) + b'"}').decode()


def _has_checksum(line: bytes) -> bool:
    head, separator, tail = line.rpartition(_CHECKSUM)
    return bool(separator) and tail == _digits(head) + b'"}'


def _without_checksum(line: bytes) -> bytes:
    """Return a line without its checksum.

    A line without a checksum is returned unchanged.

    Raises:
        ValueError: the line differs from its checksum.
    """
    head, separator, tail = line.rpartition(_CHECKSUM)
    if not separator:
        return line
    if not _has_checksum(line):
        raise ValueError(
            f"its crc32 is {_digits(head).decode()}, expected {tail[:8].decode(errors='replace')}: "
            "the line was corrupt, or edited without removing its key crc32"
        )
    return head + _END


def _digits(head: bytes) -> bytes:
    return b"%08x" % zlib.crc32(head + _END)


def _end_of_last_line(file: BinaryIO) -> int:
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 4096)
        file.seek(start)
        if (newline := file.read(end - start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0


@contextmanager
def whole_directory(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes `final` on success and is removed on error.

    Args:
        final: Folder to create. The complete folder is renamed to this name in one step.
        replace: Whether to first remove `final` and the temporary folder of an earlier attempt that
            was killed. Set `replace` only for a folder that no other process reads meanwhile. If
            two processes write the same folder, the work of one process is lost.

    Raises:
        FileExistsError: `final` exists and `replace` is not set, because a published folder never
            changes.
        TemporaryError: another process created `final` meanwhile, or removed this temporary folder.
    """
    if replace:
        for left_over in [final, *final.parent.glob(f".{escape(final.name)}.{'[0-9a-f]' * 32}")]:
            if left_over.exists():
                shutil.rmtree(left_over)
    if final.exists():
        raise FileExistsError(f"{final} exists already, expected a new folder")
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}.{uuid4().hex}")
    aside.mkdir()
    try:
        yield aside
        for folder, _, names in os.walk(aside):
            for name in names:
                fsync_path(Path(folder) / name)
            fsync_path(Path(folder))
        os.rename(aside, final)
    except Exception as error:
        if replace and (final.exists() or not aside.exists()):
            raise TemporaryError(
                f"another process also created {final}, so this work is lost: {error}"
            ) from error
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    fsync_path(final.parent)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as 64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_tree(folder: Path) -> str:
    """Return one SHA-256 of the relative names and the contents of all files below `folder`.

    Files are hashed in name order.
    """
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()
