"""The lake: `day=YYYY-MM-DD/*.parquet` in the raw schema, read a bounded piece at a time.

Days are disjoint in time, so days in order are rows in order; a day with more rows than fit is cut into spans of time,
each sorted by itself. Memory is bounded by `PIECE_ROWS` as far as the row groups' statistics tell where a day's rows
lie; many rows at one instant cannot be cut.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from components.contracts.criteo import DAY_PARTITION, EVENT_TIME, REQUEST_ID, ROW
from components.extraction.pieces import cut_evenly
from components.extraction.raw_schema import RAW_SCHEMA
from components.extraction.readers.raw_parquet import RawParquet
from components.extraction.set_aside import SetAside
from components.extraction.times import Span, day_span, parse_day

logger = logging.getLogger(__name__)

PARTITION = DAY_PARTITION.format(day="")
PIECE_ROWS = 250_000


@dataclass(frozen=True, kw_only=True)
class Lake:
    """The day partitions below one folder."""

    folder: Path
    piece_rows: int = PIECE_ROWS
    """Rows sorted at a time, about."""

    def days(self) -> dict[date, list[Path]]:
        """The visible Parquet files of each day that has any, in order.

        Names that start with a dot or underscore are someone's unfinished work.

        Raises:
            ContractError: a partition's name holds no date.
        """
        found: dict[date, list[Path]] = {}
        for partition in sorted(self.folder.glob(f"{PARTITION}*")):
            files = sorted(p for p in partition.glob("*.parquet") if not p.name.startswith((".", "_")))
            if files:
                found[parse_day(f"lake partition {partition}", partition.name.removeprefix(PARTITION))] = files
        return found

    def describe(self) -> str:
        """See `Source.describe`."""
        days = list(self.days())
        return f"lake {self.folder} holds " + (f"days {days[0]} to {days[-1]}" if days else "no rows")

    def tables(self, window: Span, set_aside: SetAside) -> Iterator[tuple[Any, int]]:
        """See `Source.tables`."""
        for day, files in self.days().items():
            span = day_span(day)
            if not window.clipped(span).is_empty:
                logger.info("reading day %s: %d files", day, len(files))
                yield from self._day(files, span, window, set_aside)

    def _day(self, files: list[Path], day: Span, window: Span, set_aside: SetAside) -> Iterator[tuple[Any, int]]:
        for i, piece in enumerate(cut_evenly(files, day.clipped(window), self.piece_rows)):
            batches = [
                batch
                for path in files
                for batch in RawParquet(path=path, span=piece, day=day, with_strays=i == 0).batches(set_aside)
            ]
            if batches:
                yield sorted_once(pa.Table.from_batches(batches, RAW_SCHEMA))


def sorted_once(table: Any) -> tuple[Any, int]:
    """The rows by event time, then request and row, each (request id, row) once; and how many were left out.

    Of rows with one identity the earliest stays.
    """
    table = table.sort_by([(EVENT_TIME, "ascending"), (REQUEST_ID, "ascending"), (ROW, "ascending")])
    keyed = table.select([REQUEST_ID, ROW]).append_column("position", pa.array(np.arange(table.num_rows)))
    first = keyed.group_by([REQUEST_ID, ROW]).aggregate([("position", "min")]).column("position_min")
    num_duplicates = table.num_rows - len(first)
    return (table.take(np.sort(first.to_numpy())) if num_duplicates else table), num_duplicates
