"""What the memory hands out: open and matured requests, and outcomes that came too late for their row."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Event = tuple[int, float]
"""(row in its request, seconds since the epoch)."""


class Waiting(NamedTuple):
    """A stored prediction whose attribution window has closed, and the outcomes that arrived for it."""

    request_id: str
    time: float
    model_version: int
    scores: NDArray[np.float32]
    positions: NDArray[np.int32] | None
    clicks: list[Event]
    users: NDArray[np.int64] | None = None
    """Category of each row's user, `MISSING_CATEGORY` = unknown; None where the recommender names no user."""


class MaturedRequest(NamedTuple):
    """The rows of one request with their final labels; arrays are [n]."""

    request_id: str
    time: float
    model_version: int
    labels: NDArray[np.uint8]
    """1 = clicked within the attribution window."""
    scores: NDArray[np.float32]
    positions: NDArray[np.int32] | None = None
    click_delays: NDArray[np.float32] | None = None
    """Seconds from the prediction to the click, NaN = no click; negative where two clocks differ so. None = no row was
    clicked, or the times are not known."""
    users: NDArray[np.int64] | None = None
    """As in `Waiting`."""


class LateOutcome(NamedTuple):
    """An outcome that changes no label here; extraction joins it from a file of its own."""

    request_id: str
    row: int
    event: str
    time: float
    predicted_at: float | None
    """None where the request is unknown."""


class OpenRows(NamedTuple):
    """Rows of one version whose attribution window is open, newest requests first; arrays are [n]."""

    scores: NDArray[np.float32]
    ages: NDArray[np.float64]
    """Seconds since the prediction."""
    clicked: NDArray[np.bool_]
    """Whether a click in time has arrived: such a label is as good as final."""


class Unarchived(NamedTuple):
    """A matured request, or a late outcome, that lies in no file yet."""

    number: int
    time: float
    """Of the prediction; of an outcome of an unknown request, its own."""
    num_rows: int


class ArchiveRow(NamedTuple):
    """A matured request on its way to the archive: the stored message and its labels."""

    payload: bytes
    labels: NDArray[np.uint8]


class ArchiveOutcome(NamedTuple):
    """A late outcome on its way to the archive."""

    outcome: LateOutcome
    stored_at: float
