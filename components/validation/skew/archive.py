"""The archive of served rows: the monitor's folder or the lake that its uploader fills, `day=YYYY-MM-DD/*.parquet`.

Only the days of the training rows are read. A later version of a day (`day=D/version=N/`) is a correction of what was
served and is left out: what the model answered was answered on the rows that the monitor wrote. Comparing is left to
`measure`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.contracts import criteo
from components.runtime.errors import ContractError, first_line
from components.storage.downloads import fetched_files
from components.storage.folder import FolderObjects
from components.storage.locations import open_objects
from components.storage.objects import ObjectInfo, Objects
from components.storage.uris import is_bucket_uri, local_path
from components.store.archived_rows import archived_files
from components.validation.skew.partitions import read_rows

logger = logging.getLogger(__name__)


class Span(NamedTuple):
    """A span of event time, both ends included."""

    first: datetime
    last: datetime

    def days(self) -> list[str]:
        """The UTC days that it touches.

        >>> utc = timezone.utc
        >>> Span(datetime(2026, 1, 1, 23, tzinfo=utc), datetime(2026, 1, 2, 1, tzinfo=utc)).days()
        ['2026-01-01', '2026-01-02']
        """
        first, last = self.first.astimezone(timezone.utc).date(), self.last.astimezone(timezone.utc).date()
        return [str(first + timedelta(days=n)) for n in range((last - first).days + 1)]


class Archive(Protocol):
    """Served rows, by day."""

    @property
    def uri(self) -> str:
        """Where it lies."""

    @contextmanager
    def files(self, span: Span, features: Sequence[str], scratch: Path) -> Iterator[list[Path]]:
        """Yields Parquet files with at least the rows of the span, oldest day first.

        Args:
            span: Of the rows; files of its days may hold others.
            features: Columns that are wanted beside those that name and date a row.
            scratch: Folder for what has to be fetched; nothing stays in it.

        Raises:
            ContractError: a file is damaged, or lacks a column.
            TemporaryError, PermanentError: it cannot be fetched; TemporaryError also where it changes meanwhile.
        """


def open_archive(uri: str) -> Archive:
    """The archive at `uri`: an absolute path, `file://` or `gs://bucket/prefix`.

    Raises:
        ContractError: `uri` is none of these, or no folder.
        PermanentError: there are no credentials for the bucket.
    """
    if is_bucket_uri(uri):
        return BucketArchive(open_objects(uri))
    folder = local_path(uri)
    if not folder.is_dir():
        raise ContractError(f"served rows {folder} is not a folder, expected the archive of a monitor")
    return FolderArchive(folder)


@dataclass(frozen=True)
class FolderArchive:
    """An archive on this machine, read in place."""

    folder: Path

    @property
    def uri(self) -> str:
        """See `Archive.uri`."""
        return self.folder.as_uri()

    @contextmanager
    def files(self, span: Span, features: Sequence[str], scratch: Path) -> Iterator[list[Path]]:
        """See `Archive.files`."""
        found = archived_files(FolderObjects(self.folder), days=span.days())
        yield [self.folder / each.name for each in found]


@dataclass(frozen=True)
class BucketArchive:
    """An archive in a bucket: of its files of the span's days the rows of the span are kept on this machine.

    They are about as many as the training rows, which this machine holds too, whatever else was served on those days.
    """

    objects: Objects

    @property
    def uri(self) -> str:
        """See `Archive.uri`."""
        return self.objects.uri

    @contextmanager
    def files(self, span: Span, features: Sequence[str], scratch: Path) -> Iterator[list[Path]]:
        """See `Archive.files`."""
        wanted = [each.info for each in archived_files(self.objects, days=span.days())]
        size = sum(each.size for each in wanted) / 1e6
        logger.info("served rows %s: %d files of %d days, %.1f MB", self.uri, len(wanted), len(span.days()), size)
        scratch.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=scratch, prefix=".served-") as kept:
            yield list(self._kept(wanted, span, features, Path(kept)))

    def _kept(self, wanted: Sequence[ObjectInfo], span: Span, features: Sequence[str], folder: Path) -> Iterator[Path]:
        for number, (info, fetched) in enumerate(fetched_files(self.objects, wanted, folder)):
            path = folder / f"{number}.parquet"
            try:
                is_any = _write(within(read_rows([fetched], features), span), path)
            except ContractError as error:
                raise ContractError(str(error).replace(str(fetched), f"{self.uri}/{info.name}")) from error
            if is_any:
                yield path


def span_of(files: Sequence[Path]) -> Span | None:
    """From the oldest to the newest row of `files`; None without rows.

    Raises:
        ContractError: a file is no Parquet, or has no event times.
    """
    ends: list[datetime] = []
    for path in files:
        try:
            for batch in pq.ParquetFile(path).iter_batches(columns=[criteo.EVENT_TIME]):
                found = pc.min_max(batch.column(0)).as_py()
                ends += [time for time in found.values() if time is not None]
        except (pa.ArrowException, OSError, KeyError, IndexError) as error:
            raise ContractError(f"{path} has no event times: {first_line(error)}") from error
    return Span(min(ends), max(ends)) if ends else None


def within(batches: Iterable[pa.RecordBatch], span: Span) -> Iterator[pa.RecordBatch]:
    """The rows of `batches` in the span; batches without any are left out."""
    kind = pa.timestamp("us", tz="UTC")
    first, last = (pa.scalar(end.astimezone(timezone.utc), kind) for end in span)
    for batch in batches:
        times = batch.column(batch.schema.get_field_index(criteo.EVENT_TIME))
        kept = batch.filter(pc.and_(pc.greater_equal(times, first), pc.less_equal(times, last)))
        if kept.num_rows:
            yield kept


def _write(batches: Iterator[pa.RecordBatch], path: Path) -> bool:
    """Writes the rows to a Parquet file; none, and no file, where there are none."""
    first = next(batches, None)
    if first is None:
        return False
    with pq.ParquetWriter(path, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)
    return True
