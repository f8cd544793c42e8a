"""From log messages to records that the monitor can trust.

In: deliveries of a `logs.event_log.Subscriber`. Out: records, or the reason why a message is a dead letter. Storing
them is left to `monitoring.memory.store`, the order of storing and acknowledging to `monitoring.monitor`.
"""

from __future__ import annotations

from typing import Any

from components.contracts.records import PredictionBatch, Record, decode
from components.runtime.errors import ContractError

MAX_FUTURE_SECONDS = 86_400.0
"""A record from further ahead has a broken clock; it would wait in the join for as long."""
_INT32 = range(-(2**31), 2**31)


def read_record(payload: bytes, *, now: float) -> Record:
    """The record in `payload`, checked beyond its encoding: one bad message must not stop the monitor later.

    Raises:
        ContractError: not decodable, or an id, time or version that no row can carry.
    """
    record = decode(payload)
    if isinstance(record, PredictionBatch):
        _expect_text("request_id", record.request_id)
        _expect_time(record.time, now)
        if type(record.model_version) is not int or record.model_version not in _INT32:
            raise ContractError(f"model_version is {record.model_version!r}, expected a 32-bit integer")
        if record.shadow_version is not None and record.shadow_version not in _INT32:
            raise ContractError(f"shadow_version is {record.shadow_version}, expected a 32-bit integer")
    else:
        _expect_text("batch_id", record.batch_id)
        for request_id in record.request_ids:
            _expect_text("request_id", request_id)
        for time in record.times.tolist():
            _expect_time(time, now)
    return record


def _expect_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or not _is_encodable(value):
        raise ContractError(f"{name} is {value!r}, expected a name")


def _is_encodable(text: str) -> bool:
    """Whether a database can hold it: JSON can spell half a surrogate pair, which is text in Python alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expect_time(time: Any, now: float) -> None:
    if isinstance(time, bool) or not isinstance(time, int | float) or time != time:
        raise ContractError(f"time is {time!r}, expected seconds since the epoch")
    # Compared and never converted: JSON's integers may be larger than any float.
    if not 0 <= time <= now + MAX_FUTURE_SECONDS:
        raise ContractError(f"time is {str(time)[:40]}, expected between 1970 and a day from now ({now:.0f})")
