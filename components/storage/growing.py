"""A local file that is completed over several calls: what a download that goes on where it ended writes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from components.runtime.durable import flushed_to_disk

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
    with flushed_to_disk(open(path, "a+b", buffering=_BUFFER_BYTES)) as file:
        yield file
