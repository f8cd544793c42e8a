"""A new version of a past day of the lake, from Criteo files or raw Parquet: whole, or not there at all.

The day's rows become what the files hold, in time order and each once. What the day held before stays where it is and
is read no more (`versions`): nothing is lost, and which model saw which version is told by `lineage`. Rows keep the
columns of the raw schema alone.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from components.contracts.criteo import DAY_PARTITION
from components.extraction.ingest_places import workshop
from components.extraction.ingestion import dated, name_of, spool_rows
from components.extraction.lake import PIECE_ROWS, sorted_once
from components.extraction.parquet_files import PartWriter
from components.extraction.pieces import cut_evenly
from components.extraction.raw_schema import RAW_SCHEMA
from components.extraction.readers.forms import find_reader
from components.extraction.readers.raw_parquet import RawParquet
from components.extraction.set_aside import DEFAULT_MAX_MALFORMED_FRACTION, SetAside
from components.extraction.times import day_span
from components.extraction.version_places import BucketDay, DayPlace, FolderDay
from components.extraction.versions import FileMark, Marker
from components.runtime.errors import ContractError
from components.storage.uris import is_bucket_uri, local_path

logger = logging.getLogger(__name__)

SET_ASIDE_FILE = "_set_aside.jsonl"
"""In the version's folder; the underscore hides it from readers."""


@dataclass(frozen=True, kw_only=True)
class BackfillSettings:
    """What becomes of a day."""

    day: date
    reason: str = ""
    """Kept in the marker, for people."""
    max_malformed_fraction: float = DEFAULT_MAX_MALFORMED_FRACTION
    """Share of a file's rows that may be malformed, or of another day, and set aside; in [0, 1]."""


class Backfilled(NamedTuple):
    """What was done."""

    version: int
    num_rows: int
    num_set_aside: int
    num_duplicates: int
    replaces: list[str]
    """Names of the files of version 0 that are read no more."""


def backfill(files: list[Path], *, lake: str, settings: BackfillSettings) -> Backfilled:
    """Writes the rows of `files` as the day's next version.

    Rows in the raw schema keep their times and must be of the day; Criteo's rows, which have none, are spread evenly
    over it in the order of `files`. Of two back-fills at once both are written, and the higher version counts.

    Args:
        files: All in the raw schema, or none.
        lake: `gs://bucket/prefix`, `file:///folder` or an absolute path; must exist.
        settings: Which day, and why.

    Raises:
        ContractError: a file is damaged, of no known form or too malformed, forms are mixed, or no row is left.
        TemporaryError: the bucket cannot be reached.
        PermanentError: no permission, no bucket, or no room.
    """
    with _place(lake, settings.day) as place:
        # Noted before any row is read: a file that comes meanwhile holds rows that nobody has corrected.
        replaces = place.own_files()
        rows = place.scratch / "rows"
        aside = SetAside(place.scratch / SET_ASIDE_FILE, max_fraction=settings.max_malformed_fraction)
        with aside as set_aside, PartWriter(rows) as writer:
            num_duplicates = 0
            for table, duplicates in _day_rows(files, settings.day, place.scratch, set_aside):
                num_duplicates += duplicates
                writer.write(table)
            set_aside.judge()
        num_rows = sum(part.num_rows for part in writer.parts)
        if not num_rows:
            raise ContractError(f"{files[0]} and its fellows hold no row of {settings.day}, expected some")
        if aside.num_rows:
            aside.path.rename(rows / SET_ASIDE_FILE)
        marks = [FileMark.of(part.path) for part in writer.parts]

        def marker(version: int) -> Marker:
            return Marker(
                day=str(settings.day),
                version=version,
                files=marks,
                replaces=replaces,
                num_rows=num_rows,
                created_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                reason=settings.reason,
            )

        version = place.publish(rows, marker)
    logger.info("%s of %s is version %d now: %d rows", settings.day, lake, version, num_rows)
    return Backfilled(version, num_rows, aside.num_rows, num_duplicates, [mark.name for mark in replaces])


@contextmanager
def _place(lake: str, day: date) -> Iterator[DayPlace]:
    partition = DAY_PARTITION.format(day=day)
    if is_bucket_uri(lake):
        scratch = Path(tempfile.mkdtemp(prefix="backfill-"))
        try:
            yield BucketDay(lake.rstrip("/"), partition, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return
    folder = local_path(lake)
    if not folder.is_dir():
        raise ContractError(f"lake {folder} does not exist, expected a folder of day partitions")
    with workshop(folder) as scratch:
        yield FolderDay(folder / partition, scratch)


def _day_rows(files: list[Path], day: date, scratch: Path, set_aside: SetAside) -> Iterator[tuple[Any, int]]:
    """The day's rows in time order, a bounded piece at a time, each with how many duplicates were left out."""
    raw = [isinstance(find_reader(path), RawParquet) for path in files]
    if any(raw) and not all(raw):
        raise ContractError(
            f"{files[raw.index(True)]} has event times, {files[raw.index(False)]} has none; expected files of one kind"
        )
    if not any(raw):
        total, _ = spool_rows(files, scratch / "spool", set_aside, None)
        source = name_of(files, prefix=f"backfill-{day}")
        for batch, _ in dated(scratch / "spool", source, total, first_day=day, days=1):
            yield batch, 0
        (scratch / "spool").unlink()
        return
    span = day_span(day)
    for i, piece in enumerate(cut_evenly(day, files, span, PIECE_ROWS)):
        readers = [RawParquet(path=path, span=piece.span, day=span, with_strays=i == 0) for path in files]
        batches = [batch for reader in readers for batch in reader.batches(set_aside)]
        yield sorted_once(pa.Table.from_batches(batches, RAW_SCHEMA))
