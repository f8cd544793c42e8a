"""Publishes what was scored, and later what came of it, to the log: at least once, in few commits.

Prediction records wait for the next flush; clicks wait for their delay too, so an outcome never precedes its
prediction. A flush that fails for now is repeated with the same ids, by which readers recognise what they have. While
the log is away records wait here, up to a bound; what comes beyond it is dropped, counted and told. How messages are
stored is the log's; what they mean together is the monitor's.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from components.contracts.records import CLICK, EVENTS, OutcomeBatch, PredictionBatch, encode
from components.logs.event_log import Publisher
from components.runtime.errors import ContractError, TemporaryError

logger = logging.getLogger(__name__)

MAX_ROWS_PER_RECORD = 2048
"""A prediction record of this many rows takes 0.55 MB; the log takes 1 MB."""
MAX_OUTCOMES_PER_MESSAGE = 4096
"""After an outage of the log all its clicks are due at once, and a message takes 1 MB: about 200 bytes a click."""
MAX_ROWS_PER_FLUSH = 50_000
"""About 14 MB: after an outage all in one would take the log longer than its timeout, again and again."""


class _Flush(NamedTuple):
    messages: list[tuple[str, bytes]]
    rows: int
    outcomes: int


class _Outcome(NamedTuple):
    due: float
    request_id: str
    row: int
    event: str


@dataclass(frozen=True, kw_only=True)
class PublisherSettings:
    """How often to publish, and how long to try."""

    interval_seconds: float = 0.15
    """Time between flushes: one commit each. Shorter is fresher, longer is cheaper."""
    first_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 2.0
    give_up_seconds: float = 60.0
    """How long one flush is repeated while the log is unavailable."""
    max_queued_rows: int = 500_000
    """Most rows that wait for the log, about 140 MB; what is added beyond them is dropped."""

    def __post_init__(self) -> None:
        """Refuses settings that cannot work."""
        if self.interval_seconds <= 0:
            raise ContractError(f"interval_seconds is {self.interval_seconds}, expected more than 0")
        if self.max_queued_rows < 1:
            raise ContractError(f"max_queued_rows is {self.max_queued_rows}, expected at least 1")


class RecordPublisher:
    """Queues predictions and outcomes, and publishes what is due; use in one event loop."""

    def __init__(
        self,
        log: Publisher,
        *,
        source: str,
        settings: PublisherSettings | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Starts with nothing queued.

        Args:
            log: Where to publish.
            source: Names this publisher in outcome ids; unique per log.
            settings: See `PublisherSettings`.
            clock: Seconds since the epoch.
            sleep: Waits between flushes and retries.
        """
        self._log, self._source, self._settings = log, source, settings or PublisherSettings()
        self._clock, self._sleep = clock, sleep
        self._predictions: list[PredictionBatch] = []
        self._waiting: list[_Outcome] = []
        """A heap by time."""
        self._pending: _Flush | None = None
        """The flush under way: kept as it is until the log has it, so that its ids never name other content."""
        self._flushing = asyncio.Lock()
        self._outcome_batches = 0
        self._stopping = False
        self._queued_rows = 0
        self._dropped_since_told = 0
        self.dropped_rows = 0
        """Rows that were added while `max_queued_rows` waited, and are lost with their clicks."""
        self.published_rows = 0
        """Rows in prediction records that the log has."""
        self.published_outcomes = 0
        """Outcomes that the log has."""

    @property
    def queued_predictions(self) -> int:
        """Prediction records not yet in the log: grows while the log is unavailable."""
        return len(self._predictions)

    def add(self, prediction: PredictionBatch, clicks: Sequence[tuple[int, float]] = ()) -> None:
        """Queues a prediction and its clicks, each a row and the seconds after the prediction's time.

        Drops both where the queue is full: a click without its prediction would be of no use.
        """
        if self._queued_rows and self._queued_rows + len(prediction) > self._settings.max_queued_rows:
            self.dropped_rows += len(prediction)
            self._dropped_since_told += len(prediction)
            return
        self._predictions.append(prediction)
        self._queued_rows += len(prediction)
        for row, delay in clicks:
            self.tell(prediction.request_id, row, prediction.time + delay)

    def tell(self, request_id: str, row: int, time: float, *, event: str = CLICK) -> None:
        """Queues an outcome of a request that any publisher of this log may have predicted.

        Args:
            request_id: The prediction's.
            row: Which of its rows, from 0.
            time: When it happened, seconds since the epoch; published once that time has come.
            event: `click` or `conversion`.

        Raises:
            ContractError: another event.
        """
        if event not in EVENTS:
            raise ContractError(f"outcome event is {event!r}, expected one of {EVENTS}")
        heapq.heappush(self._waiting, _Outcome(time, request_id, row, event))

    async def flush(self) -> None:
        """Publishes all queued predictions and the clicks that are due, in this order, in one commit.

        What an earlier flush could not publish goes first, alone; of a queue longer than `MAX_ROWS_PER_FLUSH` only its
        beginning goes.

        Raises:
            TemporaryError: the log stayed unavailable for `give_up_seconds`; the next flush tries again.
        """
        async with self._flushing:
            self._pending = self._pending or self._next_flush()
            if self._pending is None:
                return
            await self._publish(self._pending.messages)
            self._queued_rows -= self._pending.rows
            self.published_rows += self._pending.rows
            self.published_outcomes += self._pending.outcomes
            self._pending = None

    async def run(self) -> None:
        """Flushes every interval until `drain` ends it."""
        while not self._stopping:
            await self.flush()
            await self._sleep(self._settings.interval_seconds)

    async def drain(self) -> None:
        """Publishes everything still queued, waiting for each outcome's time; `run` ends too."""
        self._stopping = True
        await self.flush()
        while self._waiting or self._predictions or self._pending:
            wait = self._waiting[0].due - self._clock() if self._waiting else 0.0
            await self._sleep(max(wait, self._settings.interval_seconds))
            await self.flush()

    def _next_flush(self) -> _Flush | None:
        """What is due now; None when nothing is."""
        now = self._clock()
        predictions, self._predictions = self._first(MAX_ROWS_PER_FLUSH)
        due: dict[str, list[_Outcome]] = {}
        # Outcomes wait while predictions do: theirs may be among them.
        while not self._predictions and self._waiting and self._waiting[0].due <= now:
            outcome = heapq.heappop(self._waiting)
            due.setdefault(outcome.event, []).append(outcome)
        messages = [(p.request_id, encode(p)) for p in predictions]
        for of_event in due.values():
            for start in range(0, len(of_event), MAX_OUTCOMES_PER_MESSAGE):
                outcomes = self._outcomes(of_event[start : start + MAX_OUTCOMES_PER_MESSAGE])
                messages.append((outcomes.batch_id, encode(outcomes)))
        num_outcomes = sum(len(of_event) for of_event in due.values())
        return _Flush(messages, sum(len(p) for p in predictions), num_outcomes) if messages else None

    def _first(self, max_rows: int) -> tuple[list[PredictionBatch], list[PredictionBatch]]:
        """Queued predictions with at most so many rows, at least one prediction, and those left."""
        rows = 0
        for index, prediction in enumerate(self._predictions):
            rows += len(prediction)
            if index and rows > max_rows:
                return self._predictions[:index], self._predictions[index:]
        return self._predictions, []

    def _outcomes(self, due: list[_Outcome]) -> OutcomeBatch:
        self._outcome_batches += 1
        return OutcomeBatch(
            batch_id=f"{self._source}-outcomes-{self._outcome_batches}",
            time=due[-1].due,
            event=due[-1].event,
            request_ids=tuple(outcome.request_id for outcome in due),
            rows=np.array([outcome.row for outcome in due], dtype=np.int32),
            times=np.array([outcome.due for outcome in due], dtype=np.float64),
        )

    async def _publish(self, messages: list[tuple[str, bytes]]) -> None:
        give_up_at = self._clock() + self._settings.give_up_seconds
        backoff = self._settings.first_backoff_seconds
        while True:
            try:
                # In a thread: a commit waits for the disk, and a busy log for its other writer.
                await asyncio.to_thread(self._log.publish, messages)
                self._tell_dropped()
                return
            except TemporaryError as error:
                if self._clock() >= give_up_at:
                    raise
                logger.warning("log unavailable, publishing %d messages again: %s", len(messages), error)
                self._tell_dropped()
            await self._sleep(backoff)
            backoff = min(2 * backoff, self._settings.max_backoff_seconds)

    def _tell_dropped(self) -> None:
        if self._dropped_since_told:
            logger.error(
                "dropped %d rows with their clicks, since %d rows wait for the log: %d in all",
                self._dropped_since_told,
                self._queued_rows,
                self.dropped_rows,
            )
            self._dropped_since_told = 0
