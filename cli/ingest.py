"""`evergreen data ingest` brings a user's files into the lake.

Rows keep their times. With `--last-day`, rows get new times instead, spread evenly over whole days
in file order. Rows are first written to a temporary file on disk (`spool`), which finds copies and
sorts the rows by time. The earlier rows become day partitions of the lake, and the later rows
become a file to replay. Days are published in time order, and each file appears complete or not at
all. Ingesting the same files again replaces their earlier result. Rows that the lake already
contains from other files are left out.
"""

import argparse
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from components.extraction.lake_files import base_name, files_of_day, objects_by_day
from components.extraction.spool import Events, RowCounts, Spool
from evergreen.config.extraction import ExtractionSettings
from evergreen.config.spec import Recommender
from evergreen.contracts.manifests import CURRENT
from evergreen.contracts.raw_rows import DAY_PARTITION, EVENT_TIME
from evergreen.registry.recommenders import accepted
from evergreen.rows.archived_rows import parquet_writer
from evergreen.rows.forms import FileReader, Reader, click_log_files, find_reader, passed_over
from evergreen.rows.lines import LineCounts
from evergreen.rows.raw_schema import MalformedRows, PartWriter, lake_schema
from evergreen.rows.times import DAY_MICROS, day_span, parse_day, to_iso
from evergreen.runtime.durable import fsync_path, sha256_file
from evergreen.runtime.errors import ContractError, expect
from evergreen.runtime.exit_codes import exits_with_code
from evergreen.runtime.flags import CommandParser, add_store_flag
from evergreen.runtime.plain_text import log_as_text
from evergreen.runtime.terminal import progress
from evergreen.storage.objects import NUM_TRANSFERS, Objects, local_copy
from evergreen.storage.uris import open_objects, typed_folder, typed_uri

logger = logging.getLogger(__name__)

STORE_HELP = "registry whose newest recommender describes the files"
_PARTITION = DAY_PARTITION.format(day="")


@dataclass(frozen=True, kw_only=True)
class IngestSettings:
    """Settings of one ingestion.

    Raises:
        ContractError: a value is out of its range.
    """

    last_day: date | None = None
    """UTC day of the last row, including replayed rows. None = rows keep their own times."""
    days: int | None = None
    """Number of whole days, ending with `last_day`, over which the rows are spread. None if and
    only if `last_day` is None."""
    max_rows: int | None = None
    """Number of rows to read from the beginning, or None for all."""
    lake_fraction: float = 1.0
    """Share of the rows, counted from the earliest, that go to the lake, in (0, 1]."""
    keep_repeated: bool = False
    """Whether a row without an id is a new event, even if it equals a row of the lake. By default,
    equal rows are the same event."""

    def __post_init__(self) -> None:
        if (self.last_day is None) != (self.days is None):
            raise ContractError(
                f"last_day is {self.last_day} and days is {self.days}, expected both, or neither "
                "to keep the rows' times"
            )
        if (
            self.last_day is not None
            and self.days is not None
            and not 1 <= self.days <= self.last_day.toordinal()
        ):
            raise ContractError(f"days is {self.days}, expected at least 1")
        expect(self, "at least 1", lambda value: value is None or value >= 1, "max_rows")
        expect(self, "more than 0 and at most 1", lambda value: 0 < value <= 1, "lake_fraction")


@dataclass(kw_only=True)
class ReadCounts:
    """Counts of the rows that were read from files."""

    lines: LineCounts = field(default_factory=LineCounts)
    ahead: int = 0
    """Number of malformed rows whose time is in the future."""

    def add(self, reader: Reader) -> None:
        """Add the counts that a reader collected."""
        self.lines.add(reader.counts)
        if isinstance(reader, FileReader):
            self.ahead += reader.num_ahead


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """Result of an ingestion. Only written rows are counted."""

    rows: int
    lake_rows: int
    replay_rows: int
    clicks: int
    malformed: int
    ahead: int
    """Number of malformed rows whose time is in the future."""
    duplicates: int
    """Number of dropped rows that are equal copies of another row."""
    replaced: int
    """Number of replaced rows. The files repeat each of these rows later with other content, such
    as a click."""
    already_in_lake: int
    """Number of rows that other files of the lake already contain. These rows were not written to
    the lake again."""
    repeated: int
    """Number of rows that have no id and differ from an earlier row in the label only. Each of
    these rows counts as a separate event."""
    lines: dict[str, int]
    """Number of lines of the files by kind: rows, rejected, continued, header, blank, comments."""

    @classmethod
    def of(
        cls, counts: RowCounts, read: ReadCounts, *, num_lake: int, num_malformed: int
    ) -> "Ingested":
        """Create the result from the row counts of the reader and of the writer."""
        return cls(
            rows=counts.rows,
            lake_rows=num_lake,
            replay_rows=counts.rows - num_lake,
            clicks=counts.clicks,
            malformed=num_malformed,
            ahead=read.ahead,
            duplicates=counts.copies.num_equal,
            replaced=counts.copies.num_updated + counts.copies.num_conflicting,
            already_in_lake=counts.known,
            repeated=counts.repeated,
            lines=asdict(read.lines),
        )


def ingest(
    files: list[Path],
    recommender: Recommender,
    *,
    lake: str,
    replay: Path | None,
    settings: IngestSettings,
) -> Ingested:
    """Write the rows of files to the lake, in order, and return the result.

    Malformed rows are written to `<replay>.malformed_rows.jsonl`. If there is no replay file,
    malformed rows are written to `ingest.malformed_rows.jsonl` in the current folder. This file is
    written only if rows are malformed.

    Args:
        files: The files, ordered as their rows should be.
        recommender: The recommender that describes the files' rows.
        lake: A URI or an absolute path. A folder is created if it is absent.
        replay: Parquet file for the rows that do not go to the lake. None if all rows go to the
            lake.
        settings: Times and shares of the rows.

    Raises:
        ContractError: A file is corrupt, has an unknown format or has too many malformed rows. This
            error is also raised if the files contain no row, or if rows lack times although
            `last_day` is None. This error is also raised if too many rows have the key of another
            row, or if the lake already contains the rows.
        TemporaryError: The bucket cannot be reached.
        PermanentError: There is no permission, no bucket or no disk space.
    """
    if replay is None and settings.lake_fraction < 1:
        raise ContractError(
            f"lake_fraction is {settings.lake_fraction} without a replay file, expected 1"
        )
    source, output = name_of(files), replay or Path("ingest")
    objects = open_objects(lake)
    objects.list(_PARTITION)  # check the bucket and the permissions now, not after hours of reading
    output.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder is next to the replay file, so that a rename moves finished files.
    # Readers ignore the folder, because its name begins with a dot.
    with tempfile.TemporaryDirectory(
        prefix=".ingest.", dir=output.parent, ignore_cleanup_errors=True
    ) as folder:
        scratch, weighted, read = Path(folder), recommender.data.has_weights, ReadCounts()
        malformed_file = scratch / "malformed_rows.jsonl"
        limits = recommender.section("extraction", ExtractionSettings)
        with MalformedRows(malformed_file, max_fraction=limits.max_malformed_fraction) as malformed:
            salt = f"{source}-" if settings.keep_repeated else ""
            spool = Spool(scratch, features=recommender.features, weighted=weighted, salt=salt)
            keeps_times = settings.days is None
            for batch in read_rows(
                files,
                recommender,
                malformed,
                counts=read,
                keeps_times=keeps_times,
                max_rows=settings.max_rows,
            ):
                spool.write(batch)
            malformed.check()
        with spool.close() as events:
            if not spool.num_rows:
                raise ContractError(
                    f"{', '.join(map(str, files))} contains no row, expected at least one row"
                )
            _expect_keys(events, recommender, files, limit=limits.max_conflicting_fraction)
            if not settings.keep_repeated:
                _leave_out_known(
                    events,
                    objects,
                    source,
                    keeps_times=keeps_times,
                    limit=limits.max_conflicting_fraction,
                )
            counts = events.counts()
            num_lake = max(1, int(counts.rows * settings.lake_fraction)) if counts.rows else 0
            with parquet_writer(
                scratch / "replay", lake_schema(recommender.features, weighted=weighted)
            ) as writer:
                _write_days(
                    _ordered(events, settings),
                    num_lake,
                    days=scratch / "days",
                    source=source,
                    replay=writer,
                )
        _publish_days(objects, scratch / "days", source)
        if replay is not None:
            _publish_file(scratch / "replay", replay)
        _publish_malformed(malformed_file, malformed_path(replay))
    return Ingested.of(counts, read, num_lake=num_lake, num_malformed=malformed.num_rows)


def malformed_path(replay: Path | None) -> Path:
    """Return the file for malformed rows, which is beside the replay file if there is one."""
    output = replay or Path("ingest")
    return output.with_name(f"{output.name}.malformed_rows.jsonl")


def name_of(files: list[Path]) -> str:
    """Return the name of files in the lake, which is derived from their content.

    Files with other content therefore never get the same name.
    """
    return f"ingest-{hashlib.sha256(''.join(map(sha256_file, files)).encode()).hexdigest()[:12]}"


def read_rows(
    files: list[Path],
    recommender: Recommender,
    malformed: MalformedRows,
    *,
    counts: ReadCounts,
    keeps_times: bool = False,
    max_rows: int | None = None,
) -> Iterator[Any]:
    """Yield the first `max_rows` well-formed rows of the files, as batches in the lake's schema.

    Every batch contains at least one row.

    Args:
        files: The files, ordered as their rows should be.
        recommender: The recommender that describes the files' rows.
        malformed: Writer that collects the malformed rows.
        counts: Object to which the counts of the rows read are added.
        keeps_times: Whether rows must have times. If False, times in the files are dropped.
        max_rows: Number of rows to read, or None for all.

    Raises:
        ContractError: A file cannot be read, or lacks times that it must have.
    """
    left = max_rows
    for file in files:
        logger.info("reading %s", file)
        reader = find_reader(file, recommender, with_times=keeps_times)
        if keeps_times and not reader.has_times:
            raise ContractError(
                f"{file} has no column {recommender.data.event_time!r}, expected event times; to "
                "spread the rows over days instead, add flags such as --last-day 2026-03-07 "
                "--days 7"
            )
        if reader.has_times and not keeps_times:
            logger.warning(
                "%s has event times, which are replaced. To keep the times, leave out last_day and "
                "days",
                file,
            )
        with ExitStack() as stack:
            stack.callback(counts.add, reader)
            advance = stack.enter_context(progress(f"reading {file.name}, rows"))
            for batch in reader.batches(malformed):
                advance(batch.num_rows)
                rows = batch if left is None else batch.slice(0, left)
                left = None if left is None else left - rows.num_rows
                if rows.num_rows:
                    yield rows if keeps_times else _without_times(rows)
                if left == 0:
                    return


def _without_times(rows: Any) -> Any:
    at = rows.schema.get_field_index(EVENT_TIME)
    return rows.set_column(
        at, rows.schema.field(EVENT_TIME), pa.nulls(rows.num_rows, rows.schema.field(at).type)
    )


def _expect_keys(
    events: Events, recommender: Recommender, files: list[Path], *, limit: float
) -> None:
    """Log how many rows have the same key, and check that few of them conflict.

    Raises:
        ContractError: The share of conflicting rows exceeds `limit`. Rows conflict if they have the
            same key but different features.
    """
    found = events.counts()
    key, source = (recommender.data.request_id, recommender.data.row), ", ".join(map(str, files))
    found.copies.check(found.rows, max_fraction=limit, source=source, key=key)
    if changed := found.copies.num_updated + found.copies.num_conflicting:
        logger.warning(
            "%d rows occur again with other content: the last copy of each counts", changed
        )
    if found.copies.num_equal:
        logger.warning("%d rows are equal copies of others and are dropped", found.copies.num_equal)
    if found.repeated:
        logger.warning(
            "%d rows equal an earlier row in everything but the label. Rows without a request id "
            "count as separate rows. If the later rows are copies of the earlier rows with the "
            "click added, name the columns that identify a row: data.request_id and data.row",
            found.repeated,
        )


def _leave_out_known(
    events: Events, objects: Objects, source: str, *, keeps_times: bool, limit: float
) -> None:
    """Leave out the rows that other files of the lake already contain.

    Raises:
        ContractError: The lake already contains the rows at other times, because an earlier
            ingestion spread them over days.
    """
    days = {f"{_PARTITION}{to_iso(day * DAY_MICROS)[:10]}" for day in events.days()}
    with ExitStack() as stack:
        by_day = objects_by_day(objects.uri, objects.list(_PARTITION), DAY_PARTITION)
        others = [
            each.name
            for day, names in by_day.items()
            if DAY_PARTITION.format(day=day) in days or not keeps_times
            for each in files_of_day(objects, day, names).files
            if not base_name(each).startswith(f"part-{source}-")
        ]
        files = [stack.enter_context(local_copy(objects, name)) for name in sorted(others)]
        known = events.leave_out_known(files, with_times=keeps_times)
    num_known, total = known.num_equal, events.counts().rows + known.num_equal
    if known.num_others > limit * total:
        raise ContractError(
            f"{known.num_others:,} of {total:,} rows have the same request and row number as a row "
            f"in the lake {objects.uri}, but other features (such as {known.example}), expected at "
            f"most {limit:.2%}. Without data.row, rows of a request are numbered in file order: "
            "name a column of row numbers by data.row, or keep the order"
        )
    if not num_known:
        return
    if not keeps_times and num_known > limit * total:
        raise ContractError(
            f"{num_known:,} of {total:,} rows equal rows of other files in the lake {objects.uri}, "
            "expected new rows: use another lake, or --keep-repeated if these rows are further "
            "events"
        )
    logger.warning(
        "%d of %d rows are in the lake already and are not written again", num_known, total
    )


def _ordered(events: Events, settings: IngestSettings) -> Iterator[tuple[Any, Any]]:
    """Yield batches of the events in time order, each with its times in microseconds."""
    if settings.days and settings.last_day:
        start = day_span(settings.last_day - timedelta(days=settings.days - 1)).start
        assert start is not None
        batches = events.spread(start=start, length=settings.days * DAY_MICROS)
    else:
        batches = events.in_time_order()
    for batch in batches:
        yield batch, batch.column(EVENT_TIME).cast(pa.int64()).to_numpy()


def _write_days(
    rows: Iterator[tuple[Any, Any]], num_lake: int, *, days: Path, source: str, replay: Any
) -> None:
    """Write the first `num_lake` rows as day partitions below `days`, and the rest to `replay`."""
    row = 0

    def lake_chunks() -> Iterator[tuple[int, Any]]:
        nonlocal row
        for batch, times in rows:
            here = min(max(num_lake - row, 0), batch.num_rows)
            if here < batch.num_rows:
                replay.write_batch(batch.slice(here))
            row += batch.num_rows
            # Rows are in time order, so the rows of each day are contiguous.
            numbers, starts = np.unique(times[:here] // DAY_MICROS, return_index=True)
            for day, start, end in zip(numbers, starts, [*starts[1:], here]):
                yield int(day), batch.slice(start, end - start)

    days.mkdir()
    for day, chunks in groupby(lake_chunks(), key=lambda chunk: chunk[0]):
        folder = days / DAY_PARTITION.format(day=to_iso(day * DAY_MICROS)[:10])
        with PartWriter(folder, prefix=f"part-{source}") as writer:
            for _, chunk in chunks:
                writer.write(chunk)


def _publish_days(objects: Objects, days: Path, source: str) -> None:
    """Publish the files below `days` in the lake day by day, and remove the source's older files.

    The files are named `part-<source>-*.parquet`.
    """
    own = re.compile(rf"{_PARTITION}[^/]*/part-{re.escape(source)}-[^/]*\.parquet")
    stale = {each.name for each in objects.list(_PARTITION) if own.fullmatch(each.name)}
    with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="ingest") as threads:
        for day in sorted(days.iterdir()):
            new = {f"{day.name}/{path.name}": path for path in sorted(day.iterdir())}
            for _ in threads.map(objects.write, new.keys(), new.values()):
                pass  # if one of the tasks failed, its error is raised here
            stale -= new.keys()
            logger.info("%s: wrote %d files of %s", objects.uri, len(new), day.name)
    for name in stale:
        objects.delete(name)


def _publish_malformed(path: Path, final: Path) -> None:
    """Replace an earlier ingestion's malformed rows by the malformed rows of this ingestion."""
    final.unlink(missing_ok=True)
    if path.exists():
        _publish_file(path, final)


def _publish_file(path: Path, final: Path) -> None:
    """Move a finished file to its location by one rename."""
    fsync_path(path)
    os.replace(path, final)
    fsync_path(final.parent)


def recommender_of(store: str) -> Recommender:
    """Return the recommender that was accepted last into the registry.

    Raises:
        ContractError: no recommender was accepted there.
    """
    return accepted(typed_folder(store, "--store"), CURRENT)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    parser = CommandParser(
        prog="evergreen data ingest",
        description=(
            "Read files of rows (Parquet, text with a header, JSON lines, Criteo's TSV) in order, "
            "and write the earlier rows to the lake and the later rows to a replay file. Rows keep "
            "their times, or get times spread over whole days. Malformed rows go to "
            "<replay>.malformed_rows.jsonl, or to ingest.malformed_rows.jsonl in the current "
            "folder. The counts are printed as JSON."
        ),
    )
    add_store_flag(parser, text=STORE_HELP)
    parser.add_argument("--data", required=True, type=Path, help="a file, or a folder of files")
    parser.add_argument(
        "--lake", required=True, help="folder or its URI, created if absent; or gs://bucket/prefix"
    )
    parser.add_argument(
        "--last-day",
        default="",
        help="UTC day of the last row, YYYY-MM-DD, if rows are spread (default: rows keep their "
        "times)",
    )
    parser.add_argument(
        "--days", type=int, default=None, help="with --last-day: number of days to spread over"
    )
    parser.add_argument(
        "--max-rows", type=int, default=None, help="number of rows to read (default: all)"
    )
    parser.add_argument(
        "--lake-fraction",
        type=float,
        default=1.0,
        help="share of the rows, from the earliest, for the lake",
    )
    parser.add_argument("--replay", type=Path, help="Parquet file for the other rows")
    parser.add_argument(
        "--keep-repeated",
        action="store_true",
        help="count rows without an id that equal rows of the lake as further events (default: as "
        "the same events)",
    )
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. `evergreen.runtime.exit_codes` lists its exit codes."""
    arguments = build_parser().parse_args(argv)
    log_as_text()
    settings = IngestSettings(
        last_day=parse_day("last_day", arguments.last_day) if arguments.last_day else None,
        days=arguments.days,
        max_rows=arguments.max_rows,
        lake_fraction=arguments.lake_fraction,
        keep_repeated=arguments.keep_repeated,
    )
    files = click_log_files(arguments.data)
    lake = typed_uri(arguments.lake)
    recommender = recommender_of(arguments.store)
    done = ingest(files, recommender, lake=lake, replay=arguments.replay, settings=settings)
    file = str(malformed_path(arguments.replay)) if done.malformed else None
    found = {**asdict(done), "malformed_file": file, "skipped_files": passed_over(arguments.data)}
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
