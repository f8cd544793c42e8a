"""Which files are a day: its newest complete version, and what came to version 0 after it.

A back-fill replaces the files that lay in the day's folder when it was written, which its marker names, and nothing
else: what the uploader appends later is new rows, and is read beside it. Writing a version is left to `backfill`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from components.contracts.criteo import VERSION_COMPLETE, VERSION_PARTITION, is_visible
from components.runtime.durable import sha256_file
from components.runtime.errors import ContractError

logger = logging.getLogger(__name__)

_FOLDER = re.compile(re.escape(VERSION_PARTITION.format(version="")) + r"([1-9][0-9]{0,8})")
_MARKER_VERSION = 1


class FileMark(NamedTuple):
    """A file as a marker names it."""

    name: str
    """Without its folder."""
    size: int
    """Bytes."""
    sha256: str = ""
    """Of its bytes; empty for a file that was replaced."""

    @classmethod
    def of(cls, path: Path) -> FileMark:
        """The mark of a file to be kept."""
        return cls(path.name, path.stat().st_size, sha256_file(path))


@dataclass(frozen=True, kw_only=True)
class VersionMarker:
    """What `_SUCCESS` in a version's folder says."""

    day: str
    """YYYY-MM-DD."""
    version: int
    files: list[FileMark]
    """The version's own."""
    replaces: list[FileMark]
    """The files of version 0 that were there when it was written, and are read no more."""
    num_rows: int
    created_at: str
    reason: str
    """What the person who asked for it said."""

    def to_json(self) -> str:
        """The marker's text."""
        return json.dumps({"format_version": _MARKER_VERSION, **asdict(self)}, indent=2) + "\n"


@dataclass(frozen=True)
class DayFiles:
    """The files that are a day."""

    version: int
    """0: the day was never back-filled."""
    files: list[Path]
    """The version's, then those that came to version 0 later; each by name."""
    sha256: dict[Path, str] = field(default_factory=dict)
    """Of those that a marker names."""
    incomplete: list[int] = field(default_factory=list)
    """Versions that are ignored."""
    replaced: list[Path] = field(default_factory=list)
    """Files of version 0 that the version was written in place of; nobody reads them."""

    @property
    def appended(self) -> list[Path]:
        """Those of `files` that are version 0's: the uploader brought them."""
        return [path for path in self.files if path not in self.sha256]

    @property
    def later(self) -> list[Path]:
        """Files that came to version 0 after the version was back-filled."""
        return self.appended if self.version else []

    def warn(self, day: Path) -> None:
        """Logs what of the folder `day` is ignored, and what is read beside a back-filled version."""
        if self.incomplete:
            logger.warning("ignored versions %s of %s: they have no %s", self.incomplete, day, VERSION_COMPLETE)
        if self.later:
            logger.warning(
                "%s: %d files came after version %d was back-filled and are read beside it: %s",
                day, len(self.later), self.version, [path.name for path in self.later[:5]],
            )  # fmt: skip


class DayState(NamedTuple):
    """What was read of a day."""

    version: int
    digest: str
    """SHA-256 over names, sizes and contents of its files."""

    @classmethod
    def of_files(cls, day: DayFiles, read: list[Path]) -> DayState:
        """The state of those files of a day."""
        digest = hashlib.sha256()
        for path in read:
            content = day.sha256.get(path) or sha256_file(path)
            digest.update(f"{path.name}\0{path.stat().st_size}\0{content}\n".encode())
        return cls(day.version, digest.hexdigest())


def version_of_folder(name: str) -> int:
    """The version whose folder has this name; 0 for any other name.

    >>> version_of_folder("version=12"), version_of_folder("version=012"), version_of_folder("outcomes")
    (12, 0, 0)
    """
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found else 0


def newest_complete(names: Iterable[str]) -> int:
    """The version that is the day, by the names of what lies in it, relative to the day's folder; 0 = its own files.

    >>> newest_complete(["a.parquet", "version=1/b.parquet", "version=1/_SUCCESS", "version=2/c.parquet"])
    1
    """
    parted = [name.partition("/") for name in names]
    return max((version_of_folder(folder) for folder, _, rest in parted if rest == VERSION_COMPLETE), default=0)


def version_folders(day: Path) -> dict[int, Path]:
    """The folders of versions in a day's folder, complete or not, by version."""
    inside = day.iterdir() if day.is_dir() else ()
    found = {version: each for each in inside if (version := version_of_folder(each.name))}
    return dict(sorted(found.items()))


def visible_files(folder: Path) -> list[Path]:
    """The Parquet files directly in a folder, by name."""
    return sorted(p for p in folder.glob("*.parquet") if is_visible(p.name))


def files_of_day(day: Path) -> DayFiles:
    """The files that are the day in the folder `day`.

    Raises:
        ContractError: a marker is damaged, or a file that it names is absent or of another size.
    """
    own = visible_files(day)
    folders = version_folders(day)
    incomplete = [version for version, folder in folders.items() if not (folder / VERSION_COMPLETE).is_file()]
    version = max(folders.keys() - set(incomplete), default=0)
    if not version:
        return DayFiles(0, own, incomplete=incomplete)
    folder = folders[version]
    marker = read_marker(folder / VERSION_COMPLETE)
    files = {folder / mark.name: mark for mark in marker.files}
    for path, mark in files.items():
        if not path.is_file() or path.stat().st_size != mark.size:
            raise ContractError(
                f"{path} is absent or changed, expected {mark.size} bytes as its {VERSION_COMPLETE} says"
            )
    replaced = {(mark.name, mark.size) for mark in marker.replaces}
    later = [path for path in own if (path.name, path.stat().st_size) not in replaced]
    hashes = {path: mark.sha256 for path, mark in files.items()}
    return DayFiles(version, [*files, *later], hashes, incomplete, sorted({*own} - {*later}))


def read_marker(path: Path) -> VersionMarker:
    """The marker at `path`.

    Raises:
        ContractError: it is none of this format.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        if document.pop("format_version") != _MARKER_VERSION:
            raise ContractError(f"{path} is of a later format, expected format_version {_MARKER_VERSION}")
        files, replaces = ([FileMark(*each) for each in document.pop(name)] for name in ("files", "replaces"))
        return VersionMarker(**document, files=files, replaces=replaces)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContractError(f"{path} is no marker of a back-filled version: {error!r}") from error
