"""Reader of a lake's chunks as tables: sorted by time, each row once, with late clicks."""

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from components.extraction.copies import Copies, corrected_copies, newest_copies, without_known
from components.extraction.lake import CHUNK_ROWS, LakeChunk, read_footers, split_into_chunks
from components.extraction.late_clicks import LateClicks
from evergreen.config.features import Features
from evergreen.contracts.category_texts import TextCounts
from evergreen.contracts.raw_rows import REQUEST_ID
from evergreen.rows.parquet import RawParquet
from evergreen.rows.raw_schema import MalformedRows, lake_schema, raw_schema
from evergreen.rows.times import day_span
from evergreen.runtime.errors import ContractError

logger = logging.getLogger(__name__)


class SortedRows(NamedTuple):
    """The rows of one chunk."""

    day: date
    """UTC day of the rows."""
    table: Any
    """Rows in the raw schema, sorted by event time. Each (request id, row) occurs once."""
    copies: Copies
    """Counts of the rows that were left out because another copy was kept."""
    num_changed: int
    """Number of late rows that were left out because the lineage was trained on a copy with another
    label or other features."""
    num_late_clicks: int
    """Number of rows whose label a late click changed from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class RowReader:
    """Reader of chunks of one lake."""

    features: Features
    weighted: bool = False
    """Whether the rows have weights."""
    unread: frozenset[str] = frozenset()
    """See `RawParquet.unread`."""
    clicks: LateClicks
    """Late clicks of the lake."""
    text_counts: TextCounts = field(default_factory=TextCounts, repr=False)
    """Counts of the string categories of the rows that were read."""

    def copy(self) -> "RowReader":
        """Return a reader for a part of the rows, with counts of its own."""
        return replace(self, clicks=self.clicks.copy(), text_counts=TextCounts())

    def add(self, part: "RowReader") -> None:
        """Add the counts of a copy that has read a part of the rows."""
        self.text_counts.merge(part.text_counts)
        self.clicks.add_files_of(part.clicks)

    def tables(self, chunks: Iterable[LakeChunk], malformed: MalformedRows) -> Iterator[SortedRows]:
        """Yield the rows of each chunk. Chunks without rows and without copies are skipped.

        If the chunks are in time order, all rows are in time order.

        Raises:
            ContractError: a file is corrupt or too malformed.
        """
        for chunk in chunks:
            rows = self.read(chunk, malformed)
            if rows.table.num_rows or rows.copies.num_rows:
                yield rows

    def read(self, chunk: LakeChunk, malformed: MalformedRows) -> SortedRows:
        """Return the rows of a chunk.

        Raises:
            ContractError: see `tables`.
        """
        table, copies = self._sorted(chunk, malformed)
        num_changed = 0
        if table.num_rows and chunk.trained_files:
            table, trained = self._without_trained(table, chunk, malformed)
            num_changed = trained.num_updated + trained.num_conflicting
            copies.add(trained)
        table, num_late_clicks = self.clicks.join(table, chunk.day)
        return SortedRows(chunk.day, table, copies, num_changed, num_late_clicks)

    def _sorted(self, chunk: LakeChunk, malformed: MalformedRows) -> tuple[Any, Copies]:
        """Return a chunk's rows, sorted and without duplicates, and count the dropped copies."""
        appended = [path for path in chunk.files if path not in chunk.corrected]
        if not chunk.corrected or not appended:
            return newest_copies(self._table(chunk, malformed), self.features)
        corrected = [path for path in chunk.files if path in chunk.corrected]
        return corrected_copies(
            self._table(chunk._replace(files=corrected), malformed),
            self._table(chunk._replace(files=appended), malformed),
            self.features,
        )

    def _table(self, chunk: LakeChunk, malformed: MalformedRows) -> Any:
        return self._table_of(self._batches(chunk, malformed))

    def _table_of(self, batches: Iterable[Any]) -> Any:
        return pa.Table.from_batches(batches, raw_schema(self.features, weighted=self.weighted))

    def _batches(self, chunk: LakeChunk, malformed: MalformedRows) -> Iterator[Any]:
        day = day_span(chunk.day)
        for path in chunk.files:
            reader = RawParquet(
                path=path,
                features=self.features,
                weighted=self.weighted,
                span=chunk.span,
                day=day,
                with_strays=chunk.reports_strays,
                unread=self.unread,
                text_counts=self.text_counts,
            )
            try:
                yield from reader.batches(malformed)
            except ContractError as error:
                malformed.add_unfit(path, error)

    def _without_trained(
        self, table: Any, chunk: LakeChunk, malformed: MalformedRows
    ) -> tuple[Any, Copies]:
        """Leave out each row that has a valid copy in the chunk's `trained_files`.

        The trained files are read one batch at a time.
        """
        trained = chunk._replace(files=list(chunk.trained_files), reports_strays=False)
        requests = table.column(REQUEST_ID).combine_chunks()
        # The runs that trained on these files have already checked the malformed rows of the files.
        with MalformedRows(
            Path(os.devnull), max_fraction=1.0, collects_unfit=malformed.collects_unfit
        ) as ignored:
            known = [
                batch.filter(pc.is_in(batch.column(REQUEST_ID), value_set=requests))
                for batch in self._batches(trained, ignored)
            ]
        malformed.add_unfit_of(ignored)
        return without_known(table, self._table_of(known), self.features)


def sorted_day(
    files: list[Path],
    day: date,
    *,
    features: Features,
    malformed: MalformedRows,
    weighted: bool = False,
) -> Iterator[tuple[Any, Copies]]:
    """Yield the rows of a day's raw files in the lake's schema, sorted and without duplicates.

    Rows of other days are malformed.

    Raises:
        ContractError: a file is corrupt or too malformed.
    """
    span = day_span(day)
    for chunk in split_into_chunks(day, read_footers(files), span, chunk_rows=CHUNK_ROWS):
        readers = [
            RawParquet(
                path=path,
                features=features,
                weighted=weighted,
                span=chunk.span,
                day=span,
                with_strays=chunk.reports_strays,
                with_strings=True,
            )
            for path in chunk.files
        ]
        batches = [batch for reader in readers for batch in reader.batches(malformed)]
        yield newest_copies(
            pa.Table.from_batches(batches, lake_schema(features, weighted=weighted)), features
        )
