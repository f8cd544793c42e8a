"""Formats of times in files, and the detection of the format of a column.

The format of times is not visible in a single number. For example, 26030100 can be an hour of 2026
or a second of 1970. The format is therefore found from many values of a column. A format fits if
all values are times between `EARLIEST` and a day from now. If no format fits, or more than one, the
user must set `data.time_format`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from evergreen.contracts.values import is_missing_text
from evergreen.rows.raw_schema import TIME_TYPE
from evergreen.rows.times import DAY_MICROS, to_iso, to_micros
from evergreen.rows.values import Parsed, is_text, matching, missing_texts, plain
from evergreen.runtime.errors import ContractError

_END_OF_TIME = to_micros(datetime(9999, 12, 31))
EARLIEST = to_micros(datetime(1990, 1, 1))
"""Earliest time of a click log, in microseconds since the epoch. Smaller numbers are not times."""
USUAL = to_micros(datetime(2000, 1, 1))
"""Start of the period of common event times. The reader accepts earlier times with a warning."""
_SURE_HUNDREDS = 24
"""Minimum number of values that differ in more than their last two digits. With fewer such values,
numbers such as Unix seconds can look like calendar digits by chance."""
_FITTING_SHARE = 0.9
"""Minimum share of a column's distinct values that a format must parse. Values that the format
cannot parse are malformed."""
_ISO = re.compile(
    r"(\d{4})[-/](\d{2})[-/](\d{2})(?:[T ]+(\d{2}):(\d{2})(?::(\d{2})(?:[.,](\d{1,9}))?)?"
    r" ?(Z|z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)?)?",
    re.ASCII,
)
_COMPACT = re.compile(
    r"(\d{4})(\d{2})(\d{2})T(\d{2})(\d{2})(\d{2})()(Z|[+-]\d{2}:?\d{2})?", re.ASCII
)
_NUMBER = re.compile(r"(\d{1,19})(?:\.(\d*))?", re.ASCII)
_SCIENTIFIC = re.compile(r"\d(?:\.\d{1,18})?[eE]\+?\d{1,2}", re.ASCII)


def iso_micros(text: str) -> int | None:
    """Convert an ISO 8601 date or time to microseconds since the epoch.

    A time without a zone is UTC. Returns None if the text is not a date or time.

    >>> iso_micros("1970-01-01 00:00:01.5 UTC"), iso_micros("1970-01-02"), iso_micros("1970-13-01")
    (1500000, 86400000000, None)
    """
    found = _ISO.fullmatch(text) or _COMPACT.fullmatch(text)
    if not found:
        return None
    year, month, day, hour, minute, second, fraction, zone = found.groups()
    micros = _calendar(year, month, day, hour or "0", minute or "0", second or "0")
    if micros is None:
        return None
    micros += int((fraction or "").ljust(9, "0")[:9] or 0) // 1000
    if zone and zone[0] in "+-":
        digits = zone[1:].replace(":", "").ljust(4, "0")
        if int(digits[:2]) > 23 or int(digits[2:]) > 59:
            return None
        minutes = int(digits[:2]) * 60 + int(digits[2:])
        micros -= (1 if zone[0] == "+" else -1) * minutes * 60_000_000
    return micros


def _calendar(*parts: str) -> int | None:
    try:
        return to_micros(datetime(*map(int, parts), tzinfo=timezone.utc))  # type: ignore[arg-type,misc]
    except (ValueError, OverflowError):
        return None


def _counted(per_second: int) -> Callable[[int, float], int | None]:
    def micros(whole: int, fraction: float) -> int | None:
        found = whole * 1_000_000 // per_second + round(fraction * 1_000_000 / per_second)
        return found if found < _END_OF_TIME else None

    return micros


def _digits(pattern: str) -> Callable[[int, float], int | None]:
    """Return a parser of numbers whose digits are a calendar time, such as YYYYMMDD."""
    widths = [len(part) for part in re.findall(r"Y+|M+|D+|h+|m+|s+", pattern)]
    length = sum(widths)

    def micros(whole: int, fraction: float) -> int | None:
        text = str(whole)
        # The leading zero may be absent only if the year has two digits.
        if fraction or not length - (widths[0] == 2) <= len(text) <= length:
            return None
        text = text.zfill(length)
        parts, at = [], 0
        for width in widths:
            parts.append(text[at : at + width])
            at += width
        if widths[0] == 2:
            parts[0] = f"20{parts[0]}"
        return _calendar(*parts)

    return micros


ISO = "iso"
FORMS: dict[str, Callable[[int, float], int | None]] = {
    "YYYYMMDD": _digits("YYYYMMDD"),
    "YYMMDDhh": _digits("YYMMDDhh"),
    "YYYYMMDDhh": _digits("YYYYMMDDhh"),
    "YYMMDDhhmm": _digits("YYMMDDhhmm"),
    "YYYYMMDDhhmm": _digits("YYYYMMDDhhmm"),
    "YYYYMMDDhhmmss": _digits("YYYYMMDDhhmmss"),
    "seconds": _counted(1),
    "milliseconds": _counted(1_000),
    "microseconds": _counted(1_000_000),
    "nanoseconds": _counted(1_000_000_000),
}
"""Formats of numbers, by their names in a recommender's file. A format such as `seconds` counts the
time since 1970. Formats of calendar digits come first, because few numbers fit them by chance."""
NAMES = (ISO, *FORMS)
"""Values that `data.time_format` accepts."""


def find_form(column: Any, *, now: float, name: str) -> str:
    """Return the time format of a column's values.

    Args:
        column: Arrow array of any type, with the values of a complete file or of its first rows.
        now: Seconds since the epoch. A time more than a day after `now` is invalid.
        name: Name of the column, for messages.

    Raises:
        ContractError: No format fits nearly all values, or two formats fit equally well.
    """
    column = plain(column)
    if (
        pa.types.is_timestamp(column.type)
        or pa.types.is_date(column.type)
        or pa.types.is_null(column.type)
    ):
        return ISO
    if pa.types.is_nested(column.type):
        raise ContractError(f"{name} is of type {column.type}, expected times")
    distinct = pc.unique(column.drop_null())
    values = [value for value in distinct.to_pylist() if not is_missing_text(str(value))]
    if not values:
        return ISO
    texts = [_plain_text(value) for value in values]
    if sum(iso_micros(text) is not None for text in texts) >= _FITTING_SHARE * len(texts):
        return ISO
    latest = round(now * 1e6) + DAY_MICROS
    numbers = [_number(text) for text in texts]
    num_fitting = {}
    for form, read in FORMS.items():
        times = [None if number is None else read(*number) for number in numbers]
        num_fitting[form] = sum(time is not None and EARLIEST <= time <= latest for time in times)
    most = max(num_fitting.values())
    fitting = [
        form for form, num in num_fitting.items() if num == most >= _FITTING_SHARE * len(numbers)
    ]
    digits = [form for form in fitting if form.startswith("Y")]
    # A count of time units can look like calendar digits by chance. This is likely if the counts
    # span a minute, and very unlikely if the counts span a day.
    is_sure = len({number[0] // 100 for number in numbers if number is not None}) >= _SURE_HUNDREDS
    if len(digits) == 1 and (is_sure or len(fitting) == 1):
        return digits[0]
    if len(fitting) == 1:
        return fitting[0]
    example = f"{name} is {values[0]!r}"
    if fitting:
        raise ContractError(
            f"{example}, which can be {' or '.join(fitting)}; expected one of these names as "
            "data.time_format"
        )
    spans = _spans_of(texts, numbers)
    raise ContractError(
        f"{example}, which is not a time between 1990 and tomorrow{spans}; expected ISO 8601 such "
        "as "
        f"2026-01-31T00:00:00Z, or data.time_format set to one of {', '.join(FORMS)}"
    )


def _spans_of(texts: Sequence[str], numbers: Sequence[tuple[int, float] | None]) -> str:
    times = [iso_micros(text) for text in texts]
    if all(time is None for time in times):
        times = [None if number is None else FORMS["seconds"](*number) for number in numbers]
    known = [time for time in times if time is not None and time < 250_000_000_000_000_000]
    return (
        f" (read as seconds since 1970: {to_iso(min(known))[:10]} to {to_iso(max(known))[:10]})"
        if known
        else ""
    )


def _plain_text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _number(text: str) -> tuple[int, float] | None:
    if _SCIENTIFIC.fullmatch(text):
        digits, number = text.lower().partition("e")[0].replace(".", ""), Decimal(text)
        # A spreadsheet rounds a number if it shows fewer digits than the number has.
        return (
            (int(number), 0.0)
            if number == int(number) and len(digits) >= len(str(int(number)))
            else None
        )
    if not (found := _NUMBER.fullmatch(text)):
        return None
    whole, fraction = found.groups()
    return int(whole), float(f"0.{fraction}") if fraction else 0.0


@dataclass(frozen=True, kw_only=True)
class TimeRule:
    """Parsing rule for the times of a column (see `values.ValueRule`)."""

    form: str
    type = TIME_TYPE
    is_required = True

    @cached_property
    def expected(self) -> str:
        """See `ValueRule.expected`."""
        return "an ISO 8601 time" if self.form == ISO else f"a time as {self.form}"

    def parse(self, column: Any) -> Parsed:
        """Parse a column of any Arrow type."""
        column = plain(column)
        if pa.types.is_null(column.type):
            missing = np.ones(len(column), bool)
            return Parsed(pa.nulls(len(column), TIME_TYPE), pa.array(missing), pa.array(~missing))
        if pa.types.is_nested(column.type) or str(column.type) in ("float", "halffloat"):
            return Parsed(
                pa.nulls(len(column), TIME_TYPE), column.is_null(), column.is_valid()
            )  # 32-bit floats are too inexact for times
        if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            found = _in_micros(column)
            return Parsed(found, column.is_null(), pc.and_not(found.is_null(), column.is_null()))
        encoded = column.dictionary_encode()
        words = encoded.dictionary
        times, missing = (
            pa.nulls(len(words), TIME_TYPE),
            pc.is_nan(words) if _is_floating(words) else words.is_null(),
        )
        if is_text(words.type):
            missing = missing_texts(words)
            times = _usual_times(words) if self.form == ISO else times
        at = np.flatnonzero(pc.and_not(times.is_null(), missing).to_numpy(zero_copy_only=False))
        others = pa.array(
            [self._micros(word) for word in words.take(pa.array(at)).to_pylist()], pa.int64()
        )
        mask = np.isin(np.arange(len(words)), at)
        found = pc.replace_with_mask(times, pa.array(mask), others.cast(TIME_TYPE)).take(
            encoded.indices
        )
        missing = pc.fill_null(missing.take(encoded.indices), True)
        return Parsed(found, missing, pc.and_not(found.is_null(), missing))

    def _micros(self, value: object) -> int | None:
        if value is None or isinstance(value, bool):
            return None
        text = _plain_text(value)
        if self.form == ISO:
            return iso_micros(text)
        number = _number(text)
        return None if number is None else FORMS[self.form](*number)


def _is_floating(column: Any) -> bool:
    return bool(pa.types.is_floating(column.type))


_USUAL = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T "
    r"][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})?$"
)


def _usual_times(texts: Any) -> Any:
    """Return the times of the texts in the most common format. Other texts become null."""
    usual = matching(texts, _USUAL)
    has_zone = pc.match_substring_regex(usual, r"(Z|[+-][0-9]{2}:[0-9]{2})$")
    usual = pc.if_else(has_zone, usual, pc.binary_join_element_wise(usual, "Z", ""))
    try:
        return usual.cast(pa.timestamp("ns", tz="UTC")).cast(TIME_TYPE, safe=False)
    except pa.ArrowInvalid:  # a text is not a valid date, such as the 31st of February
        return pa.nulls(len(texts), TIME_TYPE)


def _in_micros(column: Any) -> Any:
    """Return timestamps or dates in microseconds.

    A time outside the range of microseconds becomes null.
    """
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("ms"))
    try:
        return column.cast(pa.timestamp("us", tz=column.type.tz), safe=False).cast(TIME_TYPE)
    except pa.ArrowException:
        return pa.concat_arrays([_one(column.slice(i, 1)) for i in range(len(column))])


def _one(value: Any) -> Any:
    try:
        return value.cast(pa.timestamp("us", tz=value.type.tz), safe=False).cast(TIME_TYPE)
    except pa.ArrowException:
        return pa.nulls(1, TIME_TYPE)
