"""The step's work: one window of rows, in time order, split into training rows and those that judge.

Those that judge are the newest, of times and requests from which no contestant learned: not the candidate, which learns
the rest of the window, nor its parent, nor the champion. A model looks better than it is on rows that it learned, and
on others of their requests, because the rows of a request are alike. So the cut lies between two times, after the
newest row that a rival learned, and a row after it whose request has rows before it judges nobody. No row is lost by
that: the next round begins after the newest row learned here. What cannot be seen here is a request whose other rows
all lie before the window. Late rows (see `seen_files`) come before the others in training and are never held out.

The output folder `<work>/<run>/extraction/` appears whole: `train/` and `holdout/` with Parquet files in the raw
schema, `replay/` and `replay_holdout/` with rows older than the window (see `replay`), `malformed.jsonl` where a row
was malformed, `ahead.jsonl` where rows are ahead of the clock, and `words.json` where a column holds words. A retried
task replaces it.

Files that are unfit to read are left out (see `unfit`). A pass over the rows names all that it finds, and the next pass
does without them, so that the rows are those of the other files.
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
from components.extraction.window import NO_RIVALS, Rivals, days_asked, watermark
from evergreen.config.extraction import MAX_LATE_DAYS, ExtractionSettings
from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import Model, RawDataset
from evergreen.contracts.raw_rows import DAY_PARTITION, EVENT_TIME, REQUEST_ID
from evergreen.contracts.row_hash import request_hashes
from evergreen.contracts.words import WordCounts
from evergreen.rows.archived_rows import parquet_file
from evergreen.rows.raw_schema import FILE_ROWS, MalformedRows, PartFile, PartWriter, cut_newest, excluded_columns
from evergreen.rows.times import DAY_MICROS, TimeSpan, to_iso
from evergreen.rows.unfit import NUM_NAMED, QuarantinedFile, UnfitFiles, expect_few
from evergreen.runtime import forked
from evergreen.runtime.durable import sha256_tree, whole_directory
from evergreen.runtime.errors import FROM_SCRATCH, ContractError, run_again
from evergreen.runtime.workers import Workers, workers_of


class Cut(NamedTuple):
    """Where the rows that are learned end."""

    num_older: int
    """Rows before the cut."""
    last_learned: int
    """Time of the newest of them, microseconds since the epoch."""


def event_times(path: Path) -> NDArray[np.int64]:
    """Event times of a file's rows, microseconds since the epoch, [n]."""
    times: NDArray[np.int64] = parquet_file(path).read([EVENT_TIME]).column(0).cast(pa.int64()).to_numpy()
    return times


def rows_until(parts: Sequence[PartFile], time: int) -> int:
    """How many rows of files in the order of time are at or before `time`."""
    return sum(int(np.searchsorted(event_times(part.path), time, side="right")) for part in parts)


def find_cut(parts: Sequence[PartFile], num_wanted: int, *, learned: int | None) -> Cut | None:
    """The cut that leaves about `num_wanted` rows to judge, all newer than `learned`; None where there is none.

    Rows of the cut's own time are all left to judge, so they may be more than `num_wanted`; they are all learned
    where no older row would be left to learn. `parts` are the window's rows in the order of time; `learned` is the
    newest row that a rival learned, microseconds since the epoch, None = there is no rival.
    """
    num_rows = sum(part.num_rows for part in parts)
    num_learned = 0 if learned is None else rows_until(parts, learned)
    place = max(num_rows - num_wanted, num_learned)
    if place >= num_rows:
        return None
    time = _time_at(parts, place)
    num_older = rows_until(parts, time - 1) or rows_until(parts, time)
    return Cut(num_older, _time_at(parts, num_older - 1)) if num_older < num_rows else None


def remove_straddling(holdout: Path, learned: Sequence[Path], workers: Workers) -> int:
    """Removes from `holdout` the rows of requests that have rows in the folders `learned`; returns how many.

    In memory are a number of 4 bytes for each request of `holdout`, and for each worker the request ids of one file.
    """
    own = np.unique(np.concatenate([request_hashes(_request_ids(path)) for path in sorted(holdout.glob("*.parquet"))]))
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
        for part in writer.parts:  # one, or none where no row is left
            part.path.rename(path)
        whole.unlink()
    return num_removed


def _request_ids(path: Path) -> Any:
    """The distinct request ids of a file."""
    return parquet_file(path).read([REQUEST_ID]).column(0).unique()


def _ids_among(hashes: NDArray[np.uint32], path: Path) -> list[str]:
    """The request ids of a file that have one of these ascending hashes; different ids may have one hash."""
    ids = _request_ids(path)
    mine = request_hashes(ids)
    places = np.minimum(np.searchsorted(hashes, mine), len(hashes) - 1)
    found: list[str] = ids.filter(pa.array(hashes[places] == mine)).to_pylist()
    return found


def _time_at(parts: Sequence[PartFile], place: int) -> int:
    for part in parts:
        if place < part.num_rows:
            return int(event_times(part.path)[place])
        place -= part.num_rows
    raise AssertionError("the place is one of a row")


logger = logging.getLogger(__name__)

MIN_ROWS = 10
LOT_ROWS = 4 * FILE_ROWS
"""Rows that a worker copies at a time, about."""
WINDOW, LATE = "all", "late"
"""Folders while the step works; the last is the beginning of late rows' file names, too, which sort before `part`."""
MALFORMED_FILE, AHEAD_FILE, WORDS_FILE = "malformed.jsonl", "ahead.jsonl", "words.json"


@dataclass
class _CopiedRows:
    num_rows: int = 0
    copies: Copies = field(default_factory=Copies)
    """Rows that were left out because another copy of them counts."""
    first: int = 0
    days: Counter[int] = field(default_factory=Counter)
    """Rows read of each day, by its number since 1970."""
    last: int = 0

    def add_newer(self, other: "_CopiedRows") -> None:
        """Counts the rows that another counted."""
        assert other.first >= self.last or not self.num_rows, "rows come in time order"
        self.first = self.first if self.num_rows else other.first
        self.last = other.last
        self.num_rows += other.num_rows
        self.copies.add(other.copies)
        self.days.update(other.days)

    def add(self, table: Any, copies: Copies) -> None:
        """Count the rows of a table that was read, and the copies that were left out of it."""
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
    rivals: Rivals = NO_RIVALS,
    dask_scheduler: str = "",
) -> RawDataset:
    """Writes the window's rows below `folder`, replacing what was there, and returns their manifest.

    The workers of the Dask scheduler at that address copy them; empty = processes of this machine.

    Raises:
        ContractError: a setting is wrong, too few rows are there to learn or to judge by, or too many files are unfit
            to read.
        TemporaryError: see `runtime.workers.workers_of`.
    """
    while True:
        try:
            return _extract_fit(
                lake, window, folder=folder, recommender=recommender, rivals=rivals, dask_scheduler=dask_scheduler
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
    lake: Lake, window: TimeSpan, *, folder: Path, recommender: Recommender, rivals: Rivals, dask_scheduler: str
) -> RawDataset:
    """Do what `extract` does, once.

    Raises:
        ContractError: as `extract`.
        TemporaryError: as `extract`.
        UnfitFiles: files are unfit to read that `lake` does not leave out yet.
    """
    settings = recommender.section("extraction", ExtractionSettings)
    with (
        whole_directory(folder, replace=True) as aside,
        workers_of(dask_scheduler, processes=forked.usual_processes(), shared=aside) as workers,
    ):
        found = _write_rows(lake, window, folder=aside, settings=settings, rivals=rivals, workers=workers)
        has_words = lake.words.write(aside / WORDS_FILE, without=recommender.columns_of_users)
    split = found.split
    logger.info(
        "%s: %d rows to learn, %d late; %d newer ones", window, split.num_train, found.late.num_rows, split.num_newer
    )
    dataset = _dataset(found, lake, window, folder=folder, recommender=recommender, rivals=rivals)
    return replace(dataset, words_uri=(folder / WORDS_FILE).as_uri() if has_words else None)


def _dataset(
    found: "_Written", lake: Lake, window: TimeSpan, *, folder: Path, recommender: Recommender, rivals: Rivals
) -> RawDataset:
    """The manifest of what was written, without words."""
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
        malformed_uri=(folder / MALFORMED_FILE).as_uri() if malformed.num_rows else None,
        num_ahead=found.num_ahead,
        ahead_uri=(folder / AHEAD_FILE).as_uri() if found.num_ahead else None,
        num_left_files=len(lake.left_files),
        num_left_rows=_num_left_rows(lake),
        num_duplicates=found.copies.num_equal,
        num_updated=found.copies.num_updated,
        num_conflicting=found.copies.num_conflicting,
        digest=data_digest(folder),
        parent_model_id=rivals.parent.model_id if rivals.parent else None,
        champion_model_id=rivals.champion.model_id if rivals.champion else None,
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
    """What a window's rows became."""

    copied: _CopiedRows
    late: _CopiedRows
    copies: Copies
    """Left out of both."""
    malformed: MalformedRows
    num_ahead: int
    num_late_clicks: int
    """Of the window's and late rows; replayed ones have theirs, too."""
    last_learned: int
    split: "_Split"
    record: "_Record"
    replay: DrawnReplay
    num_straddling: int


def _write_rows(
    lake: Lake, window: TimeSpan, *, folder: Path, settings: ExtractionSettings, rivals: Rivals, workers: Workers
) -> _Written:
    """Writes the folders of the module's head into `folder`; errors as `extract`."""
    num_ahead = _note_ahead(lake, folder / AHEAD_FILE)
    _warn_of_left(lake, settings)
    limit = settings.max_malformed_fraction
    if lake.files.unfit:
        _expect_few_unfit(lake, window, settings=settings)
    with MalformedRows(
        folder / MALFORMED_FILE, max_fraction=limit, named=lake.files.named, collects_unfit=True
    ) as malformed:
        count, parts = _copy_window(lake, window, malformed, folder=folder, workers=workers)
        late = _copy_late(lake, window, malformed, folder=folder)
        malformed.judge()
    copies = _judged_copies(count, late, window, settings=settings)
    num_late_clicks = lake.late.num_joined
    _expect_rows(count, window, lake=lake, parent=rivals.parent)
    cut = _cut(parts, window, lake=lake, settings=settings, rivals=rivals)
    split = _split(parts, cut, num_late=late.num_rows, folder=folder)
    last_learned = max(cut.last_learned, watermark(rivals.parent) if rivals.parent else 0)
    # Before old rows are drawn: a file that is unfit only in these is seen all the same.
    record = _Record(
        days=_days_read(lake, window, num_rows=count.days, num_late=late.days, num_newer=split.newer_days),
        files=_files_seen(lake, last_learned),
        unread_files=_files_unread(lake, window, last_learned),
    )
    num_drawn = {"num_rows": settings.num_replayed(split.num_train), "num_holdout_rows": split.num_newer}
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
    """Check that most files with rows of the window, or with late ones, can be read, and most of late outcomes.

    Files that an earlier run of the line left out do not count.

    Raises:
        ContractError: too many are unfit.
        UnfitFiles: further ones are.
    """
    rows, outcomes = list[QuarantinedFile](), list[QuarantinedFile]()
    for each in lake.files.unfit.values():
        if not each.file.startswith(DAY_PARTITION.format(day="")):
            outcomes.append(each)
        elif lake.seen is None or not lake.seen.was_quarantined(each.file):
            rows.append(each)
    limit = settings.max_quarantined_file_fraction
    expect_few(rows, lake.num_read_files(window), what=f"with rows of window {window}", max_fraction=limit)
    lake.pieces(window)
    expect_few(outcomes, lake.late.num_files, what="of late outcomes", max_fraction=limit)


def _note_ahead(lake: Lake, path: Path) -> int:
    """Record the files with rows ahead of the clock, a line each, and return how many rows are."""
    if not (found := lake.ahead_files()):
        return 0
    path.write_text("".join(json.dumps(each._asdict()) + "\n" for each in found), encoding="utf-8")
    num_rows = sum(each.num_rows for each in found)
    logger.warning(
        "%d rows in %d files are not learned yet, because their times are ahead of the clock; the first: %s: %s",
        num_rows, len(found), found[0].file, found[0].reason,
    )  # fmt: skip
    return num_rows


def _warn_of_left(lake: Lake, settings: ExtractionSettings) -> None:
    """Name the files that the parent's line has not seen and that this round does not learn."""
    if not (left := lake.left_files):
        return
    assert lake.seen is not None
    counted = [each.num_rows for each in left if each.num_rows is not None]
    rows = f"with about {sum(counted):,} rows " if len(counted) == len(left) else ""
    first, last = min(each.day for each in left), max(each.day for each in left)
    needed = (days_asked(lake.seen.watermark, 0)[0] - first).days
    bound = "older than window_start" if lake.seen.begins_anew else f"older than late_days={settings.late_days}"
    way = f"a window_start of {first}" + (
        f" or --set extraction.late_days={needed}" if needed <= MAX_LATE_DAYS and not lake.seen.begins_anew else ""
    )
    logger.warning(
        "%d files %sof %s to %s were not seen by this lineage and are %s: their rows are not learned; %s learns them. "
        "The first: %s", len(left), rows, first, last, bound, way, left[0].name,
    )  # fmt: skip


def _num_left_rows(lake: Lake) -> int | None:
    """See `RawDataset.num_left_rows`."""
    counts = [each.num_rows for each in lake.left_files]
    return None if None in counts else sum(each or 0 for each in counts)


def _judged_copies(count: _CopiedRows, late: _CopiedRows, window: TimeSpan, *, settings: ExtractionSettings) -> Copies:
    """The rows left out of window and late rows, logged; too many that conflict are refused."""
    copies = Copies()
    copies.add(count.copies)
    copies.add(late.copies)
    if copies.num_rows:
        logger.info(
            "%s: of rows that came more than once %d equal copies were left out, %d older ones with another label or "
            "time, and %d with other features", window, copies.num_equal, copies.num_updated, copies.num_conflicting,
        )  # fmt: skip
    limit = settings.max_conflicting_fraction
    copies.judge(count.num_rows + late.num_rows, max_fraction=limit, source=f"window {window}")
    return copies


def data_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of the Parquet files of a dataset's folder, old rows included if it has any."""
    parts = [part for part in ("train", "holdout", REPLAYED, HELD_OUT) if (folder / part).exists()]
    trees = "".join(f"{part} {sha256_tree(folder / part)}\n" for part in parts)
    return hashlib.sha256(trees.encode()).hexdigest()


class _Lot(NamedTuple):
    """Consecutive pieces that one worker copies."""

    number: int
    pieces: list[WindowPiece]


class _CopiedLot(NamedTuple):
    """What a lot's copy hands back."""

    rows: _CopiedRows
    parts: list[PartFile]
    malformed: MalformedRows
    words: WordCounts
    num_late_clicks: int


def _copy_window(
    lake: Lake, window: TimeSpan, malformed: MalformedRows, *, folder: Path, workers: Workers
) -> tuple[_CopiedRows, list[PartFile]]:
    """The window's rows in `folder`: lot by lot, whose number follows from the rows and not from the workers."""
    pieces = lake.pieces(window)
    number = max(1, round(sum(each.piece.num_rows for each in pieces) / LOT_ROWS))
    divided = forked.shares(pieces, number, weight=lambda each: each.piece.num_rows + 1) if pieces else []
    lots = [_Lot(number, lot) for number, lot in enumerate(divided)]
    count, parts = _CopiedRows(), []
    for copied in workers.run_all(partial(_copy_lot, lake=lake, malformed=malformed, folder=folder), lots):
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


def _copy_late(lake: Lake, window: TimeSpan, malformed: MalformedRows, *, folder: Path) -> _CopiedRows:
    count = _CopiedRows()
    with PartWriter(folder / LATE, prefix=LATE) as writer:
        for table, copies in lake.late_tables(window, malformed):
            writer.write(table)
            count.add(table, copies)
    return count


def _days_read(
    lake: Lake, window: TimeSpan, *, num_rows: Counter[int], num_late: Counter[int], num_newer: Counter[int]
) -> list[dict[str, Any]]:
    """See `RawDataset.days`."""
    days = []
    for number, num in sorted((num_rows + num_late).items()):
        day = date.fromisoformat(to_iso(number * DAY_MICROS)[:10])
        state = {"day": str(day), "version": lake.version_of(day), "digest": lake.digest_of(day, window)}
        among = {"num_late_rows": num_late[number], "num_holdout_rows": num_newer[number]}
        days.append({**state, "num_rows": num, **{name: part for name, part in among.items() if part}})
    return days


def _files_seen(lake: Lake, last_learned: int) -> dict[str, dict[str, int]]:
    """See `RawDataset.files`."""
    days = days_asked(last_learned, MAX_LATE_DAYS)
    found = {day: lake.files_of(day) for day in days}
    return {str(day): files for day, files in found.items() if files or day == days[0]}


def _files_unread(lake: Lake, window: TimeSpan, last_learned: int) -> dict[str, dict[str, str]]:
    """See `RawDataset.unread_files`."""
    found = {day: lake.unread_files_of(day, window) for day in days_asked(last_learned, MAX_LATE_DAYS)}
    return {str(day): files for day, files in found.items() if files}


class _Record(NamedTuple):
    """What the manifest says of the lake's files."""

    days: list[dict[str, Any]]
    """See `RawDataset.days`."""
    files: dict[str, dict[str, int]]
    """See `RawDataset.files`."""
    unread_files: dict[str, dict[str, str]]
    """See `RawDataset.unread_files`."""


class _Split(NamedTuple):
    """The two sides of the cut."""

    num_train: int
    """Late rows are among them."""
    num_newer: int
    newer_days: Counter[int]
    """Rows newer than the cut of each day, by its number since 1970."""


def _split(parts: list[PartFile], cut: Cut, *, num_late: int, folder: Path) -> _Split:
    """Moves the window's rows to `folder`/train and `folder`/holdout, and late ones, first by name, to the former."""
    num_newer = sum(part.num_rows for part in parts) - cut.num_older
    cut_newest(parts, num_newer, older=folder / "train", newest=folder / "holdout")
    for path in sorted((folder / LATE).iterdir()):
        path.rename(folder / "train" / path.name)
    (folder / LATE).rmdir()
    for torn in (folder / WINDOW).glob(".*"):  # of workers that were killed
        torn.unlink()
    (folder / WINDOW).rmdir()
    days: Counter[int] = Counter()
    for path in (folder / "holdout").iterdir():
        days.update((event_times(path) // DAY_MICROS).tolist())
    return _Split(num_late + cut.num_older, num_newer, days)


def _remove_straddling(folder: Path, num_newer: int, window: TimeSpan, *, workers: Workers) -> int:
    """Removes the rows of requests of which rows are learned from `folder`/holdout; how many. Refuses to remove all."""
    num_straddling = remove_straddling(folder / "holdout", [folder / "train", folder / REPLAYED], workers)
    if num_straddling == num_newer:
        raise ContractError(
            f"window {window} has {num_newer} newest rows whose requests have older rows, too, expected a request "
            "whose rows are all new, to judge by: if data.request_id names a session, a user or a day, remove it from "
            "the recommender's file, accept that, and ingest the rows again into an empty lake"
        )
    return num_straddling


def _expect_rows(count: _CopiedRows, window: TimeSpan, *, lake: Lake, parent: Model | None) -> None:
    if count.num_rows < MIN_ROWS:
        found = f"{count.num_rows} rows" if count.num_rows else "no rows"
        others = "bring more rows by `evergreen ingest`, or ask for others by window_start and window_end"
        again = f"; to learn all of them from scratch, {run_again('-p parent=none')}" if parent else ""
        raise ContractError(
            f"window {window} holds {found}, expected at least {MIN_ROWS}; {lake.describe()}: {others}{again}"
        )


def _cut(parts: list[PartFile], window: TimeSpan, *, lake: Lake, settings: ExtractionSettings, rivals: Rivals) -> Cut:
    """Where the rows that are learned end; refuses rows of one time, and too few that no rival learned."""
    num_rows, learned = sum(part.num_rows for part in parts), rivals.learned
    if learned is not None and (num_newer := num_rows - rows_until(parts, learned)) < MIN_ROWS:
        raise ContractError(
            f"window {window} holds {num_newer} rows newer than {to_iso(learned)}, up to which "
            f"{' or '.join(model.model_id for model in rivals.models)} learned, expected at least {MIN_ROWS}: rows "
            f"that one of the compared models learned cannot judge; {_enough(lake, learned, settings.attribution)}"
        )
    num_wanted = min(max(1, round(num_rows * settings.holdout_fraction)), num_rows - 1)
    cut = find_cut(parts, num_wanted, learned=learned)
    if cut is None:
        raise ContractError(
            f"window {window} holds {num_rows} rows of one time, expected older and newer ones: name the column of "
            "their times by data.event_time and ingest them again into an empty lake; without one `evergreen ingest` "
            "spreads them over days"
        )
    return cut


def _enough(lake: Lake, learned: int, attribution: int) -> str:
    """Which window's end leaves enough rows newer than `learned`; for messages."""
    newer: list[int] = []
    with MalformedRows(Path(os.devnull), max_fraction=1.0, collects_unfit=True) as ignored:
        for table, _ in lake.tables(TimeSpan(learned + 1, None), ignored):
            newer += table.column(EVENT_TIME).cast(pa.int64()).to_pylist()[:MIN_ROWS]
            if len(newer) >= MIN_ROWS:
                return f"a window_end of {to_iso(newer[MIN_ROWS - 1] + 1 + attribution)} or later would do"
    return (
        f"the lake holds {len(newer)} such rows, so no window would do before more have come (`evergreen ingest`); to "
        f"learn all rows anew without a comparison, {run_again(FROM_SCRATCH)}"
    )
