"""A text file, plain or gzip, as blocks of whole lines with their line numbers; memory is bounded by a block.

A damaged or truncated gzip stream is told apart from the end of the file. What a line means is left to `fields`.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from components.contracts.errors import ContractError

BLOCK_BYTES = 8 << 20
"""About 35,000 Criteo lines: large enough that pyarrow's cost per call vanishes."""
MAX_LINE_BYTES = 1 << 20
_READ_BYTES = 256 << 10
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


class Block(NamedTuple):
    """Whole lines of a file; only the file's last may lack its newline."""

    first_line: int
    """Number of its first line in the file, from 1."""
    content: bytes


def is_gzip(path: Path) -> bool:
    """Whether the file's first bytes say gzip, whatever its name."""
    with open(path, "rb") as file:
        return file.read(2) == _GZIP_MAGIC


def blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """The blocks of `path`, in order; a UTF-8 byte order mark is left out.

    Raises:
        ContractError: the gzip stream is truncated or damaged, or a line is longer than `MAX_LINE_BYTES`.
    """
    first_line, pending = 1, bytearray()
    open_file = gzip.open if is_gzip(path) else open
    with open_file(path, "rb") as file:
        for chunk in _chunks(cast(BinaryIO, file), path):
            pending += chunk
            if len(pending) < block_bytes:
                continue
            end = pending.rfind(b"\n") + 1
            if len(pending) - end > MAX_LINE_BYTES:
                raise ContractError(f"{path} has a line longer than {MAX_LINE_BYTES} bytes, expected Criteo rows")
            if end:
                block = Block(first_line, bytes(pending[:end]))
                del pending[:end]
                first_line += block.content.count(b"\n")
                yield block
    if pending:
        yield Block(first_line, bytes(pending))


def _chunks(file: BinaryIO, path: Path) -> Iterator[bytes]:
    num_lines, at_start = 0, True
    while True:
        try:
            # read1, because read would lose the sound bytes before the damage.
            chunk: bytes = file.read1(_READ_BYTES)  # type: ignore[attr-defined]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            damage = "truncated" if isinstance(error, EOFError) else f"damaged ({error})"
            raise ContractError(
                f"{path} is {damage}: {num_lines} whole lines were read before, expected a complete gzip file"
            ) from error
        if not chunk:
            return
        num_lines += chunk.count(b"\n")
        yield chunk.removeprefix(_BOM) if at_start else chunk
        at_start = False
