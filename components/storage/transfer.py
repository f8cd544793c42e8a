"""Objects into files, several at a time; the first that fails ends all, and what came is kept for the next try."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from components.runtime.durable import fsync_path
from components.storage.objects import ObjectInfo, Objects

NUM_TRANSFERS = 8
"""At a time; Google's client keeps ten connections."""


class Errand(NamedTuple):
    """One object to bring."""

    wanted: ObjectInfo
    part: Path
    """What came of it so far; nobody reads it."""
    path: Path
    """Where it is when it is whole."""


class _Stopped(Exception):
    """Another transfer failed."""


def transfer(
    objects: Objects,
    errands: list[Errand],
    *,
    arrived: Callable[[int], None],
    finished: Callable[[], None],
    num_transfers: int = NUM_TRANSFERS,
) -> None:
    """Brings every object to its path, whole; large ones first, so that no single one is waited for at the end.

    Args:
        objects: Where they are.
        errands: What is brought; no two of one path.
        arrived: See `Objects.fetch`.
        finished: Called for each file that is whole.
        num_transfers: At a time.

    Raises:
        Changed, TemporaryError, PermanentError: see `Objects.fetch`; of several the first. No transfer goes on.
    """
    stop = threading.Event()

    def heard(num_bytes: int) -> None:
        if stop.is_set():
            raise _Stopped
        arrived(num_bytes)

    def bring(errand: Errand) -> None:
        if stop.is_set():
            raise _Stopped
        objects.fetch(errand.wanted, errand.part, arrived=heard)
        os.replace(errand.part, errand.path)
        fsync_path(errand.path.parent)
        finished()

    with ThreadPoolExecutor(num_transfers, thread_name_prefix="transfer") as threads:
        ordered = sorted(errands, key=lambda errand: -errand.wanted.size)
        try:
            for done in as_completed([threads.submit(bring, errand) for errand in ordered]):
                done.result()
        finally:
            stop.set()
