"""The archive of served rows: the monitor's folder or the lake that its uploader fills, `day=YYYY-MM-DD/*.parquet`.

Only the days of the training rows are read. A later version of a day (`day=D/version=N/`) is a correction of what was
served and is left out: what the model answered was answered on the rows that the monitor wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.contracts import criteo
from components.contracts.errors import ContractError, first_line


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


def served_files(archive: Path, span: Span) -> list[Path]:
    """The archive's files of the span's days, oldest day first.

    Raises:
        ContractError: `archive` is no folder.
    """
    if not archive.is_dir():
        raise ContractError(f"served rows {archive} is not a folder, expected the archive of a monitor")
    return [path for day in span.days() for path in sorted((archive / f"day={day}").glob("*.parquet"))]


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
