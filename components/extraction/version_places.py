"""Where versions of one day are put: a folder, into which one rename brings a version, or a bucket.

In a bucket a version is claimed first, so that two writers never share one; its files follow, and its marker is last.
What an interrupted writer leaves there is not removed: whether it is dead or only slow cannot be known from its claim,
and a marker that it wrote afterwards would name files that are gone, which stops every reader. People are told of it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from components.contracts.criteo import VERSION_COMPLETE, VERSION_PARTITION
from components.extraction.versions import FileMark, Marker, version_folders, version_of_folder, visible_files
from components.runtime.durable import fsync_path, write_whole
from components.runtime.errors import ContractError, PermanentError
from components.runtime.people import whoami
from components.storage.locations import open_objects
from components.storage.objects import ABSENT, Changed

CLAIM = "_CLAIM"
"""Object in a bucket's version that says that a writer has begun it: JSON with who and when, for people."""
MakeMarker = Callable[[int], Marker]

logger = logging.getLogger(__name__)


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
        """See `DayPlace.publish`.

        Raises:
            PermanentError: somebody removed or changed files of the version while it was written.
        """
        version = self._claim()
        folder = self._folder(version)
        for path in sorted(rows.iterdir()):
            self._objects.upload(f"{folder}/{path.name}", path)
        found = {info.name: info.size for info in self._objects.list(f"{folder}/")}
        # A marker over files that are gone stops every reader of the day.
        if lacking := [p.name for p in sorted(rows.iterdir()) if found.get(f"{folder}/{p.name}") != p.stat().st_size]:
            told = f"{self._objects.uri}/{folder}: {', '.join(lacking)}"
            raise PermanentError(f"{told}: removed or changed while the version was written; it is not read")
        content = marker(version).to_json().encode()
        self._objects.write(f"{folder}/{VERSION_COMPLETE}", content, if_generation=ABSENT)
        return version

    def _claim(self) -> int:
        parted = [info.name.removeprefix(f"{self._partition}/").partition("/") for info in self._listed]
        begun = {version for folder, _, _ in parted if (version := version_of_folder(folder))}
        complete = {version_of_folder(folder) for folder, _, name in parted if name == VERSION_COMPLETE}
        for incomplete in sorted(begun - complete):
            self._tell_incomplete(incomplete)
        version = max(begun, default=0)
        claim = {"by": whoami(), "at": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        while True:
            version += 1
            try:
                content = json.dumps(claim).encode()
                self._objects.write(f"{self._folder(version)}/{CLAIM}", content, if_generation=ABSENT)
            except Changed:
                continue
            return version

    def _tell_incomplete(self, version: int) -> None:
        folder = self._folder(version)
        claim = self._objects.read(f"{folder}/{CLAIM}")
        told = claim.content.decode(errors="replace") if claim and claim.content else "nobody says by whom or when"
        logger.warning(
            "%s/%s was begun (%s) and not finished; it is not read. If no back-fill of the day is at work, remove it: "
            "gcloud storage rm --recursive '%s/%s/'",
            self._objects.uri, folder, told, self._objects.uri, folder,
        )  # fmt: skip

    def _folder(self, version: int) -> str:
        return f"{self._partition}/{VERSION_PARTITION.format(version=version)}"
