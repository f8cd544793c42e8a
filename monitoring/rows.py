"""Types that the monitor's state returns: open and matured requests, and late outcomes."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.contracts.records import Requests

Click = tuple[int, int, float]
"""A click as a tuple: number of the prediction, row in its request, time in seconds since the
epoch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Waiting(Requests):
    """Stored predictions that have no final labels yet."""

    numbers: NDArray[np.int64]
    """Number that identifies each prediction in the state, shape [m]."""
    users: NDArray[np.int64]
    """Category of each row's user, shape [n]. `MISSING_CATEGORY` if the user is unknown or the
    recommender names no user."""

    OF_REQUESTS: ClassVar[tuple[str, ...]] = (*Requests.OF_REQUESTS, "numbers")


@dataclass(frozen=True, kw_only=True, eq=False)
class MaturedRequests(Waiting):
    """Requests with the labels of their rows.

    The labels are final, or are the labels known so far if the caller requested these.
    """

    labels: NDArray[np.uint8]
    """1 if the row was clicked within the attribution window, else 0. Shape [n]."""
    click_delays: NDArray[np.float32]
    """Seconds from the prediction to the click, shape [n]. The delay is negative if two clocks
    differ. NaN if there is no click, or if the time of the click is unknown."""


class LateOutcome(NamedTuple):
    """An outcome that changes no label in the monitor.

    Extraction reads late outcomes from separate files and joins them to their rows.
    """

    request_id: str
    row: int
    event: str
    time: float
    predicted_at: float | None
    """Time of the prediction in seconds since the epoch. None if the request is unknown."""


class Unarchived(NamedTuple):
    """Matured requests of one UTC day, or a late outcome, that no archive file contains."""

    number: int
    time: float
    """Time of the first prediction, or of the outcome itself if its request is unknown."""
    num_rows: int


class ArchiveOutcome(NamedTuple):
    """A late outcome for the archive."""

    outcome: LateOutcome
    stored_at: float
