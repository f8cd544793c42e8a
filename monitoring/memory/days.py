"""Times and types as archive files spell them: UTC days, Arrow schemas of the contract's texts."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import lru_cache

import pyarrow as pa

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


def arrow_schema(types: dict[str, str]) -> pa.Schema:
    """The schema of these columns, types as `contracts.criteo` spells them.

    >>> str(arrow_schema({"a": "int32", "b": "bool"})).split()
    ['a:', 'int32', 'b:', 'bool']
    """
    return pa.schema([(name, _type(text)) for name, text in types.items()])


def _type(text: str) -> pa.DataType:
    if text.startswith("timestamp"):
        return pa.timestamp("us", tz="UTC")
    return pa.bool_() if text == "bool" else getattr(pa, text)()
