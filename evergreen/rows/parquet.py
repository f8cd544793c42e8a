"""Reader of Parquet files in the raw schema of a lake.

Row groups whose statistics are outside the wanted span are skipped. `components.extraction.reader`
sorts the rows and removes duplicates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from evergreen.config.data import WEIGHT
from evergreen.config.features import Features
from evergreen.contracts.category_texts import TextCounts
from evergreen.contracts.raw_rows import EVENT_TIME, SERVED_BY
from evergreen.rows.archived_rows import bounded_batches, reading_parquet
from evergreen.rows.raw_schema import (
    BATCH_ROWS,
    KEY_COLUMNS,
    MalformedRows,
    categories,
    find_malformed,
    find_schema_mismatches,
    in_lists,
    is_text,
    lake_schema,
    nan_to_null,
    open_parquet,
    plain_value,
    raw_batch,
    raw_schema,
    record_malformed,
    texts,
    whole_numbers,
    without_missing_texts,
    without_rows,
)
from evergreen.rows.times import TimeSpan, to_micros
from evergreen.runtime.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class RawParquet:
    """Reader of one file in the raw schema."""

    path: Path
    features: Features
    span: TimeSpan = TimeSpan()
    """Time span of the rows to read."""
    day: TimeSpan = TimeSpan()
    """Day of the file. Rows of another day are malformed, because rows must be in the order of
    days."""
    with_strays: bool = True
    """Whether this reader reports rows without a time, and rows of another day, as malformed. If
    several readers read the same day, only one of them must report these rows."""
    unread: frozenset[str] = frozenset()
    """Names of features that are not read and that are null in the rows. A file may lack the
    features that are not read."""
    weighted: bool = False
    """Whether rows have weights. If a file has no weight column, each row has weight 1."""
    with_strings: bool = False
    """Whether strings and integers are returned in the form in which the lake stores them. If
    False, strings and integers are converted to categories."""
    text_counts: TextCounts | None = None
    """Counter of the texts in the rows. None = texts are not counted."""
    has_times: bool = True
    """See `Reader.has_times`."""

    def batches(self, malformed: MalformedRows) -> Iterator[Any]:
        """See `Reader.batches`."""
        file = open_parquet(self.path)
        schema = file.schema_arrow  # pyarrow computes the property again at each access
        not_required = {*schema.names, *SERVED_BY, WEIGHT}
        absent = [name for name in self._names if name not in not_required]
        if missing := [name for name in absent if name not in self.features.names]:
            raise ContractError(
                f"{self.path} lacks the columns {missing}, expected the raw schema: "
                f"{', '.join(self._schema.names)}"
            )
        malformed.add_absent(self.path, absent, day=self.day)
        malformed.add_mismatches(
            find_schema_mismatches(
                schema, self.path, self.features, unread=self.unread, weighted=self.weighted
            )
        )
        # Arrow's cast would accept any integer as a time.
        if not pa.types.is_timestamp(found := schema.field(EVENT_TIME).type):
            raise ContractError(
                f"{self.path} has {EVENT_TIME} of type {found}, expected a timestamp"
            )
        first_row = 1
        for group in range(file.num_row_groups):
            if self._may_hold(file.metadata.row_group(group)):
                yield from self._group_batches(file, group, malformed, first_row=first_row)
            first_row += file.metadata.row_group(group).num_rows

    @property
    def _names(self) -> list[str]:
        return [name for name in self._schema.names if name not in self.unread]

    @cached_property
    def _schema(self) -> Any:
        schema_of = lake_schema if self.with_strings else raw_schema
        return schema_of(self.features, weighted=self.weighted)

    def _group_batches(
        self, file: Any, group: int, malformed: MalformedRows, *, first_row: int
    ) -> Iterator[Any]:
        with reading_parquet(self.path):
            present = set(file.schema_arrow.names)
            names = [name for name in self._names if name in present]
            for found in bounded_batches(self.path, names, group=group, batch_rows=BATCH_ROWS):
                times = self._conform_column(EVENT_TIME, found.column(EVENT_TIME))
                strays = pc.invert(within(times, self.day))
                ours = pc.and_not(within(times, self.span), strays)
                rows = pc.indices_nonzero(pc.or_(ours, strays) if self.with_strays else ours)
                batch = self._conform(found if len(rows) == found.num_rows else found.take(rows))
                reasons = find_malformed(batch, self.features, keys=KEY_COLUMNS)
                for at in pc.indices_nonzero(strays.take(rows)).to_pylist():
                    time = plain_value(batch.column(EVENT_TIME)[at])
                    reasons.setdefault(
                        at, f"event_time {time} is outside the file's day, expected {self.day}"
                    )
                numbers = (first_row + rows.to_numpy()).tolist()
                record_malformed(
                    batch, reasons, path=self.path, numbers=numbers, malformed=malformed
                )
                malformed.count(self.path, batch.num_rows)
                kept = without_rows(batch, reasons)
                first_row += found.num_rows
                if kept.num_rows:
                    yield kept

    def _conform(self, found: Any) -> Any:
        """Convert a batch to the exact types of the schema."""
        columns = {
            name: self._conform_column(name, found.column(name)) for name in found.schema.names
        }
        if self.weighted and WEIGHT not in columns:
            columns[WEIGHT] = pa.array(np.ones(found.num_rows, np.float32))
        return raw_batch(columns, self._schema)

    def _conform_column(self, name: str, values: Any) -> Any:
        wanted = self._schema.field(name).type
        try:
            if name in self.features.lists:
                return in_lists(values, partial(self._conform_values, name, wanted.value_type))
            return self._conform_values(name, wanted, values)
        except pa.ArrowException as error:
            raise ContractError(
                f"{self.path} has {name} of type {values.type}, expected {wanted}: {error}"
            ) from error

    def _conform_values(self, name: str, wanted: Any, values: Any) -> Any:
        """Convert the values of a column, or the elements of its lists, to the type `wanted`."""
        if pa.types.is_floating(
            values.type
        ):  # categories need this too, because pandas represents a missing category by NaN
            values = nan_to_null(values)
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if name not in (*self.features.categorical, *self.features.lists):
            if name in self.features.numeric and is_text(values.type):
                values = without_missing_texts(values)
            return values.cast(wanted) if values.type != wanted else values
        # A text of digits is converted to its whole number. `find_schema_mismatches` reports that
        # the column has an unexpected type.
        is_string = name in self.features.string_features
        if self.text_counts and is_string and not pa.types.is_integer(values.type):
            self.text_counts.add(name, texts(values))
        if not self.with_strings:
            return categories(values, is_string=is_string)
        return texts(values) if is_string else whole_numbers(values)

    def _may_hold(self, group: Any) -> bool:
        """Return whether a row group may contain rows to read.

        The decision uses the statistics of the file.

        Returns True if the row group has no statistics.
        """
        times = group_times(group)
        if times is None:
            return True
        if self.with_strays and (
            times.num_nulls or not self.day.holds(times.first) or not self.day.holds(times.last)
        ):
            return True
        return self.span.overlaps(times.first, times.last)


class GroupTimes(NamedTuple):
    """Range of the event times in a row group, from the statistics in the footer."""

    first: int
    last: int
    num_nulls: int


def group_times(group: Any) -> GroupTimes | None:
    """Return the range of the event times in one row group of a raw file.

    Returns None if the file has no statistics of times.
    """
    names = [group.column(i).path_in_schema for i in range(group.num_columns)]
    statistics = group.column(names.index(EVENT_TIME)).statistics if EVENT_TIME in names else None
    if statistics is None or not statistics.has_min_max or not statistics.has_null_count:
        return None
    try:
        first, last = statistics.min, statistics.max
    except (
        OverflowError,
        ValueError,
    ):  # the statistics contain a year outside the range of Python's dates
        return None
    if not isinstance(first, datetime) or not isinstance(last, datetime):
        return None
    return GroupTimes(to_micros(first), to_micros(last), statistics.null_count)


def within(times: Any, span: TimeSpan) -> Any:
    """Return whether each time is in the span. A null time is never in the span.

    Args:
        times: Array of timestamps in microseconds.
        span: The span.
    """
    micros = times.cast(pa.int64())
    inside = pc.is_valid(times)
    if span.start is not None:
        inside = pc.and_(inside, pc.fill_null(pc.greater_equal(micros, span.start), False))
    if span.end is not None:
        inside = pc.and_(inside, pc.fill_null(pc.less(micros, span.end), False))
    return inside
