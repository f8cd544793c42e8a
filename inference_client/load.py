"""Puts a stated load on a scorer and measures it, in an open or a closed loop.

Open: requests come at a rate, whatever the server does. That is how users come: a slow answer makes nobody else wait
with asking. So latency counts from the moment a request was due (`LoadReport.latency_ms`), and while `max_in_flight`
requests are out the schedule does not pause: what waits grows older. Closed: so many callers, each of whom waits for
its answer before it asks again. Requests are never cancelled. Any `Scorer` can be loaded, a peer's too; the command
with its table is `load_command`'s.
"""

from __future__ import annotations

import asyncio
import selectors
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from components.runtime.errors import ContractError, PermanentError, TemporaryError
from inference_client.load_report import LoadReport, Tally
from inference_client.scorer import FeatureRows, Scorer, Seams

T = TypeVar("T")

POISSON, EVEN = "poisson", "even"
LATE_SECONDS = 0.005
"""A request sent later than this after it was due counts as late; an idle machine stays far below it."""


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """What load, and for how long."""

    rate: float | None = None
    """Requests per second in open loop; None = closed loop."""
    concurrency: int = 1
    """Callers in closed loop; open loop takes no notice of it."""
    rows_per_request: int = 64
    seconds: float = 10.0
    """Measured, after the warm-up."""
    warm_up_seconds: float = 1.0
    """Load of the same kind before, which is not counted."""
    seed: int = 0
    """Of the arrivals."""
    arrivals: str = POISSON
    """Open loop: `poisson` (independent users) or `even` (one every 1/rate seconds)."""
    max_in_flight: int = 512
    """Open loop: requests out at once; those due beyond it wait, and their wait counts."""

    def __post_init__(self) -> None:
        """Refuses settings that cannot work."""
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ContractError(f"rate is {self.rate}, expected requests per second above 0")
        if self.arrivals not in (POISSON, EVEN):
            raise ContractError(f"arrivals is {self.arrivals!r}, expected {POISSON} or {EVEN}")
        if not 0 < self.seconds < float("inf") or not 0 <= self.warm_up_seconds < float("inf"):
            raise ContractError(
                f"seconds is {self.seconds} and warm_up_seconds {self.warm_up_seconds}, expected above 0, and 0 or more"
            )
        for name in ("concurrency", "rows_per_request", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 1")


async def run_load(
    scorer: Scorer, rows: FeatureRows, settings: LoadSettings, *, seams: Seams | None = None
) -> LoadReport:
    """Loads `scorer` with `rows`, which are cut into requests and repeated.

    Args:
        scorer: Anything that scores; a call of its `score` is one request.
        rows: At least one; fewer than `rows_per_request` are repeated within a request.
        settings: See `LoadSettings`.
        seams: Timer and sleep.

    Raises:
        ContractError: there are no rows. Errors of single requests are counted, not raised.
    """
    requests = _cut(rows, settings.rows_per_request)
    run = _Load(scorer, requests, settings, seams or Seams())
    try:
        return await (run.closed() if settings.rate is None else run.open(settings.rate))
    except asyncio.CancelledError:
        await run.stop()
        raise


def run_precisely(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` with timers exact to microseconds, for up to about 1000 open sockets.

    The usual loop's epoll rounds every wait up to a millisecond, with which a request that takes less would be charged.

    Raises:
        KeyboardInterrupt: on Ctrl-C, once `main`, which is cancelled, has ended in order: breaking off its calls could
            crash the server.
    """
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    task = loop.create_task(main)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()

    try:
        # Signals are the main thread's.
        with suppress(ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGINT, interrupt)
        return loop.run_until_complete(task)
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class _Request(NamedTuple):
    dense: NDArray[np.float32]
    categorical: NDArray[np.int64]


class _Load:
    def __init__(self, scorer: Scorer, requests: list[_Request], settings: LoadSettings, seams: Seams) -> None:
        self._scorer, self._settings, self._seams = scorer, settings, seams
        self._num_distinct = len(requests)
        self._requests = cycle(requests)
        self._tally = Tally(rows_per_request=settings.rows_per_request)
        self._start = seams.timer() + settings.warm_up_seconds
        self._end = self._start + settings.seconds
        self._in_flight: set[asyncio.Task[None]] = set()
        self._defect: BaseException | None = None

    async def open(self, rate: float) -> LoadReport:
        """Sends each request when it is due, until the schedule's end."""
        unsent = 0
        for due in self._schedule(rate):
            wait = due - self._seams.timer()
            if wait > 0:
                await self._seams.sleep(wait)
            while len(self._in_flight) >= self._settings.max_in_flight and self._seams.timer() < self._end:
                await self._one_ends()
            if self._defect is not None:
                break
            if len(self._in_flight) >= self._settings.max_in_flight:
                unsent += due >= self._start
            else:
                self._send(due)
        return await self._finish(unsent)

    async def closed(self) -> LoadReport:
        """Keeps `concurrency` callers asking, until the end."""

        async def caller() -> None:
            due = self._seams.timer()
            while due < self._end and self._defect is None:
                await self._serve(due)
                due = self._seams.timer()

        for _ in range(self._settings.concurrency):
            self._track(caller())
        return await self._finish(0)

    async def stop(self) -> None:
        """Sends no more, and waits for what is in flight."""
        self._end = self._seams.timer()
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    def _schedule(self, rate: float) -> Iterator[float]:
        """When requests are due, from now to the end."""
        gap = _gaps(np.random.default_rng([self._settings.seed, 11]), rate, self._settings.arrivals)
        due = self._seams.timer()
        while due < self._end:
            yield due
            due += gap()

    def _send(self, due: float) -> None:
        self._track(self._serve(due))

    def _track(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._in_flight.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._defect = self._defect or error

    async def _one_ends(self) -> None:
        """Waits until a request ends, or for the schedule's end."""
        until_end = asyncio.ensure_future(self._seams.sleep(self._end - self._seams.timer()))
        await asyncio.wait({until_end, *self._in_flight}, return_when=asyncio.FIRST_COMPLETED)
        until_end.cancel()

    async def _serve(self, due: float) -> None:
        request = next(self._requests)
        counts = due >= self._start
        sent = self._seams.timer()
        if counts:
            self._tally.count_sent(behind=sent - due, late_after=LATE_SECONDS)
        try:
            scored = await self._scorer.score(*request)
        except (TemporaryError, PermanentError, ContractError) as error:
            if counts:
                self._tally.count_failure(error, self._seams.timer())
            return
        if counts:
            self._tally.count_answer(due=due, sent=sent, now=self._seams.timer(), version=scored.model_version)

    async def _finish(self, unsent: int) -> LoadReport:
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        if self._defect is not None:
            raise self._defect
        return self._tally.report(start=self._start, end=self._end, unsent=unsent, distinct_requests=self._num_distinct)


def _gaps(random: Generator, rate: float, arrivals: str) -> Callable[[], float]:
    if arrivals == EVEN:
        return lambda: 1 / rate
    return lambda: float(random.exponential(1 / rate))


def _cut(rows: FeatureRows, size: int) -> list[_Request]:
    """Requests of `size` rows each; what is left over at the end is not sent."""
    if not len(rows):
        raise ContractError("there are no rows to load the server with, expected at least 1")
    dense, categorical = rows.dense, rows.categorical
    if len(rows) < size:
        repeated = np.arange(size) % len(rows)
        dense, categorical = dense[repeated], categorical[repeated]
    starts = range(0, len(dense) - size + 1, size)
    return [_Request(dense[at : at + size], categorical[at : at + size]) for at in starts]
