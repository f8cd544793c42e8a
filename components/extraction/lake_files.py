"""The files of a lake by day, and their local copies.

A lake in a folder is read in place. Objects of a bucket are downloaded when they are needed. A lake
is listed once, and a run reads only the listed files. Files that an uploader or a back-fill adds
later belong to a later run. Objects of a bucket are downloaded into a cache, at the generations in
the listing, so that no object is downloaded twice. If an object was replaced or removed since the
listing, the run fails with a temporary error. Copies have the same names, bytes and order as the
objects of the bucket. Therefore a window has the same rows and the same digest as with a copy of
the lake in a folder.

In the cache, `objects/<generation>/<name>` is complete and never changes. A name with the suffix
`.part` is an unfinished download, which the next run continues. Only one run at a time uses the
cache, and it locks the file `lock`. Objects that the run did not need are deleted.

Version 0 of a day consists of the files that the uploader writes to the day's folder. A back-fill
(`cli.backfill`) writes a new version of the day to a folder of its own. The marker of this version
lists the files of version 0 that the version replaces. A run reads the files of the newest complete
version. The run also reads the files that the uploader added to version 0 after the back-fill,
because they contain new rows. The caller of `replace_file` decides which rows a file loses.
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

logger = logging.getLogger(__name__)

_CACHE_FOLDER = ".lake-cache"
_PART = ".part"
_FOLDER = re.compile(re.escape(VERSION_PARTITION.format(version="")) + r"([1-9][0-9]{0,8})")
_MARKER_VERSION = 1
_OUTCOMES = OUTCOME_PARTITION.partition("/")[0]
_NUM_NAMED = 5
"""Number of unexpected files that an error names."""


class FileEntry(NamedTuple):
    """Entry for a file in a marker."""

    name: str
    """Name without its folder."""
    size: int
    """Size in bytes."""
    sha256: str = ""
    """SHA-256 of the content. Empty for a file that was replaced."""

    @classmethod
    def of(cls, path: Path) -> "FileEntry":
        """Return the entry for an existing file."""
        return cls(path.name, path.stat().st_size, sha256_file(path))


@dataclass(frozen=True, kw_only=True)
class VersionMarker:
    """Content of `_SUCCESS` in a version's folder."""

    day: str
    """YYYY-MM-DD."""
    version: int
    files: list[FileEntry]
    """Files of the version."""
    replaces: list[FileEntry]
    """Files of version 0 that existed before the back-fill. Readers skip these files."""
    num_rows: int
    created_at: str
    reason: str
    """Reason why the version was written, as a sentence for people."""

    def to_json(self) -> str:
        """Return the text of the marker."""
        return json.dumps({"format_version": _MARKER_VERSION, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def parse(cls, content: bytes, uri: str) -> "VersionMarker":
        """Parse the content of the marker at `uri`.

        Raises:
            ContractError: the content is not a marker of this format.
        """
        try:
            document: dict[str, Any] = json.loads(content)
            if document.pop("format_version") != _MARKER_VERSION:
                raise ContractError(
                    f"{uri} is of a later format, expected format_version {_MARKER_VERSION}"
                )
            files, replaces = (
                [FileEntry(*each) for each in document.pop(name)] for name in ("files", "replaces")
            )
            return cls(**document, files=files, replaces=replaces)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ContractError(
                f"{uri} is no marker of a back-filled version: {error!r}"
            ) from error


@dataclass(frozen=True)
class DayFiles:
    """The objects of one day."""

    version: int
    """Newest complete version. 0 if the day was never back-filled."""
    files: list[ObjectInfo]
    """Files to read. The files of the version come first, and then the files that were added to
    version 0 later, each sorted by name."""
    own: list[ObjectInfo]
    """All files of version 0, including files that a back-fill replaced."""
    sha256: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file of the version, by name."""
    incomplete: list[int] = field(default_factory=list)
    """Incomplete versions, which are ignored."""

    @property
    def corrected(self) -> list[ObjectInfo]:
        """Files of the back-filled version."""
        return [each for each in self.files if each.name in self.sha256]

    @property
    def appended(self) -> list[ObjectInfo]:
        """Files of version 0 to read.

        After a back-fill, only files that were added later are read.
        """
        return [each for each in self.files if each.name not in self.sha256]


def version_of_folder(name: str) -> int:
    """Return the version whose folder has this name, or 0 for any other name.

    >>> [version_of_folder(name) for name in ("version=12", "version=012", "outcomes")]
    [12, 0, 0]
    """
    found = _FOLDER.fullmatch(name)
    return int(found[1]) if found else 0


def newest_complete(names: Iterable[str]) -> int:
    """Return the newest complete version of a day, or 0 if there is none.

    `names` are relative to the day's folder.

    >>> newest_complete(["a.parquet", "version=1/b.parquet", "version=1/_SUCCESS", "version=2/c"])
    1
    """
    parted = [name.partition("/") for name in names]
    return max(
        (version_of_folder(folder) for folder, _, rest in parted if rest == VERSION_COMPLETE),
        default=0,
    )


def is_own_file(name: str) -> bool:
    """Return whether a name in the day's folder is a file of version 0.

    >>> [is_own_file(name) for name in ("a.parquet", "_half.parquet", "version=1/a.parquet")]
    [True, False, False]
    """
    return "/" not in name and name.endswith(".parquet") and is_visible(name)


def _is_allowed(name: str) -> bool:
    """Return whether a lake may contain a file with this relative name.

    Hidden files are allowed anywhere.

    >>> _is_allowed("day=2026-03-01/a.parquet"), _is_allowed("outcomes/day=2026-03-01/a.parquet")
    (True, True)
    >>> _is_allowed("dt=2026-03-01/a.parquet"), _is_allowed("day=2026-03-01/a.csv")
    (False, False)
    >>> _is_allowed("_notes/a.txt")
    True
    """
    *folders, file = name.split("/")
    if not file or not all(
        map(is_visible, (*folders, file))
    ):  # a bucket's console represents a folder by an object with an empty name
        return True
    is_partition = bool(folders) and folders[-1].startswith(DAY_PARTITION.format(day=""))
    if folders and version_of_folder(folders[-1]):
        is_partition = len(folders) == 2 and folders[0].startswith(DAY_PARTITION.format(day=""))
    elif is_partition:
        is_partition = folders[:-1] in ([], [_OUTCOMES])
    return is_partition and file.endswith(".parquet")


def _allowed_files(
    objects: Objects, listed: Iterable[ObjectInfo], ignore: Sequence[str], *, name: str
) -> list[ObjectInfo]:
    """Leave out files that match `ignore`, and check that all others are allowed in a lake.

    Args:
        objects: Objects of the lake.
        listed: Files of the lake.
        ignore: Patterns of names relative to the lake. `*` also matches slashes.
        name: Name of the lake in messages.

    Raises:
        ContractError: one of the other files is not allowed in a lake, or is not a regular file.
    """
    found = [
        each for each in listed if not any(fnmatchcase(each.name, pattern) for pattern in ignore)
    ]
    local = {each.name: objects.local(each.name) for each in found}
    wrong = [
        n for n, path in local.items() if not _is_allowed(n) or not (path is None or path.is_file())
    ]
    if wrong:
        more = f" and {len(wrong) - _NUM_NAMED} more" if len(wrong) > _NUM_NAMED else ""
        raise ContractError(
            f"lake {name} has {len(wrong)} unexpected files: "
            f"{', '.join(wrong[:_NUM_NAMED])}{more}; expected only regular files "
            "day=YYYY-MM-DD/*.parquet and outcomes/day=YYYY-MM-DD/*.parquet. Move the "
            "unexpected files, or ignore them: --set "
            f"'extraction.ignore=[{json.dumps(_folder_pattern(wrong[0]))}]'"
        )
    return found


def _folder_pattern(name: str) -> str:
    """Return a pattern that matches the file and all other files in its folder.

    A file in a day's folder gets a pattern that matches only this file.
    """
    folder, _, file = name.rpartition("/")
    return (
        f"{folder}/*"
        if folder and not _is_allowed(f"{folder}/a.parquet")
        else f"{folder}/{file}".lstrip("/")
    )


def objects_by_day(
    uri: str, listed: Iterable[ObjectInfo], partition: str
) -> dict[date, dict[str, ObjectInfo]]:
    """Return each day's objects by their name in the day's folder. The days are ascending.

    Days without Parquet files are left out.

    Args:
        uri: URI of the lake, for messages.
        listed: Objects of the lake.
        partition: `DAY_PARTITION` or `OUTCOME_PARTITION`.

    Raises:
        ContractError: the name of a partition contains no date.
    """
    start = partition.format(day="")
    found: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
    for each in listed:
        day, _, name = each.name.removeprefix(start).partition("/")
        if each.name.startswith(start) and name:
            found[day][name] = each
    days = {
        day: names
        for day, names in sorted(found.items())
        if any(name.endswith(".parquet") for name in names)
    }
    return {
        parse_day(f"lake partition {uri}/{start}{day}", day): names for day, names in days.items()
    }


def files_of_day(objects: Objects, day: date, names: Mapping[str, ObjectInfo]) -> DayFiles:
    """Return the objects of one day.

    Args:
        objects: Objects of the lake.
        day: The day.
        names: Objects in the day's folder, by name within the folder.

    Raises:
        ContractError: a marker is corrupt, or a file named in a marker is absent or has another
            size.
    """
    own = [each for name, each in sorted(names.items()) if is_own_file(name)]
    version = newest_complete(names)
    begun = {version_of_folder(name.partition("/")[0]) for name in names}
    complete = {
        version_of_folder(name.partition("/")[0])
        for name in names
        if name.endswith(f"/{VERSION_COMPLETE}")
    }
    incomplete = sorted(begun - complete - {0})
    if not version:
        return DayFiles(0, own, own, incomplete=incomplete)
    folder = VERSION_PARTITION.format(version=version)
    location = f"{DAY_PARTITION.format(day=day)}/{folder}"
    stored = objects.read(f"{location}/{VERSION_COMPLETE}")
    marker = VersionMarker.parse(
        stored.content if stored else b"", f"{objects.uri}/{location}/{VERSION_COMPLETE}"
    )
    files: list[ObjectInfo] = []
    for entry in marker.files:
        found = names.get(f"{folder}/{entry.name}")
        if found is None or found.size != entry.size:
            raise ContractError(
                f"{objects.uri}/{location}/{entry.name} is absent or changed, expected "
                f"{entry.size} bytes as in {VERSION_COMPLETE}"
            )
        files.append(found)
    replaced = {(entry.name, entry.size) for entry in marker.replaces}
    later = [each for each in own if (base_name(each), each.size) not in replaced]
    hashes = {found.name: entry.sha256 for found, entry in zip(files, marker.files)}
    return DayFiles(version, [*files, *later], own, hashes, incomplete)


def base_name(file: ObjectInfo) -> str:
    """Return the object's name without its folder."""
    return file.name.rpartition("/")[2]


def replace_file(objects: Objects, file: ObjectInfo, content: Path, *, num_gone: int) -> None:
    """Replace a Parquet file of a lake by `content`, which has `num_gone` rows fewer.

    Readers see either the old or the new file. `content` replaces a file of a complete version
    under a new name. Readers use the new file as soon as the version's marker contains the new
    name. If the marker does not contain the file, the file is deleted, because it is never read. A
    file of version 0 keeps its name, so that later runs recognize it as seen. Before such a file is
    replaced, its new size is added to the markers of the versions that replace the file.

    Raises:
        Changed: another writer came first.
    """
    folder, _, name = file.name.rpartition("/")
    day, entry = file.name.partition("/")[0], FileEntry.of(content)
    for each in [
        found for found in objects.list(f"{day}/") if base_name(found) == VERSION_COMPLETE
    ]:
        if (stored := objects.read(each.name)) is None:
            continue
        marker = VersionMarker.parse(stored.content, f"{objects.uri}/{each.name}")
        files, replaces = list(marker.files), list(marker.replaces)
        if is_own := each.name == f"{folder}/{VERSION_COMPLETE}":
            if at := [i for i, known in enumerate(files) if known.name == name]:
                stem = name.removesuffix(".parquet").partition("~")[0]
                files[at[0]] = entry._replace(name=f"{stem}~{entry.sha256[:12]}.parquet")
                objects.write(f"{folder}/{files[at[0]].name}", content)
        elif (
            folder == day
            and FileEntry(name, file.size) in replaces
            and FileEntry(name, entry.size) not in replaces
        ):
            replaces.append(FileEntry(name, entry.size))
        if (files, replaces) != (marker.files, marker.replaces):
            gone = num_gone if is_own else 0
            changed = replace(
                marker, files=files, replaces=replaces, num_rows=marker.num_rows - gone
            )
            objects.write(each.name, changed.to_json().encode(), if_generation=stored.generation)
        if is_own:
            objects.delete(file.name, if_generation=file.generation)
            return
    objects.write(file.name, content, if_generation=file.generation)


def _free_bytes(folder: Path) -> int:
    """Return the number of bytes that this process may still write on the folder's disk."""
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, kw_only=True)
class DownloadCache:
    """The downloaded objects of one lake. Only one run at a time uses a cache."""

    folder: Path
    free: Callable[[Path], int] = _free_bytes
    _used: set[Path] = field(default_factory=set, repr=False, compare=False)
    """Files that this run reads, with verified checksums."""

    @property
    def objects_folder(self) -> Path:
        """Return the folder of complete objects.

        The folder has one subfolder for each generation. The subfolder contains the object under
        its name.
        """
        return self.folder / "objects"

    def path(self, wanted: ObjectInfo) -> Path:
        """Return the path of the complete object."""
        return self.objects_folder / str(wanted.generation) / wanted.name

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other run uses the cache, and lock the cache for this run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another run that uses the cache %s", self.folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def fill(self, objects: Objects, wanted: list[ObjectInfo]) -> None:
        """Download the missing objects. The cache must be `locked`.

        Raises:
            Changed, TemporaryError: see `Objects.fetch`. Received bytes are kept, and the next call
                requests the rest.
            PermanentError: see `Objects.fetch`. A full disk also raises this error. Complete
                objects are kept.
        """
        missing = [
            each
            for each in wanted
            if self.path(each) not in self._used and not self._is_complete(each)
        ]
        self._used.update(map(self.path, wanted))
        if not missing:
            return
        paths = [self.path(each) for each in missing]
        downloads = [
            Download(each, path.with_name(path.name + _PART), path)
            for each, path in zip(missing, paths)
        ]
        num_bytes = self._make_room(objects.uri, downloads)
        logger.info(
            "fetching %d files of %s, %.1f MB", len(downloads), objects.uri, num_bytes / 1e6
        )
        download_all(objects, downloads)
        logger.info("all files are fetched")

    def prune(self) -> None:
        """Remove the objects that this run did not use, and then the empty folders."""
        for path in sorted(
            self.objects_folder.rglob("*"), reverse=True
        ):  # a folder comes after its content
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in self._used and path.with_suffix("") not in self._used:
                path.unlink()

    def _is_complete(self, wanted: ObjectInfo) -> bool:
        """Return whether the cache has the complete object with the listed bytes.

        A file with the wrong bytes is removed.
        """
        path = self.path(wanted)
        if not path.is_file() or path.stat().st_size != wanted.size:
            return False
        with open(path, "rb") as file:
            found = file_crc32c(file)
        if found != wanted.crc32c:
            logger.warning(
                "%s has CRC32C %s, expected %s: it is fetched again", path, found, wanted.crc32c
            )
            path.unlink()
        return found == wanted.crc32c

    def _make_room(self, uri: str, downloads: list[Download]) -> int:
        """Return how many bytes must still be downloaded. If necessary, disk space is freed first.

        Raises:
            PermanentError: the disk is too full.
        """
        parts = [each.part.stat().st_size if each.part.exists() else 0 for each in downloads]
        needed = sum(each.wanted.size for each in downloads) - sum(parts)
        if self.free(self.folder) < needed:
            self.prune()
        if (free := self.free(self.folder)) < needed:
            problem = (
                f"{len(downloads)} files of {uri} need {needed} more bytes, but only {free} "
                "bytes are free on the disk"
            )
            raise PermanentError(f"{self.folder}: {problem}")
        return needed


class LakeFiles:
    """The objects of one lake.

    Args:
        objects: Objects of the lake.
        cache: Local copies of a bucket's objects. None if the lake is a folder.
        until: Time in seconds since the epoch. Objects with a later time are ignored. None includes
            all objects.
        ignore: Objects whose names match one of these patterns are ignored.

    Raises:
        ContractError: there is no day, the name of a partition contains no date, or a file is not
            allowed in a lake.
    """

    def __init__(
        self,
        objects: Objects,
        cache: DownloadCache | None = None,
        *,
        until: float | None = None,
        ignore: Sequence[str] = (),
    ) -> None:
        self._objects, self._cache = objects, cache
        self.uri = objects.uri
        self.name = objects.uri if cache else str(local_path(objects.uri))
        """Name for people."""
        written = [each for each in objects.list() if until is None or each.written_at <= until]
        listed = _allowed_files(objects, written, ignore, name=self.name)
        self._rows = objects_by_day(self.uri, listed, DAY_PARTITION)
        outcomes = objects_by_day(self.uri, listed, OUTCOME_PARTITION)
        if not self._rows and not outcomes:
            raise ContractError(
                f"lake {self.name} holds no rows, expected folders day=YYYY-MM-DD of Parquet "
                "files; `evergreen data ingest` brings files of rows into a lake"
            )
        self.outcomes = {
            day: [
                each
                for name, each in sorted(names.items())
                if "/" not in name and name.endswith(".parquet")
            ]
            for day, names in outcomes.items()
        }
        """Files of late outcomes by day. The days are ascending."""
        self.of_day: Callable[[date], DayFiles] = functools.cache(self._files_of_day)
        """Function that returns which files of a day are read, see `files_of_day`."""
        self.unfit: dict[str, QuarantinedFile] = {}
        """Unfit files, which are left out, by name."""
        self._names: dict[Path, str] = {}
        """Object names of the local files that were requested."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker process, which cannot download files."""
        kept = {"uri": self.uri, "name": self.name, "outcomes": self.outcomes}
        return {**kept, "unfit": {}, "_objects": None, "_cache": None, "_names": {}}

    @property
    def days(self) -> list[date]:
        """Days that have files of rows, in order."""
        return list(self._rows)

    def leave_out(self, error: UnfitFiles) -> None:
        """Ignore these files from now on, and log a warning for each."""
        for path, reason in error.reasons.items():
            name = self._names[path]
            assert name not in self.unfit, "files that were left out are not read again"
            self.unfit[name] = QuarantinedFile.of(path, name, self.named(reason))
            logger.warning(
                "%s is quarantined, and the run goes on without it: %s",
                name,
                self.unfit[name].reason,
            )
        self.outcomes = {
            day: [each for each in files if each.name not in self.unfit]
            for day, files in self.outcomes.items()
        }
        self.of_day = functools.cache(self._files_of_day)

    @property
    def unfit_outcomes(self) -> list[QuarantinedFile]:
        """Unfit files of late outcomes."""
        return [each for each in self.unfit.values() if each.file.startswith(f"{_OUTCOMES}/")]

    @property
    def unfit_rows(self) -> list[QuarantinedFile]:
        """Unfit files that contain rows."""
        return [each for each in self.unfit.values() if not each.file.startswith(f"{_OUTCOMES}/")]

    def own_files(self, day: date) -> dict[str, ObjectInfo]:
        """Return the listed files of a day's version 0, by name."""
        return {
            name: each
            for name, each in sorted(self._rows.get(day, {}).items())
            if is_own_file(name)
        }

    @property
    def is_folder(self) -> bool:
        """Whether the lake is a folder on this machine."""
        return self._cache is None

    def paths(self, wanted: Iterable[ObjectInfo]) -> list[Path]:
        """Return the local files of these objects, and download them if necessary.

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
        """Return a text in which the names of the objects replace the paths of cached copies."""
        if self._cache is None:
            return str(text)
        return re.sub(rf"{re.escape(str(self._cache.objects_folder))}/\d+", self.uri, str(text))

    def _files_of_day(self, day: date) -> DayFiles:
        found = files_of_day(self._objects, day, self._rows.get(day, {}))
        if found.incomplete:
            logger.warning(
                "ignored versions %s of %s: they have no %s; if no back-fill of the day is "
                "running, remove them",
                found.incomplete,
                day,
                VERSION_COMPLETE,
            )
        if found.version and found.appended:
            logger.warning(
                "%s: %d files were added after the back-fill of version %d and are read too: %s",
                day,
                len(found.appended),
                found.version,
                [base_name(each) for each in found.appended[:5]],
            )
        return replace(found, files=[each for each in found.files if each.name not in self.unfit])


@contextmanager
def opened_lake(
    uri: str,
    *,
    work: Path,
    until: float | None = None,
    ignore: Sequence[str] = (),
    open_storage: Callable[[str], Objects] = open_objects,
    **settings: Any,
) -> Iterator[LakeFiles]:
    """Open the lake at `uri`.

    A ContractError raised in the `with` body names the lake's own files and not their local copies.

    Args:
        uri: `gs://bucket/prefix`, `file://` or an absolute path.
        work: Folder of the cache `.lake-cache/` for a bucket's files.
        until: See `LakeFiles`.
        ignore: See `LakeFiles`.
        open_storage: Function that opens the objects of a bucket.
        **settings: Further arguments of `DownloadCache`.

    Raises:
        ContractError: `uri` has another form, or the location does not exist.
        TemporaryError, PermanentError: the bucket cannot be listed.
    """
    if not is_bucket_uri(uri):
        try:
            folder = local_path(uri)
        except ContractError as error:
            expected = "expected gs://bucket/prefix, file:///... or an absolute path"
            raise ContractError(f"lake is {uri!r}, {expected}") from error
        if not folder.is_dir():
            raise ContractError(
                f"lake {folder} does not exist, expected a folder of day partitions"
            )
        yield LakeFiles(open_objects(uri), until=until, ignore=ignore)
        return
    uri = uri.rstrip("/")
    cache = DownloadCache(
        folder=work / _CACHE_FOLDER / hashlib.sha256(uri.encode()).hexdigest()[:16], **settings
    )
    with cache.locked():
        write_whole(cache.folder / "uri", uri + "\n")
        files = LakeFiles(open_storage(uri), cache, until=until, ignore=ignore)
        try:
            yield files
        except ContractError as error:
            raise ContractError(files.named(error)) from error
        cache.prune()
