"""A Parquet file that is whole or absent: the steps between its name in the store and its name in the folder.

The order that survives a kill: the rows are given to a file name (store), the file is written aside, flushed and
renamed, its folder is flushed, then it is sealed (store). On restart an intended file that exists, here or among the
uploaded, is sealed; one that does not is written again under the same name from the same rows. What is in a file is
left to `monitoring.memory.archive` and `monitoring.memory.outcomes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from components.runtime.durable import fsync_path
from components.runtime.errors import TemporaryError

UPLOADED_FOLDER = "uploaded"


def no_checkpoint(name: str) -> None:
    """Passes; tests put a crash here, at each place that names itself."""


def marker_path(archive: Path, name: str) -> Path:
    """The uploader's proof that the file `name` (`day=.../part-....parquet`) is in the lake."""
    return archive / UPLOADED_FOLDER / f"{Path(name).name}.json"


class SealedFiles:
    """Writes the files of one kind below `folder`."""

    def __init__(self, folder: Path, kind: str, checkpoint: Callable[[str], None]) -> None:
        """Removes what a predecessor left half-written.

        Args:
            folder: The archive; created if missing.
            kind: Prefix of the checkpoints' names.
            checkpoint: Called with the name of each step that a crash may follow.

        Raises:
            TemporaryError: the folder cannot be written.
        """
        self._folder, self._kind, self._checkpoint = folder, kind, checkpoint
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for pattern in ("day=*/.part-*", "outcomes/day=*/.part-*"):
                for torn in folder.glob(pattern):
                    torn.unlink()
        except OSError as error:
            raise TemporaryError(f"archive {folder} cannot be written: {error}") from error

    def reached(self, step: str) -> None:
        """A step that a crash may follow."""
        self._checkpoint(f"{self._kind}.{step}")

    def make(self, name: str, build: Callable[[], pa.Table]) -> None:
        """Puts the file `name` into place unless it is there, or was and is uploaded.

        Raises:
            TemporaryError: the disk is full or refuses; nothing is left aside, and the store keeps the rows.
        """
        path = self._folder / name
        if marker_path(self._folder, name).exists():
            return
        try:
            if not path.exists():
                self._write(path, build())
            # Also where it was there: a predecessor may have ended just after the rename.
            self._sync(path.parent)
        except OSError as error:
            raise TemporaryError(f"archive file {path} cannot be written: {error}") from error
        self.reached("synced")

    def _write(self, path: Path, table: pa.Table) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.aside")
        try:
            pq.write_table(table, aside)
            self.reached("written")
            fsync_path(aside)
            self.reached("written_aside")
            os.rename(aside, path)
        except OSError:
            # On a full disk the torn file would keep the room that the next try needs.
            aside.unlink(missing_ok=True)
            raise
        self.reached("renamed")

    def _sync(self, folder: Path) -> None:
        """Flushes the names of the file and of the folders above it, up to the archive's."""
        while True:
            fsync_path(folder)
            if folder == self._folder:
                return
            folder = folder.parent
