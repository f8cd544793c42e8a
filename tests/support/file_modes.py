"""Checks of file modes, for the files that a program wrote."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def argo_umask() -> Iterator[None]:
    """Set the umask that Argo's executor gives a step, and restore the former umask afterwards."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def too_open(folder: Path, allowed: int) -> dict[str, str]:
    """Return the files and folders below `folder` whose mode has a bit outside `allowed`.

    Execute bits are ignored.
    """
    modes = {
        path: path.lstat().st_mode & 0o777 for path in folder.rglob("*") if not path.is_symlink()
    }
    return {
        str(path.relative_to(folder)): oct(mode)
        for path, mode in modes.items()
        if mode & ~0o111 & ~allowed
    }
