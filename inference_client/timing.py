"""Object with the client's clocks, waits and random numbers, which tests can replace."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple


def shortened(seconds: float) -> float:
    """Reduce `seconds` by a random share of up to 1/2, so that clients retry at different times."""
    return seconds * random.uniform(0.5, 1.0)


class Timing(NamedTuple):
    """Clocks, sleep, backoff jitter and exploration's random numbers."""

    clock: Callable[[], float] = time.time
    """Seconds since the epoch, for records."""
    timer: Callable[[], float] = time.monotonic
    """Clock in seconds from an arbitrary start, for deadlines, schedules and latencies."""
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
    jitter: Callable[[float], float] = shortened
    """Function that returns the actual wait for a backoff in seconds."""
    uniform: Callable[[], float] = random.random
    """Function that returns a uniform number in [0, 1), for exploration. Unlike NumPy's generator,
    Python's generator is reseeded after a fork."""
