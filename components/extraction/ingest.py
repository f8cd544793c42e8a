"""Brings a user's files into the lake: `python -m components.extraction.ingest`.

Rows keep their times, or get some: spread evenly, in file order, over whole days, as rows without times (Criteo's) must
be. Rows are spooled to disk first: their spacing depends on their number, which malformed rows make known only at the
end, and times come in any order. The earlier rows become day partitions of the lake, the later ones a file to replay.
Days appear in the order of their rows' times, each file whole or not at all; ingesting the same files again replaces
what they left.
"""

import argparse
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from components.contracts.manifests import CURRENT
from components.contracts.raw_rows import DAY_PARTITION, EVENT_TIME, LABEL, REQUEST_ID, ROW
from components.contracts.recommender import Recommender
from components.extraction.lake import sorted_day
from components.extraction.raw_schema import (
    BATCH_ROWS,
    TIME_TYPE,
    MalformedRows,
    PartWriter,
    click_columns,
    lake_schema,
    raw_batch,
)
from components.extraction.readers.forms import click_log_files, find_reader, passed_over
from components.extraction.settings import ExtractionSettings
from components.extraction.times import DAY_MICROS, day_span, parse_day, to_iso
from components.runtime.durable import fsync_path
from components.runtime.errors import ContractError, expect
from components.runtime.exit_codes import exits_with_code
from components.runtime.flags import CommandParser
from components.runtime.plain_text import log_as_text
from components.storage.objects import NUM_TRANSFERS, Objects
from components.storage.uris import open_objects, typed_folder, typed_uri
from components.store.recommenders import accepted

logger = logging.getLogger(__name__)

ROWS_PER_REQUEST = 100
MAX_DAYS = 500
"""Days of one ingestion, each of which has a file open."""
_PARTITION = DAY_PARTITION.format(day="")


@dataclass(frozen=True, kw_only=True)
class IngestSettings:
    """What becomes of the rows.

    Raises:
        ContractError: a value is out of its range.
    """

    last_day: date | None = None
    """UTC day of the last row, replayed rows included; None = rows keep the times that they have."""
    days: int | None = None
    """Whole days, ending with `last_day`, over which the rows spread; None where that is."""
    max_rows: int | None = None
    """Rows taken from the beginning; None = all."""
    lake_fraction: float = 1.0
    """Share of the rows, the earlier ones, that go to the lake; in (0, 1]."""

    def __post_init__(self) -> None:
        if (self.last_day is None) != (self.days is None):
            raise ContractError(
                f"last_day is {self.last_day} and days is {self.days}, expected both, or none: rows keep their times"
            )
        if self.last_day is not None and self.days is not None and not 1 <= self.days <= self.last_day.toordinal():
            raise ContractError(f"days is {self.days}, expected at least 1")
        expect(self, "at least 1", lambda value: value is None or value >= 1, "max_rows")
        expect(self, "more than 0 and at most 1", lambda value: 0 < value <= 1, "lake_fraction")


def ingest(
    files: list[Path], recommender: Recommender, *, lake: str, replay: Path | None, settings: IngestSettings
) -> dict[str, int]:
    """Ingests the files in order and returns counts: rows, lake_rows, replay_rows, malformed, duplicates, clicks.

    Malformed rows are kept in `<replay>.malformed_rows.jsonl`, without a replay file in `ingest.malformed_rows.jsonl`
    in the current folder; it exists only if there are any. `files` are in the order of their rows. The lake is a URI or
    an absolute path; a folder is created if absent. `replay` is the Parquet file for the rows that do not go to the
    lake; None where all of them do.

    Raises:
        ContractError: a file is of no known form, damaged or too malformed, there is no row at all, or rows are to keep
            times that they do not have.
        TemporaryError: the bucket cannot be reached.
        PermanentError: no permission, no bucket, or no room.
    """
    if replay is None and settings.lake_fraction < 1:
        raise ContractError(f"lake_fraction is {settings.lake_fraction} without a file to replay, expected 1")
    source, place = name_of(files), replay or Path("ingest")
    objects = open_objects(lake)
    objects.list(_PARTITION)  # fails here and not after hours of reading if there is no bucket or no permission
    place.parent.mkdir(parents=True, exist_ok=True)
    # Beside the replay file, so that finished files are moved by a rename; its dot hides it from readers.
    with tempfile.TemporaryDirectory(prefix=".ingest.", dir=place.parent, ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        spool, weighted, counts = scratch / "spool", recommender.data.has_weights, Counter[str]()
        malformed_file = scratch / "malformed_rows.jsonl"
        limit = recommender.section("extraction", ExtractionSettings).max_malformed_fraction
        with MalformedRows(malformed_file, max_fraction=limit) as malformed:
            reading = partial(read_rows, files, recommender, malformed, counts=counts, max_rows=settings.max_rows)
            if settings.days:
                spool_rows(reading(), recommender, spool)
            else:
                spool_days(reading(with_keys=True), source, spool)
            malformed.judge()
        if not (total := counts["rows"]):
            raise ContractError(f"{', '.join(map(str, files))} holds no row, expected some")
        num_lake, num_sorted = max(1, int(total * settings.lake_fraction)), 0
        if settings.days and settings.last_day:
            first_day = settings.last_day - timedelta(days=settings.days - 1)
            rows = dated(spool, source, recommender, total=total, first_day=first_day, days=settings.days)
        else:
            rows = in_time_order(spool, recommender)
        with pq.ParquetWriter(scratch / "replay", lake_schema(recommender.features, weighted=weighted)) as replay_file:
            num_sorted = _write_days(rows, num_lake, days=scratch / "days", source=source, replay=replay_file)
        num_lake = min(num_lake, num_sorted)
        _publish_days(objects, scratch / "days", source)
        if replay is not None:
            _publish_file(scratch / "replay", replay)
        _publish_malformed(malformed_file, place.with_name(f"{place.name}.malformed_rows.jsonl"))
    return {
        "rows": num_sorted,
        "lake_rows": num_lake,
        "replay_rows": num_sorted - num_lake,
        "malformed": malformed.num_rows,
        "duplicates": total - num_sorted,
        "clicks": counts["clicks"],
    }


def name_of(files: list[Path], *, prefix: str = "ingest") -> str:
    """Names these files in request ids and lake files by their names and sizes, whatever folder they lie in."""
    text = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def spool_rows(batches: Iterable[Any], recommender: Recommender, path: Path) -> None:
    """Copies what the rows of `read_rows` say by themselves to an Arrow stream file."""
    features, weighted = recommender.features, recommender.data.has_weights
    names, schema = click_columns(features, weighted=weighted), lake_schema(features, weighted=weighted)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(path, pa.schema([schema.field(name) for name in names]), options=options) as spool:
        for rows in batches:
            spool.write_batch(rows.select(names))


def spool_days(batches: Iterable[Any], source: str, folder: Path) -> None:
    """Copies the rows of `read_rows`, which have times, to a file a day in the new folder.

    Raises:
        ContractError: the rows are of more than `MAX_DAYS` days.
    """
    folder.mkdir()
    origin = _Origin(source)
    writers: dict[int, Any] = {}
    with ExitStack() as stack:
        for found in batches:
            rows = origin.complete(found)
            days = rows.column(EVENT_TIME).cast(pa.int64()).to_numpy() // DAY_MICROS
            for day in np.unique(days).tolist():
                if day not in writers:
                    if len(writers) == MAX_DAYS:
                        raise ContractError(f"rows are of more than {MAX_DAYS} days, expected the times of a click log")
                    path = folder / f"{to_iso(day * DAY_MICROS)[:10]}.parquet"
                    writers[day] = stack.enter_context(pq.ParquetWriter(path, rows.schema))
                writers[day].write_batch(rows.filter(pa.array(days == day)))


def read_rows(
    files: list[Path],
    recommender: Recommender,
    malformed: MalformedRows,
    *,
    counts: Counter[str],
    with_keys: bool = False,
    max_rows: int | None = None,
) -> Iterator[Any]:
    """The first `max_rows` well-formed rows of the files, in batches in the lake's schema, of which none is empty.

    `counts` gets their `rows` and `clicks`.

    Raises:
        ContractError: a file cannot be read, or has no times where they are wanted (`with_keys`).
    """
    left = max_rows
    for file in files:
        logger.info("reading %s", file)
        reader = find_reader(file, recommender, with_keys=with_keys)
        if with_keys and not reader.has_times:
            raise ContractError(
                f"{file} has no column {recommender.data.event_time!r}, expected times, or last_day and days over "
                "which rows are spread"
            )
        if reader.has_times and not with_keys:
            logger.warning("%s has event times, which are replaced: rows keep them without last_day and days", file)
        for batch in reader.batches(malformed):
            rows = batch if left is None else batch.slice(0, left)
            left = None if left is None else left - rows.num_rows
            if rows.num_rows:
                counts.update(rows=rows.num_rows, clicks=pc.sum(rows.column(LABEL)).as_py() or 0)
                yield rows
            if left == 0:
                return


class _Origin:
    """Names the rows of files that do not say which request they belong to, or which row of it they are.

    Without a request id each row is a request of its own; without a number the rows of a request are numbered in file
    order, for which every request id is held in memory.
    """

    def __init__(self, source: str) -> None:
        self._source, self._num_rows = source, 0
        self._num_of_request: dict[str, int] = {}

    def complete(self, batch: Any) -> Any:
        """The batch with a request id and a number in each row; either column has all values, or none."""
        requests, numbers = batch.column(REQUEST_ID), batch.column(ROW)
        if requests.null_count:
            requests = _request_ids(self._source, self._num_rows + np.arange(batch.num_rows))
        if numbers.null_count:
            numbers = pa.array(self._number(requests.dictionary_encode()), pa.int32())
        self._num_rows += batch.num_rows
        columns = {name: batch.column(name) for name in batch.schema.names}
        return raw_batch({**columns, REQUEST_ID: requests, ROW: numbers}, batch.schema)

    def _number(self, encoded: Any) -> NDArray[np.int64]:
        codes = encoded.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        sizes = np.bincount(codes)
        first = np.cumsum(sizes) - sizes
        numbers: NDArray[np.int64] = np.empty(len(codes), np.int64)
        numbers[order] = np.arange(len(codes)) - first[codes[order]]
        names = encoded.dictionary.to_pylist()
        before = np.array([self._num_of_request.get(name, 0) for name in names])
        self._num_of_request.update(zip(names, (before + sizes).tolist()))
        numbers += before[codes]
        return numbers


def in_time_order(folder: Path, recommender: Recommender) -> Iterator[tuple[Any, NDArray[np.int64]]]:
    """The rows that `spool_days` wrote in order of time, each (request id, row) once, and their times."""
    features, weighted = recommender.features, recommender.data.has_weights
    with MalformedRows(Path(os.devnull)) as malformed:  # what was spooled has none
        for path in sorted(folder.iterdir()):
            day = parse_day("day", path.stem)
            for table, _ in sorted_day([path], day, features=features, malformed=malformed, weighted=weighted):
                for batch in table.to_batches(max_chunksize=BATCH_ROWS):
                    yield batch, batch.column(EVENT_TIME).cast(pa.int64()).to_numpy()


def dated(
    spool: Path, source: str, recommender: Recommender, *, total: int, first_day: date, days: int
) -> Iterator[tuple[Any, NDArray[np.int64]]]:
    """The `total` spooled rows in the lake's schema, and their times, spread evenly over `days` days."""
    start = day_span(first_day).start
    assert start is not None
    row = 0
    with pa.ipc.open_stream(pa.OSFile(str(spool))) as stream:
        for batch in stream:
            for at in range(0, batch.num_rows, BATCH_ROWS):
                piece = batch.slice(at, BATCH_ROWS)
                times = spread(row, piece.num_rows, start=start, length=days * DAY_MICROS, total=total)
                yield with_origin(piece, recommender, source=source, first_row=row, times=times), times
                row += piece.num_rows


def with_origin(batch: Any, recommender: Recommender, *, source: str, first_row: int, times: NDArray[np.int64]) -> Any:
    """The click columns of `batch` as rows of requests `<source>-<n>`, 100 rows each.

    `source` names where the rows come from, and `first_row` is the place of the first one there; `times` are
    microseconds.
    """
    features, weighted = recommender.features, recommender.data.has_weights
    places = first_row + np.arange(batch.num_rows, dtype=np.int64)
    return raw_batch(
        {
            **{name: batch.column(name) for name in click_columns(features, weighted=weighted)},
            REQUEST_ID: _request_ids(source, places // ROWS_PER_REQUEST),
            ROW: pa.array((places % ROWS_PER_REQUEST).astype(np.int32)),
            EVENT_TIME: pa.array(times).cast(TIME_TYPE),
        },
        lake_schema(features, weighted=weighted),
    )


def _request_ids(source: str, numbers: NDArray[np.int64]) -> Any:
    return pc.binary_join_element_wise(source, pc.ascii_lpad(pa.array(numbers).cast(pa.string()), 9, "0"), "-")


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
) -> int:
    """Writes the first `num_lake` rows as day partitions below `days`, the others to `replay`; how many all are."""
    row = 0

    def lake_pieces() -> Iterator[tuple[int, Any]]:
        nonlocal row
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
    return row


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


def _publish_malformed(path: Path, final: Path) -> None:
    """Puts the malformed rows, where there are any, in place of an earlier ingestion's."""
    final.unlink(missing_ok=True)
    if path.exists():
        _publish_file(path, final)


def _publish_file(path: Path, final: Path) -> None:
    """Moves a finished file to its location, by one rename."""
    fsync_path(path)
    os.replace(path, final)
    fsync_path(final.parent)


def add_store_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that says whose rows a person's files hold; see `recommender_of`."""
    parser.add_argument("--store", required=True, help="model store whose newest recommender describes the files")


def recommender_of(store: str) -> Recommender:
    """The newest that was accepted into the store.

    Raises:
        ContractError: nobody accepted one there.
    """
    return accepted(typed_folder(store, "--store"), CURRENT)


def build_parser() -> argparse.ArgumentParser:
    """The command's flags; `--help` is its documentation."""
    parser = CommandParser(
        prog="evergreen ingest",
        description="Reads files of rows (Parquet, text with a header; Criteo's TSV) in order, and writes the earlier "
        "ones to the lake, the later ones to a file to replay. Rows keep their times, or get some, spread over whole "
        "days. Malformed rows are kept in <replay>.malformed_rows.jsonl, or ingest.malformed_rows.jsonl in the current "
        "folder. Prints its counts as JSON.",
    )
    add_store_flag(parser)
    parser.add_argument("--data", required=True, type=Path, help="a file, or a folder of files")
    parser.add_argument("--lake", required=True, help="folder or its URI, created if absent; or gs://bucket/prefix")
    parser.add_argument(
        "--last-day",
        default="",
        help="UTC day of the last row, YYYY-MM-DD, if rows are spread; default: rows keep their times",
    )
    parser.add_argument("--days", type=int, default=None, help="whole days over which the rows spread; with --last-day")
    parser.add_argument("--max-rows", type=int, default=None, help="rows taken from the beginning; default: all")
    parser.add_argument("--lake-fraction", type=float, default=1.0, help="share of the rows, the earlier ones, to lake")
    parser.add_argument("--replay", type=Path, help="Parquet file for the other rows, where there are some")
    return parser


@exits_with_code
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see `runtime.exit_codes` for its exit codes."""
    arguments = build_parser().parse_args(argv)
    log_as_text()
    settings = IngestSettings(
        last_day=parse_day("last_day", arguments.last_day) if arguments.last_day else None,
        days=arguments.days,
        max_rows=arguments.max_rows,
        lake_fraction=arguments.lake_fraction,
    )
    files = click_log_files(arguments.data)
    lake = typed_uri(arguments.lake)
    recommender = recommender_of(arguments.store)
    counts = ingest(files, recommender, lake=lake, replay=arguments.replay, settings=settings)
    print(json.dumps({**counts, "passed_over": passed_over(arguments.data)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
