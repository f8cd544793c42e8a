"""From log messages to records that the monitor can trust.

In: deliveries of a `logs.event_log.Subscriber`. Out: records, or the reason why a message is a dead letter. Storing
them is left to `monitoring.memory.store`, the order of storing and acknowledging to `monitoring.monitor`.
"""

from __future__ import annotations

from components.contracts.recommender import Recommender
from components.contracts.records import PredictionBatch, Record, decode
from components.runtime.errors import ContractError

MAX_FUTURE_SECONDS = 86_400.0
"""A record from further ahead has a broken clock; it would wait in the join for as long."""


def read_record(payload: bytes, *, now: float, recommender: Recommender) -> Record:
    """The record in `payload`, checked beyond its encoding: one bad message must not stop the monitor later.

    Raises:
        ContractError: not decodable, a time far ahead, or a prediction of another recommender or with other
            numbers of columns.
    """
    record = decode(payload)
    if isinstance(record, PredictionBatch):
        newest = record.time
        if record.recommender not in (None, recommender.name):
            raise ContractError(f"rows are of recommender {record.recommender!r}, expected {recommender.name!r}")
        features = recommender.features
        own = (len(features.numeric), len(features.categorical))
        width = (record.dense.shape[1], record.categorical.shape[1])
        if width != own:
            expected = f"expected {own[0]} and {own[1]}"
            raise ContractError(f"rows have {width[0]} numeric and {width[1]} categorical columns, {expected}")
    else:
        newest = max(record.time, float(record.times.max()))
    if newest > now + MAX_FUTURE_SECONDS:
        raise ContractError(f"time is {newest}, expected at most a day from now ({now:.0f})")
    return record
