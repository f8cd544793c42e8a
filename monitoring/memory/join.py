"""The label of a row: was it clicked within the attribution window of its prediction?

In: a prediction's time and the clicks that arrived for it. Out: labels. All rows of a request mature together when
the window closes: counting clicks as they come and misses only at the end would lift the click rate, and with it
every number, while the window is open. When a window may close, see `monitoring.memory.intake.Watermark`; keeping
what waits is left to `monitoring.memory.store`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Attribution(NamedTuple):
    """Labels of one request, uint8 of shape [n], and the clicks that no row could use."""

    labels: NDArray[np.uint8]
    num_too_late: int
    """Clicks after the window."""
    num_unmatched: int
    """Clicks on rows that the request does not have."""


def attribute_clicks(
    num_rows: int, predicted_at: float, clicks: Iterable[tuple[int, float]], *, window_seconds: float
) -> Attribution:
    """Labels of the `num_rows` rows predicted at `predicted_at`.

    A click counts if it happened at most `window_seconds` after the prediction. One that seems to precede its
    prediction counts too: the two times come from two machines' clocks.

    Args:
        num_rows: Rows in the request.
        predicted_at: Seconds since the epoch.
        clicks: (row, seconds since the epoch) in any order, repetitions allowed.
        window_seconds: Length of the attribution window.

    >>> attribute_clicks(3, 100.0, [(1, 130.0), (2, 161.0), (7, 110.0)], window_seconds=60)
    Attribution(labels=array([0, 1, 0], dtype=uint8), num_too_late=1, num_unmatched=1)
    """
    labels = np.zeros(num_rows, np.uint8)
    num_too_late = num_unmatched = 0
    for row, clicked_at in clicks:
        if not 0 <= row < num_rows:
            num_unmatched += 1
        elif clicked_at > predicted_at + window_seconds:
            num_too_late += 1
        else:
            labels[row] = 1
    return Attribution(labels, num_too_late, num_unmatched)


def due_before(watermark: float, *, window_seconds: float) -> float:
    """The newest prediction time whose window has closed once every record up to `watermark` is in."""
    return watermark - window_seconds
