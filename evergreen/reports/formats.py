"""Text forms of numbers and times on pages and in terminals. A missing number is a dash."""

import math
from datetime import datetime, timezone

ABSENT = "–"


def number(value: float | None) -> str:
    """Format a number with four significant digits.

    >>> number(0.123456), number(None)
    ('0.1235', '–')
    """
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.4g}"


def interval(low: float | None, high: float | None) -> str:
    """Format both ends of an interval.

    >>> interval(0.7581, 0.7934), interval(None, 0.7)
    ('0.7581 to 0.7934', '–')
    """
    return ABSENT if low is None or high is None else f"{number(low)} to {number(high)}"


def percent(value: float | None) -> str:
    """Format a share in percent.

    >>> percent(0.0123), percent(0.00005), percent(None)
    ('1.23 %', '0.005 %', '–')
    """
    return ABSENT if value is None or not math.isfinite(value) else f"{100 * value:.3g} %"


def probability(value: float | None) -> str:
    """Format a p-value or q-value.

    >>> probability(0.00002), probability(0.0312)
    ('< 0.0001', '0.031')
    """
    return ABSENT if value is None else "< 0.0001" if value < 0.0001 else f"{value:.2g}"


def utc_time(time: float) -> str:
    """Format a time in seconds since the epoch.

    >>> utc_time(0)
    '1970-01-01 00:00:00 UTC'
    """
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
