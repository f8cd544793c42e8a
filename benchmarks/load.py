"""Send a defined load to a server and measure it, in an open or a closed loop.

In an open loop, requests come at a fixed rate that does not depend on the server, like the requests
of users. The latency of a request begins at its scheduled time. The latency therefore includes the
wait behind a slow request (no coordinated omission). In a closed loop, each caller waits for its
response before it sends the next request.
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
class Responses:
    """Results of one loop."""

    due: NDArray[np.float64]
    """Scheduled time of each request with a response, in seconds of the timer, shape [n]."""
    latencies: NDArray[np.float64]
    """Seconds from the scheduled time to the response, shape [n]."""
    seconds: float
    """Seconds from the first request to the last response, or to the end of an open loop's
    schedule."""
    failed: dict[str, int]
    """Number of failed requests by error class."""
    first_errors: dict[str, str]
    """First message by error class."""


async def closed_loop(
    send: Callable[[int], Awaitable[object]],
    concurrency: int,
    seconds: float,
    *,
    timing: Timing | None = None,
) -> Responses:
    """Run `concurrency` callers for `seconds`.

    Each caller sends its next request after the response to the previous request. `send` receives
    the index of the request, counted from 0. Errors of the three error classes are counted, and
    other errors are raised.
    """
    timer = (timing or Timing()).timer
    recorder = _Recorder(send, timer)

    async def send_repeatedly() -> None:
        while (now := timer()) < recorder.began + seconds and recorder.defect is None:
            await recorder.send(now)

    await asyncio.gather(*(send_repeatedly() for _ in range(concurrency)))
    return recorder.responses(timer() - recorder.began)


async def open_loop(
    send: Callable[[int], Awaitable[object]],
    rate: float,
    seconds: float,
    *,
    seed: int = 0,
    until: asyncio.Event | None = None,
    timing: Timing | None = None,
) -> Responses:
    """Send requests at the times of a Poisson process, without waiting for responses.

    Args:
        send: Function that sends a request. The function receives the index of the request, counted
            from 0.
        rate: Requests per second.
        seconds: Duration of the loop in seconds.
        seed: Random seed for the times of the requests.
        until: Event that ends the loop before `seconds` have passed.
        timing: Clock of the loop, and function to sleep.
    """
    timing, random = timing or Timing(), np.random.default_rng(seed)
    recorder, in_flight = _Recorder(send, timing.timer), set[asyncio.Task[None]]()
    due = recorder.began
    while (
        due < recorder.began + seconds
        and recorder.defect is None
        and not (until and until.is_set())
    ):
        if (left := due - timing.timer()) > 0:
            await timing.sleep(left)
        task = asyncio.ensure_future(recorder.send(due))
        in_flight.add(task)
        task.add_done_callback(in_flight.discard)
        due += random.exponential(1 / rate)
    if in_flight:
        await asyncio.wait(in_flight)
    elapsed = timing.timer() - recorder.began
    return recorder.responses(elapsed if until else max(elapsed, seconds))


class _Recorder:
    """Sender of requests, which records the results for `Responses`."""

    def __init__(
        self, send: Callable[[int], Awaitable[object]], timer: Callable[[], float]
    ) -> None:
        self._send, self._timer = send, timer
        self.began = timer()
        self.defect: Exception | None = None
        self._sent = 0
        self._completed: list[tuple[float, float]] = []
        self._failed: Counter[str] = Counter()
        self._first_errors: dict[str, str] = {}

    async def send(self, due: float) -> None:
        number, self._sent = self._sent, self._sent + 1
        try:
            await self._send(number)
        except (TemporaryError, PermanentError, ContractError) as error:
            kind = type(error).__name__
            self._failed[kind] += 1
            self._first_errors.setdefault(kind, str(error))
        except Exception as defect:
            self.defect = self.defect or defect
        else:
            self._completed.append((due, self._timer() - due))

    def responses(self, seconds: float) -> Responses:
        if self.defect is not None:
            raise self.defect
        due, latencies = np.array(self._completed, dtype=np.float64).reshape(-1, 2).T
        return Responses(due, latencies, seconds, dict(self._failed), self._first_errors)


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Percentiles in milliseconds with NumPy's default interpolation, or None without responses."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    mean: float | None = None

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> "Latencies":
        """Return the percentiles of times in seconds."""
        if not len(seconds):
            return cls()
        percentiles = {
            f"p{percent}": 1e3 * float(np.percentile(seconds, percent)) for percent in (50, 95, 99)
        }
        return cls(**percentiles, max=1e3 * float(seconds.max()), mean=1e3 * float(seconds.mean()))


def run_precisely(main: Coroutine[Any, Any, T]) -> T:
    """Run `asyncio.run` with timers precise to microseconds, for up to about 1000 open sockets.

    The epoll of the default loop rounds every wait up to whole milliseconds. The measured times of
    short requests would then be too long.
    """
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    task = loop.create_task(main)
    try:
        # Ctrl-C cancels `main`, which then lets its calls end. Interrupted calls could crash the
        # server. Only the main thread handles signals.
        with suppress(ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGINT, task.cancel)
        return loop.run_until_complete(task)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def within(responses: Responses, begin: float, end: float) -> NDArray[np.float64]:
    """Return the latencies of the requests that were due in [begin, end)."""
    return responses.latencies[(responses.due >= begin) & (responses.due < end)]


def window_figures(
    responses: Responses, *, window: tuple[float, float], quiet: tuple[float, float]
) -> dict[str, Any]:
    """Compare the requests that were due in a window with the requests of a quiet time.

    The quiet time is longer than the window, because the p99 of few requests varies.

    Args:
        responses: Results of a continuous load. All times are values of the same clock.
        window: Begin and end of the window. The window of a release lasts from its announcement to
            its record in the journal.
        quiet: Begin and end of a quiet time with the same rate of requests. No model is loaded in
            this time.

    Returns:
        The p99 of the window and of the quiet time in milliseconds, and their ratio. A p99 without
        requests is None. If one p99 is None, the ratio is None.
    """
    in_window = within(responses, *window)
    during, before = Latencies.of(in_window), Latencies.of(within(responses, *quiet))
    known = during.p99 is not None and before.p99 is not None
    return {
        "window_seconds": window[1] - window[0],
        "num_in_window": len(in_window),
        "window_p99_ms": during.p99,
        "before_p99_ms": before.p99,
        "ratio": during.p99 / before.p99 if known else None,
    }
