"""Modes of the files that a program left, as whoever shares the disk meets them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def argo_umask() -> Iterator[None]:
    """Has the umask that Argo's executor gives a step; afterwards the one before."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def too_open(folder: Path, allowed: int) -> dict[str, str]:
    """Mode of each file and folder below `folder` that has a bit beyond `allowed`, execution aside."""
    modes = {path: path.lstat().st_mode & 0o777 for path in folder.rglob("*") if not path.is_symlink()}
    return {str(path.relative_to(folder)): oct(mode) for path, mode in modes.items() if mode & ~0o111 & ~allowed}
