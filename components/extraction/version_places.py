"""Where versions of one day are put: a folder, into which one rename brings a version, or a bucket.

In a bucket a version is claimed first, so that two writers never share one; its files follow, and its marker is last.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from components.contracts.criteo import VERSION_COMPLETE, VERSION_PARTITION
from components.contracts.durable import fsync_path, write_whole
from components.contracts.errors import ContractError
from components.extraction.versions import FileMark, Marker, version_folders, version_of_folder, visible_files
from components.storage.locations import open_objects
from components.storage.objects import ABSENT, Changed

CLAIM = "_CLAIM"
"""Object in a bucket's version that says that a writer has begun it."""
MakeMarker = Callable[[int], Marker]


class DayPlace(Protocol):
    """One day of a lake."""

    scratch: Path
    """A folder of this machine to work in, on the lake's file system if it is a folder."""

    def own_files(self) -> list[FileMark]:
        """The files of version 0."""

    def publish(self, rows: Path, marker: MakeMarker) -> int:
        """Makes the files of the folder `rows` the day's next version, and gives its number."""


class FolderDay:
    """A day of a lake that is a folder."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder, self.scratch = folder, scratch

    def own_files(self) -> list[FileMark]:
        """See `DayPlace.own_files`."""
        return [FileMark(path.name, path.stat().st_size) for path in visible_files(self._folder)]

    def publish(self, rows: Path, marker: MakeMarker) -> int:
        """See `DayPlace.publish`: in one rename."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in rows.iterdir():
            fsync_path(path)
        version = max(version_folders(self._folder), default=0)
        while True:
            version += 1
            write_whole(rows / VERSION_COMPLETE, marker(version).to_json())
            try:
                os.rename(rows, self._folder / VERSION_PARTITION.format(version=version))
            except OSError as error:
                # Another back-fill, or what is left of one, has this number.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue
            fsync_path(self._folder)
            fsync_path(self._folder.parent)
            return version


class BucketDay:
    """A day of a lake in a bucket."""

    def __init__(self, lake: str, partition: str, scratch: Path) -> None:
        self._objects, self._partition, self.scratch = open_objects(lake), partition, scratch
        self._listed = self._objects.list(f"{partition}/")
        if not self._listed and not self._objects.list():
            raise ContractError(f"lake {lake} holds no object, expected day partitions")

    def own_files(self) -> list[FileMark]:
        """See `DayPlace.own_files`."""
        inside = [(info.name.removeprefix(f"{self._partition}/"), info.size) for info in self._listed]
        return [FileMark(name, size) for name, size in inside if "/" not in name and name.endswith(".parquet")]

    def publish(self, rows: Path, marker: MakeMarker) -> int:
        """See `DayPlace.publish`."""
        version = self._claim()
        folder = f"{self._partition}/{VERSION_PARTITION.format(version=version)}"
        for path in sorted(rows.iterdir()):
            self._objects.upload(f"{folder}/{path.name}", path)
        content = marker(version).to_json().encode()
        self._objects.write(f"{folder}/{VERSION_COMPLETE}", content, if_generation=ABSENT)
        return version

    def _claim(self) -> int:
        names = [info.name.removeprefix(f"{self._partition}/").partition("/")[0] for info in self._listed]
        version = max((found for name in names if (found := version_of_folder(name))), default=0)
        while True:
            version += 1
            name = f"{self._partition}/{VERSION_PARTITION.format(version=version)}/{CLAIM}"
            try:
                self._objects.write(name, b"", if_generation=ABSENT)
            except Changed:
                continue
            return version
