"""Decode log messages into checked records, and attribute clicks to rows.

`read_records` turns messages into records, or into dead letters with reasons. `attribute` turns
predictions and their clicks into labels and late outcomes. All rows of a request mature together
when its window closes. Suppose that rows with a click matured immediately, and rows without a click
at the end of the window. Every click rate would then be too high at first. `monitoring.state.store`
stores records and open requests.
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
"""Maximum seconds that a record may be in the future. A record with a later time comes from a wrong
clock, and its labels would stay open until that time."""
_DECODED_BYTES = 32 << 20
"""Approximate maximum memory in bytes of the records that one call decodes. A single record may be
larger."""


class UnscoredRows(ContractError):
    """A prediction with rows whose score is not a probability.

    The prediction is counted and becomes a dead letter.
    """

    def __init__(self, *, request_id: str, version: int, rows: int) -> None:
        super().__init__(
            f"{rows} rows of request {request_id} have no score by model version {version}"
        )
        self.request_id, self.version, self.rows = request_id, version, rows


class Intake(NamedTuple):
    """The decoded messages of one pull."""

    predictions: Predictions | None
    """Decoded predictions. None if the messages contained no prediction."""
    indexes: NDArray[np.int64]
    """Message index of each prediction, shape [m]."""
    outcomes: list[OutcomeBatch]
    bad: list[tuple[int, ContractError]]
    """Message index and error of each unusable message."""
    left: list[int]
    """Indexes of messages that were not read yet, because all records together would take too much
    memory."""


class IntakeRules(NamedTuple):
    """Rules that a decoded record must meet."""

    form: RecordFormat
    recommender: str
    """Name of the recommender whose predictions are accepted."""
    max_age_seconds: float
    """Maximum age of a record. The limit exists because every UTC day of rows has its own files."""
    versions: AdmittedVersions


def read_records(payloads: Sequence[bytes], rules: IntakeRules, *, now: float) -> Intake:
    """Decode messages, and check values beyond the checks of the decoder.

    An unusable message must not stop the monitor at a later step. A message is unusable if it
    cannot be decoded, or if its time is too old or far in the future. It is also unusable if it
    comes from another recommender or names a rejected model version. Predictions without a
    probability for some row become `UnscoredRows`.
    """
    form, since, last = rules.form, max(now - rules.max_age_seconds, 0.0), now + MAX_FUTURE_SECONDS
    rules.versions.begin_batch()
    plain, rest = form.decode_plain(
        payloads,
        recommender=rules.recommender,
        since=since,
        before=last,
        versions=rules.versions.now,
    )
    batches: list[PredictionBatch] = []
    indexes: list[int] = []
    outcomes: list[OutcomeBatch] = []
    bad: list[tuple[int, ContractError]] = []
    num_bytes, num_read = 0, 0
    for index in rest:
        if num_bytes >= _DECODED_BYTES:
            break
        num_read += 1
        try:
            record = form.decode(payloads[index], recommender=rules.recommender)
            _expect_usable(record, rules, now=now)
        except ContractError as error:
            bad.append((index, error))
            continue
        num_bytes += form.decoded_bytes(record)
        if isinstance(record, PredictionBatch):
            batches.append(record)
            indexes.append(index)
        else:
            outcomes.append(record)
    left = rest[num_read:]
    if batches:
        plain.append((Predictions.of(batches), np.array(indexes, np.int64)))
    if not plain:
        return Intake(None, np.empty(0, np.int64), outcomes, bad, left)
    predictions, positions_of = zip(*plain)
    return Intake(
        Predictions.joined(predictions), np.concatenate(positions_of), outcomes, bad, left
    )


def _expect_usable(record: Record, rules: IntakeRules, *, now: float) -> None:
    times = (
        [record.time]
        if isinstance(record, PredictionBatch)
        else [record.time, *record.times.tolist()]
    )
    if (newest := max(times)) > now + MAX_FUTURE_SECONDS:
        raise ContractError(f"time is {newest}, expected at most a day from now ({now:.0f})")
    if (oldest := min(times)) < now - rules.max_age_seconds:
        days = rules.max_age_seconds / 86_400.0
        raise ContractError(
            f"time is {oldest}, {(now - oldest) / 86_400.0:.1f} days ago, expected at most "
            f"{days:g} days "
            "(max_age_seconds)"
        )
    if isinstance(record, PredictionBatch):
        rules.versions.expect(record.model_version)
    # If any score is NaN, the minimum is NaN, and a comparison with NaN is false.
    if isinstance(record, PredictionBatch) and not np.minimum.reduce(record.scores) >= 0:
        rows = int(np.isnan(record.scores).sum())
        raise UnscoredRows(request_id=record.request_id, version=record.model_version, rows=rows)


class Attribution(NamedTuple):
    """Requests with labels from the known clicks."""

    requests: MaturedRequests
    late: list[LateOutcome]
    """Clicks that change no label, because they came after the window or their row does not exist
    in the request."""
    unmatched: list[LateOutcome]
    """Clicks in `late` whose row number does not exist in the request."""


def attribute(waiting: Waiting, clicks: Iterable[Click], *, window_seconds: float) -> Attribution:
    """Label the rows of `waiting` by the first click on each row, in any order.

    The attribution window is `window_seconds` long. A click counts if it happened within the window
    after the prediction. Times are compared in whole microseconds, as in the archive. Extraction
    joins the late clicks and must use the same end of the window. A click before its prediction
    counts too, because the two times come from different clocks.
    """
    labels = np.zeros(waiting.num_rows, np.uint8)
    delays = np.full(waiting.num_rows, np.nan, np.float32)
    late, unmatched = [], []
    ends, starts = waiting.micros + microseconds(window_seconds), waiting.starts
    order = np.argsort(waiting.numbers)
    for number, row, time in clicks:
        index = order[np.searchsorted(waiting.numbers, number, sorter=order)]
        predicted_at, has_row = float(waiting.times[index]), 0 <= row < waiting.sizes[index]
        if has_row and microseconds(time) <= ends[index]:
            at = starts[index] + row
            labels[at], delays[at] = 1, time - predicted_at
        else:
            late.append(LateOutcome(waiting.ids[index], row, CLICK, time, predicted_at))
            if not has_row:
                unmatched.append(late[-1])
    return Attribution(
        waiting.to(MaturedRequests, labels=labels, click_delays=delays), late, unmatched
    )
