"""What every way of scoring has in common: rows in, probabilities and a version out.

Joins who scores (`client`, `routing`) to who has rows scored (`replay`, `ranking`, `load`, `scoring`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureRows:
    """Rows of raw features."""

    dense: NDArray[np.float32]
    """[n, 13], NaN = missing."""
    categorical: NDArray[np.int64]
    """[n, 26], -1 = missing."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.dense)


class Scored(NamedTuple):
    """Probabilities and who computed them."""

    scores: NDArray[np.float32]
    """[n] in [0, 1], in the order of the rows asked for."""
    model_version: int
    """Of the reply, whatever was expected."""
    canary: bool = False
    """Whether the traffic plan's canary answered."""
    shadow: asyncio.Future[Scored | None] | None = None
    """What the plan's other arm says of the same rows, for the record only: done some time later, None if it failed.
    It never raises, and nobody has to wait for it."""


class Scorer(Protocol):
    """Whoever scores rows."""

    async def score(self, dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> Scored:
        """Scores rows; raises TemporaryError, PermanentError or ContractError."""


class KeyedScorer(Protocol):
    """A scorer that may let different models answer different requests."""

    async def score(
        self,
        dense: NDArray[np.float32],
        categorical: NDArray[np.int64],
        *,
        request_id: str | None = None,
        key: str | None = None,
    ) -> Scored:
        """As `Scorer`; the same key (a user, else the request) is answered by the same model."""


async def shadow_of(scored: Scored, seconds: float) -> Scored | None:
    """The shadow's answer if there is one and it comes within `seconds`."""
    if scored.shadow is None:
        return None
    await asyncio.wait({scored.shadow}, timeout=seconds)
    answer = scored.shadow.result() if scored.shadow.done() and not scored.shadow.cancelled() else None
    # Both arms at one version (a promotion under way) would be a comparison of a model with itself.
    return None if answer is None or answer.model_version == scored.model_version else answer


class Seams(NamedTuple):
    """Time, as whoever sends requests sees it."""

    clock: Callable[[], float] = time.time
    """Seconds since the epoch, for records."""
    timer: Callable[[], float] = time.monotonic
    """Seconds, for schedules and latencies."""
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
