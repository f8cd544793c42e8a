"""CRC32C as Cloud Storage writes it: of a whole file, and of a file while bytes are appended to it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, BinaryIO

import google_crc32c

from components.storage.objects import ignore_progress

_BUFFER_BYTES = 1 << 20


class ChecksummedFile:
    """A file to which bytes are appended, and the checksum of all that it holds.

    Args:
        file: Open for reading and writing, or for writing alone if nothing is kept.
        keep: Whether the file's content is the beginning of what arrives; else it is emptied.
        arrived: Called with the number of bytes of each piece, less than 0 if bytes are discarded.
    """

    def __init__(self, file: BinaryIO, *, keep: bool = False, arrived: Callable[[int], None] = ignore_progress) -> None:
        self._file, self._arrived = file, arrived
        self._checksum = google_crc32c.Checksum()
        self.size = 0
        """Bytes that the file holds."""
        if not keep:
            self._empty()
            return
        file.seek(0)
        while content := file.read(_BUFFER_BYTES):
            self._checksum.update(content)
            self.size += len(content)

    def write(self, content: bytes) -> int:
        """Appends `content`."""
        num_bytes = self._file.write(content)
        self._checksum.update(content)
        self.size += len(content)
        self._arrived(len(content))
        return num_bytes

    def restart(self) -> None:
        """Discards all bytes."""
        self._arrived(-self.size)
        self._checksum, self.size = google_crc32c.Checksum(), 0
        self._empty()

    def crc32c(self) -> str:
        """CRC32C of the bytes so far, as Cloud Storage writes it."""
        return checksum_text(self._checksum)

    def _empty(self) -> None:
        self._file.seek(0)
        self._file.truncate()


def file_crc32c(file: BinaryIO) -> str:
    """CRC32C of a file from its start, as Cloud Storage writes it; leaves the file at its end."""
    file.seek(0)
    checksum = google_crc32c.Checksum()
    while content := file.read(_BUFFER_BYTES):
        checksum.update(content)
    return checksum_text(checksum)


def checksum_text(checksum: Any) -> str:
    """Base64 of a checksum's bytes, most significant first."""
    return base64.b64encode(checksum.digest()).decode()
