"""Brings a user's Criteo files into the lake: `python -m components.extraction.ingest`.

Criteo's rows have no times, so they get some: spread evenly, in file order, over whole days. Rows are spooled to disk
first, because their spacing depends on their number, which malformed rows make known only at the end. The earlier rows
become day partitions of the lake, the later ones a file to replay. Days appear in the order of their rows' times, each
file whole or not at all; ingesting the same files again replaces what they left.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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

from components.contracts.raw_rows import DAY_PARTITION, EVENT_TIME, LABEL, REQUEST_ID, ROW
from components.extraction.malformed_rows import MalformedRows
from components.extraction.part_files import PartWriter
from components.extraction.raw_schema import BATCH_ROWS, CLICK_COLUMNS, RAW_SCHEMA, raw_batch
from components.extraction.readers.forms import click_log_files, find_reader, passed_over
from components.extraction.readers.parquet import RawParquet
from components.extraction.settings import ExtractionSettings
from components.extraction.times import DAY_MICROS, day_span, parse_day, to_iso
from components.runtime.durable import fsync_path
from components.runtime.errors import ContractError
from components.runtime.exit_codes import exits_with_code
from components.storage.downloads import NUM_TRANSFERS
from components.storage.locations import open_objects
from components.storage.objects import Objects
from components.storage.uris import typed_uri

logger = logging.getLogger(__name__)

ROWS_PER_REQUEST = 100
COMPARED_ROWS = 1000
"""By these first rows, or by all of a smaller file, a file is known that is there twice, as `day_0` and `day_0.gz`."""
_PARTITION = DAY_PARTITION.format(day="")
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
    """Share of a file's rows that may be malformed before the command stops; in [0, 1]."""

    def __post_init__(self) -> None:
        """Refuses values out of range."""
        if not 1 <= self.days <= self.last_day.toordinal():
            raise ContractError(f"days is {self.days}, expected at least 1")
        if self.max_rows is not None and self.max_rows < 1:
            raise ContractError(f"max_rows is {self.max_rows}, expected at least 1")
        if not 0 < self.lake_fraction <= 1:
            raise ContractError(f"lake_fraction is {self.lake_fraction}, expected more than 0 and at most 1")


def ingest(files: list[Path], *, lake: str, replay: Path, settings: IngestSettings) -> dict[str, int]:
    """Ingests the files in order and returns counts: rows, lake_rows, replay_rows, malformed, clicks.

    Malformed rows are kept in `<replay>.malformed_rows.jsonl`, which exists only if there are any.

    Args:
        files: A user's files, in the order of their rows.
        lake: `gs://bucket/prefix`, `file:///folder` or an absolute path; a folder is created if absent.
        replay: Parquet file for the rows that do not go to the lake.
        settings: What becomes of the rows.

    Raises:
        ContractError: a file is of no known form, damaged or too malformed, or there is no row at all.
        TemporaryError: the bucket cannot be reached.
        PermanentError: no permission, no bucket, or no room.
    """
    source = name_of(files)
    objects = open_objects(lake)
    objects.list(_PARTITION)  # fails here and not after hours of reading if there is no bucket or no permission
    replay.parent.mkdir(parents=True, exist_ok=True)
    # Beside the replay file, so that finished files are moved by a rename; its dot hides it from readers.
    with tempfile.TemporaryDirectory(prefix=".ingest.", dir=replay.parent, ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        malformed_file = scratch / "malformed_rows.jsonl"
        with MalformedRows(malformed_file, max_fraction=settings.max_malformed_fraction) as malformed:
            total, clicks = spool_rows(files, scratch / "spool", malformed, max_rows=settings.max_rows)
            malformed.judge()
        if total == 0:
            raise ContractError(f"{', '.join(map(str, files))} holds no row, expected Criteo rows")
        num_lake = max(1, int(total * settings.lake_fraction))
        first_day = settings.last_day - timedelta(days=settings.days - 1)
        rows = dated(scratch / "spool", source, total, first_day=first_day, days=settings.days)
        with pq.ParquetWriter(scratch / "replay", RAW_SCHEMA) as replay_file:
            _write_days(rows, num_lake, days=scratch / "days", source=source, replay=replay_file)
        _publish_days(objects, scratch / "days", source)
        _publish_file(scratch / "replay", replay)
        final_malformed = replay.with_name(f"{replay.name}.malformed_rows.jsonl")
        final_malformed.unlink(missing_ok=True)
        if malformed_file.exists():
            _publish_file(malformed_file, final_malformed)
    return {
        "rows": total,
        "lake_rows": num_lake,
        "replay_rows": total - num_lake,
        "malformed": malformed.num_rows,
        "clicks": clicks,
    }


def name_of(files: list[Path], *, prefix: str = "ingest") -> str:
    """Names these files in request ids and lake files by their names and sizes, whatever folder they lie in."""
    text = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def spool_rows(
    files: list[Path], path: Path, malformed: MalformedRows, *, max_rows: int | None = None
) -> tuple[int, int]:
    """Copies the well-formed rows to an Arrow stream file; returns how many they are, and how many are clicks.

    Raises:
        ContractError: two files begin with the same rows, which would be learnt and judged twice; or a file cannot be
            read.
    """
    total = clicks = 0
    beginnings: dict[str, Path] = {}
    with pa.ipc.new_stream(path, _SPOOL_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4")) as spool:
        for file in files:
            logger.info("reading %s", file)
            reader = find_reader(file)
            if isinstance(reader, RawParquet):
                logger.warning(
                    "%s has event times and request ids, which are replaced by new ones. To keep them, copy the file "
                    "into its day's folder of the lake, or use `evergreen backfill`",
                    file,
                )
            batches = reader.batches(malformed)
            beginning = _first_rows(batches)
            _refuse_repetition(file, beginning, beginnings)
            for batch in itertools.chain(beginning, batches):
                rows = batch.select(list(CLICK_COLUMNS))
                if max_rows is not None:
                    rows = rows.slice(0, max_rows - total)
                spool.write_batch(rows)
                total += rows.num_rows
                clicks += pc.sum(rows.column(LABEL)).as_py() or 0
                if total == max_rows:
                    return total, clicks
    return total, clicks


def _first_rows(batches: Iterator[Any]) -> list[Any]:
    """The first batches, with `COMPARED_ROWS` rows or more, or all where there are fewer."""
    found: list[Any] = []
    while sum(batch.num_rows for batch in found) < COMPARED_ROWS and (batch := next(batches, None)) is not None:
        found.append(batch)
    return found


def _refuse_repetition(file: Path, beginning: list[Any], known: dict[str, Path]) -> None:
    """Notes in `known` the file of each beginning; refuses one that is there."""
    rows = [row for batch in beginning for row in batch.select(list(CLICK_COLUMNS)).slice(0, COMPARED_ROWS).to_pylist()]
    rows = rows[:COMPARED_ROWS]
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    if rows and known.setdefault(digest, file) is not file:
        raise ContractError(
            f"{file} begins with the {len(rows):,} rows that {known[digest]} begins with, expected each row in one file"
        )


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


def with_origin(batch: Any, *, source: str, first_row: int, times: NDArray[np.int64]) -> Any:
    """The click columns of `batch` as rows of requests `<source>-<n>`, 100 rows each.

    Args:
        batch: Has the click columns.
        source: Names where the rows come from.
        first_row: Place of the first row in the source, from 0.
        times: Event times in microseconds, one a row.
    """
    places = first_row + np.arange(batch.num_rows, dtype=np.int64)
    numbers = pc.ascii_lpad(pa.array(places // ROWS_PER_REQUEST).cast(pa.string()), 9, "0")
    return raw_batch(
        {
            **{name: batch.column(name) for name in CLICK_COLUMNS},
            REQUEST_ID: pc.binary_join_element_wise(source, numbers, "-"),
            ROW: pa.array((places % ROWS_PER_REQUEST).astype(np.int32)),
            EVENT_TIME: pa.array(times).cast(RAW_SCHEMA.field(EVENT_TIME).type),
        }
    )


def spread(first_row: int, num_rows: int, *, start: int, length: int, total: int) -> NDArray[np.int64]:
    """Times of rows `first_row` .. when `total` rows lie evenly in [start, start + length) microseconds.

    Row i lies at start + floor(i * length / total).

    >>> spread(1, 3, start=100, length=10, total=4).tolist()
    [102, 105, 107]
    """
    # Whole files have more rows times microseconds than an int64; what is left per batch has not.
    whole, rest = divmod(first_row * length, total)
    return start + whole + (rest + np.arange(num_rows, dtype=np.int64) * length) // total


def _write_days(
    rows: Iterator[tuple[Any, NDArray[np.int64]]], num_lake: int, *, days: Path, source: str, replay: Any
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


def _publish_days(objects: Objects, days: Path, source: str) -> None:
    """Makes the files below `days`, named `part-<source>-*.parquet`, the source's only ones in the lake; day by day."""
    own = re.compile(rf"{_PARTITION}[^/]*/part-{re.escape(source)}-[^/]*\.parquet")
    stale = {each.name for each in objects.list(_PARTITION) if own.fullmatch(each.name)}
    with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="ingest") as threads:
        for day in sorted(days.iterdir()):
            new = {f"{day.name}/{path.name}": path for path in sorted(day.iterdir())}
            for _ in threads.map(objects.write, new.keys(), new.values()):
                pass  # the first failure is raised here
            stale -= new.keys()
            logger.info("%s: wrote %d files of %s", objects.uri, len(new), day.name)
    for name in stale:
        objects.delete(name)


def _publish_file(path: Path, final: Path) -> None:
    """Moves a finished file to its location, by one rename."""
    fsync_path(path)
    os.replace(path, final)
    fsync_path(final.parent)


def build_parser() -> argparse.ArgumentParser:
    """The command's flags; `--help` is its documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m components.extraction.ingest",
        description="Reads Criteo files (1TB TSV, Kaggle CSV, Parquet) in order, gives rows times spread over whole "
        "days, and writes the earlier ones to the lake, the later ones to a file to replay. Prints its counts as JSON.",
    )
    parser.add_argument("--data", required=True, type=Path, help="a Criteo file, or a folder of them")
    parser.add_argument(
        "--lake", required=True, help="lake: folder or its URI, created if absent; or gs://bucket/prefix"
    )
    parser.add_argument("--last-day", required=True, help="UTC day of the last row, YYYY-MM-DD")
    parser.add_argument("--days", required=True, type=int, help="whole days over which the rows spread")
    parser.add_argument("--max-rows", type=int, default=None, help="rows taken from the beginning; default: all")
    parser.add_argument(
        "--lake-fraction", required=True, type=float, help="share of the rows, the earlier ones, to lake"
    )
    parser.add_argument("--replay", required=True, type=Path, help="Parquet file for the other rows")
    parser.add_argument(
        "--max-malformed-fraction",
        type=float,
        default=ExtractionSettings.max_malformed_fraction,
        help="share of a file's rows that may be malformed; they are kept in <replay>.malformed_rows.jsonl",
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see `runtime.exit_codes` for its exit codes."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = IngestSettings(
        last_day=parse_day("last_day", arguments.last_day),
        days=arguments.days,
        max_rows=arguments.max_rows,
        lake_fraction=arguments.lake_fraction,
        max_malformed_fraction=arguments.max_malformed_fraction,
    )
    files = click_log_files(arguments.data)
    counts = ingest(files, lake=typed_uri(arguments.lake), replay=arguments.replay, settings=settings)
    print(json.dumps({**counts, "passed_over": passed_over(arguments.data)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
