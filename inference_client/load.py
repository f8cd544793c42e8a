"""Puts a stated load on a server and measures it, in an open or a closed loop.

Open: requests come at a rate, whatever the server does, as users do. So latency counts from the moment a request was
due, and one that waits behind a slow one counts its wait (no coordinated omission). Closed: a number of
callers, each of which waits for its answer before it sends the next request.
"""

import asyncio
import selectors
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from components.contracts.recommender import Recommender
from components.runtime.errors import ContractError, PermanentError, TemporaryError, expect
from inference_client.recommender import RecommenderClient
from inference_client.rows import FeatureRows
from inference_client.scoring import ClientSettings
from inference_client.timing import Timing

T = TypeVar("T")

POOL_ROWS = 65_536
"""Rows that a load repeats, read before it starts: making rows must not take its time."""
MAX_IN_FLIGHT = 512
"""Open loop: requests on the wire at once; those due beyond it wait, and their wait counts."""


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
    most_behind_seconds: float
    """How late the latest request was sent: where it is large, the asking machine could not keep up."""


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
        self._most_behind = 0.0

    async def send(self, due: float) -> None:
        number, self._sent = self._sent, self._sent + 1
        self._most_behind = max(self._most_behind, self._timer() - due)
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
        return Answers(due, latencies, seconds, dict(self._failed), self._first_errors, self._most_behind)


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

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ContractError(f"rate is {self.rate}, expected requests per second above 0")
        if not 0 < self.seconds < float("inf") or not 0 <= self.warm_up_seconds < float("inf"):
            raise ContractError(
                f"seconds is {self.seconds} and warm_up_seconds {self.warm_up_seconds}, expected above 0, and 0 or more"
            )
        expect(self, "at least 1", lambda value: value >= 1, "concurrency", "rows_per_request")


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What happened to the requests that were due after the warm-up."""

    answered: int
    failed: dict[str, int]
    """See `Answers`."""
    first_errors: dict[str, str]
    seconds: float
    latency_ms: Latencies
    """Of the answered requests, from the moment that each was *due* to its answer."""
    requests_per_second: float
    """Answered, by `seconds`."""
    rows_per_second: float
    most_behind_ms: float
    versions: dict[str, int]
    """Answers by model version."""


async def run_load(
    client: RecommenderClient, rows: FeatureRows, settings: LoadSettings, *, timing: Timing | None = None
) -> LoadReport:
    """Loads `client` with `rows`, which are cut into requests and repeated.

    Each `score` is one request; fewer rows than `rows_per_request` are repeated within one.

    Raises:
        ContractError: There are no rows. Errors of single requests are counted, not raised.
    """
    requests, versions = _cut_into_requests(rows, settings.rows_per_request), Counter[int]()

    async def ask(number: int) -> None:
        versions[(await client.score(requests[number % len(requests)])).model_version] += 1

    async def load_for(seconds: float) -> Answers:
        if settings.rate is None:
            return await closed_loop(ask, settings.concurrency, seconds, timing=timing)
        return await open_loop(ask, settings.rate, seconds, seed=settings.seed, timing=timing)

    if settings.warm_up_seconds:
        await load_for(settings.warm_up_seconds)
        versions.clear()
    answers = await load_for(settings.seconds)
    rate = len(answers.due) / answers.seconds
    return LoadReport(
        answered=len(answers.due),
        failed=answers.failed,
        first_errors=answers.first_errors,
        seconds=answers.seconds,
        latency_ms=Latencies.of(answers.latencies),
        requests_per_second=rate,
        rows_per_second=rate * settings.rows_per_request,
        most_behind_ms=1e3 * answers.most_behind_seconds,
        versions={str(version): count for version, count in sorted(versions.items())},
    )


def _cut_into_requests(rows: FeatureRows, size: int) -> Sequence[FeatureRows]:
    """Requests of `size` rows each; what is left over at the end is not sent."""
    if not len(rows):
        raise ContractError("there are no rows to load the server with, expected at least 1")
    if len(rows) < size:
        rows = rows.take(np.arange(size) % len(rows))
    return [rows.take(slice(at, at + size)) for at in range(0, len(rows) - size + 1, size)]


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


def load_server(
    server: str,
    rows: FeatureRows,
    settings: LoadSettings,
    *,
    recommender: Recommender,
    client: ClientSettings,
    log_url: str | None = None,
) -> LoadReport:
    """Loads the Triton at `server` (host:port), with every request logged where there is a log.

    Raises:
        TemporaryError, PermanentError, ContractError: The first request, sent before the load, was not answered: an
            absent server or model is one clear error instead of a load of failures.
    """

    async def run() -> LoadReport:
        async with RecommenderClient(server, recommender=recommender, log=log_url, settings=client) as asking:
            await asking.score(rows.take(slice(1)), log=False)
            return await run_load(asking, rows, settings)

    return run_precisely(run())
