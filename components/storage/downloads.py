"""Objects as files of this machine: several at a time, or one alone.

How the bytes of one object arrive and are proven is `Objects.fetch`. Extraction caches what it reads repeatedly.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from components.runtime.durable import fsync_path
from components.runtime.errors import ContractError
from components.storage.objects import ObjectInfo, Objects, ignore_progress

NUM_TRANSFERS = 8
"""At a time; Google's client keeps ten connections."""


class Download(NamedTuple):
    """One object to fetch."""

    wanted: ObjectInfo
    part: Path
    """What has arrived so far; no reader looks at it."""
    path: Path
    """Where it lies once it is whole."""


class _Stopped(Exception):
    """Another transfer failed."""


def download_all(
    objects: Objects,
    downloads: Sequence[Download],
    *,
    arrived: Callable[[int], None] = ignore_progress,
    finished: Callable[[], None] = lambda: None,
) -> None:
    """Brings every object to its path, whole; large ones first, so that no single one is waited for at the end.

    The first failure ends all transfers; what arrived is kept for the next try. No two downloads have the same path;
    `arrived` is as in `Objects.fetch`, `finished` is called for each file that is whole.

    Raises:
        Changed, TemporaryError, PermanentError: see `Objects.fetch`; the first one. No transfer continues.
    """
    stop = threading.Event()

    def count(num_bytes: int) -> None:
        if stop.is_set():
            raise _Stopped
        arrived(num_bytes)

    def bring(download: Download) -> None:
        if stop.is_set():
            raise _Stopped
        objects.fetch(download.wanted, download.part, arrived=count)
        os.replace(download.part, download.path)
        fsync_path(download.path.parent)
        finished()

    with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="download") as threads:
        ordered = sorted(downloads, key=lambda download: -download.wanted.size)
        try:
            for done in as_completed([threads.submit(bring, download) for download in ordered]):
                done.result()
        finally:
            stop.set()


def download(objects: Objects, name: str, path: Path) -> None:
    """Makes the file at `path` the object's content, whole or not at all.

    Raises:
        ContractError: there is no such object.
        TemporaryError, PermanentError: it cannot be fetched.
    """
    found = [each for each in objects.list(name) if each.name == name]
    if not found:
        raise ContractError(f"{objects.uri}/{name} is absent, expected an object")
    download_all(objects, [Download(found[0], path.with_name(f".{path.name}.part"), path)])


@contextmanager
def local_copy(objects: Objects, name: str) -> Iterator[Path]:
    """Yields the object's file: itself in a folder; for a bucket a copy, which is removed afterwards.

    Raises:
        ContractError: there is no such object in the bucket.
        TemporaryError, PermanentError: it cannot be fetched.
    """
    if (local := objects.local(name)) is not None:
        yield local
        return
    with TemporaryDirectory(prefix="evergreen-object-") as folder:
        path = Path(folder) / "content"
        download(objects, name, path)
        yield path
