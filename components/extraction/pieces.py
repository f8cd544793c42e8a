"""A day cut into spans of about equal numbers of rows, judged by the row groups' statistics alone."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from components.contracts.criteo import EVENT_TIME
from components.extraction.raw_schema import RAW_SCHEMA, open_parquet
from components.extraction.readers.raw_parquet import group_times
from components.extraction.times import Span
from components.runtime.errors import ContractError


class Piece(NamedTuple):
    """A part of one day that is read at a time."""

    day: date
    files: list[Path]
    """All of the day's files; each may hold rows of the span."""
    span: Span
    num_rows: float
    """Rows that lie in the span, by the row groups' statistics: about."""


def newest_time(path: Path, day: Span) -> int | None:
    """Event time of the newest row of a raw file that lies in its day, microseconds since the epoch; None without one.

    Raises:
        ContractError: the file is not whole Parquet, or has no event times.
    """
    file = open_parquet(path)
    if EVENT_TIME not in file.schema_arrow.names:
        raise ContractError(f"{path} lacks the column {EVENT_TIME}, expected the raw schema")
    found: list[int] = []
    for group in range(file.num_row_groups):
        stated = group_times(file.metadata.row_group(group))
        if stated is not None and day.holds(stated.last):
            found.append(stated.last)
        elif stated is None or day.overlaps(stated.first, stated.last):
            times = file.read_row_group(group, columns=[EVENT_TIME]).column(0).cast(RAW_SCHEMA.field(EVENT_TIME).type)
            found += [time for time in times.drop_null().cast(pa.int64()).to_pylist() if day.holds(time)]
    return max(found, default=None)


def may_hold_rows(path: Path, span: Span) -> bool:
    """Whether a raw file can hold a row of the span, by its row groups' statistics; True where there are none.

    Raises:
        ContractError: the file is not whole Parquet.
    """
    metadata = open_parquet(path).metadata
    times = [group_times(metadata.row_group(group)) for group in range(metadata.num_row_groups)]
    return any(time is None or span.overlaps(time.first, time.last) for time in times)


def cut_evenly(day: date, files: list[Path], span: Span, piece_rows: int) -> list[Piece]:
    """Pieces whose spans together are `span`, in order, each with about `piece_rows` rows of the files; at least one.

    Rows are taken to lie evenly within their row group, and within `span` where a group has no statistics. Traffic
    that comes in bursts is thus cut where it is, not by the clock.

    Raises:
        ContractError: a file is not whole Parquet.
    """
    assert span.start is not None
    assert span.end is not None
    firsts, lasts, counts = [], [], []
    for path in files:
        file = open_parquet(path)
        is_time = EVENT_TIME in file.schema_arrow.names and str(file.schema_arrow.field(EVENT_TIME).type)[:4] == "time"
        for i in range(file.num_row_groups):
            group = file.metadata.row_group(i)
            times = group_times(group) if is_time else None
            firsts.append(times.first if times else span.start)
            lasts.append(times.last + 1 if times else span.end)
            counts.append(group.num_rows)
    edges = np.unique(np.clip([span.start, span.end, *firsts, *lasts], span.start, span.end))
    # How many rows lie before each edge; microseconds of this epoch are exact in float64.
    before = np.zeros(len(edges))
    for first, last, count in zip(firsts, lasts, counts):
        before += count * np.clip((edges - first) / max(last - first, 1), 0, 1)
    num_pieces = max(1, int(-(-(before[-1] - before[0]) // piece_rows)))
    wanted = before[0] + (before[-1] - before[0]) * np.arange(1, num_pieces) / num_pieces
    inner = np.interp(wanted, before, edges).astype(np.int64).tolist()
    bounds = sorted({span.start, *inner, span.end})
    sizes = np.diff(np.interp(bounds, edges, before)).tolist()
    return [Piece(day, files, Span(a, b), size) for a, b, size in zip(bounds, bounds[1:], sizes)]
