"""The step's work: one window of rows, in time order, split into training rows and the newest as holdout.

Late rows (see `seen_files`) come before the others in training and are never held out.

The output folder `<work>/<run>/extraction/` appears whole: `train/` and `holdout/` with Parquet files in the raw
schema, `replay/` and `replay_holdout/` with rows older than the window (see `replay`), and `malformed.jsonl` where a
row was malformed. A retried task replaces it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from components.contracts.criteo import EVENT_TIME
from components.contracts.manifests import RawDataset
from components.extraction.lake import Lake
from components.extraction.malformed_rows import DEFAULT_MAX_MALFORMED_FRACTION, MalformedRows
from components.extraction.part_files import PartWriter, cut_newest
from components.extraction.replay import HELD_OUT, REPLAYED, draw_replay
from components.extraction.times import DAY_MICROS, TimeSpan, to_iso
from components.extraction.window import days_asked
from components.runtime.durable import sha256_tree, whole_directory
from components.runtime.errors import ContractError

logger = logging.getLogger(__name__)

MIN_ROWS = 10
WINDOW, LATE = "all", "late"
"""Folders while the step works; the last is the beginning of late rows' file names, too, which sort before `part`."""
MAX_LATE_DAYS = 366
"""Each model names the files of so many days."""
MALFORMED_FILE = "malformed.jsonl"


@dataclass(frozen=True, kw_only=True)
class ExtractionSettings:
    """How a window becomes a dataset.

    Raises:
        ContractError: a value is out of its range.
    """

    holdout_fraction: float = 0.1
    """Share of the window's rows, the newest ones, kept from training; in (0, 1). Each side gets one at least."""
    max_malformed_fraction: float = DEFAULT_MAX_MALFORMED_FRACTION
    """Share of a file's rows that may be malformed before the step stops; in [0, 1]."""
    replay_share: float = 0.0
    """Share of older rows among the rows that training will learn from, in [0, 1); 0 = the window alone."""
    replay_days: int = 7
    """Days before the window, the newest that have rows, from which old rows are drawn: those to replay, and as many
    as the window's holdout (100,000 at most) for measuring what is remembered, whatever `replay_share` is. 0 = none is
    read: measured over six days of 300,000 rows, in one file each, the reading took 3.5 s of a core."""
    negative_rate: float = 1.0
    """Share of the training rows without a click that preprocessing is to keep, in (0, 1]."""
    excluded: tuple[str, ...] = ()
    """Features that the run does not learn from, in the order of files."""
    unread: frozenset[str] = frozenset()
    """Those of them that are not read from the lake."""
    late_days: int = 1
    """Days before the last row read whose files are noted, so that a later round knows which rows of them come late; 0
    = none. Which rows are late in this round the lake knows."""
    attribution: int = 0
    """Microseconds after a row in which its click may still come; the window ends that long before its request."""

    def __post_init__(self) -> None:
        """Refuses values out of range."""
        if not 0 < self.holdout_fraction < 1:
            raise ContractError(f"holdout_fraction is {self.holdout_fraction}, expected more than 0 and less than 1")
        if not 0 <= self.max_malformed_fraction <= 1:
            raise ContractError(f"max_malformed_fraction is {self.max_malformed_fraction}, expected 0 to 1")
        if not 0 <= self.replay_share < 1:
            raise ContractError(f"replay_share is {self.replay_share}, expected at least 0 and less than 1")
        if not 0 < self.negative_rate <= 1:
            raise ContractError(f"negative_rate is {self.negative_rate}, expected more than 0 and at most 1")
        if self.replay_days < 0:
            raise ContractError(f"replay_days is {self.replay_days}, expected at least 0")
        if not 0 <= self.late_days <= MAX_LATE_DAYS:
            raise ContractError(f"late_days is {self.late_days}, expected 0 (late rows are left) to {MAX_LATE_DAYS}")
        if self.replay_share and not self.replay_days:
            raise ContractError(f"replay_share is {self.replay_share} with replay_days 0, expected at least one day")

    def num_replayed(self, num_train_rows: int) -> int:
        """Old rows that make up `replay_share` of all rows learned.

        >>> ExtractionSettings(replay_share=0.2).num_replayed(1000)
        250
        """
        return round(num_train_rows * self.replay_share / (1 - self.replay_share))


@dataclass
class _CopiedRows:
    num_rows: int = 0
    num_duplicates: int = 0
    first: int = 0
    days: Counter[int] = field(default_factory=Counter)
    """Rows read of each day, by its number since 1970."""
    last: int = 0

    def add(self, table: Any, num_duplicates: int) -> None:
        """Counts the rows of a table that was read, and how many duplicates were left out of it."""
        self.num_rows += table.num_rows
        self.num_duplicates += num_duplicates
        times = table.column(EVENT_TIME).cast(pa.int64()).to_numpy()
        numbers, counts = np.unique(times // DAY_MICROS, return_counts=True)
        self.days.update(dict(zip(numbers.tolist(), counts.tolist())))


def extract(lake: Lake, window: TimeSpan, *, folder: Path, settings: ExtractionSettings) -> RawDataset:
    """Writes the window's rows below `folder`, replacing what was there, and returns their manifest.

    Raises:
        ContractError: the window holds too few rows, or a file of the lake is damaged or too malformed.
    """
    with whole_directory(folder, replace=True) as aside:
        with MalformedRows(
            aside / MALFORMED_FILE, max_fraction=settings.max_malformed_fraction, named=lake.files.named
        ) as malformed:
            count, parts = _copy_window(lake, window, malformed, folder=aside)
            late = _copy_late(lake, window, malformed, folder=aside)
            malformed.judge()
        _expect_rows(count, window, lake)
        num_holdout = min(max(1, round(count.num_rows * settings.holdout_fraction)), count.num_rows - 1)
        cut_newest(parts.parts, num_holdout, older=aside / "train", newest=aside / "holdout")
        _prepend_late(aside)
        num_train = late.num_rows + count.num_rows - num_holdout
        num_late_clicks = lake.late.num_joined
        num_drawn = {"num_rows": settings.num_replayed(num_train), "num_holdout_rows": num_holdout}
        replay = draw_replay(lake, count.first, **num_drawn, num_days=settings.replay_days, folder=aside)
        digest = data_digest(aside)
    logger.info("%s: %d rows to learn, %d of them late; %d held out", window, num_train, late.num_rows, num_holdout)
    return RawDataset(
        source_uri=lake.files.uri,
        window_start=to_iso(window.start) if window.start is not None else None,
        window_end=to_iso(window.end) if window.end is not None else None,
        first_event_time=to_iso(count.first),
        last_event_time=to_iso(count.last),
        train_uri=(folder / "train").as_uri(),
        holdout_uri=(folder / "holdout").as_uri(),
        num_train_rows=num_train,
        num_holdout_rows=num_holdout,
        num_malformed=malformed.num_rows,
        malformed_uri=(folder / MALFORMED_FILE).as_uri() if malformed.num_rows else None,
        num_duplicates=count.num_duplicates + late.num_duplicates,
        digest=digest,
        replay_uri=(folder / REPLAYED).as_uri() if replay.num_rows else None,
        num_replay_rows=replay.num_rows,
        replay_holdout_uri=(folder / HELD_OUT).as_uri() if replay.num_holdout_rows else None,
        num_replay_holdout_rows=replay.num_holdout_rows,
        replay_share=settings.replay_share,
        replay_days=replay.days,
        num_late_clicks=num_late_clicks,
        outcomes_digest=lake.late.digest(),
        excluded_columns=list(settings.excluded),
        unread_columns=[name for name in settings.excluded if name in settings.unread],
        negative_rate=settings.negative_rate,
        attribution_seconds=settings.attribution / 1e6,
        days=_days_read(lake, window, num_rows=count.days, num_late=late.days),
        num_late_rows=late.num_rows,
        files=_files_seen(lake, count.last, settings.late_days),
        schema_mismatches=malformed.schema_mismatches,
    )


def data_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of the Parquet files of a dataset's folder, old rows included if it has any."""
    parts = [part for part in ("train", "holdout", REPLAYED, HELD_OUT) if (folder / part).exists()]
    trees = "".join(f"{part} {sha256_tree(folder / part)}\n" for part in parts)
    return hashlib.sha256(trees.encode()).hexdigest()


def _copy_window(
    lake: Lake, window: TimeSpan, malformed: MalformedRows, *, folder: Path
) -> tuple[_CopiedRows, PartWriter]:
    """Writes the window's rows below `folder`/all."""
    count = _CopiedRows()
    with PartWriter(folder / WINDOW) as writer:
        for table, num_duplicates in lake.tables(window, malformed):
            times = table.column(EVENT_TIME).cast(pa.int64()).to_numpy()
            assert times.min() >= count.last or not count.num_rows, "rows come in time order"
            count.first = count.first if count.num_rows else int(times[0])
            count.last = int(times[-1])
            count.add(table, num_duplicates)
            writer.write(table)
    return count, writer


def _copy_late(lake: Lake, window: TimeSpan, malformed: MalformedRows, *, folder: Path) -> _CopiedRows:
    """Writes late rows below `folder`/late."""
    count = _CopiedRows()
    with PartWriter(folder / LATE, prefix=LATE) as writer:
        for table, num_duplicates in lake.late_tables(window, malformed):
            writer.write(table)
            count.add(table, num_duplicates)
    return count


def _days_read(lake: Lake, window: TimeSpan, *, num_rows: Counter[int], num_late: Counter[int]) -> list[dict[str, Any]]:
    """See `RawDataset.days`."""
    days = []
    for number, num in sorted((num_rows + num_late).items()):
        day = date.fromisoformat(to_iso(number * DAY_MICROS)[:10])
        state = {"day": str(day), "version": lake.version_of(day), "digest": lake.digest_of(day, window)}
        of_late = {"num_late_rows": num_late[number]} if num_late[number] else {}
        days.append({**state, "num_rows": num, **of_late})
    return days


def _files_seen(lake: Lake, newest: int, late_days: int) -> dict[str, dict[str, int]]:
    """See `RawDataset.files`."""
    return {str(day): lake.files_of(day) for day in days_asked(newest, late_days)} if late_days else {}


def _prepend_late(folder: Path) -> None:
    """Moves the late rows' files to the training rows, where their names come first; nothing is left beside them."""
    for path in sorted((folder / LATE).iterdir()):
        path.rename(folder / "train" / path.name)
    (folder / LATE).rmdir()
    (folder / WINDOW).rmdir()


def _expect_rows(count: _CopiedRows, window: TimeSpan, lake: Lake) -> None:
    if count.num_rows < MIN_ROWS:
        found = f"{count.num_rows} rows" if count.num_rows else "no rows"
        raise ContractError(f"window {window} holds {found}, expected at least {MIN_ROWS}; {lake.describe()}")
