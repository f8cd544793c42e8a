"""One deployment at a time: the kernel's lock of a folder, a lease in a bucket.

The kernel's lock (flock) cannot outlive a killed deployment; it needs a filesystem that has it. A lease ends by itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from components.runtime.errors import ContractError, TemporaryError
from components.storage.lease import Lease
from components.storage.objects import Objects

LEASE_SECONDS = 60.0
LEASE_FILE = "deployment.lease"
_LOCK_FILE = ".deployment.lock"

Check = Callable[[], None]
"""Returns if the lock is still held; TemporaryError otherwise."""


@contextmanager
def exclusive(
    objects: Objects,
    folder: Path | None,
    *,
    holder: str,
    lease_seconds: float = LEASE_SECONDS,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> Iterator[Check]:
    """Keeps every other deployment out of the model repository in `objects`.

    Args:
        objects: The repository.
        folder: Its root, where that is a folder of this machine; None = a bucket.
        holder: Who takes the lock, for the others' errors.
        lease_seconds: How long a bucket's lock outlives a killed holder.
        clock: Seconds since the epoch.
        monotonic: Seconds by a clock that nobody sets.

    Raises:
        ContractError: the folder cannot be written; names the path.
        TemporaryError: another deployment is at work; names it.
    """
    if folder is not None:
        with _flocked(folder, holder):
            yield lambda: None
        return
    lease = Lease(objects, LEASE_FILE, holder=holder, seconds=lease_seconds, clock=clock, monotonic=monotonic)
    try:
        lease.acquire()
    except TemporaryError as error:
        raise TemporaryError(f"another deployment is at work in model repository {objects.uri}: {error}") from error
    with lease.kept():
        yield lease.check


@contextmanager
def _flocked(folder: Path, holder: str) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ContractError(f"model repository {folder} is not writable: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            other = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            raise TemporaryError(
                f"another deployment is at work in model repository {folder}: it is held by {other}"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{holder}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
