"""Replay traffic through `RecommenderClient` at a given rate, and report the clicks later.

The load is open-loop: requests start at their scheduled times and do not wait for earlier answers.
The number of requests in flight has a limit. At this limit, the replay falls behind its schedule.
If the replay is more than a second late, it skips the missed part of the schedule instead of
sending a burst. `traffic` provides the rows, and the monitor measures the quality of the scores. In
a process of its own (`run_replay`), the replay reads commands from standard input, and writes one
line per second and a summary. The process stops at the end of standard input, for example when its
parent process ends.
"""

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from demo.simulation.traffic import Request, Traffic
from evergreen.config.spec import Recommender
from evergreen.contracts.records import MAX_ROWS_PER_RECORD
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError, expect
from evergreen.statistics.metrics import roc_auc
from inference_client.publisher import Outcome, Unpublished
from inference_client.recommender import RecommenderClient
from inference_client.scoring import ClientSettings
from inference_client.timing import Timing

logger = logging.getLogger(__name__)

MAX_DELAY_FACTOR = 4.0
"""Maximum delay of a click, as a multiple of the mean delay."""
_BEFORE, _AFTER = "before", "after"
"""Phases of a replay: before and after the drift."""
_MAX_BEHIND_SECONDS = 1.0
_MAX_QUEUED_ROWS = 128_000
"""The replay pauses when this number of rows waits in the queue to the event log."""
_STOP_SECONDS = 0.1
"""Maximum time in seconds after which a waiting replay notices `stop`."""
_MAX_LATENCIES = 200_000
_MAX_PROBABILITY_ROWS = 2_000_000
"""Maximum rows of each phase for the Bayes-optimal AUC, with 8 bytes per row. The limit bounds
memory, because a replay may run for weeks."""


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Rate and limits of a replay."""

    rate: float
    """Rows per second."""
    rows_per_request: int = 64
    label_delay_seconds: float = 1.5
    """Mean seconds between a prediction and its click. The delay is exponential, up to
    `MAX_DELAY_FACTOR` times this mean."""
    max_rows: int | None = None
    """Number of rows after which the replay stops. None means that the replay stops only on
    command."""
    max_in_flight: int = 16
    """Maximum concurrent requests. When the replay reaches this limit, it falls behind its
    schedule."""
    max_consecutive_failures: int = 20

    def __post_init__(self) -> None:
        most = MAX_ROWS_PER_RECORD
        expect(self, "rows per second above 0", lambda value: 0 < value < float("inf"), "rate")
        expect(self, f"1..{most}", lambda value: 1 <= value <= most, "rows_per_request")
        expect(self, "0 or more", lambda value: 0 <= value < float("inf"), "label_delay_seconds")
        limits = ("max_rows", "max_in_flight", "max_consecutive_failures")
        expect(self, "at least 1", lambda value: value is None or value >= 1, *limits)


class Replay:
    """Replay of one source of traffic. Commands must be sent from the event loop of the replay."""

    def __init__(
        self,
        client: RecommenderClient,
        traffic: Traffic,
        settings: ReplaySettings,
        *,
        random: Generator,
        run: str,
        timing: Timing | None = None,
    ) -> None:
        """Prepare the replay, which `send` starts.

        Args:
            client: Client that scores the rows.
            traffic: Source of the requests to replay.
            settings: Rate and limits.
            random: Random numbers for the click delays.
            run: Prefix of the request ids, unique in the event log.
            timing: Clocks and waits.
        """
        self._client, self._traffic = client, traffic
        self._settings, self._timing = settings, timing or Timing()
        self._random, self._run = random, run
        self._stopping = False
        self._in_flight: set[asyncio.Task[None]] = set()
        self._consecutive_failures = 0
        self._defect: BaseException | None = None
        """Unexpected error of a request's task, which `send` raises."""
        self.statistics = _ReplayStatistics()
        self.skipped_seconds = 0.0
        """Seconds of the schedule that were skipped because the server or the event log was too
        slow."""
        self.exhausted = False
        """Whether all rows of the source were returned."""
        self.failure: str | None = None
        """Why the replay gave up after too many consecutive failures, or None."""

    def command(self, line: str) -> None:
        """Execute the command `drift` or `stop`. Any other line is logged and ignored."""
        words = line.split()
        try:
            if words == ["drift"]:
                self._drift_simulator()
            elif words == ["stop"]:
                self.stop()
            elif words:
                raise ContractError(f"command is {line.strip()!r}, expected drift or stop")
        except ContractError as error:
            logger.error("command ignored: %s", error)

    def stop(self) -> None:
        """Stop `send` after the requests in flight."""
        self._stopping = True

    async def send(self) -> None:
        """Send requests until a stop, the end of the traffic, `max_rows`, or too many failures.

        The replay waits for requests in flight and never cancels them (see `transport`).
        """
        due, rows_left = self._timing.timer(), self._settings.max_rows or float("inf")
        while not self._stopping:
            await self._wait_for_turn(due)
            if self._stopping or not rows_left:
                break
            # Rows are drawn when they are sent, so a drift takes effect at the next request.
            request = self._traffic.take(int(min(self._settings.rows_per_request, rows_left)))
            if request is None:
                self.exhausted = True
                break
            self.statistics.sent += 1
            serving = self._serve(
                f"{self._run}-{self.statistics.sent}", request, self.statistics.phase
            )
            task = asyncio.get_running_loop().create_task(serving)
            self._in_flight.add(task)
            task.add_done_callback(self._forget_request)
            rows_left -= len(request.label)
            now = self._timing.timer()
            if now - due > _MAX_BEHIND_SECONDS:
                self.skipped_seconds += now - due
                due = now
            due += len(request.label) / self._settings.rate
        while self._in_flight:
            await asyncio.wait(self._in_flight)
        if self._defect is not None:
            raise self._defect

    async def _wait_for_turn(self, due: float) -> None:
        while not self._stopping and (wait := due - self._timing.timer()) > 0:
            await self._timing.sleep(min(wait, _STOP_SECONDS))
        while len(self._in_flight) >= self._settings.max_in_flight and not self._stopping:
            await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
        while self._client.log_counts.queued_rows >= _MAX_QUEUED_ROWS and not self._stopping:
            await self._timing.sleep(_STOP_SECONDS)
        if self._client.log_counts.refused:
            # The event log refuses records, so the outcomes of further requests would be lost.
            self.stop()

    def _forget_request(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._defect = error
            self.stop()

    async def _serve(self, request_id: str, request: Request, phase: str) -> None:
        started = self._timing.timer()
        try:
            scored = await self._client.score(request.features, request_id=request_id)
        except (TemporaryError, PermanentError, ContractError) as error:
            self.statistics.count_failure(error)
            self._consecutive_failures += 1
            if self._consecutive_failures == self._settings.max_consecutive_failures:
                self.failure = (
                    f"{self._consecutive_failures} requests failed in a row, the last with: {error}"
                )
                logger.error("giving up: %s", self.failure)
                self.stop()
            return
        self._consecutive_failures = 0
        latency = self._timing.timer() - started
        self.statistics.count_answer(
            request, phase, version=scored.model_version, latency_seconds=latency
        )
        if not scored.logged:
            # A click without its prediction cannot be joined.
            return
        clicked, mean = np.flatnonzero(request.label), self._settings.label_delay_seconds
        delays = np.minimum(self._random.exponential(mean, len(clicked)), MAX_DELAY_FACTOR * mean)
        for row, delay in zip(clicked.tolist(), delays.tolist()):
            self._client.report(Outcome(request_id=request_id, row=row, time=scored.time + delay))

    def _drift_simulator(self) -> None:
        if self.statistics.phase == _AFTER:
            raise ContractError("the traffic has drifted already")
        self._traffic.drift()
        self.statistics.drift_time = self._timing.clock()
        logger.info("drift begins after %d rows", self.statistics.rows)


class _ReplayStatistics:
    """Counts of requests and rows since the start, and since the last line of statistics."""

    def __init__(self) -> None:
        self.sent = self.failed = 0
        """Number of requests sent, and number of requests that failed after all retries."""
        self.rows = self.clicks = 0
        """Number of answered rows, and number of clicks on these rows."""
        self.drift_time: float | None = None
        """Time of the drift in seconds since the epoch, or None before it."""
        self._versions: Counter[int] = Counter()
        self._errors: Counter[str] = Counter()
        self._latencies: list[float] = []
        self._probabilities: dict[str, list[tuple[NDArray[np.int32], NDArray[np.float32]]]] = {
            _BEFORE: [],
            _AFTER: [],
        }
        self._probability_rows: Counter[str] = Counter()
        self._reported = {"requests_sent": 0, "requests_failed": 0, "rows": 0}
        """Counts of all lines so far."""
        self._second_latencies: list[float] = []
        self._second_versions: Counter[int] = Counter()

    @property
    def phase(self) -> str:
        """`before` or `after` the drift."""
        return _BEFORE if self.drift_time is None else _AFTER

    def count_answer(
        self, request: Request, phase: str, *, version: int, latency_seconds: float
    ) -> None:
        """Count one answered request.

        `phase` is the phase of the replay in which the answered rows were drawn.
        """
        n = len(request.label)
        self.rows += n
        self.clicks += int(request.label.sum())
        self._versions[version] += n
        self._second_versions[version] += n
        self._second_latencies.append(latency_seconds)
        if len(self._latencies) < _MAX_LATENCIES:
            self._latencies.append(latency_seconds)
        if (
            request.probability is not None
            and self._probability_rows[phase] < _MAX_PROBABILITY_ROWS
        ):
            self._probability_rows[phase] += n
            self._probabilities[phase].append(
                (request.label, request.probability.astype(np.float32))
            )

    def count_failure(self, error: Exception) -> None:
        """Count one request that failed after all retries."""
        self.failed += 1
        self._errors[type(error).__name__] += 1

    def take_second(self, time: float) -> dict[str, Any]:
        """Return the next line, which covers the time since the previous line.

        The line's field `versions` is the number of answered rows by version.
        """
        counts = {"requests_sent": self.sent, "requests_failed": self.failed, "rows": self.rows}
        line: dict[str, Any] = {
            name: count - self._reported[name] for name, count in counts.items()
        }
        latencies, self._second_latencies = self._second_latencies, []
        self._reported = counts
        percentiles = {f"p{p}_ms": _milliseconds(latencies, p) for p in (50, 99)}
        versions = {str(version): rows for version, rows in sorted(self._second_versions.items())}
        self._second_versions.clear()
        return {
            "time": round(time, 3),
            "phase": self.phase,
            **line,
            **percentiles,
            "versions": versions,
        }

    def summary(self) -> dict[str, Any]:
        """Return all counts and metrics of the replay. A number that is undefined is None.

        Percentiles cover the first 200,000 answers, and `bayes_auc` covers each phase's first
        2,000,000 rows.
        """
        return {
            "requests": {"sent": self.sent, "failed": self.failed},
            "rows": self.rows,
            "clicks": self.clicks,
            "drift_time": self.drift_time,
            "bayes_auc": {phase: self._bayes_auc(phase) for phase in (_BEFORE, _AFTER)},
            "versions_seen": {
                str(version): rows for version, rows in sorted(self._versions.items())
            },
            "latency_ms": {
                "p50": _milliseconds(self._latencies, 50),
                "p99": _milliseconds(self._latencies, 99),
            },
            "errors": dict(self._errors),
        }

    def _bayes_auc(self, phase: str) -> float | None:
        if not self._probabilities[phase]:
            return None
        labels, probabilities = (
            np.concatenate(arrays) for arrays in zip(*self._probabilities[phase])
        )
        return roc_auc(labels, probabilities)


def _milliseconds(latencies: list[float], percentile: float) -> float | None:
    return round(float(np.percentile(latencies, percentile)) * 1e3, 3) if latencies else None


@dataclass(frozen=True, kw_only=True)
class ReplayProcess:
    """Inputs and outputs of a replay."""

    server: str
    recommender: Recommender
    """Recommender whose rows are sent."""
    log_url: str
    seed: int
    stats_path: Path
    """File with one JSON line per second."""
    summary_path: Path
    """JSON file that is written when the replay ends for any reason."""
    run: str
    """Prefix of the request ids, unique in the event log."""
    plan_uri: str | None = None
    """Model repository with the traffic plan to follow. If None, all requests use the same
    model."""
    stdin: int = 0
    """File descriptor from which the commands `drift` and `stop` are read. The end of the input has
    the same effect as `stop`."""


async def run_replay(
    process: ReplayProcess,
    traffic: Traffic,
    settings: ReplaySettings,
    *,
    client_settings: ClientSettings,
) -> dict[str, Any]:
    """Replay the traffic and return the summary.

    A command or too many failures end the replay early.

    Raises:
        ContractError: the event log's URL or its use is invalid.
        PermanentError: too many consecutive requests failed, or records were lost. The summary is
            written before the error is raised.
    """
    client = RecommenderClient(
        process.server,
        recommender=process.recommender,
        log=process.log_url,
        plan_uri=process.plan_uri,
        settings=client_settings,
        source=process.run,
    )
    process.stats_path.parent.mkdir(parents=True, exist_ok=True)
    async with client:
        replay = Replay(
            client,
            traffic,
            settings,
            random=np.random.default_rng([process.seed, 8]),
            run=process.run,
        )
        _follow_standard_input(process.stdin, replay)
        with open(process.stats_path, "w") as stats:
            lines = asyncio.create_task(_write_lines(replay, stats))
            await replay.send()
            error = None if replay.failure is None else f"server {process.server}: {replay.failure}"
            try:
                await client.close()
            except Unpublished as loss:
                error = str(loss)
            lines.cancel()
            _write_line(replay, stats)
    counts = client.log_counts
    summary = {
        **replay.statistics.summary(),
        "outcomes": counts.published_outcomes,
        "published_rows": counts.published_rows,
        "dropped_rows": counts.dropped_rows,
        "exhausted": replay.exhausted,
        "drift": traffic.drift_note,
        "behind_seconds": round(replay.skipped_seconds, 3),
        "run": process.run,
        "server": process.server,
        "error": error,
    }
    write_whole(process.summary_path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    if error is not None:
        raise PermanentError(error)
    return summary


def _follow_standard_input(stdin: int, replay: Replay) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, replay.stop)
    threading.Thread(
        target=_read_commands, args=(stdin, loop, replay), name="commands", daemon=True
    ).start()


async def _write_lines(replay: Replay, stats: IO[str]) -> None:
    while True:
        await asyncio.sleep(1.0)
        _write_line(replay, stats)


def _write_line(replay: Replay, stats: IO[str]) -> None:
    line = replay.statistics.take_second(time.time())
    stats.write(json.dumps({**line, "exhausted": replay.exhausted}, allow_nan=False) + "\n")
    stats.flush()


def _read_commands(stdin: int, loop: asyncio.AbstractEventLoop, replay: Replay) -> None:
    # Use os.read instead of sys.stdin, because a daemon thread in a buffered reader can abort the
    # interpreter's exit.
    unread = b""
    try:
        while chunk := os.read(stdin, 4096):
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                loop.call_soon_threadsafe(replay.command, line.decode(errors="replace"))
    except OSError as error:
        logger.error("standard input cannot be read, stopping: %s", error)
    try:
        loop.call_soon_threadsafe(replay.stop)
    except RuntimeError:
        logger.debug("standard input ended after the replay")
