"""A folder that one run reads: the lake's own names, each a link to an object of the cache.

Links are hard, so that the cache may let an object go while a run reads it. A view lives as long as its process, which
holds a lock beside it; what a killed one left is swept by the next.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

_LOCK = ".lock"


class View:
    """What one run sees; made by `new_view`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def show(self, files: Mapping[str, Path], *, empty: Iterable[str] = ()) -> None:
        """Shows exactly these: names to files of the cache, and names of files without content."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        for name, source in files.items():
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(source, target)
        for name in empty:
            (self.folder / name).touch()


@contextmanager
def new_view(views: Path) -> Iterator[View]:
    """Makes a view below `views`, which is gone afterwards. To be entered while the cache is locked."""
    views.mkdir(parents=True, exist_ok=True)
    _sweep(views)
    folder = views / uuid4().hex
    lock = folder.with_suffix(_LOCK)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield View(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _sweep(views: Path) -> None:
    """Removes the views whose processes are gone."""
    for folder in {path.with_suffix("") for path in views.iterdir()}:
        lock = folder.with_suffix(_LOCK)
        with open(lock, "w") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        # A file system without hard links, or with too many of this file.
        shutil.copyfile(source, target)
