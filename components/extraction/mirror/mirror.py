"""A lake in a bucket as a folder of this machine, listed once and fetched at the generations of that listing.

An object that was replaced or removed since is noticed, and the lake is listed anew, a bounded number of times. What a
folder would show, the view shows: names, bytes and order are the bucket's, so a window's rows and digest are those that
the same lake in a folder gives.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from components.extraction.criteo_files import CriteoFiles
from components.extraction.lake import PIECE_ROWS, Lake
from components.extraction.mirror.cache import Cache
from components.extraction.mirror.choice import LakeObjects, is_lake
from components.extraction.mirror.listing import find_objects, list_objects
from components.extraction.mirror.view import View, new_view
from components.extraction.seen_files import SeenFiles
from components.extraction.times import DAY_MICROS, Span, day_span
from components.runtime.durable import write_whole
from components.runtime.errors import ContractError, TemporaryError
from components.storage.locations import open_objects
from components.storage.objects import Changed, ObjectInfo, Objects

logger = logging.getLogger(__name__)

CACHE_FOLDER = ".lake-cache"
MAX_LISTINGS = 3
"""So often the lake is listed where objects change while they are fetched."""


@contextmanager
def opened_mirror(
    uri: str, work: Path, *, open_storage: Callable[[str], Objects] = open_objects, **settings: Any
) -> Iterator[Mirror]:
    """Opens the lake at `uri` (`gs://`) with its cache below `work`.

    Args:
        uri: Of the lake.
        work: Folder for big data.
        open_storage: Opens what lies below a URI.
        settings: Of the `Cache`.

    Raises:
        ContractError: nothing is there.
        TemporaryError, PermanentError: the bucket cannot be listed.
    """
    uri = uri.rstrip("/")
    name = hashlib.sha256(uri.encode()).hexdigest()[:16]
    cache = Cache(folder=work / CACHE_FOLDER / name, **settings)
    objects, listing, file = find_objects(uri, open_storage)
    with ExitStack() as stack:
        with cache.locked():
            write_whole(cache.folder / "uri", uri + "\n")
            view = stack.enter_context(new_view(cache.folder / "views"))
        yield Mirror(uri, objects, cache, view, listing=listing, file=file)


class Mirror:
    """See `lake_folder.LakeFolder`.

    Args:
        uri: The lake's.
        objects: Where it is listed and fetched.
        cache: Where it is kept.
        view: What is read.
        listing: What `objects` hold.
        file: The one object that is the lake; None = all of them.
    """

    def __init__(
        self, uri: str, objects: Objects, cache: Cache, view: View, *, listing: list[ObjectInfo], file: str | None
    ) -> None:
        self.uri = uri
        self.path = view.folder / file if file else view.folder
        self._objects, self._cache, self._view, self._file = objects, cache, view, file
        self._listing: list[ObjectInfo] | None = listing
        self._newest: set[date] = set()

    def named(self, path: Path) -> str:
        """See `LakeFolder.named`."""
        return str(path).replace(str(self.path), self.uri, 1)

    def fetch(self, window: Span, *, replay_days: int, seen: SeenFiles | None = None) -> None:
        """See `LakeFolder.fetch`."""
        with self._cache.locked():
            self._cache.prune(self._repeated(lambda listing: self._fetch(listing, window, replay_days, seen)))

    def fetch_newest(self) -> None:
        """See `LakeFolder.fetch_newest`."""
        with self._cache.locked():
            self._repeated(self._fetch_newest)

    def listed(self) -> Mapping[date, Mapping[str, int]] | None:
        """See `LakeFolder.listed`: of the listing at whose generations the files were fetched."""
        listing = self._listed()
        return LakeObjects(self.uri, listing).appended if is_lake(listing) else None

    def _repeated(self, bring: Callable[[list[ObjectInfo]], list[ObjectInfo]]) -> list[ObjectInfo]:
        """Calls `bring`, which says what the view shows, with a listing that holds until all is fetched."""
        for _ in range(MAX_LISTINGS):
            try:
                return bring(self._listed())
            except Changed as error:
                logger.warning("listing the lake anew: %s", error)
                self._listing, last = None, error
        raise TemporaryError(f"lake {self.uri} changed while it was read, {MAX_LISTINGS} times: {last}") from last

    def _listed(self) -> list[ObjectInfo]:
        if self._listing is None:
            self._listing = list_objects(self._objects, self.uri, self._file)
        return self._listing

    def _fetch(
        self, listing: list[ObjectInfo], window: Span, replay_days: int, seen: SeenFiles | None
    ) -> list[ObjectInfo]:
        if not is_lake(listing):
            return self._fetch_criteo(listing, window)
        lake = LakeObjects(self.uri, listing)
        days, older = {*lake.in_window(window), *self._newest.intersection(lake.days)}, lake.before(window)
        late, num_older = lake.late(seen) if seen else [], replay_days
        while True:
            near = {*days, *older[:num_older]}
            shown = self._show(lake.files({*near, *late}))
            # A day may have files and no row before the window to replay, which only their footers tell.
            replayable = (
                self._num_replayable(window, replay_days, near, seen) if num_older < len(older) else replay_days
            )
            lacking = replay_days - replayable
            if lacking <= 0:
                return shown
            num_older += lacking

    def _num_replayable(
        self, window: Span, num_days: int, days: Collection[date], seen: SeenFiles | None = None
    ) -> int:
        """How many of `days` have rows to replay, `num_days` at most; other days may be here for their late rows."""
        assert window.start is not None
        lake = Lake(folder=self.path, seen=seen)
        try:
            pieces = lake.pieces_before(window.start, num_days=num_days, piece_rows=PIECE_ROWS)
        except ContractError:
            return num_days  # A damaged file: the draw will meet it too, and says what it means.
        return len({piece.day for piece in pieces} & {*days})

    def _fetch_newest(self, listing: list[ObjectInfo]) -> list[ObjectInfo]:
        if not is_lake(listing):
            # Days are told by the names there.
            self._numbered(listing)
            return []
        lake, shown = LakeObjects(self.uri, listing), list[ObjectInfo]()
        for day in reversed(lake.days):
            self._newest.add(day)
            shown = self._show(lake.files(self._newest & {*lake.days}, with_outcomes=False))
            end = day_span(day).end
            if end and self._num_replayable(Span(end), 1, self._newest):
                break
        return shown

    def _fetch_criteo(self, listing: list[ObjectInfo], window: Span) -> list[ObjectInfo]:
        """Brings the files of the window's days; an empty one stands for each other, for a file's place is its day."""
        days = [(day * DAY_MICROS, path.name) for day, path in self._numbered(listing)]
        names = {name for start, name in days if window.overlaps(start, start + DAY_MICROS - 1)}
        wanted = [each for each in listing if each.name in names]
        return self._show(wanted, empty=[n for each in listing if "/" not in (n := each.name) and n not in names])

    def _numbered(self, listing: list[ObjectInfo]) -> list[tuple[int, Path]]:
        self._view.show({}, empty=[each.name for each in listing if "/" not in each.name])
        return CriteoFiles(path=self.path).numbered()

    def _show(self, wanted: list[ObjectInfo], *, empty: list[str] | None = None) -> list[ObjectInfo]:
        self._cache.fill(self._objects, wanted)
        self._view.show({each.name: self._cache.path(each) for each in wanted}, empty=empty or [])
        return wanted
