"""Where ingested days are put: a lake that is a folder, or one in a bucket. What the days hold is `ingestion`'s.

Either way a file is there whole or not at all, and what an earlier ingest of the same files left is replaced. Files
come in the order of their rows' times: whoever reads a lake while it is filled sees its earlier rows, as from an
uploader.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from components.extraction.lake import PARTITION
from components.runtime.durable import fsync_path
from components.storage.locations import open_objects
from components.storage.objects import ObjectInfo
from components.storage.transfer import NUM_TRANSFERS
from components.storage.uris import is_bucket_uri, local_path

logger = logging.getLogger(__name__)

STAGE = "_ingest"
"""Below a bucket's lake: what is on its way. No reader looks there."""


class LakePlace(Protocol):
    """A lake to which days are added."""

    scratch: Path
    """A folder of this machine to work in, on the lake's file system if it is a folder."""

    def publish(self, days: Path, source: str) -> None:
        """Adds the day partitions in the folder `days`, whose files are named `part-<source>-*.parquet`.

        Raises:
            TemporaryError: the bucket cannot be reached, or another ingest of the same files is at work.
            PermanentError: no permission, no bucket, or no room.
        """


@contextmanager
def opened_place(lake: str, *, beside: Path) -> Iterator[LakePlace]:
    """Opens the lake at `lake`, an absolute path, `file://` (both made where absent) or `gs://bucket/prefix`.

    Args:
        lake: The lake's URI.
        beside: A folder of this machine with room for all that goes to a bucket.

    Raises:
        ContractError: `lake` is none of these.
        TemporaryError, PermanentError: the bucket cannot be listed.
    """
    if is_bucket_uri(lake):
        with workshop(beside) as scratch:
            yield BucketLake(lake, scratch)
    else:
        folder = local_path(lake)
        with workshop(folder) as scratch:
            yield FolderLake(folder, scratch)


@contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """A folder in `folder` that no reader looks at, gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".ingest.{uuid4().hex}"
    aside.mkdir()
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish_file(path: Path, final: Path) -> None:
    """Moves a finished file to its place, in one rename."""
    final.parent.mkdir(parents=True, exist_ok=True)
    fsync_path(path)
    os.replace(path, final)
    fsync_path(final.parent)


class FolderLake:
    """A lake that is a folder."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder, self.scratch = folder, scratch

    def publish(self, days: Path, source: str) -> None:
        """See `LakePlace.publish`."""
        new = _files(days)
        for name, path in new.items():
            publish_file(path, self._folder / name)
        for path in self._folder.glob(f"{PARTITION}*/part-{source}-*.parquet"):
            if path.relative_to(self._folder).as_posix() not in new:
                path.unlink()


class BucketLake:
    """A lake in a bucket.

    All files go up beside the lake first, which takes long; then each becomes the lake's by a copy within the bucket,
    which does not. What was cut off while it went up is not read, and gone on with when the same files are ingested
    again.
    """

    def __init__(self, uri: str, scratch: Path) -> None:
        self._objects, self.scratch = open_objects(uri), scratch
        # Before hours of reading: whether there is such a bucket, and a permission.
        self._objects.list(f"{STAGE}/")

    def publish(self, days: Path, source: str) -> None:
        """See `LakePlace.publish`."""
        new, own = _files(days), re.compile(rf"{PARTITION}[^/]*/part-{re.escape(source)}-[^/]*\.parquet")
        there = {each.name: each for each in self._objects.list(PARTITION) if own.fullmatch(each.name)}
        missing = [name for name in new if name not in there]
        staged = self._stage(f"{STAGE}/{source}", {name: new[name] for name in missing})
        for name, path in new.items():
            if name not in there:
                self._objects.copy(staged[name], name)
            elif not _is_same(there[name], path):
                self._objects.write(name, path, if_generation=there[name].generation)
        for name in there.keys() - new.keys():
            self._objects.delete(name, if_generation=there[name].generation)
        for each in self._objects.list(f"{STAGE}/{source}/"):
            self._objects.delete(each.name, if_generation=each.generation)

    def _stage(self, stage: str, files: dict[str, Path]) -> dict[str, str]:
        """Brings the files beside the lake, those that are not there yet; their names there."""
        there = {each.name: each for each in self._objects.list(f"{stage}/")}
        staged = {name: f"{stage}/{name}" for name in files}

        def bring(name: str) -> None:
            found = there.get(staged[name])
            if found is None or not _is_same(found, files[name]):
                self._objects.write(staged[name], files[name])

        with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="ingest") as threads:
            try:
                for number, _ in enumerate(threads.map(bring, files), 1):
                    logger.info("%s: %d of %d files are up", self._objects.uri, number, len(files))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        return staged


def _files(days: Path) -> dict[str, Path]:
    """The files below `days` by their names in the lake, in the order of their rows' times."""
    return {path.relative_to(days).as_posix(): path for path in sorted(days.glob(f"{PARTITION}*/*.parquet"))}


def _is_same(stored: ObjectInfo, path: Path) -> bool:
    if stored.size != path.stat().st_size:
        return False
    from components.storage.arriving import file_crc32c

    with open(path, "rb") as file:
        return file_crc32c(file) == stored.crc32c
