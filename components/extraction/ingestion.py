"""A user's Criteo files become a lake and a replay file.

Criteo's rows have no times, so they get some: spread evenly, in file order, over whole days. Rows are spooled to disk
first, because their spacing needs their number, and malformed rows make that known only at the end. The files appear
when all are written; ingesting the same files again replaces what they left in the lake (`ingest_places`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.criteo import DAY_PARTITION, LABEL
from components.extraction.ingest_places import opened_place, publish_file, workshop
from components.extraction.origin import spread, with_origin
from components.extraction.parquet_files import PartWriter
from components.extraction.raw_schema import BATCH_ROWS, CLICK_COLUMNS, RAW_SCHEMA
from components.extraction.readers.forms import find_reader
from components.extraction.readers.raw_parquet import RawParquet
from components.extraction.set_aside import SetAside
from components.extraction.times import DAY_MICROS, day_span, to_iso
from components.runtime.errors import ContractError

logger = logging.getLogger(__name__)

_SPOOL_SCHEMA = pa.schema([RAW_SCHEMA.field(name) for name in CLICK_COLUMNS])


@dataclass(frozen=True, kw_only=True)
class IngestSettings:
    """What becomes of the rows.

    Raises:
        ContractError: a value is out of its range.
    """

    last_day: date
    """UTC day of the last row, replayed rows included."""
    days: int
    """Whole days, ending with `last_day`, over which the rows spread."""
    max_rows: int | None
    """Rows taken from the beginning; None = all."""
    lake_fraction: float
    """Share of the rows, the earlier ones, that go to the lake; in (0, 1]."""
    max_malformed_fraction: float
    """Share of a file's rows that may be malformed and set aside before all stops; in [0, 1]."""

    def __post_init__(self) -> None:
        """Refuses values out of range."""
        if not 1 <= self.days <= self.last_day.toordinal():
            raise ContractError(f"days is {self.days}, expected at least 1")
        if self.max_rows is not None and self.max_rows < 1:
            raise ContractError(f"max_rows is {self.max_rows}, expected at least 1")
        if not 0 < self.lake_fraction <= 1:
            raise ContractError(f"lake_fraction is {self.lake_fraction}, expected more than 0 and at most 1")


def ingest(files: list[Path], *, lake: str, replay: Path, settings: IngestSettings) -> dict[str, int]:
    """Ingests the files in order and returns counts: rows, lake_rows, replay_rows, set_aside, clicks.

    Rows set aside are kept in `<replay>.set_aside.jsonl`, which exists only if there are any.

    Args:
        files: A user's, in the order of their rows.
        lake: `gs://bucket/prefix`, `file:///folder` or an absolute path; a folder is made where it is absent.
        replay: Parquet file for the rows that do not go to the lake.
        settings: What becomes of the rows.

    Raises:
        ContractError: a file is of no known form, damaged or too malformed, or there is no row at all.
        TemporaryError: the bucket cannot be reached.
        PermanentError: no permission, no bucket, or no room.
    """
    source = name_of(files)
    with opened_place(lake, beside=replay.parent) as place, workshop(replay.parent) as replay_aside:
        aside = place.scratch
        malformed = replay_aside / "set_aside.jsonl"
        with SetAside(malformed, max_fraction=settings.max_malformed_fraction) as set_aside:
            total, clicks = spool_rows(files, aside / "spool", set_aside, settings.max_rows)
            set_aside.judge()
        if total == 0:
            raise ContractError(f"{files[0].parent} holds no row, expected Criteo rows")
        num_lake = max(1, int(total * settings.lake_fraction))
        first_day = settings.last_day - timedelta(days=settings.days - 1)
        rows = dated(aside / "spool", source, total, first_day=first_day, days=settings.days)
        with pq.ParquetWriter(replay_aside / "replay", RAW_SCHEMA) as replay_file:
            _lay_out(rows, num_lake, aside / "days", source, replay_file)
        place.publish(aside / "days", source)
        publish_file(replay_aside / "replay", replay)
        set_aside_path = replay.with_name(f"{replay.name}.set_aside.jsonl")
        set_aside_path.unlink(missing_ok=True)
        if malformed.exists():
            publish_file(malformed, set_aside_path)
    return {
        "rows": total,
        "lake_rows": num_lake,
        "replay_rows": total - num_lake,
        "set_aside": set_aside.num_rows,
        "clicks": clicks,
    }


def name_of(files: list[Path], *, prefix: str = "ingest") -> str:
    """Names these files in request ids and lake files, whatever folder they lie in: by their names and sizes."""
    text = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def spool_rows(files: list[Path], path: Path, set_aside: SetAside, max_rows: int | None) -> tuple[int, int]:
    """Copies the sound rows to an Arrow stream file; how many they are, and how many of them are clicks."""
    total = clicks = 0
    with pa.ipc.new_stream(path, _SPOOL_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4")) as spool:
        for file in files:
            logger.info("reading %s", file)
            reader = find_reader(file)
            if isinstance(reader, RawParquet):
                logger.warning(
                    "%s has event times and request ids, which are given up: its rows get new ones. A file of the raw "
                    "schema goes to the lake as it is, into its day's folder, or by `evergreen backfill`",
                    file,
                )
            for batch in reader.batches(set_aside):
                rows = batch.select(list(CLICK_COLUMNS))
                if max_rows is not None:
                    rows = rows.slice(0, max_rows - total)
                spool.write_batch(rows)
                total += rows.num_rows
                clicks += pc.sum(rows.column(LABEL)).as_py() or 0
                if total == max_rows:
                    return total, clicks
    return total, clicks


def dated(
    spool: Path, source: str, total: int, *, first_day: date, days: int
) -> Iterator[tuple[Any, NDArray[np.int64]]]:
    """The `total` spooled rows in the raw schema, and their times, spread evenly over `days` days from `first_day`."""
    start = day_span(first_day).start
    assert start is not None
    row = 0
    with pa.ipc.open_stream(pa.OSFile(str(spool))) as stream:
        for batch in stream:
            for at in range(0, batch.num_rows, BATCH_ROWS):
                piece = batch.slice(at, BATCH_ROWS)
                times = spread(row, piece.num_rows, start=start, length=days * DAY_MICROS, total=total)
                yield with_origin(piece, source=source, first_row=row, times=times), times
                row += piece.num_rows


def _lay_out(
    rows: Iterator[tuple[Any, NDArray[np.int64]]], num_lake: int, days: Path, source: str, replay: Any
) -> None:
    """Writes the first `num_lake` rows as day partitions below `days`, the others to `replay`."""

    def lake_pieces() -> Iterator[tuple[int, Any]]:
        row = 0
        for batch, times in rows:
            here = min(max(num_lake - row, 0), batch.num_rows)
            if here < batch.num_rows:
                replay.write_batch(batch.slice(here))
            row += batch.num_rows
            # Rows are in time order, so each day's are contiguous.
            numbers, starts = np.unique(times[:here] // DAY_MICROS, return_index=True)
            for day, start, end in zip(numbers, starts, [*starts[1:], here]):
                yield int(day), batch.slice(start, end - start)

    days.mkdir()
    for day, pieces in groupby(lake_pieces(), key=lambda piece: piece[0]):
        folder = days / DAY_PARTITION.format(day=to_iso(day * DAY_MICROS)[:10])
        with PartWriter(folder, prefix=f"part-{source}") as writer:
            for _, piece in pieces:
                writer.write(piece)
