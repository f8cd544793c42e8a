"""Which files are a day: its newest complete version, and what came to version 0 after it.

A back-fill replaces the files that lay in the day's folder when it was written, which its marker names, and nothing
else: what the uploader appends later is new rows, and is read beside it. Everything follows from a listing of the lake
and the markers; fetching the files is left to `lake_files`, writing a version to `backfill`, and which rows a file
loses (`replace_file`) to its caller.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from components.contracts.raw_rows import DAY_PARTITION, VERSION_COMPLETE, VERSION_PARTITION, is_visible
from components.extraction.times import parse_day
from components.runtime.durable import sha256_file
from components.runtime.errors import ContractError
from components.storage.objects import ObjectInfo, Objects

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
    def of(cls, path: Path) -> "FileMark":
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
    """Why it was written, for people."""

    def to_json(self) -> str:
        """The marker's text."""
        return json.dumps({"format_version": _MARKER_VERSION, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def parse(cls, content: bytes, uri: str) -> "VersionMarker":
        """The marker that the object at `uri` holds.

        Raises:
            ContractError: it is none of this format.
        """
        try:
            document: dict[str, Any] = json.loads(content)
            if document.pop("format_version") != _MARKER_VERSION:
                raise ContractError(f"{uri} is of a later format, expected format_version {_MARKER_VERSION}")
            files, replaces = ([FileMark(*each) for each in document.pop(name)] for name in ("files", "replaces"))
            return cls(**document, files=files, replaces=replaces)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ContractError(f"{uri} is no marker of a back-filled version: {error!r}") from error


@dataclass(frozen=True)
class DayFiles:
    """The objects that are a day."""

    version: int
    """0: the day was never back-filled."""
    files: list[ObjectInfo]
    """The version's, then those that came to version 0 later; each by name."""
    own: list[ObjectInfo]
    """All of version 0, those included that the version was written in place of and nobody reads."""
    sha256: dict[str, str] = field(default_factory=dict)
    """By name, of the version's files."""
    incomplete: list[int] = field(default_factory=list)
    """Versions that are ignored."""

    @property
    def appended(self) -> list[ObjectInfo]:
        """Those of `files` that are version 0's: the uploader brought them."""
        return [each for each in self.files if each.name not in self.sha256]


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


def is_own_file(name: str) -> bool:
    """Whether a name, relative to the day's folder, is a file of version 0.

    >>> [is_own_file(name) for name in ("a.parquet", "_half.parquet", "version=1/a.parquet", "notes.txt")]
    [True, False, False, False]
    """
    return "/" not in name and name.endswith(".parquet") and is_visible(name)


def objects_by_day(uri: str, listed: Iterable[ObjectInfo], partition: str) -> dict[date, dict[str, ObjectInfo]]:
    """The objects of each day in order, by name within the day's folder; days without Parquet files do not count.

    `partition` is `DAY_PARTITION` or `OUTCOME_PARTITION`.

    Raises:
        ContractError: a partition's name holds no date.
    """
    start = partition.format(day="")
    found: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
    for each in listed:
        day, _, name = each.name.removeprefix(start).partition("/")
        if each.name.startswith(start) and name:
            found[day][name] = each
    days = {day: names for day, names in sorted(found.items()) if any(name.endswith(".parquet") for name in names)}
    return {parse_day(f"lake partition {uri}/{start}{day}", day): names for day, names in days.items()}


def files_of_day(objects: Objects, day: date, names: Mapping[str, ObjectInfo]) -> DayFiles:
    """The objects that are a day, of those in its folder.

    Raises:
        ContractError: a marker is damaged, or a file that it names is absent or of another size.
    """
    own = [each for name, each in sorted(names.items()) if is_own_file(name)]
    version = newest_complete(names)
    begun = {version_of_folder(name.partition("/")[0]) for name in names}
    complete = {version_of_folder(name.partition("/")[0]) for name in names if name.endswith(f"/{VERSION_COMPLETE}")}
    incomplete = sorted(begun - complete - {0})
    if not version:
        return DayFiles(0, own, own, incomplete=incomplete)
    folder = VERSION_PARTITION.format(version=version)
    location = f"{DAY_PARTITION.format(day=day)}/{folder}"
    stored = objects.read(f"{location}/{VERSION_COMPLETE}")
    marker = VersionMarker.parse(stored.content if stored else b"", f"{objects.uri}/{location}/{VERSION_COMPLETE}")
    files: list[ObjectInfo] = []
    for mark in marker.files:
        found = names.get(f"{folder}/{mark.name}")
        if found is None or found.size != mark.size:
            raise ContractError(
                f"{objects.uri}/{location}/{mark.name} is absent or changed, expected {mark.size} bytes as its "
                f"{VERSION_COMPLETE} says"
            )
        files.append(found)
    replaced = {(mark.name, mark.size) for mark in marker.replaces}
    later = [each for each in own if (base_name(each), each.size) not in replaced]
    hashes = {found.name: mark.sha256 for found, mark in zip(files, marker.files)}
    return DayFiles(version, [*files, *later], own, hashes, incomplete)


def base_name(file: ObjectInfo) -> str:
    """The object's name without its folder."""
    return file.name.rpartition("/")[2]


def replace_file(objects: Objects, file: ObjectInfo, content: Path, *, num_gone: int) -> None:
    """Replaces a Parquet file of a lake by `content`, which lacks `num_gone` of its rows; readers find one of the two.

    A file of a complete version gets another name, which the version's marker tells in one write; one that its marker
    does not name is removed, since nobody reads it. Any other file keeps its name, by which rounds know that they have
    seen it, and the markers of versions that were written in its place learn its new size first.

    Raises:
        Changed: another writer came first.
    """
    folder, _, name = file.name.rpartition("/")
    day, mark = file.name.partition("/")[0], FileMark.of(content)
    for each in [found for found in objects.list(f"{day}/") if base_name(found) == VERSION_COMPLETE]:
        if (stored := objects.read(each.name)) is None:
            continue
        marker = VersionMarker.parse(stored.content, f"{objects.uri}/{each.name}")
        files, replaces = list(marker.files), list(marker.replaces)
        if is_own := each.name == f"{folder}/{VERSION_COMPLETE}":
            if at := [i for i, known in enumerate(files) if known.name == name]:
                stem = name.removesuffix(".parquet").partition("~")[0]
                files[at[0]] = mark._replace(name=f"{stem}~{mark.sha256[:12]}.parquet")
                objects.write(f"{folder}/{files[at[0]].name}", content)
        elif folder == day and FileMark(name, file.size) in replaces and FileMark(name, mark.size) not in replaces:
            replaces.append(FileMark(name, mark.size))
        if (files, replaces) != (marker.files, marker.replaces):
            gone = num_gone if is_own else 0
            changed = replace(marker, files=files, replaces=replaces, num_rows=marker.num_rows - gone)
            objects.write(each.name, changed.to_json().encode(), if_generation=stored.generation)
        if is_own:
            objects.delete(file.name, if_generation=file.generation)
            return
    objects.write(file.name, content, if_generation=file.generation)
