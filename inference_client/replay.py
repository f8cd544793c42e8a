"""Replays traffic against a server at a stated rate: scores, publishes predictions, and later their clicks.

Open loop: requests start when their time comes, not when the last answer came, up to a bound in flight; beyond it
the replay falls behind, says by how much, and after a second forgives what it owes instead of bursting. Rows come
from `traffic`, counts go to `statistics`; whether scores were good is the monitor's to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.random import Generator

from components.contracts.records import PredictionBatch
from components.runtime.errors import ContractError, PermanentError, TemporaryError
from inference_client.publisher import MAX_ROWS_PER_RECORD, RecordPublisher
from inference_client.scorer import KeyedScorer, Scored, Seams, shadow_of
from inference_client.statistics import AFTER, ReplayStatistics
from inference_client.traffic import Request, Traffic

logger = logging.getLogger(__name__)

MAX_DELAY_FACTOR = 4.0
"""No click comes later than this many mean delays."""
_FORGIVEN_SECONDS = 1.0
_MAX_QUEUED_PREDICTIONS = 2000
SHADOW_WAIT_SECONDS = 2.0
"""How long a record waits for its shadow's scores before it goes without them; its answer was served long before."""


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """How to replay."""

    rate: float
    """Rows per second."""
    rows_per_request: int = 64
    label_delay_seconds: float = 1.5
    """Mean delay of a click after its prediction: exponential, cut at `MAX_DELAY_FACTOR` times this."""
    max_rows: int | None = None
    """Stop after this many rows sent; None = when told to."""
    max_in_flight: int = 16
    """Requests at once; beyond it the replay falls behind."""
    max_consecutive_failures: int = 20

    def __post_init__(self) -> None:
        """Refuses settings that cannot work."""
        if not 0 < self.rate < float("inf"):
            raise ContractError(f"rate is {self.rate}, expected rows per second above 0")
        if not 1 <= self.rows_per_request <= MAX_ROWS_PER_RECORD:
            raise ContractError(f"rows_per_request is {self.rows_per_request}, expected 1..{MAX_ROWS_PER_RECORD}")
        if not 0 <= self.label_delay_seconds < float("inf"):
            raise ContractError(f"label_delay_seconds is {self.label_delay_seconds}, expected 0 or more")
        if self.max_rows is not None and self.max_rows < 1:
            raise ContractError(f"max_rows is {self.max_rows}, expected at least 1")
        for name, value in (
            ("max_in_flight", self.max_in_flight),
            ("max_consecutive_failures", self.max_consecutive_failures),
        ):
            if value < 1:
                raise ContractError(f"{name} is {value}, expected at least 1")


class Replay:
    """One replay; commands may come at any time while it runs, from its own event loop."""

    def __init__(
        self,
        scorer: KeyedScorer,
        traffic: Traffic,
        publisher: RecordPublisher,
        settings: ReplaySettings,
        random: Generator,
        *,
        run: str | None = None,
        seams: Seams | None = None,
    ) -> None:
        """Sends nothing yet.

        Args:
            scorer: Where to score.
            traffic: Where rows come from.
            publisher: Where records go; the caller runs and drains it.
            settings: See `ReplaySettings`.
            random: For the delays of clicks.
            run: Names this replay in request ids; must be new to the log. Random without one.
            seams: Clock, timer, sleep.
        """
        self._scorer, self._traffic, self._publisher = scorer, traffic, publisher
        self._settings, self._random = settings, random
        self._run = run or f"replay-{uuid4().hex[:12]}"
        self._seams = seams or Seams()
        self._rate = settings.rate
        self._stopping = False
        self._woken = asyncio.Event()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._unrecorded: set[asyncio.Task[None]] = set()
        """Answered requests whose records wait for their shadows: they are in nobody's way."""
        self._consecutive_failures = 0
        self._defect: BaseException | None = None
        """An error that no request may end with: raised where `send` is awaited instead of lost in its task."""
        self.statistics = ReplayStatistics()
        self.behind_seconds = 0.0
        """How late the newest request was sent."""
        self.forgiven_seconds = 0.0
        """Schedule time given up because the server or the log could not keep up."""
        self.exhausted = False
        """Whether the traffic ran out of rows."""
        self.last_error: Exception | None = None
        self.gave_up = False
        """Whether too many requests in a row failed."""

    def command(self, line: str) -> None:
        """Obeys one line: `drift`, `rate N` or `stop`; what is none of these is logged and ignored."""
        words = line.split()
        try:
            if words == ["drift"]:
                self._drift()
            elif words == ["stop"]:
                self.stop()
            elif len(words) == 2 and words[0] == "rate" and 0 < float(words[1]) < float("inf"):
                self._rate = float(words[1])
                logger.info("rate is now %g rows per second", self._rate)
            elif words:
                raise ContractError(f"command is {line.strip()!r}, expected drift, rate N (above 0) or stop")
        except ValueError as error:
            logger.error("command ignored: %s", error)

    def stop(self) -> None:
        """Ends `send` after the requests in flight."""
        self._stopping = True
        self._woken.set()

    async def send(self) -> None:
        """Sends requests until stopped, exhausted, at `max_rows`, or after too many failures in a row.

        Requests in flight are waited for, never cancelled (see `transport`).
        """
        due = self._seams.timer()
        rows_sent = 0
        while not self._stopping:
            await self._wait_for_turn(due)
            wanted = self._settings.rows_per_request
            if self._settings.max_rows is not None:
                wanted = min(wanted, self._settings.max_rows - rows_sent)
            if self._stopping or not wanted:
                break
            # Rows are drawn when they are sent, so a drift takes effect at the very next request.
            request = self._traffic.take(wanted)
            if request is None:
                self.exhausted = True
                break
            self._start(request, self.statistics.phase)
            rows_sent += len(request.label)
            due = self._next_due(due, len(request.label))
        while waited := self._in_flight | self._unrecorded:
            await asyncio.wait(waited)
        if self._defect is not None:
            raise self._defect

    async def _wait_for_turn(self, due: float) -> None:
        wait = due - self._seams.timer()
        if wait > 0:
            await self._pause(wait)
        while len(self._in_flight) >= self._settings.max_in_flight and not self._stopping:
            await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
        while self._publisher.queued_predictions >= _MAX_QUEUED_PREDICTIONS and not self._stopping:
            await self._pause(0.1)

    async def _pause(self, seconds: float) -> None:
        """Waits, but not past a stop."""
        if seconds < 0.1:
            await self._seams.sleep(seconds)
            return
        sleeping = asyncio.ensure_future(self._seams.sleep(seconds))
        woken = asyncio.ensure_future(self._woken.wait())
        _, pending = await asyncio.wait({sleeping, woken}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    def _next_due(self, due: float, rows: int) -> float:
        now = self._seams.timer()
        self.behind_seconds = max(0.0, now - due)
        if self.behind_seconds > _FORGIVEN_SECONDS:
            self.forgiven_seconds += self.behind_seconds
            due = now
        return due + rows / self._rate

    def _start(self, request: Request, phase: str) -> None:
        self.statistics.count_sent()
        request_id = f"{self._run}-{self.statistics.sent}"
        self._track(self._serve(request_id, request, phase), self._in_flight)

    def _track(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._defect = error
            self.stop()

    async def _serve(self, request_id: str, request: Request, phase: str) -> None:
        started = self._seams.timer()
        try:
            scored = await self._scorer.score(request.dense, request.categorical, request_id=request_id)
        except (TemporaryError, PermanentError, ContractError) as error:
            self._count_failure(error)
            return
        self._consecutive_failures = 0
        self.statistics.count_answer(
            phase=phase,
            version=scored.model_version,
            latency_seconds=self._seams.timer() - started,
            label=request.label,
            probability=request.probability,
        )
        clicked = np.flatnonzero(request.label)
        clicks = list(zip(clicked.tolist(), self._delays(len(clicked))))
        prediction = PredictionBatch(
            request_id=request_id,
            time=self._seams.clock(),
            model_version=scored.model_version,
            dense=request.dense,
            categorical=request.categorical,
            scores=scored.scores,
            canary=scored.canary,
        )
        if scored.shadow is None:
            self._publisher.add(prediction, clicks)
        else:
            self._track(self._record_with_shadow(prediction, clicks, scored), self._unrecorded)

    async def _record_with_shadow(
        self, prediction: PredictionBatch, clicks: list[tuple[int, float]], scored: Scored
    ) -> None:
        shadow = await shadow_of(scored, SHADOW_WAIT_SECONDS)
        if shadow is not None:
            prediction = replace(prediction, shadow_version=shadow.model_version, shadow_scores=shadow.scores)
        self._publisher.add(prediction, clicks)

    def _count_failure(self, error: Exception) -> None:
        self.statistics.count_failure(error)
        self.last_error = error
        self._consecutive_failures += 1
        if self._consecutive_failures >= self._settings.max_consecutive_failures and not self.gave_up:
            self.gave_up = True
            logger.error("giving up after %d failed requests in a row: %s", self._consecutive_failures, error)
            self.stop()

    def _delays(self, count: int) -> list[float]:
        mean = self._settings.label_delay_seconds
        delays: list[float] = np.minimum(self._random.exponential(mean, count), MAX_DELAY_FACTOR * mean).tolist()
        return delays

    def _drift(self) -> None:
        if self.statistics.phase == AFTER:
            raise ContractError("the world has drifted already")
        self._traffic.drift()
        self.statistics.drift_time = self._seams.clock()
        logger.info("drift begins after %d rows", self.statistics.rows)
