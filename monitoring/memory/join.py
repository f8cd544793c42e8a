"""The label of a row: was it clicked within the attribution window of its prediction?

In: a prediction's time and the outcomes that arrived for it. Out: labels, and the outcomes that made none. All rows of
a request mature together when the window closes: if clicks counted as they come and misses only at the end, the click
rate, and every number with it, would be too high while the window is open. Keeping open requests is left to
`monitoring.memory.store`.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.contracts.raw_rows import microseconds
from components.contracts.records import CLICK
from monitoring.memory.database import add_to
from monitoring.rows import Event, LateOutcome, MaturedRequest, Waiting


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


def mature_request(
    waiting: Waiting, counts: dict[str, float], late: list[LateOutcome], *, window_seconds: float
) -> MaturedRequest:
    """The request with its final click labels.

    `counts` are added to; `late` takes the clicks that made no label.
    """
    found = attribute(len(waiting.scores), waiting.time, waiting.clicks, window_seconds=window_seconds)
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
