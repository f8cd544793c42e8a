"""Headerless files of numbers: written aside, flushed, and of the size that was meant; read in pieces.

Joins the model files' writers and readers (`contracts.dense_files`, `contracts.sparse_files`), which know what the
numbers mean. Nothing in such a file says how long it should be, so sizes are what is checked, on both sides. No
function here holds a second copy of the bytes it is given, nor more of a file than is asked for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from components.runtime.durable import whole_file
from components.runtime.errors import ContractError, PermanentError


class FlatWriter:
    """A file being written; see `sized_file`."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file

    def put(self, values: NDArray[Any], dtype: str, *, at: int | None = None) -> None:
        """Writes `values`, row-major as `dtype`, at byte `at` or where the last write ended.

        Raises:
            PermanentError: the system refuses.
        """
        # Of a contiguous array of this type neither call copies; the view is of bytes because a memoryview cannot cast
        # an empty array.
        content = np.ascontiguousarray(values, dtype).reshape(-1).view(np.uint8).data
        with _refused(self._path):
            if at is not None:
                self._file.seek(at)
            self._file.write(content)

    def extend(self, num_bytes: int) -> None:
        """Makes the file at least this long; what is never put is zero."""
        with _refused(self._path):
            self._file.truncate(num_bytes)


@contextmanager
def sized_file(path: Path, num_bytes: int) -> Iterator[FlatWriter]:
    """Yields a writer, whose file becomes `path` if it then has `num_bytes` bytes on disk.

    Raises:
        PermanentError: it has another size, or the system refuses to write.
    """
    with ExitStack() as stack:
        with _refused(path):
            file = stack.enter_context(whole_file(path))
        yield FlatWriter(path, file)
        # A full disk may refuse as late as here.
        with _refused(path):
            file.flush()
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        if size != num_bytes:
            raise PermanentError(f"model file {path} has {size} bytes after writing, expected {num_bytes}")


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PermanentError(f"model file {path} cannot be written: {error.strerror or error}") from error


def is_kept(path: Path) -> bool:
    """Whether a file that may be left out was not: anything of its name, a link to nowhere too, must then be right."""
    return os.path.lexists(path)


def size_of(path: Path) -> int:
    """Bytes of the file at `path`.

    Raises:
        ContractError: it is absent, is no file or cannot be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise ContractError(f"model file {path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ContractError(f"model file {path} is no file but a {'folder' if path.is_dir() else 'device or pipe'}")
    return found.st_size


def require_size(path: Path, *expected: int, reason: str = "") -> None:
    """Refuses a file that has none of the `expected` numbers of bytes; `reason` says where they come from.

    Raises:
        ContractError: names the file, its size and what was expected; also where it is absent.
    """
    if (size := size_of(path)) not in expected:
        raise ContractError(f"model file {path} has {size} bytes, expected {' or '.join(map(str, expected))}{reason}")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Yields the file at `path` for reading.

    Raises:
        ContractError: it is absent or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise ContractError(f"model file {path} cannot be read: {error.strerror}") from error


def get(file: BinaryIO, shape: tuple[int, ...], dtype: str, *, at: int) -> NDArray[Any]:
    """The array of `shape` and `dtype` that begins at byte `at` of `file`.

    Raises:
        ContractError: the file ends before.
    """
    values = np.empty(shape, dtype)
    file.seek(at)
    if (found := file.readinto(values.reshape(-1).view(np.uint8).data)) != values.nbytes:  # type: ignore[attr-defined]
        raise ContractError(f"model file {file.name} ends at byte {at + found}, expected {at + values.nbytes}")
    return values
