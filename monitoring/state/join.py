"""From log messages to labels: records that the monitor can trust, and whether a row was clicked in its window.

In: a message; a prediction's time and the outcomes that arrived for it. Out: a record, or why the message is a dead
letter; labels, and the outcomes that made none. All rows of a request mature together when the window closes: if clicks
counted as they come and misses only at the end, the click rate, and every number with it, would be too high while the
window is open. Keeping records and open requests is left to `monitoring.state.store`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.contracts.raw_rows import microseconds
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import CLICK, OutcomeBatch, PredictionBatch, Predictions, Record
from evergreen.runtime.errors import ContractError
from monitoring.rows import Click, LateOutcome, MaturedRequests, Waiting
from monitoring.state.admission import AdmittedVersions

MAX_FUTURE_SECONDS = 86_400.0
"""A record from further ahead has a broken clock; it would wait in the join for as long."""
DECODED_BYTES = 32 << 20
"""Memory of the records that one call decodes one by one, about, or of a single larger one."""


class UnscoredRows(ContractError):
    """A prediction some of whose rows got no probability from their model; counted, beside being a dead letter."""

    def __init__(self, *, request_id: str, version: int, rows: int) -> None:
        super().__init__(f"{rows} rows of request {request_id} have no score by model version {version}")
        self.request_id, self.version, self.rows = request_id, version, rows


class Intake(NamedTuple):
    """What the messages of one pull say."""

    predictions: Predictions | None
    """None = there are none."""
    places: NDArray[np.int64]
    """[m] of each prediction among the messages."""
    outcomes: list[OutcomeBatch]
    bad: list[tuple[int, ContractError]]
    """Place among the messages, and why it is none of these."""
    left: list[int]
    """Places of messages that were not read: with these the records would take too much memory at once."""


class IntakeRules(NamedTuple):
    """What the monitor expects of a record beyond its encoding."""

    form: RecordFormat
    recommender: str
    """Name of the one whose predictions are taken in."""
    max_age_seconds: float
    """Oldest record that is taken in: each UTC day of the rows has files of its own."""
    versions: AdmittedVersions


def read_records(payloads: Sequence[bytes], rules: IntakeRules, *, now: float) -> Intake:
    """Decode messages and check what their encoding does not: one bad message must not stop the monitor later.

    Bad are `UnscoredRows`, to which a model gave no probability, and what is not decodable, is too old or from a time
    far ahead, or is a prediction of another recommender or of one model version too many.
    """
    form, since, last = rules.form, max(now - rules.max_age_seconds, 0.0), now + MAX_FUTURE_SECONDS
    rules.versions.begin_batch()
    plain, rest = form.decode_plain(
        payloads, recommender=rules.recommender, since=since, before=last, versions=rules.versions.now
    )
    batches: list[PredictionBatch] = []
    places: list[int] = []
    outcomes: list[OutcomeBatch] = []
    bad: list[tuple[int, ContractError]] = []
    num_bytes, num_read = 0, 0
    for place in rest:
        if num_bytes >= DECODED_BYTES:
            break
        num_read += 1
        try:
            record = form.decode(payloads[place], recommender=rules.recommender)
            _expect_usable(record, rules, now=now)
        except ContractError as error:
            bad.append((place, error))
            continue
        num_bytes += form.decoded_bytes(record)
        if isinstance(record, PredictionBatch):
            batches.append(record)
            places.append(place)
        else:
            outcomes.append(record)
    left = rest[num_read:]
    if batches:
        plain.append((Predictions.of(batches), np.array(places, np.int64)))
    if not plain:
        return Intake(None, np.empty(0, np.int64), outcomes, bad, left)
    predictions, places_of = zip(*plain)
    return Intake(Predictions.joined(predictions), np.concatenate(places_of), outcomes, bad, left)


def _expect_usable(record: Record, rules: IntakeRules, *, now: float) -> None:
    times = [record.time] if isinstance(record, PredictionBatch) else [record.time, *record.times.tolist()]
    if (newest := max(times)) > now + MAX_FUTURE_SECONDS:
        raise ContractError(f"time is {newest}, expected at most a day from now ({now:.0f})")
    if (oldest := min(times)) < now - rules.max_age_seconds:
        days = rules.max_age_seconds / 86_400.0
        raise ContractError(
            f"time is {oldest}, {(now - oldest) / 86_400.0:.1f} days ago, expected at most {days:g} days "
            "(max_age_seconds)"
        )
    if isinstance(record, PredictionBatch):
        rules.versions.expect(record.model_version)
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
