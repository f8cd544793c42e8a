"""The files of a lake by day, on this machine: in place in a folder, fetched when they are needed from a bucket.

A lake is listed once, and all that a run reads is of that listing: what an uploader or a back-fill adds later is
another run's. Objects of a bucket are fetched at the generations listed, into a cache (`download_cache`) that one run
at a time uses; one that was replaced or removed since ends the run with an error that a retry mends. Names, bytes and
order are the bucket's, so a window's rows and digest are those that the same lake in a folder gives.
"""

import functools
import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from components.contracts.raw_rows import DAY_PARTITION, OUTCOME_PARTITION, VERSION_COMPLETE
from components.extraction.day_versions import DayFiles, base_name, files_of_day, objects_by_day
from components.extraction.download_cache import DownloadCache
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError
from components.storage.locations import open_objects
from components.storage.objects import ObjectInfo, Objects
from components.storage.uris import is_bucket_uri, local_path

logger = logging.getLogger(__name__)

CACHE_FOLDER = ".lake-cache"


class LakeFiles:
    """The objects of one lake.

    `cache` keeps those of a bucket on this machine; None for a folder.

    Raises:
        ContractError: there is no day, or a partition's name holds no date.
    """

    def __init__(self, objects: Objects, cache: DownloadCache | None = None) -> None:
        self._objects, self._cache = objects, cache
        self.uri = objects.uri
        self.name = objects.uri if cache else str(local_path(objects.uri))
        """For people."""
        listed = objects.list()
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

    @property
    def days(self) -> list[date]:
        """Days that have files of rows, in order."""
        return list(self._rows)

    def paths(self, wanted: Iterable[ObjectInfo]) -> list[Path]:
        """The files of these objects.

        Raises:
            TemporaryError, PermanentError: see `DownloadCache.fill`.
        """
        found = list(wanted)
        if self._cache is None:
            return [path for each in found if (path := self._objects.local(each.name))]
        self._cache.fill(self._objects, found)
        return [self._cache.path(each) for each in found]

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
        return found


@contextmanager
def opened_lake(
    uri: str, *, work: Path, open_storage: Callable[[str], Objects] = open_objects, **settings: Any
) -> Iterator[LakeFiles]:
    """Opens the lake at `uri`. A `ContractError` from the body names the lake's own files, not copies of them.

    The URI is `gs://bucket/prefix`, `file://` or an absolute path; copies of a bucket's files lie in
    `work/.lake-cache/`, by the `settings` of its `DownloadCache`.

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
        yield LakeFiles(open_objects(uri))
        return
    uri = uri.rstrip("/")
    cache = DownloadCache(folder=work / CACHE_FOLDER / hashlib.sha256(uri.encode()).hexdigest()[:16], **settings)
    with cache.locked():
        write_whole(cache.folder / "uri", uri + "\n")
        files = LakeFiles(open_storage(uri), cache)
        try:
            yield files
        except ContractError as error:
            raise ContractError(files.named(error)) from error
        cache.prune()
