"""A local file that is completed over several calls: what a download that goes on where it ended writes to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_BUFFER_BYTES = 256 << 10
"""Of what came, a process that is killed loses at most so much."""


def unheard(num_bytes: int) -> None:
    """Takes what `Objects.fetch` tells of its progress, and tells nobody."""


@contextmanager
def growing(path: Path) -> Iterator[BinaryIO]:
    """Opens the file at `path`, made where it is absent, to read what it holds and to append; flushed to disk at last.

    On error it keeps what reached it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b", buffering=_BUFFER_BYTES)  # noqa: SIM115
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
