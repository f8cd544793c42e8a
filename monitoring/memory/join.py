"""From log messages to labels: records that the monitor can trust, and whether a row was clicked in its window.

In: a message; a prediction's time and the outcomes that arrived for it. Out: a record, or why the message is a dead
letter; labels, and the outcomes that made none. All rows of a request mature together when the window closes: if clicks
counted as they come and misses only at the end, the click rate, and every number with it, would be too high while the
window is open. Keeping records and open requests is left to `monitoring.memory.store`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts.raw_rows import microseconds
from components.contracts.record_format import RecordFormat
from components.contracts.records import CLICK, PredictionBatch, Record
from components.runtime.errors import ContractError
from monitoring.memory.database import add_to
from monitoring.rows import Event, LateOutcome, MaturedRequest, Waiting

MAX_FUTURE_SECONDS = 86_400.0
"""A record from further ahead has a broken clock; it would wait in the join for as long."""


class UnscoredRows(ContractError):
    """A prediction some of whose rows got no probability from their model; counted, beside being a dead letter."""

    def __init__(self, *, request_id: str, version: int, rows: int) -> None:
        super().__init__(f"{rows} rows of request {request_id} have no score by model version {version}")
        self.version = version
        self.rows = rows


def read_records(
    payloads: Sequence[bytes], *, now: float, form: RecordFormat, recommender: str
) -> list[Record | ContractError]:
    """The record in each payload, checked beyond its encoding: one bad message must not stop the monitor later.

    In its place stands `UnscoredRows` where a model gave no probability, and another ContractError where it is not
    decodable, has a time far ahead, or is a prediction of another recommender.
    """
    return [_checked(record, now) for record in form.decode_all(payloads, recommender=recommender)]


def _checked(record: Record | ContractError, now: float) -> Record | ContractError:
    if isinstance(record, ContractError):
        return record
    newest = record.time if isinstance(record, PredictionBatch) else max(record.time, float(record.times.max()))
    if newest > now + MAX_FUTURE_SECONDS:
        return ContractError(f"time is {newest}, expected at most a day from now ({now:.0f})")
    # NaN is the minimum of whatever holds one, and fails the comparison.
    if isinstance(record, PredictionBatch) and not np.minimum.reduce(record.scores) >= 0:
        rows = int(np.isnan(record.scores).sum())
        return UnscoredRows(request_id=record.request_id, version=record.model_version, rows=rows)
    return record


class Attribution(NamedTuple):
    """Labels of one request, uint8 of shape [n], and the outcomes that no row could use."""

    labels: NDArray[np.uint8]
    delays: NDArray[np.float32] | None
    """Seconds from the prediction to the first outcome in time, shape [n]; NaN = none. None = none of any row."""
    too_late: list[Event]
    """After the window."""
    unmatched: list[Event]
    """On rows that the request does not have."""


def attribute(num_rows: int, predicted_at: float, events: Iterable[Event], *, window_seconds: float) -> Attribution:
    """Labels of the `num_rows` rows predicted at `predicted_at`.

    An outcome counts if it happened at most `window_seconds` after the prediction, in whole microseconds as in the
    archive: extraction, which joins what came too late, must not see the end of a window elsewhere. One that seems to
    precede its prediction counts too: the two times come from two machines' clocks. `events` are (row, seconds since
    the epoch) in any order, repetitions allowed.

    >>> attribute(3, 100.0, [(1, 130.0), (2, 161.0), (7, 110.0)], window_seconds=60)[:1]
    (array([0, 1, 0], dtype=uint8),)
    """
    labels = np.zeros(num_rows, np.uint8)
    delays = np.full(num_rows, np.nan, np.float32)
    too_late: list[Event] = []
    unmatched: list[Event] = []
    last = microseconds(predicted_at) + microseconds(window_seconds)
    for row, time in events:
        if not 0 <= row < num_rows:
            unmatched.append((row, time))
        elif microseconds(time) > last:
            too_late.append((row, time))
        else:
            labels[row] = 1
            delays[row] = np.fmin(delays[row], time - predicted_at)
    return Attribution(labels, delays, too_late, unmatched)


def mature_request(
    waiting: Waiting, counts: dict[str, float], late: list[LateOutcome], *, window_seconds: float
) -> MaturedRequest:
    """The request with its final click labels.

    `counts` are added to; `late` takes the clicks that made no label.
    """
    n = len(waiting.scores)
    found = Attribution(np.zeros(n, np.uint8), None, [], [])
    if waiting.clicks:
        found = attribute(n, waiting.time, waiting.clicks, window_seconds=window_seconds)
    add_to(counts, "late_outcome", len(found.too_late))
    add_to(counts, "unmatched_outcome", len(found.unmatched))
    late += [
        LateOutcome(waiting.request_id, row, CLICK, time, waiting.time)
        for row, time in (*found.too_late, *found.unmatched)
    ]
    return MaturedRequest(
        waiting.request_id,
        waiting.time,
        waiting.model_version,
        found.labels,
        waiting.scores,
        waiting.positions,
        found.delays,
        waiting.users,
    )
