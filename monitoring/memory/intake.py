"""From log messages to records that the monitor can trust.

In: deliveries of a `logs.event_log.Subscriber`. Out: records, or the reason why a message is a dead letter. Storing
them is left to `monitoring.memory.store`, the order of storing and acknowledging to `monitoring.monitor`.
"""

import numpy as np

from components.contracts.record_format import RecordFormat
from components.contracts.records import PredictionBatch, Record
from components.runtime.errors import ContractError

MAX_FUTURE_SECONDS = 86_400.0
"""A record from further ahead has a broken clock; it would wait in the join for as long."""


class UnscoredRows(ContractError):
    """A prediction some of whose rows got no probability from their model; counted, beside being a dead letter."""

    def __init__(self, *, request_id: str, version: int, rows: int) -> None:
        super().__init__(f"{rows} rows of request {request_id} have no score by model version {version}")
        self.version = version
        self.rows = rows


def read_record(payload: bytes, *, now: float, form: RecordFormat, recommender: str) -> Record:
    """The record in `payload`, checked beyond its encoding: one bad message must not stop the monitor later.

    Raises:
        UnscoredRows: a model gave no probability.
        ContractError: not decodable, a time far ahead, or a prediction of another recommender.
    """
    record = form.decode(payload, recommender=recommender)
    newest = record.time if isinstance(record, PredictionBatch) else max(record.time, float(record.times.max()))
    if newest > now + MAX_FUTURE_SECONDS:
        raise ContractError(f"time is {newest}, expected at most a day from now ({now:.0f})")
    # NaN is the minimum of whatever holds one, and fails the comparison.
    if isinstance(record, PredictionBatch) and not np.minimum.reduce(record.scores) >= 0:
        rows = int(np.isnan(record.scores).sum())
        raise UnscoredRows(request_id=record.request_id, version=record.model_version, rows=rows)
    return record
