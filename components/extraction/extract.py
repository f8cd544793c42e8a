"""The extraction of one window: rows sorted by time, split into training rows and holdout.

The steps of the extraction, each in a module of its own:

1. `lake`: list what is read, and what is left out.
2. `copying`: copy the window's rows and the late rows, which `reader` reads.
3. `holdout`: split the copied rows into training rows and the holdout.
4. `replay`: sample rows older than the window.
5. `holdout`: remove holdout rows whose requests also have training rows.

The output folder `<work>/<run>/extraction/` is written atomically, and a retried task replaces it.
The folder contains:

- `train/` and `holdout/`: Parquet files in the raw schema.
- `replay/` and `replay_holdout/`: rows older than the window (see `components.extraction.replay`).
- `malformed.jsonl`: malformed rows, if there are any.
- `ahead.jsonl`: files with rows ahead of the clock, if there are any.
- `texts.json`: counts of string categories, if a column has them.

Unreadable files and files with unsuitable content are left out (see `evergreen.rows.unfit`). The
first pass over the rows finds all files to leave out, and the next pass does not read them.
Therefore the result is the same as for a lake without these files.
"""

import hashlib
import json
import logging
import os
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from components.extraction.copying import MALFORMED_FILE, Copied, CopiedRows, copy_rows
from components.extraction.holdout import (
    HOLDOUT,
    TRAIN,
    RowSplit,
    remove_straddling,
    rows_until,
    split_rows,
)
from components.extraction.lake import Lake, WindowPlan
from components.extraction.reader import RowReader
from components.extraction.replay import HELD_OUT, REPLAYED, DrawnReplay, draw_replay
from components.extraction.window import NO_BASELINES, Baselines, watermark
from evergreen.config.extraction import ExtractionSettings
from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import RawDataset
from evergreen.contracts.raw_rows import EVENT_TIME
from evergreen.rows.raw_schema import MalformedRows, excluded_columns, unread_columns
from evergreen.rows.times import TimeSpan, to_iso
from evergreen.rows.unfit import NUM_NAMED, UnfitFiles
from evergreen.runtime import forked
from evergreen.runtime.durable import sha256_tree, whole_directory
from evergreen.runtime.errors import FROM_SCRATCH, ContractError, run_again
from evergreen.runtime.workers import workers_of

logger = logging.getLogger(__name__)

_MIN_ROWS = 10
_AHEAD_FILE, _TEXTS_FILE = "ahead.jsonl", "texts.json"


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
        lake: Lake with the rows. The call leaves unfit files out of the lake.
        window: Times of the rows.
        folder: Output folder.
        recommender: Recommender with its settings.
        baselines: Parent and champion of the candidate.
        dask_scheduler: Address of the Dask scheduler whose workers copy the rows. If the address is
            empty, processes on this machine copy the rows.

    Raises:
        ContractError: a setting is wrong, there are too few rows for training or the holdout, or
            too many files are unfit to read.
        TemporaryError: see `evergreen.runtime.workers.workers_of`.
    """
    while True:
        try:
            return _extract_once(
                lake,
                window,
                folder=folder,
                recommender=recommender,
                baselines=baselines,
                dask_scheduler=dask_scheduler,
            )
        except UnfitFiles as error:
            lake.files.leave_out(error)
        except ContractError as error:
            if not (unfit := list(lake.files.unfit.values())):
                raise
            names = ", ".join(each.file for each in unfit[:NUM_NAMED])
            more = f" and {len(unfit) - NUM_NAMED} more" if len(unfit) > NUM_NAMED else ""
            raise ContractError(f"{error}; unfit files were left out: {names}{more}") from error


def _extract_once(
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
    excluded = excluded_columns(settings.columns, recommender.features)
    unread = unread_columns(excluded, baselines.champion)
    plan = lake.plan(window, max_unfit_fraction=settings.max_quarantined_file_fraction)
    reader = RowReader(
        features=recommender.features,
        weighted=recommender.data.has_weights,
        unread=unread,
        clicks=plan.late_clicks,
    )
    with (
        whole_directory(folder, replace=True) as aside,
        workers_of(dask_scheduler, processes=forked.usual_processes(), shared=aside) as workers,
    ):
        copied = copy_rows(
            plan, reader, folder=aside, settings=settings, named=lake.files.named, workers=workers
        )
        num_trained = _expect_rows(
            copied.window,
            plan,
            lake=lake,
            reader=reader,
            baselines=baselines,
            attribution=settings.attribution,
        )
        split = split_rows(
            copied,
            num_trained=num_trained,
            holdout_fraction=settings.holdout_fraction,
            window=window,
            folder=aside,
        )
        replay = draw_replay(
            lake, reader, copied.window.first_time, split=split, settings=settings, folder=aside
        )
        num_straddling = remove_straddling(
            aside, split, trained=[aside / TRAIN, aside / REPLAYED], window=window, workers=workers
        )
        has_texts = reader.text_counts.write(
            aside / _TEXTS_FILE, without=recommender.columns_of_users
        )
        if plan.ahead_files:
            lines = (json.dumps(each._asdict()) + "\n" for each in plan.ahead_files)
            (aside / _AHEAD_FILE).write_text("".join(lines), encoding="utf-8")
    logger.info(
        "%s: %d training rows (%d of them late), and %d rows after the split",
        window,
        split.num_train,
        copied.late.num_rows,
        split.num_newer,
    )
    written = _Written(
        plan=plan,
        copied=copied,
        split=split,
        replay=replay,
        num_straddling=num_straddling,
        has_texts=has_texts,
        outcomes_digest=reader.clicks.digest(),
        quarantined_files=lake.quarantined_files(),
    )
    return _dataset(written, folder=folder, recommender=recommender, baselines=baselines)


class _Written(NamedTuple):
    """Rows that were written, and counts of them."""

    plan: WindowPlan
    copied: Copied
    split: RowSplit
    replay: DrawnReplay
    num_straddling: int
    has_texts: bool
    outcomes_digest: str | None
    quarantined_files: list[dict[str, Any]]


def _dataset(
    written: _Written, *, folder: Path, recommender: Recommender, baselines: Baselines
) -> RawDataset:
    """Return the manifest of the written rows."""
    settings = recommender.section("extraction", ExtractionSettings)
    plan, copied, split, replay = written.plan, written.copied, written.split, written.replay
    window, malformed, days = plan.window, copied.malformed, _days(plan, copied, split)
    num_ahead = sum(each.num_rows for each in plan.ahead_files)
    num_left_out = [each.num_rows for each in plan.left_out_files]
    parent = baselines.parent
    last_trained = max(split.last_trained, watermark(parent) if parent else 0)
    return RawDataset(
        source_uri=plan.source_uri,
        window_start=to_iso(window.start) if window.start is not None else None,
        window_end=to_iso(window.end) if window.end is not None else None,
        first_event_time=to_iso(copied.window.first_time),
        last_event_time=to_iso(copied.window.last_time),
        watermark=to_iso(last_trained),
        train_uri=(folder / TRAIN).as_uri(),
        holdout_uri=(folder / HOLDOUT).as_uri(),
        num_train_rows=split.num_train,
        num_holdout_rows=split.num_newer - written.num_straddling,
        num_malformed=malformed.num_rows,
        malformed_uri=(folder / MALFORMED_FILE).as_uri() if malformed.num_rows else None,
        num_ahead=num_ahead,
        ahead_uri=(folder / _AHEAD_FILE).as_uri() if num_ahead else None,
        num_left_files=len(num_left_out),
        num_left_rows=None if None in num_left_out else sum(each or 0 for each in num_left_out),
        num_duplicates=copied.copies.num_equal,
        num_updated=copied.copies.num_updated,
        num_conflicting=copied.copies.num_conflicting,
        digest=data_digest(folder),
        parent_model_id=parent.model_id if parent else None,
        champion_model_id=baselines.champion.model_id if baselines.champion else None,
        num_straddling_rows=written.num_straddling,
        replay_uri=(folder / REPLAYED).as_uri() if replay.num_rows else None,
        num_replay_rows=replay.num_rows,
        replay_holdout_uri=(folder / HELD_OUT).as_uri() if replay.num_holdout_rows else None,
        num_replay_holdout_rows=replay.num_holdout_rows,
        replay_share=settings.replay_share,
        replay_days=replay.days,
        num_late_clicks=copied.window.num_late_clicks + copied.late.num_late_clicks,
        outcomes_digest=written.outcomes_digest,
        excluded_columns=excluded_columns(settings.columns, recommender.features),
        days=days,
        num_late_rows=copied.late.num_rows,
        files=plan.record.seen_up_to(last_trained),
        quarantined_files=written.quarantined_files,
        unread_files=plan.record.unread_up_to(last_trained),
        schema_mismatches=malformed.schema_mismatches,
        texts_uri=(folder / _TEXTS_FILE).as_uri() if written.has_texts else None,
        recommender=recommender,
    )


def _days(plan: WindowPlan, copied: Copied, split: RowSplit) -> list[dict[str, Any]]:
    """Return `RawDataset.days`."""
    num_rows, num_late = copied.window.days, copied.late.days
    found = []
    for planned in plan.days:
        number = (planned.day - date(1970, 1, 1)).days
        among = {
            "num_late_rows": num_late[number],
            "num_holdout_rows": split.newer_days[number],
        }
        if num := num_rows[number] + num_late[number]:
            found.append(
                {
                    "day": str(planned.day),
                    "version": planned.version,
                    "digest": planned.digest(),
                    "num_rows": num,
                    **{name: part for name, part in among.items() if part},
                }
            )
    return found


def _expect_rows(
    copied: CopiedRows,
    plan: WindowPlan,
    *,
    lake: Lake,
    reader: RowReader,
    baselines: Baselines,
    attribution: int,
) -> int:
    """Check that the rows suffice for training and for a holdout.

    Returns:
        The number of rows at the start of the window that were used to train the parent or the
        champion.

    Raises:
        ContractError: too few rows were copied, or too few are newer than the training rows of
            parent and champion.
    """
    window = plan.window
    if copied.num_rows < _MIN_ROWS:
        found = f"{copied.num_rows} rows" if copied.num_rows else "no rows"
        others = (
            "bring more rows by `evergreen data ingest`, or select other rows by window_start "
            "and window_end"
        )
        again = (
            f"; to train on all rows from scratch, {run_again('-p parent=none')}"
            if baselines.parent
            else ""
        )
        raise ContractError(
            f"window {window} has {found}, expected at least {_MIN_ROWS}; {lake.describe()}; "
            f"{others}{again}"
        )
    newest = baselines.watermark
    if newest is None:
        return 0
    num_trained = rows_until(copied.parts, newest)
    num_newer = copied.num_rows - num_trained
    if num_newer < _MIN_ROWS:
        models = " or ".join(model.model_id for model in baselines.models)
        advice = _window_end_needed(lake, reader, newest, attribution=attribution)
        raise ContractError(
            f"window {window} has {num_newer} rows after {to_iso(newest)}, the time of the "
            f"newest training row of {models}, expected at least {_MIN_ROWS} rows for the "
            f"holdout; {advice}"
        )
    return num_trained


def _window_end_needed(lake: Lake, reader: RowReader, newest: int, *, attribution: int) -> str:
    """Return advice for a message: the earliest `window_end` with enough new rows.

    A row is new if its time is after `newest`.
    """
    times: list[int] = []
    chunks = lake.plan(TimeSpan(newest + 1, None)).chunks
    with MalformedRows(Path(os.devnull), max_fraction=1.0, collects_unfit=True) as ignored:
        for rows in reader.tables(chunks, ignored):
            times += rows.table.column(EVENT_TIME).cast(pa.int64()).to_pylist()[:_MIN_ROWS]
            if len(times) >= _MIN_ROWS:
                return (
                    f"use a window_end of {to_iso(times[_MIN_ROWS - 1] + 1 + attribution)} or later"
                )
    return (
        f"the lake has only {len(times)} such rows: bring more rows by `evergreen data "
        f"ingest`; to train on all rows without a comparison, {run_again(FROM_SCRATCH)}"
    )


def data_digest(folder: Path) -> str:
    """Hash the names and the bytes of a dataset's Parquet files with SHA-256.

    Files of old rows are included.
    """
    parts = [part for part in (TRAIN, HOLDOUT, REPLAYED, HELD_OUT) if (folder / part).exists()]
    trees = "".join(f"{part} {sha256_tree(folder / part)}\n" for part in parts)
    return hashlib.sha256(trees.encode()).hexdigest()
