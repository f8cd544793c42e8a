"""Puts a stated load on a server and measures it, in an open or a closed loop: what the benchmarks of serving share.

Open: requests come at a rate, whatever the server does, as users do. So latency counts from the moment a request was
due, and one that waits behind a slow one counts its wait (no coordinated omission). Closed: a number of
callers, each of which waits for its answer before it sends the next request.
"""

import asyncio
import selectors
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError
from inference_client.timing import Timing

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Answers:
    """What came back in one loop."""

    due: NDArray[np.float64]
    """[n] when each answered request was due, in seconds of the timer."""
    latencies: NDArray[np.float64]
    """[n] seconds from then to its answer."""
    seconds: float
    """From the first request to the last answer, or to the end of an open loop's schedule."""
    failed: dict[str, int]
    """Failed requests by the kind of error (its class)."""
    first_errors: dict[str, str]
    """The first message of each kind."""


async def closed_loop(
    ask: Callable[[int], Awaitable[object]], concurrency: int, seconds: float, *, timing: Timing | None = None
) -> Answers:
    """`concurrency` callers, each asking as soon as it is answered, for `seconds`.

    `ask` sends the request of a number, from 0; errors of the three families are counted, others are raised.
    """
    timer = (timing or Timing()).timer
    notes = _Notes(ask, timer)

    async def ask_on() -> None:
        while (now := timer()) < notes.began + seconds and notes.defect is None:
            await notes.send(now)

    await asyncio.gather(*(ask_on() for _ in range(concurrency)))
    return notes.answers(timer() - notes.began)


async def open_loop(
    ask: Callable[[int], Awaitable[object]],
    rate: float,
    seconds: float,
    *,
    seed: int = 0,
    until: asyncio.Event | None = None,
    timing: Timing | None = None,
) -> Answers:
    """Requests at the times of a Poisson process, as of independent users, however late answers are.

    `ask` is as of `closed_loop`; `seed` decides the times; `until` ends the load earlier.
    """
    timing, random = timing or Timing(), np.random.default_rng(seed)
    notes, in_flight = _Notes(ask, timing.timer), set[asyncio.Task[None]]()
    due = notes.began
    while due < notes.began + seconds and notes.defect is None and not (until and until.is_set()):
        if (left := due - timing.timer()) > 0:
            await timing.sleep(left)
        task = asyncio.ensure_future(notes.send(due))
        in_flight.add(task)
        task.add_done_callback(in_flight.discard)
        due += random.exponential(1 / rate)
    if in_flight:
        await asyncio.wait(in_flight)
    elapsed = timing.timer() - notes.began
    return notes.answers(elapsed if until else max(elapsed, seconds))


class _Notes:
    """Sends requests and collects what `Answers` holds."""

    def __init__(self, ask: Callable[[int], Awaitable[object]], timer: Callable[[], float]) -> None:
        self._ask, self._timer = ask, timer
        self.began = timer()
        self.defect: Exception | None = None
        self._sent = 0
        self._answered: list[tuple[float, float]] = []
        self._failed: Counter[str] = Counter()
        self._first_errors: dict[str, str] = {}

    async def send(self, due: float) -> None:
        number, self._sent = self._sent, self._sent + 1
        try:
            await self._ask(number)
        except (TemporaryError, PermanentError, ContractError) as error:
            kind = type(error).__name__
            self._failed[kind] += 1
            self._first_errors.setdefault(kind, str(error))
        except Exception as defect:
            self.defect = self.defect or defect
        else:
            self._answered.append((due, self._timer() - due))

    def answers(self, seconds: float) -> Answers:
        if self.defect is not None:
            raise self.defect
        due, latencies = np.array(self._answered, dtype=np.float64).reshape(-1, 2).T
        return Answers(due, latencies, seconds, dict(self._failed), self._first_errors)


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Percentiles in milliseconds, interpolated as NumPy does by default; all None where nothing was answered."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    mean: float | None = None

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> "Latencies":
        """The percentiles of some times in seconds."""
        if not len(seconds):
            return cls()
        percentiles = {f"p{percent}": 1e3 * float(np.percentile(seconds, percent)) for percent in (50, 95, 99)}
        return cls(**percentiles, max=1e3 * float(seconds.max()), mean=1e3 * float(seconds.mean()))


def run_precisely(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` with timers exact to microseconds, for up to about 1000 open sockets.

    The usual loop's epoll rounds every wait up to a millisecond, with which a request that takes less would be charged.
    """
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    task = loop.create_task(main)
    try:
        # Ctrl-C cancels `main`, which ends in order: breaking off its calls could crash the server. Signals are the
        # main thread's.
        with suppress(ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGINT, task.cancel)
        return loop.run_until_complete(task)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
