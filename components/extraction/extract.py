"""The extraction of one window: rows sorted by time, split into training rows and holdout.

The holdout consists of the newest rows. No row with a time or a request of the holdout was used to
train the candidate, its parent or the champion. A model looks better than it is on its own training
rows, and on other rows of the same requests, because the rows of a request are alike. The split is
therefore a point in time after the newest training row of the parent and the champion. A row after
the split is dropped if its request has rows before the split. The dropped row is not lost, because
the next run begins after the newest training row of this run. If all other rows of a request are
before the window, this run cannot detect the request. Late rows (see `seen_files`) precede the
other rows in training and are never held out.

The output folder `<work>/<run>/extraction/` is written atomically, and a retried task replaces it.
The folder contains:

- `train/` and `holdout/`: Parquet files in the raw schema.
- `replay/` and `replay_holdout/`: rows older than the window (see `components.extraction.replay`).
- `malformed.jsonl`: malformed rows, if there are any.
- `ahead.jsonl`: files with rows ahead of the clock, if there are any.
- `words.json`: counts of string categories, if a column has them.

Unreadable files and files with unsuitable content are left out (see `evergreen.rows.unfit`). The
first pass over the rows finds all files to leave out, and the next pass does not read them. The
result therefore equals that of a lake without these files.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from components.extraction.copies import Copies
from components.extraction.lake import Lake, WindowPiece
from components.extraction.replay import HELD_OUT, REPLAYED, DrawnReplay, draw_replay
from components.extraction.window import NO_BASELINES, Baselines, days_asked, watermark
from evergreen.config.extraction import MAX_LATE_DAYS, ExtractionSettings
from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import Model, RawDataset
from evergreen.contracts.raw_rows import DAY_PARTITION, EVENT_TIME, REQUEST_ID
from evergreen.contracts.row_hash import request_hashes
from evergreen.contracts.words import WordCounts
from evergreen.rows.archived_rows import parquet_file
from evergreen.rows.raw_schema import (
    FILE_ROWS,
    MalformedRows,
    PartFile,
    PartWriter,
    cut_newest,
    excluded_columns,
)
from evergreen.rows.times import DAY_MICROS, TimeSpan, to_iso
from evergreen.rows.unfit import NUM_NAMED, QuarantinedFile, UnfitFiles, expect_few
from evergreen.runtime import forked
from evergreen.runtime.durable import sha256_tree, whole_directory
from evergreen.runtime.errors import FROM_SCRATCH, ContractError, run_again
from evergreen.runtime.workers import Workers, workers_of

logger = logging.getLogger(__name__)

_MIN_ROWS = 10
_LOT_ROWS = 4 * FILE_ROWS
"""Approximate number of rows that a worker copies in one task."""
WINDOW, _LATE = "all", "late"
"""Temporary folders of the step. `_LATE` is also the prefix of the late rows' files, so that they
sort before `part`."""
_MALFORMED_FILE, _AHEAD_FILE, _WORDS_FILE = "malformed.jsonl", "ahead.jsonl", "words.json"


class Cut(NamedTuple):
    """The split between training rows and newer rows."""

    num_older: int
    """Number of rows before the split."""
    last_learned: int
    """Time of the newest row before the split, microseconds since the epoch."""


def _event_times(path: Path) -> NDArray[np.int64]:
    """Return the event times of a file's rows, microseconds since the epoch, [n]."""
    times: NDArray[np.int64] = (
        parquet_file(path).read([EVENT_TIME]).column(0).cast(pa.int64()).to_numpy()
    )
    return times


def _rows_until(parts: Sequence[PartFile], time: int) -> int:
    """Return the number of rows at or before `time` in files that are sorted by time."""
    return sum(int(np.searchsorted(_event_times(part.path), time, side="right")) for part in parts)


def _find_cut(parts: Sequence[PartFile], num_wanted: int, *, learned: int | None) -> Cut | None:
    """Return the split that leaves about `num_wanted` newer rows, or None if there is none.

    All rows with the time of the split are newer rows, so there can be more than `num_wanted`. If
    no training row would remain, all rows become training rows.

    Args:
        parts: Files with the window's rows, sorted by time.
        num_wanted: Number of holdout rows.
        learned: Time of the newest training row of the baselines, microseconds since the epoch. All
            holdout rows are newer than this time. None if there is no baseline.
    """
    num_rows = sum(part.num_rows for part in parts)
    num_learned = 0 if learned is None else _rows_until(parts, learned)
    place = max(num_rows - num_wanted, num_learned)
    if place >= num_rows:
        return None
    time = _time_at(parts, place)
    num_older = _rows_until(parts, time - 1) or _rows_until(parts, time)
    return Cut(num_older, _time_at(parts, num_older - 1)) if num_older < num_rows else None


def remove_straddling(holdout: Path, learned: Sequence[Path], workers: Workers) -> int:
    """Remove from `holdout` the rows of requests that also have training rows.

    The function needs 4 bytes of memory for each request of `holdout`. Each worker needs memory for
    the request ids of one file.

    Args:
        holdout: Folder of the holdout rows.
        learned: Folders of training rows.
        workers: Workers that read the files.

    Returns:
        The number of removed rows.
    """
    own = np.unique(
        np.concatenate(
            [request_hashes(_request_ids(path)) for path in sorted(holdout.glob("*.parquet"))]
        )
    )
    files = [path for folder in learned for path in sorted(folder.glob("*.parquet"))]
    found = workers.run_all(partial(_ids_among, own), files)
    shared, num_removed = pa.array(sorted(set().union(*found)), pa.string()), 0
    for path in sorted(holdout.glob("*.parquet")) if len(shared) else ():
        if not pc.any(pc.is_in(_request_ids(path), value_set=shared)).as_py():
            continue
        whole = path.rename(path.with_suffix(".whole"))
        with PartWriter(holdout, prefix=path.stem) as writer:
            for batch in parquet_file(whole).iter_batches():
                kept = batch.filter(pc.invert(pc.is_in(batch.column(REQUEST_ID), value_set=shared)))
                num_removed += batch.num_rows - kept.num_rows
                writer.write(kept)
        for part in writer.parts:  # one file at most, because rows were only removed
            part.path.rename(path)
        whole.unlink()
    return num_removed


def _request_ids(path: Path) -> Any:
    """Return the distinct request ids of a file."""
    return parquet_file(path).read([REQUEST_ID]).column(0).unique()


def _ids_among(hashes: NDArray[np.uint32], path: Path) -> list[str]:
    """Return those request ids of a file whose hash is in `hashes`. The hashes are ascending.

    Different ids may have the same hash.
    """
    ids = _request_ids(path)
    mine = request_hashes(ids)
    places = np.minimum(np.searchsorted(hashes, mine), len(hashes) - 1)
    found: list[str] = ids.filter(pa.array(hashes[places] == mine)).to_pylist()
    return found


def _time_at(parts: Sequence[PartFile], place: int) -> int:
    for part in parts:
        if place < part.num_rows:
            return int(_event_times(part.path)[place])
        place -= part.num_rows
    raise AssertionError("the place is one of a row")


@dataclass
class _CopiedRows:
    num_rows: int = 0
    copies: Copies = field(default_factory=Copies)
    """Counts of rows that were left out because another copy was kept."""
    first: int = 0
    days: Counter[int] = field(default_factory=Counter)
    """Number of rows of each day. Days are numbered since 1970."""
    last: int = 0

    def add_newer(self, other: "_CopiedRows") -> None:
        """Add the counts of newer rows."""
        assert other.first >= self.last or not self.num_rows, "rows come in time order"
        self.first = self.first if self.num_rows else other.first
        self.last = other.last
        self.num_rows += other.num_rows
        self.copies.add(other.copies)
        self.days.update(other.days)

    def add(self, table: Any, copies: Copies) -> None:
        """Count the rows of a table, and the copies that were left out of it."""
        self.num_rows += table.num_rows
        self.copies.add(copies)
        times = table.column(EVENT_TIME).cast(pa.int64()).to_numpy()
        numbers, counts = np.unique(times // DAY_MICROS, return_counts=True)
        self.days.update(dict(zip(numbers.tolist(), counts.tolist())))


def extract(
    lake: Lake,
    window: TimeSpan,
    *,
    folder: Path,
    recommender: Recommender,
    baselines: Baselines = NO_BASELINES,
    dask_scheduler: str = "",
) -> RawDataset:
    """Write the window's rows to `folder`, replacing its content, and return their manifest.

    Args:
        lake: Lake with the rows.
        window: Times of the rows.
        folder: Output folder.
        recommender: Recommender with its settings.
        baselines: Parent and champion of the candidate.
        dask_scheduler: Address of the Dask scheduler whose workers copy the rows. If it is empty,
            processes on this machine copy the rows.

    Raises:
        ContractError: a setting is wrong, there are too few rows for training or the holdout, or
            too many files are unfit to read.
        TemporaryError: see `evergreen.runtime.workers.workers_of`.
    """
    while True:
        try:
            return _extract_fit(
                lake,
                window,
                folder=folder,
                recommender=recommender,
                baselines=baselines,
                dask_scheduler=dask_scheduler,
            )
        except UnfitFiles as error:
            lake = lake.without(error)
        except ContractError as error:
            if not (unfit := list(lake.files.unfit.values())):
                raise
            names = ", ".join(each.file for each in unfit[:NUM_NAMED])
            more = f" and {len(unfit) - NUM_NAMED} more" if len(unfit) > NUM_NAMED else ""
            raise ContractError(f"{error}; unfit files were left out: {names}{more}") from error


def _extract_fit(
    lake: Lake,
    window: TimeSpan,
    *,
    folder: Path,
    recommender: Recommender,
    baselines: Baselines,
    dask_scheduler: str,
) -> RawDataset:
    """Do the work of `extract` once.

    Raises:
        ContractError: see `extract`.
        TemporaryError: see `extract`.
        UnfitFiles: further files of `lake` are unfit to read.
    """
    settings = recommender.section("extraction", ExtractionSettings)
    with (
        whole_directory(folder, replace=True) as aside,
        workers_of(dask_scheduler, processes=forked.usual_processes(), shared=aside) as workers,
    ):
        found = _write_rows(
            lake, window, folder=aside, settings=settings, baselines=baselines, workers=workers
        )
        has_words = lake.words.write(aside / _WORDS_FILE, without=recommender.columns_of_users)
    split = found.split
    logger.info(
        "%s: %d rows to learn, %d late; %d newer ones",
        window,
        split.num_train,
        found.late.num_rows,
        split.num_newer,
    )
    dataset = _dataset(
        found, lake, window, folder=folder, recommender=recommender, baselines=baselines
    )
    return replace(dataset, words_uri=(folder / _WORDS_FILE).as_uri() if has_words else None)


def _dataset(
    found: "_Written",
    lake: Lake,
    window: TimeSpan,
    *,
    folder: Path,
    recommender: Recommender,
    baselines: Baselines,
) -> RawDataset:
    """Return the manifest of the written rows, without the URI of string categories."""
    settings = recommender.section("extraction", ExtractionSettings)
    count, malformed, split, replay = found.copied, found.malformed, found.split, found.replay
    seen = lake.seen
    return RawDataset(
        source_uri=lake.files.uri,
        window_start=to_iso(window.start) if window.start is not None else None,
        window_end=to_iso(window.end) if window.end is not None else None,
        first_event_time=to_iso(count.first),
        last_event_time=to_iso(count.last),
        last_learned_time=to_iso(found.last_learned),
        train_uri=(folder / "train").as_uri(),
        holdout_uri=(folder / "holdout").as_uri(),
        num_train_rows=split.num_train,
        num_holdout_rows=split.num_newer - found.num_straddling,
        num_malformed=malformed.num_rows,
        malformed_uri=(folder / _MALFORMED_FILE).as_uri() if malformed.num_rows else None,
        num_ahead=found.num_ahead,
        ahead_uri=(folder / _AHEAD_FILE).as_uri() if found.num_ahead else None,
        num_left_files=len(lake.left_files),
        num_left_rows=_num_left_rows(lake),
        num_duplicates=found.copies.num_equal,
        num_updated=found.copies.num_updated,
        num_conflicting=found.copies.num_conflicting,
        digest=data_digest(folder),
        parent_model_id=baselines.parent.model_id if baselines.parent else None,
        champion_model_id=baselines.champion.model_id if baselines.champion else None,
        num_straddling_rows=found.num_straddling,
        replay_uri=(folder / REPLAYED).as_uri() if replay.num_rows else None,
        num_replay_rows=replay.num_rows,
        replay_holdout_uri=(folder / HELD_OUT).as_uri() if replay.num_holdout_rows else None,
        num_replay_holdout_rows=replay.num_holdout_rows,
        replay_share=settings.replay_share,
        replay_days=replay.days,
        num_late_clicks=found.num_late_clicks,
        outcomes_digest=lake.late.digest(),
        excluded_columns=excluded_columns(settings.columns, recommender.features),
        days=found.record.days,
        num_late_rows=found.late.num_rows,
        files=found.record.files,
        quarantined_files=[
            {**each._asdict(), "known": seen is not None and seen.was_quarantined(each.file)}
            for _, each in sorted(lake.files.unfit.items())
        ],
        unread_files=found.record.unread_files,
        schema_mismatches=malformed.schema_mismatches,
        recommender=recommender,
    )


class _Written(NamedTuple):
    """Counts and records of the written rows."""

    copied: _CopiedRows
    late: _CopiedRows
    copies: Copies
    """Counts of the duplicate rows that were left out, in the window and among the late rows."""
    malformed: MalformedRows
    num_ahead: int
    num_late_clicks: int
    """Number of late clicks on rows of the window and on late rows. Late clicks on replayed rows
    are not counted."""
    last_learned: int
    split: "_Split"
    record: "_Record"
    replay: DrawnReplay
    num_straddling: int


def _write_rows(
    lake: Lake,
    window: TimeSpan,
    *,
    folder: Path,
    settings: ExtractionSettings,
    baselines: Baselines,
    workers: Workers,
) -> _Written:
    """Write the output folders into `folder`. The module's docstring lists them.

    Raises the errors of `_extract_fit`.
    """
    num_ahead = _note_ahead(lake, folder / _AHEAD_FILE)
    _warn_of_left(lake, settings)
    limit = settings.max_malformed_fraction
    if lake.files.unfit:
        _expect_few_unfit(lake, window, settings=settings)
    with MalformedRows(
        folder / _MALFORMED_FILE, max_fraction=limit, named=lake.files.named, collects_unfit=True
    ) as malformed:
        count, parts = _copy_window(lake, window, malformed, folder=folder, workers=workers)
        late = _copy_late(lake, window, malformed, folder=folder)
        malformed.check()
    copies = _checked_copies(count, late, window, settings=settings)
    num_late_clicks = lake.late.num_joined
    _expect_rows(count, window, lake=lake, parent=baselines.parent)
    cut = _cut(parts, window, lake=lake, settings=settings, baselines=baselines)
    split = _split(parts, cut, num_late=late.num_rows, folder=folder)
    last_learned = max(cut.last_learned, watermark(baselines.parent) if baselines.parent else 0)
    # The files are recorded before old rows are sampled. A file that is only unfit for sampling
    # therefore still counts as seen.
    record = _Record(
        days=_days_read(
            lake, window, num_rows=count.days, num_late=late.days, num_newer=split.newer_days
        ),
        files=_files_seen(lake, last_learned),
        unread_files=_files_unread(lake, window, last_learned),
    )
    num_drawn = {
        "num_rows": settings.num_replayed(split.num_train),
        "num_holdout_rows": split.num_newer,
    }
    replay = draw_replay(lake, count.first, **num_drawn, settings=settings, folder=folder)
    num_straddling = _remove_straddling(folder, split.num_newer, window, workers=workers)
    return _Written(
        copied=count,
        late=late,
        copies=copies,
        malformed=malformed,
        num_ahead=num_ahead,
        num_late_clicks=num_late_clicks,
        last_learned=last_learned,
        split=split,
        record=record,
        replay=replay,
        num_straddling=num_straddling,
    )


def _expect_few_unfit(lake: Lake, window: TimeSpan, *, settings: ExtractionSettings) -> None:
    """Check that most files can be read.

    Only files that have rows of the window, late rows or late outcomes count.

    Files that an earlier run of the lineage left out do not count.

    Raises:
        ContractError: too many files are unfit.
        UnfitFiles: further files are unfit.
    """
    rows, outcomes = list[QuarantinedFile](), list[QuarantinedFile]()
    for each in lake.files.unfit.values():
        if not each.file.startswith(DAY_PARTITION.format(day="")):
            outcomes.append(each)
        elif lake.seen is None or not lake.seen.was_quarantined(each.file):
            rows.append(each)
    limit = settings.max_quarantined_file_fraction
    expect_few(
        rows, lake.num_read_files(window), what=f"with rows of window {window}", max_fraction=limit
    )
    lake.pieces(window)
    expect_few(outcomes, lake.late.num_files, what="of late outcomes", max_fraction=limit)


def _note_ahead(lake: Lake, path: Path) -> int:
    """Write one line for each file with rows ahead of the clock, and return the number of rows."""
    if not (found := lake.ahead_files()):
        return 0
    path.write_text("".join(json.dumps(each._asdict()) + "\n" for each in found), encoding="utf-8")
    num_rows = sum(each.num_rows for each in found)
    logger.warning(
        "%d rows in %d files are not learned yet, because their times are ahead of the clock; the "
        "first: %s: %s",
        num_rows,
        len(found),
        found[0].file,
        found[0].reason,
    )
    return num_rows


def _warn_of_left(lake: Lake, settings: ExtractionSettings) -> None:
    """Log the files that the lineage has not seen and whose rows this run leaves out."""
    if not (left := lake.left_files):
        return
    assert lake.seen is not None
    counted = [each.num_rows for each in left if each.num_rows is not None]
    rows = f"with about {sum(counted):,} rows " if len(counted) == len(left) else ""
    first, last = min(each.day for each in left), max(each.day for each in left)
    needed = (days_asked(lake.seen.watermark, 0)[0] - first).days
    bound = (
        "older than window_start"
        if lake.seen.begins_anew
        else f"older than late_days={settings.late_days}"
    )
    way = f"a window_start of {first}" + (
        f" or --set extraction.late_days={needed}"
        if needed <= MAX_LATE_DAYS and not lake.seen.begins_anew
        else ""
    )
    logger.warning(
        "%d files %sof %s to %s were not seen by this lineage and are %s: their rows are not "
        "learned; %s learns them. "
        "The first: %s",
        len(left),
        rows,
        first,
        last,
        bound,
        way,
        left[0].name,
    )


def _num_left_rows(lake: Lake) -> int | None:
    """Return `RawDataset.num_left_rows`."""
    counts = [each.num_rows for each in lake.left_files]
    return None if None in counts else sum(each or 0 for each in counts)


def _checked_copies(
    count: _CopiedRows, late: _CopiedRows, window: TimeSpan, *, settings: ExtractionSettings
) -> Copies:
    """Log and return the counts of left-out rows, and check that few conflict.

    Raises:
        ContractError: too many rows conflict.
    """
    copies = Copies()
    copies.add(count.copies)
    copies.add(late.copies)
    if copies.num_rows:
        logger.info(
            "%s: of rows that came more than once %d equal copies were left out, %d older ones "
            "with another label or time, and %d with other features",
            window,
            copies.num_equal,
            copies.num_updated,
            copies.num_conflicting,
        )
    limit = settings.max_conflicting_fraction
    copies.check(count.num_rows + late.num_rows, max_fraction=limit, source=f"window {window}")
    return copies


def data_digest(folder: Path) -> str:
    """Hash the names and the bytes of a dataset's Parquet files with SHA-256.

    Files of old rows are included.
    """
    parts = [part for part in ("train", "holdout", REPLAYED, HELD_OUT) if (folder / part).exists()]
    trees = "".join(f"{part} {sha256_tree(folder / part)}\n" for part in parts)
    return hashlib.sha256(trees.encode()).hexdigest()


class _Lot(NamedTuple):
    """Consecutive pieces that one worker copies."""

    number: int
    pieces: list[WindowPiece]


class _CopiedLot(NamedTuple):
    """Result of copying a batch of pieces."""

    rows: _CopiedRows
    parts: list[PartFile]
    malformed: MalformedRows
    words: WordCounts
    num_late_clicks: int


def _copy_window(
    lake: Lake, window: TimeSpan, malformed: MalformedRows, *, folder: Path, workers: Workers
) -> tuple[_CopiedRows, list[PartFile]]:
    """Copy the window's rows to `folder` in batches.

    The number of batches depends on the rows and not on the workers.
    """
    pieces = lake.pieces(window)
    number = max(1, round(sum(each.piece.num_rows for each in pieces) / _LOT_ROWS))
    divided = (
        forked.shares(pieces, number, weight=lambda each: each.piece.num_rows + 1) if pieces else []
    )
    lots = [_Lot(number, lot) for number, lot in enumerate(divided)]
    count, parts = _CopiedRows(), []
    for copied in workers.run_all(
        partial(_copy_lot, lake=lake, malformed=malformed, folder=folder), lots
    ):
        if copied.rows.num_rows:
            count.add_newer(copied.rows)
        parts += copied.parts
        malformed.merge(copied.malformed)
        lake.words.merge(copied.words)
        lake.late.num_joined += copied.num_late_clicks
    return count, parts


def _copy_lot(lot: _Lot, *, lake: Lake, malformed: MalformedRows, folder: Path) -> _CopiedLot:
    count = _CopiedRows()
    own, part = malformed.of_part(lot.number), lake.of_part()
    with own, PartWriter(folder / WINDOW, prefix=f"lot-{lot.number:06d}") as writer:
        for table, copies in part.tables_of(lot.pieces, own):
            times = table.column(EVENT_TIME).cast(pa.int64()).to_numpy()
            assert times.min() >= count.last or not count.num_rows, "rows come in time order"
            count.first = count.first if count.num_rows else int(times[0])
            count.last = int(times[-1])
            count.add(table, copies)
            writer.write(table)
    return _CopiedLot(count, writer.parts, own, part.words, part.late.num_joined)


def _copy_late(
    lake: Lake, window: TimeSpan, malformed: MalformedRows, *, folder: Path
) -> _CopiedRows:
    count = _CopiedRows()
    with PartWriter(folder / _LATE, prefix=_LATE) as writer:
        for table, copies in lake.late_tables(window, malformed):
            writer.write(table)
            count.add(table, copies)
    return count


def _days_read(
    lake: Lake,
    window: TimeSpan,
    *,
    num_rows: Counter[int],
    num_late: Counter[int],
    num_newer: Counter[int],
) -> list[dict[str, Any]]:
    """Return `RawDataset.days`."""
    days = []
    for number, num in sorted((num_rows + num_late).items()):
        day = date.fromisoformat(to_iso(number * DAY_MICROS)[:10])
        state = {
            "day": str(day),
            "version": lake.version_of(day),
            "digest": lake.digest_of(day, window),
        }
        among = {"num_late_rows": num_late[number], "num_holdout_rows": num_newer[number]}
        days.append(
            {**state, "num_rows": num, **{name: part for name, part in among.items() if part}}
        )
    return days


def _files_seen(lake: Lake, last_learned: int) -> dict[str, dict[str, int]]:
    """Return `RawDataset.files`."""
    days = days_asked(last_learned, MAX_LATE_DAYS)
    found = {day: lake.files_of(day) for day in days}
    return {str(day): files for day, files in found.items() if files or day == days[0]}


def _files_unread(lake: Lake, window: TimeSpan, last_learned: int) -> dict[str, dict[str, str]]:
    """Return `RawDataset.unread_files`."""
    found = {
        day: lake.unread_files_of(day, window) for day in days_asked(last_learned, MAX_LATE_DAYS)
    }
    return {str(day): files for day, files in found.items() if files}


class _Record(NamedTuple):
    """The manifest's entries about files of the lake."""

    days: list[dict[str, Any]]
    """See `RawDataset.days`."""
    files: dict[str, dict[str, int]]
    """See `RawDataset.files`."""
    unread_files: dict[str, dict[str, str]]
    """See `RawDataset.unread_files`."""


class _Split(NamedTuple):
    """Numbers of rows on both sides of the split."""

    num_train: int
    """Training rows, including late rows."""
    num_newer: int
    newer_days: Counter[int]
    """Number of holdout rows of each day. Days are numbered since 1970."""


def _split(parts: list[PartFile], cut: Cut, *, num_late: int, folder: Path) -> _Split:
    """Move the window's rows to `folder`/train and `folder`/holdout.

    Late rows are moved to `folder`/train. The file names of late rows sort before those of the
    other rows.
    """
    num_newer = sum(part.num_rows for part in parts) - cut.num_older
    cut_newest(parts, num_newer, older=folder / "train", newest=folder / "holdout")
    for path in sorted((folder / _LATE).iterdir()):
        path.rename(folder / "train" / path.name)
    (folder / _LATE).rmdir()
    for torn in (folder / WINDOW).glob(".*"):  # left by killed workers
        torn.unlink()
    (folder / WINDOW).rmdir()
    days: Counter[int] = Counter()
    for path in (folder / "holdout").iterdir():
        days.update((_event_times(path) // DAY_MICROS).tolist())
    return _Split(num_late + cut.num_older, num_newer, days)


def _remove_straddling(folder: Path, num_newer: int, window: TimeSpan, *, workers: Workers) -> int:
    """Remove holdout rows whose request also has training rows, and return how many were removed.

    Raises:
        ContractError: no holdout row would remain.
    """
    num_straddling = remove_straddling(
        folder / "holdout", [folder / "train", folder / REPLAYED], workers
    )
    if num_straddling == num_newer:
        raise ContractError(
            f"window {window} has {num_newer} holdout rows whose requests have older rows, too, "
            "expected a request whose rows are all new: if data.request_id names a session, a "
            "user or a day, remove it from the recommender's file, accept that, and ingest the "
            "rows again into an empty lake"
        )
    return num_straddling


def _expect_rows(count: _CopiedRows, window: TimeSpan, *, lake: Lake, parent: Model | None) -> None:
    if count.num_rows < _MIN_ROWS:
        found = f"{count.num_rows} rows" if count.num_rows else "no rows"
        others = (
            "bring more rows by `evergreen data ingest`, or ask for others by window_start and "
            "window_end"
        )
        again = (
            f"; to learn all of them from scratch, {run_again('-p parent=none')}" if parent else ""
        )
        raise ContractError(
            f"window {window} holds {found}, expected at least {_MIN_ROWS}; {lake.describe()}: "
            f"{others}{again}"
        )


def _cut(
    parts: list[PartFile],
    window: TimeSpan,
    *,
    lake: Lake,
    settings: ExtractionSettings,
    baselines: Baselines,
) -> Cut:
    """Return the split of the window's rows.

    Raises:
        ContractError: all rows have the same time, or too few rows are newer than the training rows
            of parent and champion.
    """
    num_rows, learned = sum(part.num_rows for part in parts), baselines.learned
    if learned is not None and (num_newer := num_rows - _rows_until(parts, learned)) < _MIN_ROWS:
        raise ContractError(
            f"window {window} holds {num_newer} rows newer than {to_iso(learned)}, up to which "
            f"{' or '.join(model.model_id for model in baselines.models)} learned, expected at "
            f"least {_MIN_ROWS}: rows that one of the compared models learned cannot be in the "
            f"holdout; {_enough(lake, learned, settings.attribution)}"
        )
    num_wanted = min(max(1, round(num_rows * settings.holdout_fraction)), num_rows - 1)
    cut = _find_cut(parts, num_wanted, learned=learned)
    if cut is None:
        raise ContractError(
            f"window {window} holds {num_rows} rows of one time, expected older and newer ones: "
            "name the column of their times by data.event_time and ingest them again into an "
            "empty lake; without one `evergreen data ingest` spreads them over days"
        )
    return cut


def _enough(lake: Lake, learned: int, attribution: int) -> str:
    """Return a phrase that says which end of the window would leave enough rows, for messages.

    Only rows after the time `learned` are counted.
    """
    newer: list[int] = []
    with MalformedRows(Path(os.devnull), max_fraction=1.0, collects_unfit=True) as ignored:
        for table, _ in lake.tables(TimeSpan(learned + 1, None), ignored):
            newer += table.column(EVENT_TIME).cast(pa.int64()).to_pylist()[:_MIN_ROWS]
            if len(newer) >= _MIN_ROWS:
                return (
                    f"a window_end of {to_iso(newer[_MIN_ROWS - 1] + 1 + attribution)} or later "
                    "would do"
                )
    return (
        f"the lake holds {len(newer)} such rows, so no window would do before more have come "
        "(`evergreen data ingest`); to learn all rows anew without a comparison, "
        f"{run_again(FROM_SCRATCH)}"
    )
