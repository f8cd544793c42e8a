"""What the memory hands out: open and matured requests, and outcomes that came too late for their row."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.contracts.records import Requests

Click = tuple[int, int, float]
"""(number of the prediction, row in its request, seconds since the epoch)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Waiting(Requests):
    """Stored predictions whose labels are not final."""

    numbers: NDArray[np.int64]
    """[m] under which the memory knows each."""
    users: NDArray[np.int64]
    """[n] category of each row's user, `MISSING_CATEGORY` = unknown, or the recommender names no user."""

    OF_REQUESTS: ClassVar[tuple[str, ...]] = (*Requests.OF_REQUESTS, "numbers")


@dataclass(frozen=True, kw_only=True, eq=False)
class MaturedRequests(Waiting):
    """Requests with their final labels, or as they are now."""

    labels: NDArray[np.uint8]
    """[n], 1 = clicked within the attribution window."""
    click_delays: NDArray[np.float32]
    """[n] seconds from the prediction to the click, negative where two clocks differ so; NaN = no click, or its time is
    not known."""


class LateOutcome(NamedTuple):
    """An outcome that changes no label here; extraction joins it from a file of its own."""

    request_id: str
    row: int
    event: str
    time: float
    predicted_at: float | None
    """None where the request is unknown."""


class Unarchived(NamedTuple):
    """Matured requests of one UTC day that are kept together, or a late outcome, in no file yet."""

    number: int
    time: float
    """Of the first prediction; of an outcome of an unknown request, its own."""
    num_rows: int


class ArchiveOutcome(NamedTuple):
    """A late outcome on its way to the archive."""

    outcome: LateOutcome
    stored_at: float
