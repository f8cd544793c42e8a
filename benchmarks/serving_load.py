"""Asks in a closed or an open loop and notes when each answer came; who is asked is `serving_callers`'.

Like `inference_client.load`, whose clock-true event loop it runs on, but it keeps every request's time, which is needed
to see what happened while a release was on, and leaves the client library's own work out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]


class Failed(Exception):
    """A request was not answered; the message says why."""


@dataclass(frozen=True, eq=False)
class Answers:
    """What came back in one run."""

    asked: NDArray[np.float64]
    """When each request was due, seconds of `time.perf_counter`."""
    latencies: NDArray[np.float64]
    """Seconds from then to the answer."""
    seconds: float
    """From the first request to the last answer."""
    num_failed: int
    errors: tuple[str, ...] = ()
    """The first few distinct ones."""


Caller = Callable[[int], Awaitable[Scores]]


async def closed_loop(
    call: Caller, concurrency: int, seconds: float, *, clock: Callable[[], float] = time.perf_counter
) -> Answers:
    """`concurrency` callers, each asking as soon as it is answered, for `seconds` of `clock`."""
    notes = _Notes(clock)
    began = clock()
    numbers = iter(range(2**62))

    async def ask_on() -> None:
        while (now := clock()) < began + seconds:
            await notes.ask(call, next(numbers), now)

    await asyncio.gather(*(ask_on() for _ in range(concurrency)))
    return notes.answers(clock() - began)


async def open_loop(
    call: Caller,
    rate: float,
    seconds: float | None,
    *,
    seed: int = 0,
    until: asyncio.Event | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Answers:
    """Requests at the times of a Poisson process of `rate` per second, however late answers are.

    Latency counts from the time a request was due, so that a stall is felt by all who would have come in it.

    Args:
        call: Asks.
        rate: Requests per second.
        seconds: For how long; None = until `until` is set.
        seed: Of the times.
        until: Ends the load.
        clock: Seconds.
        sleep: Waits seconds of `clock`.
    """
    random = np.random.default_rng(seed)
    notes, waiting = _Notes(clock), set()
    began = due = clock()
    i = 0
    while (seconds is None or due < began + seconds) and not (until and until.is_set()):
        if (left := due - clock()) > 0:
            await sleep(left)
        task = asyncio.ensure_future(notes.ask(call, i, due))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        due += random.exponential(1 / rate)
        i += 1
    if waiting:
        await asyncio.wait(waiting)
    return notes.answers(clock() - began)


class _Notes:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked: list[float] = []
        self._latencies: list[float] = []
        self._num_failed = 0
        self._errors: dict[str, None] = {}

    async def ask(self, call: Caller, i: int, due: float) -> None:
        try:
            await call(i)
        except Failed as error:
            self._num_failed += 1
            if len(self._errors) < 5:
                self._errors[str(error)] = None
            return
        self._asked.append(due)
        self._latencies.append(self._clock() - due)

    def answers(self, seconds: float) -> Answers:
        return Answers(np.array(self._asked), np.array(self._latencies), seconds, self._num_failed, tuple(self._errors))
