"""The files of a lake by day: which they are, and where they lie on this machine.

A lake in a folder is read in place, objects of a bucket are fetched when they are needed. A lake is listed once, and
all that a run reads is of that listing: what an uploader or a back-fill adds later is another run's. Objects of a
bucket are fetched at the generations listed, into a cache, so that none is fetched twice; one that was replaced or
removed since ends the run with an error that a retry mends. Names, bytes and order are the bucket's, so a window's rows
and digest are those that the same lake in a folder gives.

In the cache `objects/<generation>/<name>` is whole and never changed; with `.part` behind its name it is an unfinished
download, which the next run continues. One run at a time uses it, holding `lock`; what it did not need is pruned.

A day is its newest complete version, and what came to version 0 after it. A back-fill replaces the files that lay in
the day's folder when it was written, which its marker names, and nothing else: what the uploader appends later is new
rows, and is read beside it. Writing a version is left to `backfill`, and which rows a file loses (`replace_file`) to
its caller.
"""

import fcntl
import functools
import hashlib
import json
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from evergreen.contracts.raw_rows import (
    DAY_PARTITION,
    OUTCOME_PARTITION,
    VERSION_COMPLETE,
    VERSION_PARTITION,
    is_visible,
)
from evergreen.rows.times import parse_day
from evergreen.rows.unfit import QuarantinedFile, UnfitFiles
from evergreen.runtime.durable import sha256_file, write_whole
from evergreen.runtime.errors import ContractError, PermanentError
from evergreen.storage.objects import Download, ObjectInfo, Objects, download_all, file_crc32c
from evergreen.storage.uris import is_bucket_uri, local_path, open_objects

_FOLDER = re.compile(re.escape(VERSION_PARTITION.format(version="")) + r"([1-9][0-9]{0,8})")
_MARKER_VERSION = 1
_OUTCOMES = OUTCOME_PARTITION.partition("/")[0]
_NUM_NAMED = 5
"""Unexpected files that an error names."""


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


def has_place(name: str) -> bool:
    """Whether a lake has a place for a file of this name, relative to the lake; hidden files have one anywhere.

    >>> [has_place(name) for name in ("day=2026-03-01/a.parquet", "outcomes/day=2026-03-01/a.parquet", "_notes/a.txt")]
    [True, True, True]
    >>> [has_place(name) for name in ("dt=2026-03-01/a.parquet", "a.parquet", "day=2026-03-01/a.csv", "2026/a.parquet")]
    [False, False, False, False]
    """
    *folders, file = name.split("/")
    if not file or not all(map(is_visible, (*folders, file))):  # a bucket's console makes folders as empty names
        return True
    is_partition = bool(folders) and folders[-1].startswith(DAY_PARTITION.format(day=""))
    if folders and version_of_folder(folders[-1]):
        is_partition = len(folders) == 2 and folders[0].startswith(DAY_PARTITION.format(day=""))
    elif is_partition:
        is_partition = folders[:-1] in ([], [_OUTCOMES])
    return is_partition and file.endswith(".parquet")


def files_in_place(
    objects: Objects, listed: Iterable[ObjectInfo], pass_over: Sequence[str], *, name: str
) -> list[ObjectInfo]:
    """Leave out the files that a run is told to pass over, and check that the others are where a lake has files.

    Args:
        objects: The lake.
        listed: Its files.
        pass_over: Patterns of names relative to the lake, in which `*` matches slashes, too.
        name: What messages call the lake.

    Raises:
        ContractError: some other file has no place in a lake, or is no regular file.
    """
    found = [each for each in listed if not any(fnmatchcase(each.name, pattern) for pattern in pass_over)]
    local = {each.name: objects.local(each.name) for each in found}
    wrong = [n for n, path in local.items() if not has_place(n) or not (path is None or path.is_file())]
    if wrong:
        more = f" and {len(wrong) - _NUM_NAMED} more" if len(wrong) > _NUM_NAMED else ""
        raise ContractError(
            f"lake {name} holds {len(wrong)} files where no rows are read: {', '.join(wrong[:_NUM_NAMED])}{more}; "
            "expected regular files day=YYYY-MM-DD/*.parquet and outcomes/day=YYYY-MM-DD/*.parquet; move them there or "
            f"away, or pass them over: --set 'extraction.pass_over=[{json.dumps(_folder_pattern(wrong[0]))}]'"
        )
    return found


def _folder_pattern(name: str) -> str:
    """A pattern for the files beside this one, or for this one where it lies among a day's own."""
    folder, _, file = name.rpartition("/")
    return f"{folder}/*" if folder and not has_place(f"{folder}/a.parquet") else f"{folder}/{file}".lstrip("/")


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
        ContractError: a marker is corrupt, or a file that it names is absent or of another size.
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


logger = logging.getLogger(__name__)

_PART = ".part"


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write on the folder's disk."""
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, kw_only=True)
class DownloadCache:
    """The objects of one lake; used by one run at a time."""

    folder: Path
    free: Callable[[Path], int] = free_bytes
    _used: set[Path] = field(default_factory=set, repr=False, compare=False)
    """Files that this run reads, whose checksum it has verified."""

    @property
    def objects_folder(self) -> Path:
        """Below it, each generation has a folder in which the object lies under its own name."""
        return self.folder / "objects"

    def path(self, wanted: ObjectInfo) -> Path:
        """Where the object lies once it is whole."""
        return self.objects_folder / str(wanted.generation) / wanted.name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs from the cache; waits for the one that uses it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another run that reads through %s", self.folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def fill(self, objects: Objects, wanted: list[ObjectInfo]) -> None:
        """Downloads those of the objects that are not here; must be `locked`.

        Raises:
            Changed, TemporaryError: see `Objects.fetch`; what arrived is kept, and the next call asks for the rest.
            PermanentError: also if the disk has no room. What is whole is kept.
        """
        missing = [each for each in wanted if self.path(each) not in self._used and not self._is_whole(each)]
        self._used.update(map(self.path, wanted))
        if not missing:
            return
        paths = [self.path(each) for each in missing]
        downloads = [Download(each, path.with_name(path.name + _PART), path) for each, path in zip(missing, paths)]
        num_bytes = self._make_room(objects.uri, downloads)
        logger.info("fetching %d files of %s, %.1f MB", len(downloads), objects.uri, num_bytes / 1e6)
        download_all(objects, downloads)
        logger.info("fetched them")

    def prune(self) -> None:
        """Removes what this run did not use, and the folders that are empty then."""
        for path in sorted(self.objects_folder.rglob("*"), reverse=True):  # what a folder holds comes before it
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in self._used and path.with_suffix("") not in self._used:
                path.unlink()

    def _is_whole(self, wanted: ObjectInfo) -> bool:
        """Whether the object is here with the bytes that were listed; one that the disk corrupted is removed."""
        path = self.path(wanted)
        if not path.is_file() or path.stat().st_size != wanted.size:
            return False
        with open(path, "rb") as file:
            found = file_crc32c(file)
        if found != wanted.crc32c:
            logger.warning("%s has CRC32C %s, expected %s: it is fetched again", path, found, wanted.crc32c)
            path.unlink()
        return found == wanted.crc32c

    def _make_room(self, uri: str, downloads: list[Download]) -> int:
        """The bytes that are still to be downloaded, for which there is room."""
        parts = [each.part.stat().st_size if each.part.exists() else 0 for each in downloads]
        needed = sum(each.wanted.size for each in downloads) - sum(parts)
        if self.free(self.folder) < needed:
            self.prune()
        if (free := self.free(self.folder)) < needed:
            problem = f"{len(downloads)} files of {uri} need {needed} bytes more, {free} are free on the disk"
            raise PermanentError(f"{self.folder}: {problem}")
        return needed


CACHE_FOLDER = ".lake-cache"


class LakeFiles:
    """The objects of one lake.

    `cache` keeps those of a bucket on this machine; None for a folder. Objects written after `until`, seconds since the
    epoch, do not count; None = all do. Neither do those whose names match a pattern of `pass_over`.

    Raises:
        ContractError: there is no day, a partition's name holds no date, or a file has no place in a lake.
    """

    def __init__(
        self,
        objects: Objects,
        cache: DownloadCache | None = None,
        *,
        until: float | None = None,
        pass_over: Sequence[str] = (),
    ) -> None:
        self._objects, self._cache = objects, cache
        self.uri = objects.uri
        self.name = objects.uri if cache else str(local_path(objects.uri))
        """For people."""
        written = [each for each in objects.list() if until is None or each.written_at <= until]
        listed = files_in_place(objects, written, pass_over, name=self.name)
        self._rows = objects_by_day(self.uri, listed, DAY_PARTITION)
        outcomes = objects_by_day(self.uri, listed, OUTCOME_PARTITION)
        if not self._rows and not outcomes:
            raise ContractError(
                f"lake {self.name} holds no rows, expected folders day=YYYY-MM-DD of Parquet files; `evergreen ingest` "
                "brings files of rows into a lake"
            )
        self.outcomes = {
            day: [each for name, each in sorted(names.items()) if "/" not in name and name.endswith(".parquet")]
            for day, names in outcomes.items()
        }
        """Files of late outcomes, by day in order."""
        self.of_day: Callable[[date], DayFiles] = functools.cache(self._files_of_day)
        """What is read of a day; see `files_of_day`."""
        self.unfit: dict[str, QuarantinedFile] = {}
        """The files that are left out, by name."""
        self._names: dict[Path, str] = {}
        """Of the files that somebody asked for."""

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that reads files it is told: without the way to fetch another one."""
        kept = {"uri": self.uri, "name": self.name, "outcomes": self.outcomes}
        return {**kept, "unfit": {}, "_objects": None, "_cache": None, "_names": {}}

    @property
    def days(self) -> list[date]:
        """Days that have files of rows, in order."""
        return list(self._rows)

    def leave_out(self, error: UnfitFiles) -> None:
        """Read no more of these files; a warning names each."""
        for path, reason in error.reasons.items():
            name = self._names[path]
            assert name not in self.unfit, "what is left out is not read again"
            self.unfit[name] = QuarantinedFile.of(path, name, self.named(reason))
            logger.warning("%s is quarantined, and the run goes on without it: %s", name, self.unfit[name].reason)
        self.outcomes = {
            day: [each for each in files if each.name not in self.unfit] for day, files in self.outcomes.items()
        }
        self.of_day = functools.cache(self._files_of_day)

    def own_files(self, day: date) -> dict[str, ObjectInfo]:
        """The files of a day's version 0 by name, of the listing alone."""
        return {name: each for name, each in sorted(self._rows.get(day, {}).items()) if is_own_file(name)}

    @property
    def is_folder(self) -> bool:
        """Whether all files are on this machine."""
        return self._cache is None

    def paths(self, wanted: Iterable[ObjectInfo]) -> list[Path]:
        """The files of these objects.

        Raises:
            TemporaryError, PermanentError: see `DownloadCache.fill`.
        """
        found = list(wanted)
        if self._cache is None:
            paths = [path for each in found if (path := self._objects.local(each.name))]
        else:
            self._cache.fill(self._objects, found)
            paths = [self._cache.path(each) for each in found]
        self._names.update(zip(paths, (each.name for each in found)))
        return paths

    def named(self, text: object) -> str:
        """`text`, an error or a path, with objects of the lake in place of the cache's copies of them."""
        if self._cache is None:
            return str(text)
        return re.sub(rf"{re.escape(str(self._cache.objects_folder))}/\d+", self.uri, str(text))

    def _files_of_day(self, day: date) -> DayFiles:
        found = files_of_day(self._objects, day, self._rows.get(day, {}))
        if found.incomplete:
            logger.warning(
                "ignored versions %s of %s: they have no %s; if no back-fill of the day is running, remove them",
                found.incomplete, day, VERSION_COMPLETE,
            )  # fmt: skip
        if found.version and found.appended:
            logger.warning(
                "%s: %d files came after version %d was back-filled and are read beside it: %s",
                day, len(found.appended), found.version, [base_name(each) for each in found.appended[:5]],
            )  # fmt: skip
        return replace(found, files=[each for each in found.files if each.name not in self.unfit])


@contextmanager
def opened_lake(
    uri: str,
    *,
    work: Path,
    until: float | None = None,
    pass_over: Sequence[str] = (),
    open_storage: Callable[[str], Objects] = open_objects,
    **settings: Any,
) -> Iterator[LakeFiles]:
    """Opens the lake at `uri`. A `ContractError` from the body names the lake's own files, not copies of them.

    The URI is `gs://bucket/prefix`, `file://` or an absolute path; copies of a bucket's files lie in
    `work/.lake-cache/`, by the `settings` of its `DownloadCache`. `until` and
    `pass_over`: see `LakeFiles`.

    Raises:
        ContractError: `uri` is none of these, or nothing is there.
        TemporaryError, PermanentError: the bucket cannot be listed.
    """
    if not is_bucket_uri(uri):
        try:
            folder = local_path(uri)
        except ContractError as error:
            expected = "expected gs://bucket/prefix, file:///... or an absolute path"
            raise ContractError(f"lake is {uri!r}, {expected}") from error
        if not folder.is_dir():
            raise ContractError(f"lake {folder} does not exist, expected a folder of day partitions")
        yield LakeFiles(open_objects(uri), until=until, pass_over=pass_over)
        return
    uri = uri.rstrip("/")
    cache = DownloadCache(folder=work / CACHE_FOLDER / hashlib.sha256(uri.encode()).hexdigest()[:16], **settings)
    with cache.locked():
        write_whole(cache.folder / "uri", uri + "\n")
        files = LakeFiles(open_storage(uri), cache, until=until, pass_over=pass_over)
        try:
            yield files
        except ContractError as error:
            raise ContractError(files.named(error)) from error
        cache.prune()
