"""Puts a stated load on a client and measures it, in an open or a closed loop; the `load` command with its report.

Open: requests come at a rate, whatever the server does, as users do. So latency counts from the moment a request was
due (`LoadReport.latency_ms`), and while `max_in_flight` requests are out the schedule does not pause: those due grow
older. Closed: so many callers, each of whom waits for its answer before it asks again. Requests are never cancelled.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.random import Generator

from components.runtime.durable import write_whole
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from inference_client.recommender import RecommenderClient
from inference_client.rows import FeatureRows
from inference_client.scoring import ClientSettings
from inference_client.simulation.world import World
from inference_client.timing import Timing

T = TypeVar("T")

POISSON, EVEN = "poisson", "even"
POOL_ROWS = 65_536
"""Rows that a load repeats, drawn or read before it starts: making rows must not take its time."""
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


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Percentiles in milliseconds, interpolated as NumPy does by default; all None where nothing was answered."""

    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None
    mean: float | None

    @classmethod
    def of(cls, seconds: list[float]) -> Latencies:
        """The percentiles of some times in seconds."""
        if not seconds:
            return cls(p50=None, p95=None, p99=None, max=None, mean=None)
        milliseconds = np.array(seconds) * 1e3
        percentiles = {f"p{percent}": float(np.percentile(milliseconds, percent)) for percent in (50, 95, 99)}
        return cls(**percentiles, max=float(milliseconds.max()), mean=float(milliseconds.mean()))


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What happened to the requests that were due after the warm-up."""

    sent: int
    """Requests sent; each was answered or failed."""
    answered: int
    failed: dict[str, int]
    """Failed requests by the kind of error (its class)."""
    first_errors: dict[str, str]
    """The first message of each kind."""
    unsent: int
    """Open loop: requests that were due and never sent, because `max_in_flight` others were out until the end. Where
    this is not 0 the server was slower than the rate, and latencies are those of the requests that got through."""
    seconds: float
    """From the end of the warm-up to the end of the schedule, or to the last answer where that came later."""
    latency_ms: Latencies
    """Of the answered requests, from the moment that each was *due* to its answer, and not from when it was sent: a
    request that waits behind a slow one counts its wait, as a user would (no coordinated omission). In a closed loop
    a request is due when the one before it ended."""
    service_ms: Latencies
    """Of the answered requests, from sent to answered: what the client's own timer and `max_in_flight` left out."""
    requests_per_second: float | None
    """Answered, by `seconds`."""
    rows_per_second: float | None
    late_share: float | None
    """Share of the sent requests that were sent more than `LATE_SECONDS` after they were due; None = none sent."""
    most_behind_ms: float | None
    """How late the latest of them was sent."""
    versions: dict[str, int]
    """Answers by model version."""


async def run_load(
    client: RecommenderClient, rows: FeatureRows, settings: LoadSettings, *, timing: Timing | None = None
) -> LoadReport:
    """Loads `client` with `rows`, which are cut into requests and repeated.

    Args:
        client: Open; each `score` is one request.
        rows: At least one; fewer than `rows_per_request` are repeated within a request.
        settings: See `LoadSettings`.
        timing: Timer and sleep.

    Raises:
        ContractError: There are no rows. Errors of single requests are counted, not raised.
    """
    requests = _cut(rows, settings.rows_per_request)
    run = _Load(client, requests, settings, timing=timing or Timing())
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
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


class _Load:
    def __init__(
        self, client: RecommenderClient, requests: list[FeatureRows], settings: LoadSettings, *, timing: Timing
    ) -> None:
        self._client, self._settings = client, settings
        self._timing = timing
        self._requests = cycle(requests)
        self._tally = _Tally()
        self._start = timing.timer() + settings.warm_up_seconds
        self._end = self._start + settings.seconds
        self._in_flight: set[asyncio.Task[None]] = set()
        self._defect: BaseException | None = None

    async def open(self, rate: float) -> LoadReport:
        """Sends each request when it is due, until the schedule's end."""
        unsent = 0
        for due in self._schedule(rate):
            wait = due - self._timing.timer()
            if wait > 0:
                await self._timing.sleep(wait)
            while len(self._in_flight) >= self._settings.max_in_flight and self._timing.timer() < self._end:
                await self._one_ends()
            if self._defect is not None:
                break
            if len(self._in_flight) >= self._settings.max_in_flight:
                unsent += due >= self._start
            else:
                self._track(self._serve(due))
        return await self._finish(unsent)

    async def closed(self) -> LoadReport:
        """Keeps `concurrency` callers asking, until the end."""

        async def caller() -> None:
            due = self._timing.timer()
            while due < self._end and self._defect is None:
                await self._serve(due)
                due = self._timing.timer()

        for _ in range(self._settings.concurrency):
            self._track(caller())
        return await self._finish(0)

    async def stop(self) -> None:
        """Sends no more, and waits for what is in flight."""
        self._end = self._timing.timer()
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    def _schedule(self, rate: float) -> Iterator[float]:
        """When requests are due, from now to the end."""
        gap = _gaps(np.random.default_rng([self._settings.seed, 11]), rate, self._settings.arrivals)
        due = self._timing.timer()
        while due < self._end:
            yield due
            due += gap()

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
        until_end = asyncio.ensure_future(self._timing.sleep(self._end - self._timing.timer()))
        await asyncio.wait({until_end, *self._in_flight}, return_when=asyncio.FIRST_COMPLETED)
        until_end.cancel()

    async def _serve(self, due: float) -> None:
        request, sent = next(self._requests), self._timing.timer()
        # What is due during the warm-up is collected apart, and forgotten.
        tally = self._tally if due >= self._start else _Tally()
        tally.behind.append(sent - due)
        try:
            scored = await self._client.score(request)
        except (TemporaryError, PermanentError, ContractError) as error:
            tally.failures.append((self._timing.timer(), error))
            return
        tally.answers.append(_Answered(due, sent, self._timing.timer(), scored.model_version))

    async def _finish(self, unsent: int) -> LoadReport:
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        if self._defect is not None:
            raise self._defect
        rows_per_request = self._settings.rows_per_request
        return self._tally.report(start=self._start, end=self._end, unsent=unsent, rows_per_request=rows_per_request)


def _gaps(random: Generator, rate: float, arrivals: str) -> Callable[[], float]:
    if arrivals == EVEN:
        return lambda: 1 / rate
    return lambda: float(random.exponential(1 / rate))


def _cut(rows: FeatureRows, size: int) -> list[FeatureRows]:
    """Requests of `size` rows each; what is left over at the end is not sent."""
    if not len(rows):
        raise ContractError("there are no rows to load the server with, expected at least 1")
    if len(rows) < size:
        rows = rows.take(np.arange(size) % len(rows))
    return [rows.take(slice(at, at + size)) for at in range(0, len(rows) - size + 1, size)]


@dataclass(frozen=True)
class _Answered:
    due: float
    sent: float
    ended: float
    version: int


@dataclass
class _Tally:
    """Collects what a report is made of, of requests that were due after the warm-up."""

    behind: list[float] = field(default_factory=list)
    """How late each request was sent, in seconds."""
    answers: list[_Answered] = field(default_factory=list)
    failures: list[tuple[float, Exception]] = field(default_factory=list)
    """When each failed request ended, and why."""

    def report(self, *, start: float, end: float, unsent: int, rows_per_request: int) -> LoadReport:
        """The report of what was due from `start` to `end`."""
        ends = [answer.ended for answer in self.answers] + [ended for ended, _ in self.failures]
        seconds = max([end, *ends]) - start
        rate = len(self.answers) / seconds if seconds > 0 else None
        kinds = Counter(type(error).__name__ for _, error in self.failures)
        versions = Counter(answer.version for answer in self.answers)
        return LoadReport(
            sent=len(self.behind),
            answered=len(self.answers),
            failed=dict(sorted(kinds.items())),
            first_errors={type(error).__name__: str(error) for _, error in reversed(self.failures)},
            unsent=unsent,
            seconds=seconds,
            latency_ms=Latencies.of([answer.ended - answer.due for answer in self.answers]),
            service_ms=Latencies.of([answer.ended - answer.sent for answer in self.answers]),
            requests_per_second=rate,
            rows_per_second=None if rate is None else rate * rows_per_request,
            late_share=float(np.mean(np.array(self.behind) > LATE_SECONDS)) if self.behind else None,
            most_behind_ms=max(self.behind) * 1e3 if self.behind else None,
            versions={str(version): count for version, count in sorted(versions.items())},
        )


def load_server(
    server: str, rows: FeatureRows, settings: LoadSettings, *, client: ClientSettings, log_url: str | None = None
) -> LoadReport:
    """Loads the Triton at `server` (host:port), with every request logged where there is a log.

    Raises:
        TemporaryError, PermanentError, ContractError: The first request, sent before the load, was not answered: an
            absent server or model is one clear error instead of a load of failures.
    """

    async def run() -> LoadReport:
        async with RecommenderClient(server, log=log_url, settings=client) as recommender:
            await recommender.score(rows.take(slice(1)), log=False)
            return await run_load(recommender, rows, settings)

    return run_precisely(run())


def rows_of_world(path: Path, seed: int, num_rows: int = POOL_ROWS) -> FeatureRows:
    """Rows drawn from a simulated world."""
    drawn = World.load(path).draw(num_rows, np.random.default_rng([seed, 12]))
    return FeatureRows(dense=drawn.dense, categorical=drawn.categorical)


def write_report(path: Path, report: LoadReport, settings: LoadSettings, *, server: str) -> None:
    """Writes {server, settings, report} as JSON."""
    document = {"server": server, "settings": asdict(settings), "report": asdict(report)}
    write_whole(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_report(report: LoadReport, settings: LoadSettings) -> None:
    """Prints the report for people."""
    loop = f"closed loop, {settings.concurrency} callers"
    if settings.rate is not None:
        loop = f"open loop, {settings.rate:g} requests/s ({settings.arrivals})"
    print(f"{loop}, {settings.rows_per_request} rows a request, {settings.seconds:g} s")
    for name, value in _report_lines(report):
        print(f"  {name:<22} {value}")


def _report_lines(report: LoadReport) -> Iterable[tuple[str, str]]:
    yield "requests", f"{report.sent} sent, {report.answered} answered, {report.unsent} due and never sent"
    for kind, count in report.failed.items():
        yield f"failed: {kind}", f"{count} (first: {report.first_errors[kind]})"
    yield "rate", f"{_figure(report.requests_per_second)} requests/s, {_figure(report.rows_per_second)} rows/s"
    for name, latencies in (("latency from due", report.latency_ms), ("from sent", report.service_ms)):
        parts = ("p50", "p95", "p99", "max")
        yield f"{name}, ms", "  ".join(f"{part} {_figure(getattr(latencies, part))}" for part in parts)
    if report.late_share is not None:
        yield "sent late", f"{report.late_share:.2%} of requests, at most {_figure(report.most_behind_ms)} ms"
    yield "versions", ", ".join(f"{version}: {count}" for version, count in report.versions.items()) or "none"


def _figure(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
