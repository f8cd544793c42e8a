"""From log messages to labels: records that the monitor can trust, and whether a row was clicked in its window.

In: a message; a prediction's time and the outcomes that arrived for it. Out: a record, or why the message is a dead
letter; labels, and the outcomes that made none. All rows of a request mature together when the window closes: if clicks
counted as they come and misses only at the end, the click rate, and every number with it, would be too high while the
window is open. Keeping records and open requests is left to `monitoring.memory.store`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts.raw_rows import microseconds
from components.contracts.record_format import RecordFormat
from components.contracts.records import CLICK, OutcomeBatch, PredictionBatch, Predictions, Record
from components.runtime.errors import ContractError
from monitoring.memory.database import add_to
from monitoring.rows import Event, LateOutcome, MaturedRequests, Waiting

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
    outcomes: list[OutcomeBatch]
    bad: list[tuple[int, ContractError]]
    """Place among the messages, and why it is none of these."""


def read_records(payloads: Sequence[bytes], *, now: float, form: RecordFormat, recommender: str) -> Intake:
    """The records in the payloads, checked beyond their encoding: one bad message must not stop the monitor later.

    Bad are `UnscoredRows`, to which a model gave no probability, and what is not decodable, has a time far ahead, or is
    a prediction of another recommender.
    """
    last = now + MAX_FUTURE_SECONDS
    predictions, rest = form.decode_plain(payloads, recommender=recommender, before=last)
    batches: list[PredictionBatch] = []
    outcomes: list[OutcomeBatch] = []
    bad: list[tuple[int, ContractError]] = []
    for place in rest:
        try:
            record = form.decode(payloads[place], recommender=recommender)
            _expect_usable(record, now)
        except ContractError as error:
            bad.append((place, error))
        else:
            (batches if isinstance(record, PredictionBatch) else outcomes).append(record)  # type: ignore[arg-type]
    if batches:
        predictions.append(Predictions.of(batches))
    return Intake(Predictions.joined(predictions) if predictions else None, outcomes, bad)


def _expect_usable(record: Record, now: float) -> None:
    newest = record.time if isinstance(record, PredictionBatch) else max(record.time, float(record.times.max()))
    if newest > now + MAX_FUTURE_SECONDS:
        raise ContractError(f"time is {newest}, expected at most a day from now ({now:.0f})")
    # NaN is the minimum of whatever holds one, and fails the comparison.
    if isinstance(record, PredictionBatch) and not np.minimum.reduce(record.scores) >= 0:
        rows = int(np.isnan(record.scores).sum())
        raise UnscoredRows(request_id=record.request_id, version=record.model_version, rows=rows)


class Attribution(NamedTuple):
    """Labels of one request, uint8 of shape [n], and the outcomes that no row could use."""

    labels: NDArray[np.uint8]
    delays: NDArray[np.float32]
    """Seconds from the prediction to the first outcome in time, shape [n]; NaN = none."""
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


def mature_requests(
    waiting: Waiting,
    clicks: Mapping[int, Sequence[Event]],
    counts: dict[str, float],
    late: list[LateOutcome],
    *,
    window_seconds: float,
) -> MaturedRequests:
    """The requests with their final click labels; `clicks` are those on each, by its number.

    `counts` are added to; `late` takes the clicks that made no label.
    """
    labels = np.zeros(waiting.num_rows, np.uint8)
    delays = np.full(waiting.num_rows, np.nan, np.float32)
    starts = waiting.starts
    for place in np.flatnonzero(np.isin(waiting.numbers, list(clicks))).tolist() if clicks else ():
        n, time = int(waiting.sizes[place]), float(waiting.times[place])
        found = attribute(n, time, clicks[int(waiting.numbers[place])], window_seconds=window_seconds)
        rows = slice(starts[place], starts[place] + n)
        labels[rows], delays[rows] = found.labels, found.delays
        add_to(counts, "late_outcome", len(found.too_late))
        add_to(counts, "unmatched_outcome", len(found.unmatched))
        request_id = waiting.ids[place]
        late += [
            LateOutcome(request_id, row, CLICK, clicked_at, time)
            for row, clicked_at in (*found.too_late, *found.unmatched)
        ]
    return MaturedRequests(
        ids=waiting.ids,
        times=waiting.times,
        versions=waiting.versions,
        sizes=waiting.sizes,
        scores=waiting.scores,
        positions=waiting.positions,
        labels=labels,
        click_delays=delays,
        users=waiting.users,
    )
