"""Detection of times in a sampled column: their format, and the days that they span."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from evergreen.recommender_file.columns import TOLERATED, SampledColumn, counted
from evergreen.rows.time_forms import EARLIEST, FORMS, USUAL, TimeRule, find_form
from evergreen.rows.times import DAY_MICROS, to_iso
from evergreen.runtime.errors import ContractError

_YEAR_9999 = 253_402_300_799_000_000
_MAX_INSPECTED = 10_000
"""Maximum number of distinct values from which the format is detected. The values that are examined
are spread evenly over all values."""


@dataclass(frozen=True, kw_only=True)
class DaySpan:
    """First and last time of a set of rows, and the number of its days."""

    first: int
    """Time of the oldest row, in microseconds since 1970."""
    last: int
    num_rows: int
    num_days: int
    """Number of UTC days that have rows."""

    def __str__(self) -> str:
        first, last = to_iso(self.first)[:10], to_iso(self.last)[:10]
        days = first if first == last else f"{first} to {last}"
        return f"{days}, {counted(round(self.num_rows / self.num_days), 'row')} a day"

    @property
    def is_usual(self) -> bool:
        """Return whether all times are in 2000 or later."""
        return self.first >= USUAL


@dataclass(frozen=True, kw_only=True)
class Times:
    """Result for a column that contains readable times."""

    form: str
    """One of `TIME_FORMATS`."""
    span: DaySpan
    num_wrong: int
    """Number of rows whose value is not a time between 1990 and tomorrow."""


@dataclass(frozen=True, kw_only=True)
class NoTimes:
    """Result for a column that does not contain readable times."""

    why: str
    forms: tuple[str, ...] = ()
    """Formats that fit, if there are several."""
    span: DaySpan | None = None
    """Days of the rows. The values are interpreted as seconds since 1970, or by their own type."""


def read_times(column: SampledColumn, *, now: float) -> Times | NoTimes:
    """Return the format and the days of a column of times, or the reason why they are unknown.

    Args:
        column: Column of any kind.
        now: Current time in seconds since 1970. A time more than a day after `now` is invalid.
    """
    present = np.flatnonzero(column.is_present & (column.counts > 0))
    if not len(present) or column.is_list:
        return NoTimes(why="it has no values")
    chosen = present[
        np.unique(np.linspace(0, len(present) - 1, min(len(present), _MAX_INSPECTED)).astype(int))
    ]
    try:
        form = find_form(column.values.take(pa.array(chosen)), now=now, name=column.name)
    except ContractError:
        few = replace(
            column,
            values=column.values.take(pa.array(chosen)),
            codes=np.arange(len(chosen), dtype=np.int32),
        )
        return _no_times(column, few, now=now)
    times, span = _read(column, form, now=now, earliest=EARLIEST)
    num_wrong = column.num_present - (0 if span is None else span.num_rows)
    if span is None or num_wrong > TOLERATED * column.num_rows:
        outside = _span_of(times, column.counts)
        found = f" ({outside})" if outside else ""
        return NoTimes(
            why=f"{num_wrong:,} of {column.num_rows:,} rows have no time between 1990 and "
            f"tomorrow{found}",
            span=outside,
        )
    return Times(form=form, span=span, num_wrong=num_wrong)


def _no_times(column: SampledColumn, few: SampledColumn, *, now: float) -> NoTimes:
    """Return the reason why no time format fits a column, or why several formats fit.

    Args:
        column: The column.
        few: The same column, reduced to some of its values.
        now: Current time in seconds since 1970.
    """
    spans = {}
    for form in FORMS:
        _, fitting = _read(few, form, now=now, earliest=EARLIEST)
        if (
            fitting is not None
            and few.num_present - fitting.num_rows <= TOLERATED * few.num_present
        ):
            _, spans[form] = _read(column, form, now=now, earliest=EARLIEST)
    if len(spans) > 1:
        readings = " or as ".join(f"{form} ({span})" for form, span in spans.items())
        return NoTimes(why=f"it can be read as {readings}", forms=tuple(spans))
    seconds = np.where(np.isfinite(column.numbers), column.numbers, 0) * 1e6
    if not np.isfinite(column.numbers).any() or (np.abs(seconds) > 2**57).any():
        return NoTimes(why="its values are not times in a known form, such as 2026-01-31T00:00:00Z")
    span = _span_of(np.where(column.is_present, seconds, -1).astype(np.int64), column.counts)
    return NoTimes(
        why=f"its values are not times between 1990 and tomorrow (as seconds since 1970: {span})",
        span=span,
    )


def _read(
    column: SampledColumn, form: str, *, now: float, earliest: int
) -> tuple[Any, DaySpan | None]:
    """Return the times of the column's `values` in microseconds, and the days that they span.

    If a value is not a time, the result is -1. The span of days excludes times before `earliest`
    and after tomorrow.
    """
    found = (
        TimeRule(form=form).parse(column.values).values.cast(pa.int64()).fill_null(-1).to_numpy()
    )
    latest = round(now * 1e6) + DAY_MICROS
    return found, _span_of(
        np.where((found >= earliest) & (found <= latest), found, -1), column.counts
    )


def _span_of(times: Any, counts: Any) -> DaySpan | None:
    known = (times >= 0) & (counts > 0)
    if not known.any() or times[known].max() > _YEAR_9999:
        return None
    return DaySpan(
        first=int(times[known].min()),
        last=int(times[known].max()),
        num_rows=int(counts[known].sum()),
        num_days=len(np.unique(times[known] // DAY_MICROS)),
    )
