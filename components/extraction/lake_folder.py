"""The folder that a lake is read from: itself where it is mounted, a mirror where it lies in a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from components.extraction.seen_files import SeenFiles
from components.extraction.times import Span
from components.runtime.errors import ContractError
from components.storage.uris import is_bucket_uri, local_path


class LakeFolder(Protocol):
    """A lake, or what is asked for of one, on this machine."""

    @property
    def uri(self) -> str:
        """Where the lake itself lies: `file://` or `gs://`."""

    @property
    def path(self) -> Path:
        """What `find_source` takes."""

    def named(self, path: Path) -> str:
        """What people call a file below `path`: itself, or the object that it is a copy of."""

    def fetch(self, window: Span, *, replay_days: int, seen: SeenFiles | None = None) -> None:
        """Brings all that `extract` reads for this window: its days, older ones to replay, and late outcomes.

        Where `seen` is given, the days that have files beside those, too: late rows.

        Raises:
            ContractError: the lake holds nothing, or no day of the window.
            TemporaryError: the bucket cannot be reached, or objects change faster than they are read.
            PermanentError: no permission, no bucket, or no room on the disk.
        """

    def fetch_newest(self) -> None:
        """Brings the newest day that has rows, for whoever must know the lake's end before the window; errors alike.

        Of Criteo's own files the names, which tell their days.
        """

    def listed(self) -> Mapping[date, Mapping[str, int]] | None:
        """Files of version 0 of each day, bytes by name, fetched or not; None where `path` shows all there are."""


@dataclass(frozen=True)
class MountedLake:
    """A lake that is a folder of this machine: all of it is there."""

    path: Path

    @property
    def uri(self) -> str:
        """See `LakeFolder.uri`."""
        return self.path.as_uri()

    def named(self, path: Path) -> str:
        """See `LakeFolder.named`."""
        return str(path)

    def fetch(self, window: Span, *, replay_days: int, seen: SeenFiles | None = None) -> None:
        """See `LakeFolder.fetch`."""

    def fetch_newest(self) -> None:
        """See `LakeFolder.fetch_newest`."""

    def listed(self) -> None:
        """See `LakeFolder.listed`."""


@contextmanager
def opened_lake(uri: str, *, work: Path, **settings: Any) -> Iterator[LakeFolder]:
    """Opens the lake at `uri`; what was made for this run alone is gone afterwards, the cache stays.

    A `ContractError` from inside names the lake's own files, not those of the mirror.

    Args:
        uri: `gs://bucket/prefix`, `file://` or an absolute path.
        work: Folder for big data; the cache is `work/.lake-cache/`.
        settings: Of `Mirror`, where the lake is in a bucket.

    Raises:
        ContractError: `uri` is none of these.
    """
    if not is_bucket_uri(uri):
        yield MountedLake(_mounted(uri))
        return
    from components.extraction.mirror.mirror import opened_mirror

    with opened_mirror(uri, work, **settings) as mirror:
        try:
            yield mirror
        except ContractError as error:
            raise ContractError(str(error).replace(str(mirror.path), mirror.uri)) from error


def _mounted(uri: str) -> Path:
    try:
        return local_path(uri)
    except ContractError as error:
        raise ContractError(f"lake is {uri!r}, expected gs://bucket/prefix, file:///... or an absolute path") from error
