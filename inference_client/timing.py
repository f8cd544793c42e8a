"""Time and chance as the client sees them: the one object through which tests control both."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple


def shortened(seconds: float) -> float:
    """`seconds` less a random part of up to a half, so that clients of a returning server do not retry in step."""
    return seconds * random.uniform(0.5, 1.0)


class Timing(NamedTuple):
    """Clocks, waits, the jitter of backoffs and the draws of exploration."""

    clock: Callable[[], float] = time.time
    """Seconds since the epoch, for records."""
    timer: Callable[[], float] = time.monotonic
    """Seconds from an arbitrary start, for deadlines, schedules and latencies."""
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
    jitter: Callable[[float], float] = shortened
    """The wait for a backoff."""
    chance: Callable[[], float] = random.random
    """A uniform number in [0, 1), for exploration. Unlike NumPy's generators, Python's is seeded anew after a fork."""
