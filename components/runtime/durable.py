"""Writes that are whole or absent: aside, fsync, rename, fsync of the folder; and the hashes that prove it.

Joins every writer of files to every reader: a reader never meets half a file or half a folder. What the bytes mean
is left to the module that owns the format.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4

from components.runtime.errors import ContractError, TemporaryError

T = TypeVar("T")

UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{32}")
"""What a file or folder is called until it is whole, around its later name; a killed write leaves it."""


def no_checkpoint(name: str) -> None:
    """Does nothing; tests put a crash here, at each step of a protocol of writes that names itself."""


PRIVATE = 0o027
"""Mode bits that the files of a model registry and of a run's work lack: nothing for others, no writing for a group."""
READABLE = 0o022
"""Mode bits that files lack which another user's program reads, such as a model repository's."""


def own_umask(mask: int = PRIVATE) -> int:
    """Set this process's umask, and return the one before; what it and its children write from now on has it.

    Argo's executor starts every step with umask 0, which would leave its files writable for everybody.
    """
    return os.umask(mask)


def fsync_path(path: Path) -> None:
    """Flushes a file's or a folder's own entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes | str) -> None:
    """Writes `content` to `path` so that no reader ever sees a part of it; replaces what was there.

    The parent folder is created. Text is UTF-8.

    Raises:
        OSError: the file cannot be written; it is named, which a full disk's own error does not do.
    """
    with _named_errors(path), whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Give an OSError without a file's name that of `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write, which on success becomes `path`, replacing what was there, and on error is removed.

    The parent folder is created.
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
    """Closes `file` after the body: what was written is on disk then; an error of the body comes through as it is."""
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
    except BaseException:
        # Closing tries once more to write what could not be written; its failure would hide the first one.
        with suppress(OSError):
            file.close()
        raise
    file.close()


def append_line(path: Path, line: str) -> None:
    """Appends one line to `path` and flushes it to disk; `line` must hold no newline.

    A line torn by a crash in the middle of an append is cut off first: no caller was promised that it was written, and
    it would corrupt the next line. Writers in several processes take turns.

    Raises:
        OSError: the line cannot be written; the file is named.
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
    """Append the dataclass `record` to `path` as one line of JSON with its checksum, and flush it to disk."""
    append_line(path, _with_checksum(json.dumps(asdict(record))))


def read_records(path: Path, kind: type[T], *, name: str) -> list[T]:
    """Return the records that `append_record` wrote; empty if there is no file.

    A last line without its newline is a torn append and does not count. A line that a person wrote may lack the
    checksum.

    Args:
        path: The file.
        kind: Dataclass of the records.
        name: What a record is called in messages.

    Raises:
        ContractError: a complete line is no record, or differs from its checksum; the message names file and line. Or
            the file cannot be read.
    """
    records = []
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error
    # A line whose newline became another byte is no torn append, and must not be dropped as one.
    if _has_checksum(torn[:-1]):
        lines.append(torn)
    for number, line in enumerate(lines, start=1):
        try:
            records.append(kind(**json.loads(_without_checksum(line))))
        except (ValueError, TypeError) as error:
            raise ContractError(f"{path} line {number} is not {name}: {error}") from error
    return records


_CHECKSUM, _END = b', "crc32": "', b"}"
"""What ends a line with a checksum: the key with eight hexadecimal digits, and the end of the object."""


def _with_checksum(document: str) -> str:
    """Return an object in JSON with the CRC-32 of its text as its last key."""
    head = document.encode().removesuffix(_END)
    return (head + _CHECKSUM + _digits(head) + b'"}').decode()


def _has_checksum(line: bytes) -> bool:
    head, mark, tail = line.rpartition(_CHECKSUM)
    return bool(mark) and tail == _digits(head) + b'"}'


def _without_checksum(line: bytes) -> bytes:
    """Return the object that `_with_checksum` was given; a line without a checksum as it is.

    Raises:
        ValueError: the line differs from its checksum.
    """
    head, mark, tail = line.rpartition(_CHECKSUM)
    if not mark:
        return line
    if not _has_checksum(line):
        raise ValueError(
            f"its crc32 is {_digits(head).decode()}, expected {tail[:8].decode(errors='replace')}: the line was "
            "damaged, or edited without removing its key crc32"
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
    """Yields an empty folder beside `final`; on success it becomes `final` in one rename, on error it is removed.

    Args:
        final: The folder to make.
        replace: Whether to remove first what an earlier try left, `final` itself and the folder beside it of a try
            that was killed. Only for a folder that no other process reads at the time. Of two that write it one wins,
            and what the other was at is gone.

    Raises:
        FileExistsError: `final` exists already, and is not to be replaced: a published folder is never changed.
        TemporaryError: another process made `final` meanwhile, or began to and took this one's work away.
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
            raise TemporaryError(f"another process makes {final} too, so this one's work is lost: {error}") from error
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    fsync_path(final.parent)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_tree(folder: Path) -> str:
    """SHA-256 over the relative names and contents of every file below `folder`, in name order."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()
