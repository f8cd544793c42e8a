"""An object as a file of this machine, for what reads files alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.storage.objects import Objects


@contextmanager
def local_copy(objects: Objects, name: str) -> Iterator[Path]:
    """Yields the object's file: itself in a folder; a copy of a bucket's, which is gone afterwards.

    Raises:
        ContractError: there is no such object in the bucket.
        TemporaryError, PermanentError: it cannot be fetched.
    """
    if (local := objects.local(name)) is not None:
        yield local
        return
    with tempfile.TemporaryDirectory(prefix="evergreen-object-") as folder:
        path = Path(folder) / "content"
        objects.download(name, path)
        yield path
