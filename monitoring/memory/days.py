"""Times as archive files spell them: UTC days."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import lru_cache

from components.contracts.criteo import microseconds

_DAY_SECONDS = 86_400


def utc_day(time: float) -> str:
    """The UTC day (YYYY-MM-DD) of the time that is written, which has whole microseconds.

    >>> utc_day(86_399.9), utc_day(86_399.9999999)
    ('1970-01-01', '1970-01-02')
    """
    return _name(microseconds(time) // (_DAY_SECONDS * 1_000_000))


@lru_cache(maxsize=1000)
def _name(day: int) -> str:
    return datetime.fromtimestamp(day * _DAY_SECONDS, timezone.utc).strftime("%Y-%m-%d")
