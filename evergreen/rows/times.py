"""Times as whole microseconds since the epoch in UTC, with time spans, days and ISO 8601 text."""

from dataclasses import dataclass
from datetime import MAXYEAR, date, datetime, timedelta, timezone

from evergreen.runtime.errors import ContractError

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
DAY_MICROS = 86_400_000_000


def to_micros(time: datetime) -> int:
    """Convert a time to microseconds since the epoch. A time without a zone is UTC."""
    return ((time if time.tzinfo else time.replace(tzinfo=timezone.utc)) - _EPOCH) // _MICROSECOND


def to_iso(micros: int) -> str:
    """Return ISO 8601 text in UTC.

    >>> to_iso(1_000_000)
    '1970-01-01T00:00:01+00:00'
    """
    return (_EPOCH + micros * _MICROSECOND).isoformat()


def parse_time(name: str, text: str) -> int:
    """Convert an ISO 8601 date or time to microseconds since the epoch.

    A time without a zone is UTC.

    Args:
        name: Name of the value, for the error.
        text: The date or time.

    Raises:
        ContractError: the text is not a valid ISO 8601 date or time.

    >>> parse_time("window_start", "1970-01-02T00:00:00Z"), parse_time("window_start", "1970-01-02")
    (86400000000, 86400000000)
    """
    try:
        # Python 3.10 does not parse the suffix Z.
        return to_micros(
            datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
        )
    except ValueError as error:
        raise ContractError(
            f"{name} is {text!r}, expected an ISO 8601 time such as 2026-01-31T00:00:00Z"
        ) from error


@dataclass(frozen=True)
class TimeSpan:
    """A half-open span of time [start, end) in microseconds. None = no limit."""

    start: int | None = None
    end: int | None = None

    def __str__(self) -> str:
        """Return `[start, end)` in ISO 8601."""
        first = to_iso(self.start) if self.start is not None else "first row"
        last = to_iso(self.end) if self.end is not None else "last row"
        return f"[{first}, {last})"

    @property
    def is_empty(self) -> bool:
        """Return whether the span contains no time."""
        return self.start is not None and self.end is not None and self.start >= self.end

    def holds(self, micros: int) -> bool:
        """Return whether the time is in the span."""
        return (self.start is None or self.start <= micros) and (
            self.end is None or micros < self.end
        )

    def overlaps(self, first: int, last: int) -> bool:
        """Return whether the span contains any time from `first` to `last`, both included."""
        return (self.start is None or self.start <= last) and (self.end is None or first < self.end)

    def clipped(self, other: "TimeSpan") -> "TimeSpan":
        """Return the intersection of this span and `other`."""
        starts = [s for s in (self.start, other.start) if s is not None]
        ends = [e for e in (self.end, other.end) if e is not None]
        return TimeSpan(max(starts, default=None), min(ends, default=None))


def day_span(day: date) -> TimeSpan:
    """Return the span of the UTC day."""
    start = to_micros(datetime(day.year, day.month, day.day))
    return TimeSpan(start, start + DAY_MICROS)


def parse_day(name: str, text: str) -> date:
    """Return the date of a text YYYY-MM-DD.

    Args:
        name: Name of the value, for the error.
        text: The date.

    Raises:
        ContractError: the text is not a valid date in this format.
    """
    try:
        found = datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError as error:
        raise ContractError(f"{name} is {text!r}, expected a date YYYY-MM-DD") from error
    if str(found) != text or found.year == MAXYEAR:  # some times of the year 9999 are out of range
        raise ContractError(
            f"{name} is {text!r}, expected a date YYYY-MM-DD before the year {MAXYEAR}"
        )
    return found
