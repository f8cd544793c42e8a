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
from components.contracts.records import CLICK, OutcomeBatch, PredictionBatch, Predictions, Record
from components.runtime.errors import ContractError
from monitoring.rows import Click, LateOutcome, MaturedRequests, Waiting

MAX_FUTURE_SECONDS = 86_400.0
"""A record from further ahead has a broken clock; it would wait in the join for as long."""


class UnscoredRows(ContractError):
    """A prediction some of whose rows got no probability from their model; counted, beside being a dead letter."""

    def __init__(self, *, request_id: str, version: int, rows: int) -> None:
        super().__init__(f"{rows} rows of request {request_id} have no score by model version {version}")
        self.version = version
        self.rows = rows


class Intake(NamedTuple):
    """What the messages of one pull say."""

    predictions: Predictions | None
    """None = there are none."""
    places: NDArray[np.int64]
    """[m] of each prediction among the messages."""
    outcomes: list[OutcomeBatch]
    bad: list[tuple[int, ContractError]]
    """Place among the messages, and why it is none of these."""


def read_records(payloads: Sequence[bytes], *, now: float, form: RecordFormat, recommender: str) -> Intake:
    """The records in the payloads, checked beyond their encoding: one bad message must not stop the monitor later.

    Bad are `UnscoredRows`, to which a model gave no probability, and what is not decodable, has a time far ahead, or is
    a prediction of another recommender.
    """
    last = now + MAX_FUTURE_SECONDS
    plain, rest = form.decode_plain(payloads, recommender=recommender, before=last)
    batches: list[PredictionBatch] = []
    places: list[int] = []
    outcomes: list[OutcomeBatch] = []
    bad: list[tuple[int, ContractError]] = []
    for place in rest:
        try:
            record = form.decode(payloads[place], recommender=recommender)
            _expect_usable(record, now)
        except ContractError as error:
            bad.append((place, error))
            continue
        if isinstance(record, PredictionBatch):
            batches.append(record)
            places.append(place)
        else:
            outcomes.append(record)
    if batches:
        plain.append((Predictions.of(batches), np.array(places, np.int64)))
    if not plain:
        return Intake(None, np.empty(0, np.int64), outcomes, bad)
    predictions, places_of = zip(*plain)
    return Intake(Predictions.joined(predictions), np.concatenate(places_of), outcomes, bad)


def _expect_usable(record: Record, now: float) -> None:
    newest = record.time if isinstance(record, PredictionBatch) else max(record.time, float(record.times.max()))
    if newest > now + MAX_FUTURE_SECONDS:
        raise ContractError(f"time is {newest}, expected at most a day from now ({now:.0f})")
    # NaN is the minimum of whatever holds one, and fails the comparison.
    if isinstance(record, PredictionBatch) and not np.minimum.reduce(record.scores) >= 0:
        rows = int(np.isnan(record.scores).sum())
        raise UnscoredRows(request_id=record.request_id, version=record.model_version, rows=rows)


class Attribution(NamedTuple):
    """Requests with the labels that the clicks known give them."""

    requests: MaturedRequests
    late: list[LateOutcome]
    """The clicks that made no label: those after the window, and on rows that their request does not have."""
    num_unmatched: int
    """How many of these are on no row."""


def attribute(waiting: Waiting, clicks: Iterable[Click], *, window_seconds: float) -> Attribution:
    """Labels of the rows of `waiting`, by the first click on each, in any order.

    A click counts if it happened at most `window_seconds` after the prediction, in whole microseconds as in the
    archive: extraction, which joins what came too late, must not see the end of a window elsewhere. One that seems to
    precede its prediction counts too: the two times come from two machines' clocks.
    """
    labels = np.zeros(waiting.num_rows, np.uint8)
    delays = np.full(waiting.num_rows, np.nan, np.float32)
    late, num_unmatched = [], 0
    ends, starts = waiting.micros + microseconds(window_seconds), waiting.starts
    order = np.argsort(waiting.numbers)
    for number, row, time in clicks:
        place = order[np.searchsorted(waiting.numbers, number, sorter=order)]
        predicted_at, has_row = float(waiting.times[place]), 0 <= row < waiting.sizes[place]
        if has_row and microseconds(time) <= ends[place]:
            at = starts[place] + row
            labels[at], delays[at] = 1, time - predicted_at
        else:
            late.append(LateOutcome(waiting.ids[place], row, CLICK, time, predicted_at))
            num_unmatched += not has_row
    return Attribution(waiting.to(MaturedRequests, labels=labels, click_delays=delays), late, num_unmatched)
