"""The step's work: one window of rows, in time order, split into training rows and the newest as holdout.

The output folder `<work>/<run>/extraction/` appears whole: `train/` and `holdout/` with Parquet files in the raw
schema, `replay/` and `replay_holdout/` with rows older than the window (see `replay`), and `set_aside.jsonl` where a
row was malformed. A retried task replaces it.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from components.contracts.criteo import EVENT_TIME
from components.contracts.durable import sha256_tree, whole_directory
from components.contracts.errors import ContractError
from components.contracts.manifests import RawDataset
from components.extraction.parquet_files import PartWriter, cut_newest
from components.extraction.replay import HELD_OUT, LEARNT, draw_replay
from components.extraction.set_aside import DEFAULT_MAX_MALFORMED_FRACTION, SetAside
from components.extraction.source import Source
from components.extraction.times import Span, to_iso, to_micros

logger = logging.getLogger(__name__)

MIN_ROWS = 10
SET_ASIDE_FILE = "set_aside.jsonl"


@dataclass(frozen=True, kw_only=True)
class ExtractionSettings:
    """How a window becomes a dataset.

    Raises:
        ContractError: a value is out of its range.
    """

    holdout_fraction: float = 0.1
    """Share of the rows, the newest ones, that are kept from training; in (0, 1). Each side gets at least one row."""
    max_malformed_fraction: float = DEFAULT_MAX_MALFORMED_FRACTION
    """Share of a file's rows that may be malformed and set aside before the step stops; in [0, 1]."""
    replay_share: float = 0.0
    """Share of older rows among the rows that training will learn from, in [0, 1); 0 = the window alone."""
    replay_days: int = 7
    """Days before the window, the newest that have rows, from which old rows are drawn: those to replay, and as many
    as the window's holdout (100,000 at most) for measuring what is remembered, whatever `replay_share` is. 0 = none is
    read: measured over six days of 300,000 rows, in one file each, the reading took 3.5 s of a core."""

    def __post_init__(self) -> None:
        """Refuses values out of range."""
        if not 0 < self.holdout_fraction < 1:
            raise ContractError(f"holdout_fraction is {self.holdout_fraction}, expected more than 0 and less than 1")
        if not 0 <= self.max_malformed_fraction <= 1:
            raise ContractError(f"max_malformed_fraction is {self.max_malformed_fraction}, expected 0 to 1")
        if not 0 <= self.replay_share < 1:
            raise ContractError(f"replay_share is {self.replay_share}, expected at least 0 and less than 1")
        if self.replay_days < 0:
            raise ContractError(f"replay_days is {self.replay_days}, expected at least 0")
        if self.replay_share and not self.replay_days:
            raise ContractError(f"replay_share is {self.replay_share} with replay_days 0, expected at least one day")

    def num_replayed(self, num_train_rows: int) -> int:
        """Old rows that make up `replay_share` of all rows learnt.

        >>> ExtractionSettings(replay_share=0.2).num_replayed(1000)
        250
        """
        return round(num_train_rows * self.replay_share / (1 - self.replay_share))


@dataclass
class _Count:
    num_rows: int = 0
    num_duplicates: int = 0
    first: int = 0
    last: int = 0


def extract(source: Source, window: Span, folder: Path, settings: ExtractionSettings, *, source_uri: str) -> RawDataset:
    """Writes the window's rows below `folder`, replacing what was there, and returns their manifest.

    Raises:
        ContractError: the window holds too few rows, or a file of the source is damaged or too malformed.
    """
    with whole_directory(folder, replace=True) as aside:
        with SetAside(aside / SET_ASIDE_FILE, max_fraction=settings.max_malformed_fraction) as set_aside:
            count, parts = _copy(source, window, aside / "all", set_aside)
            set_aside.judge()
        _expect_rows(count.num_rows, window, source)
        num_holdout = min(max(1, round(count.num_rows * settings.holdout_fraction)), count.num_rows - 1)
        cut_newest(parts.parts, num_holdout, older=aside / "train", newest=aside / "holdout")
        (aside / "all").rmdir()
        num_train = count.num_rows - num_holdout
        num_late_clicks = source.late.num_joined if source.late else 0
        replay = draw_replay(
            source,
            count.first,
            num_rows=settings.num_replayed(num_train),
            num_holdout_rows=num_holdout if settings.replay_days else 0,
            num_days=settings.replay_days,
            folder=aside,
        )
        digest = data_digest(aside)
    logger.info("extracted %d rows of %s, %d held out", count.num_rows, window, num_holdout)
    return RawDataset(
        source_uri=source_uri,
        window_start=to_iso(window.start) if window.start is not None else None,
        window_end=to_iso(window.end) if window.end is not None else None,
        first_event_time=to_iso(count.first),
        last_event_time=to_iso(count.last),
        train_uri=(folder / "train").as_uri(),
        holdout_uri=(folder / "holdout").as_uri(),
        num_train_rows=num_train,
        num_holdout_rows=num_holdout,
        num_set_aside=set_aside.num_rows,
        set_aside_uri=(folder / SET_ASIDE_FILE).as_uri() if set_aside.num_rows else None,
        num_duplicates=count.num_duplicates,
        digest=digest,
        replay_uri=(folder / LEARNT).as_uri() if replay.num_rows else None,
        num_replay_rows=replay.num_rows,
        replay_holdout_uri=(folder / HELD_OUT).as_uri() if replay.num_holdout_rows else None,
        num_replay_holdout_rows=replay.num_holdout_rows,
        replay_share=settings.replay_share,
        replay_days=replay.days,
        num_late_clicks=num_late_clicks,
        outcomes_digest=source.late.digest() if source.late else None,
    )


def data_digest(folder: Path) -> str:
    """SHA-256 over the names and bytes of the Parquet files of a dataset's folder, old rows included if it has any."""
    parts = [part for part in ("train", "holdout", LEARNT, HELD_OUT) if (folder / part).exists()]
    trees = "".join(f"{part} {sha256_tree(folder / part)}\n" for part in parts)
    return hashlib.sha256(trees.encode()).hexdigest()


def _copy(source: Source, window: Span, folder: Path, set_aside: SetAside) -> tuple[_Count, PartWriter]:
    count = _Count()
    with PartWriter(folder) as writer:
        for table, num_duplicates in source.tables(window, set_aside):
            count.num_duplicates += num_duplicates
            if not count.num_rows:
                count.first = to_micros(table.column(EVENT_TIME)[0].as_py())
            first = to_micros(pc.min(table.column(EVENT_TIME)).as_py())
            assert first >= count.last or not count.num_rows, "a source yields rows in time order"
            count.last = to_micros(table.column(EVENT_TIME)[-1].as_py())
            count.num_rows += table.num_rows
            writer.write(table)
    return count, writer


def _expect_rows(num_rows: int, window: Span, source: Source) -> None:
    if num_rows < MIN_ROWS:
        found = f"{num_rows} rows" if num_rows else "no rows"
        raise ContractError(f"window {window} holds {found}, expected at least {MIN_ROWS}; {source.describe()}")
