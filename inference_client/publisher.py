"""Publishes what was scored, and later what came of it, to the log: at least once, in few commits, through any outage.

Adding a record only appends to a queue; encoding and publishing happen in another thread. Outcomes wait for their time,
and an outcome is never published before its prediction. A failed flush is repeated with the same ids, by which readers
recognise what they have. While the log is unavailable records wait here, up to a bound; beyond it the newest are
dropped and counted. The newest, because what is queued may be half published already, and its outcomes keep their
meaning: an outage leaves one gap in the log instead of many. Every change of state is one log line. How messages are
stored is the log's job; what they mean together is the monitor's.
"""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np

from evergreen.config.features import Features
from evergreen.contracts.record_format import RecordFormat
from evergreen.contracts.records import (
    CLICK,
    EVENTS,
    MAX_ID_CHARACTERS,
    MAX_ROWS_PER_RECORD,
    OutcomeBatch,
    PredictionBatch,
    Record,
    record_id,
)
from evergreen.contracts.values import is_missing
from evergreen.events.event_log import MAX_MESSAGE_BYTES, Publisher, partition_of
from evergreen.runtime.errors import ContractError, PermanentError, TemporaryError, expect
from inference_client.flush import Flush
from inference_client.timing import Timing

logger = logging.getLogger(__name__)

MAX_OUTCOMES_PER_MESSAGE = 2048
"""After an outage all outcomes are due at once; an outcome takes up to 300 bytes of a message's 1 MB."""
MAX_ROWS_PER_FLUSH, MAX_BYTES_PER_FLUSH = 50_000, 14_000_000
"""With everything in one flush, the log could time out after an outage again and again."""
MAX_OUTCOMES_PER_FLUSH = 10_000
"""They are taken from their queue in the event loop, 30 ms of it."""
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 2.0
"""Waits between failed flushes double from the first to the second."""
MAX_AHEAD_SECONDS = 86_400.0
"""How far in the future an outcome may lie: beyond it the time is taken for an error, such as milliseconds."""


@dataclass(frozen=True, kw_only=True, order=True)
class Outcome:
    """What came of a scored row."""

    time: float = 0.0
    """Seconds since the epoch of the event; 0 = now. A datetime or pandas Timestamp with a time zone, and a NumPy
    datetime64, which is UTC, become such seconds. A time to come (of simulated users) is waited for."""
    request_id: str
    """Of the request that scored the row."""
    row: int = 0
    """Which of its rows, from 0; in a ranked list, the position less 1."""
    event: str = CLICK
    """`click` or `conversion`."""

    def __post_init__(self) -> None:
        if self.event not in EVENTS:
            raise ContractError(f"outcome event is {self.event!r}, expected one of {EVENTS}")
        is_row = isinstance(self.row, int | np.integer) and not isinstance(self.row, bool)
        if not is_row or not 0 <= self.row < MAX_ROWS_PER_RECORD:
            raise ContractError(f"outcome row is {self.row!r}, expected 0..{MAX_ROWS_PER_RECORD - 1}")
        check_id("request_id", self.request_id)
        object.__setattr__(self, "time", _seconds_of(self.time))


def _seconds_of(time: object) -> float:
    """Return the seconds since the epoch of an outcome's time.

    Raises:
        ContractError: It is no number and no time with a known zone.
    """
    if not is_missing(time):
        if isinstance(time, np.datetime64) and not np.isnat(time):
            return float(time.astype("datetime64[us]").astype(np.int64)) / 1e6
        # Without a zone it would be read by the zone of whichever machine runs this.
        if isinstance(time, datetime) and time.utcoffset() is not None:
            return time.timestamp()
    if isinstance(time, int | float | np.integer | np.floating) and not isinstance(time, bool):
        try:
            return float(time)
        except OverflowError:
            pass
    raise ContractError(
        f"outcome time is {time!r}, expected seconds since the epoch, a datetime with a time zone, or a datetime64"
    )


def held_bytes(queued: PredictionBatch | Outcome) -> int:
    """Return the memory that a queued record or outcome takes, its objects included; no less than it really is."""
    if isinstance(queued, Outcome):
        return OUTCOME_BYTES + len(queued.request_id)
    num_bytes = RECORD_BYTES + len(queued.request_id)
    num_bytes += queued.dense.nbytes + queued.categorical.nbytes + queued.scores.nbytes
    for array in (queued.positions, queued.propensities, queued.shadow_scores):
        if array is not None:
            num_bytes += ARRAY_BYTES + array.nbytes
    return num_bytes


RECORD_BYTES, ARRAY_BYTES, OUTCOME_BYTES = 975, 125, 325
"""Python's objects for a record with three arrays, for each further array, and for an outcome in its queue."""
ROWS_SHARE = 0.75


@dataclass(kw_only=True)
class PublishingCounts:
    """What became of everything that was given to the log."""

    published_rows: int = 0
    """Rows of prediction records that the log has."""
    published_outcomes: int = 0
    queued_rows: int = 0
    """Rows that wait here; their number grows while the log is unavailable."""
    queued_outcomes: int = 0
    """Outcomes that wait here, including those whose time has not come."""
    dropped_rows: int = 0
    """Rows that are lost: they came while the queue was full, the log took no such message, or the client closed."""
    dropped_outcomes: int = 0
    problem: str | None = None
    """Why the log is unavailable; None while it takes records."""
    refused: bool = False
    """Whether the log refuses until somebody changes it (no such topic, no rights to it), instead of being away."""


_METRICS = (
    ("published_rows", "_total", "Rows of predictions that the log has."),
    ("published_outcomes", "_total", "Outcomes that the log has."),
    ("dropped_rows", "_total", "Rows of predictions that are lost: see the log lines."),
    ("dropped_outcomes", "_total", "Outcomes that are lost: see the log lines."),
    ("queued_rows", "", "Rows of predictions that wait for the log."),
    ("queued_outcomes", "", "Outcomes that wait for their time or for the log."),
)
"""Field of `PublishingCounts`, end of the metric's name, text."""


def metrics_text(counts: Mapping[str, PublishingCounts]) -> str:
    """What a service shows at /metrics, in Prometheus' text format: each number, and whether the log takes records.

    Args:
        counts: Of each of the service's clients, by its recommender's name.

    >>> metrics_text({"shop": PublishingCounts(dropped_rows=3)}).splitlines()[-1]
    'evergreen_client_log_available{recommender="shop"} 1'
    """
    families = [
        (name + end, "counter" if end else "gauge", text, {of: getattr(each, name) for of, each in counts.items()})
        for name, end, text in _METRICS
    ]
    available = {of: int(each.problem is None) for of, each in counts.items()}
    families.append(("available", "gauge", "1 while the log takes records, 0 while they wait.", available))
    lines = []
    for name, kind, text, values in families:
        full_name = f"evergreen_client_log_{name}"
        lines += [f"# HELP {full_name} {text}", f"# TYPE {full_name} {kind}"]
        lines += [f'{full_name}{{recommender="{of}"}} {value}' for of, value in values.items()]
    return "\n".join([*lines, ""])


class Unpublished(TemporaryError):
    """Records were lost when the publisher was closed, because the log was unavailable."""

    def __init__(self, *, rows: int, outcomes: int, reason: str) -> None:
        super().__init__(f"{rows} rows and {outcomes} outcomes could not be published and are lost: {reason}")
        self.rows, self.outcomes, self.reason = rows, outcomes, reason


@dataclass(frozen=True, kw_only=True)
class PublisherSettings:
    """How often to publish, and how much to keep."""

    interval_seconds: float = 0.15
    """Time between flushes: one commit each. Shorter is fresher, longer is cheaper."""
    close_seconds: float = 30.0
    """How long closing waits for an unavailable log before it gives up what is queued."""
    max_queued: int = 500_000
    """Most rows that wait for the log, and most outcomes."""
    max_queued_bytes: int = 250_000_000
    """Most memory that all of these take, with the objects that hold them. Rows may take three quarters, so that there
    is room for the outcomes of what waits: of 39 columns these are 150,000 requests of one row, or all `max_queued`
    rows in requests of 64. While it publishes, a client needs about 40 MB more."""

    def __post_init__(self) -> None:
        names = ("interval_seconds", "close_seconds", "max_queued", "max_queued_bytes")
        expect(self, "more than 0", lambda value: value > 0, *names)

    def share(self, count: int) -> "PublisherSettings":
        """Those of one of `count` publishers that keep together what these allow."""
        queued, num_bytes = max(self.max_queued // count, 1), max(self.max_queued_bytes // count, 1)
        return replace(self, max_queued=queued, max_queued_bytes=num_bytes)


class RecordPublisher:
    """Queues predictions and outcomes, and publishes what is due; use in one event loop."""

    def __init__(
        self,
        log: Publisher,
        *,
        features: Features,
        source: str,
        settings: PublisherSettings | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Starts with nothing queued.

        `source` names this publisher in outcome ids, unique per log.
        """
        check_id("source", source)
        self._log, self._form, self._source = log, RecordFormat(features), source
        self._settings, self._timing = settings or PublisherSettings(), timing or Timing()
        self.max_rows = min(MAX_ROWS_PER_RECORD, self._form.max_rows(MAX_MESSAGE_BYTES))
        """The most rows of one prediction: its record must fit a message of the log."""
        self._queued_bytes = 0
        self._max_flushed_rows = min(MAX_ROWS_PER_FLUSH, MAX_BYTES_PER_FLUSH // self._form.row_bytes)
        self._counts = PublishingCounts()
        self._predictions: list[PredictionBatch] = []
        self._outcomes: list[tuple[float, int, Outcome]] = []
        """A heap by time, then number: 7 times as quick as one that compares outcomes."""
        self._numbers = itertools.count()
        self._pending: Flush | None = None
        """The flush that is under way, or failed and comes first next time."""
        self._flushing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1)
        """Of its own: a log that is away must not take the threads that the service's event loop has for all."""
        self._outcome_batches = 0
        self._stopping = False
        self._failures = 0
        """Flushes that failed in a row."""
        self._failing_since = 0.0
        self._is_dropping = False

    @property
    def counts(self) -> PublishingCounts:
        """What became of everything that was added until now."""
        return replace(self._counts)

    def add(self, prediction: PredictionBatch, outcomes: Sequence[Outcome] = ()) -> bool:
        """Queues a prediction with the outcomes that are known of it; never waits.

        False where the queue is full, and then its outcomes are dropped too.
        """
        queued, num_bytes = self._counts.queued_rows, held_bytes(prediction)
        has_room = queued + len(prediction) <= self._settings.max_queued and (
            self._queued_bytes + num_bytes <= ROWS_SHARE * self._settings.max_queued_bytes
        )
        if queued and not has_room:
            self._drop(rows=len(prediction), outcomes=len(outcomes))
            return False
        self._predictions.append(prediction)
        self._counts.queued_rows += len(prediction)
        self._queued_bytes += num_bytes
        for outcome in outcomes:
            self.add_outcome(outcome)
        return True

    def add_outcome(self, outcome: Outcome) -> bool:
        """Queues an outcome of a request that any publisher of this log may have predicted; never waits.

        False where too many wait.

        Raises:
            ContractError: Its time is before 1970, or more than `MAX_AHEAD_SECONDS` in the future.
        """
        now = self._timing.clock()
        if not 0 <= outcome.time <= now + MAX_AHEAD_SECONDS:
            raise ContractError(f"outcome time is {outcome.time}, expected seconds since the epoch, about {now:.0f}")
        num_bytes = held_bytes(outcome)
        is_too_large = self._queued_bytes + num_bytes > self._settings.max_queued_bytes
        if (is_too_large and self._queued_bytes) or self._counts.queued_outcomes >= self._settings.max_queued:
            self._drop(rows=0, outcomes=1)
            return False
        if not outcome.time:
            outcome = replace(outcome, time=now)
        heapq.heappush(self._outcomes, (outcome.time, next(self._numbers), outcome))
        self._counts.queued_outcomes += 1
        self._queued_bytes += num_bytes
        return True

    async def flush(self) -> None:
        """Publishes queued predictions and the outcomes that are due, in this order, in one commit.

        What an earlier flush could not publish goes first, alone; of a queue longer than `MAX_ROWS_PER_FLUSH`, or
        larger than `MAX_BYTES_PER_FLUSH`, only its beginning goes.

        Raises:
            Exception: Whatever the log raised; the same messages go first at the next flush.
        """
        async with self._flushing:
            self._pending = self._pending or self._next_flush()
            if self._pending is None:
                return
            try:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, self._pending.publish, self._log)
            except Exception as error:
                self._note_failure(error)
                raise
            self._note_success(self._pending)
            self._pending = None

    async def run(self) -> None:
        """Flushes every interval until `drain` ends it; no failure of the log does."""
        while not self._stopping:
            await self._timing.sleep(await self._flush_or_backoff())

    async def drain(self) -> None:
        """Publishes what is queued, outcomes due within `close_seconds` at their time, later ones now; `run` ends too.

        Raises:
            Unpublished: The log refused, or stayed unavailable for `close_seconds`; what was queued is dropped.
        """
        self._stopping = True
        latest = self._timing.clock() + self._settings.close_seconds
        self._outcomes = [(at if at <= latest else 0.0, number, outcome) for at, number, outcome in self._outcomes]
        heapq.heapify(self._outcomes)
        give_up_at = None
        while True:
            wait = await self._flush_or_backoff()
            now = self._timing.timer()
            if not self._failures:
                give_up_at = None
                if not (self._predictions or self._outcomes or self._pending):
                    self._say_dropped()
                    return
                if not self._predictions:
                    wait = max(wait, self._outcomes[0][0] - self._timing.clock())
            else:
                give_up_at = now + self._settings.close_seconds if give_up_at is None else give_up_at
                if self._counts.refused or now >= give_up_at:
                    raise self._give_up()
            await self._timing.sleep(wait)

    def _say_dropped(self) -> None:
        counts = self._counts
        if counts.dropped_rows or counts.dropped_outcomes:
            logger.warning(
                "closed; %d rows and %d outcomes are in the log, %d rows and %d outcomes were dropped",
                counts.published_rows,
                counts.published_outcomes,
                counts.dropped_rows,
                counts.dropped_outcomes,
            )

    async def _flush_or_backoff(self) -> float:
        """Tries to flush; the seconds until the next try."""
        try:
            await self.flush()
        except Exception as error:
            # Whatever a log's library raises, the records wait for the next try; `_note_failure` has logged it.
            logger.debug("flush %d in a row failed: %s", self._failures, error)
            return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures - 1, 30), MAX_BACKOFF_SECONDS)
        return self._settings.interval_seconds

    def _give_up(self) -> Unpublished:
        counts, self._pending = self._counts, None
        self._predictions, self._outcomes = [], []
        lost = Unpublished(
            rows=counts.queued_rows,
            outcomes=counts.queued_outcomes,
            reason=counts.problem or "the log is unavailable",
        )
        counts.dropped_rows += counts.queued_rows
        counts.dropped_outcomes += counts.queued_outcomes
        counts.queued_rows = counts.queued_outcomes = self._queued_bytes = 0
        return lost

    def _next_flush(self) -> Flush | None:
        """What is due now, with at most `_max_flushed_rows` rows or one prediction; None when nothing is."""
        num_rows, taken = 0, 0
        for prediction in self._predictions:
            if taken and num_rows + len(prediction) > self._max_flushed_rows:
                break
            num_rows += len(prediction)
            taken += 1
        predictions = self._predictions[:taken]
        records: list[Record] = [*predictions]
        self._predictions = self._predictions[taken:]
        due: dict[str, list[Outcome]] = {}
        now, left = self._timing.clock(), MAX_OUTCOMES_PER_FLUSH
        # Outcomes wait while predictions do: theirs may be among them.
        while not self._predictions and self._outcomes and self._outcomes[0][0] <= now and left:
            *_, outcome = heapq.heappop(self._outcomes)
            due.setdefault(outcome.event, []).append(outcome)
            left -= 1
        for outcomes in due.values():
            for start in range(0, len(outcomes), MAX_OUTCOMES_PER_MESSAGE):
                records.append(self._outcome_batch(outcomes[start : start + MAX_OUTCOMES_PER_MESSAGE]))
        num_outcomes = sum(len(outcomes) for outcomes in due.values())
        num_bytes = sum(map(held_bytes, predictions)) + sum(sum(map(held_bytes, each)) for each in due.values())
        return Flush(records, self._form, num_rows, num_outcomes, num_bytes) if records else None

    def _outcome_batch(self, due: list[Outcome]) -> OutcomeBatch:
        self._outcome_batches += 1
        return OutcomeBatch(
            batch_id=f"{self._source}-outcomes-{self._outcome_batches}",
            time=due[-1].time,
            event=due[-1].event,
            request_ids=tuple(outcome.request_id for outcome in due),
            rows=np.array([outcome.row for outcome in due], dtype=np.int32),
            times=np.array([outcome.time for outcome in due], dtype=np.float64),
        )

    def _drop(self, *, rows: int, outcomes: int) -> None:
        counts = self._counts
        counts.dropped_rows += rows
        counts.dropped_outcomes += outcomes
        if not self._is_dropping:
            self._is_dropping = True
            logger.error(
                "the queue is full (%d rows, %d outcomes): the newest records are dropped",
                counts.queued_rows,
                counts.queued_outcomes,
            )

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        self._counts.problem = str(error) or repr(error)
        was_refused, self._counts.refused = self._counts.refused, isinstance(error, PermanentError)
        if self._failures == 1:
            self._failing_since = self._timing.timer()
        if self._failures == 1 or was_refused != self._counts.refused:
            state = "refuses records" if self._counts.refused else "is unavailable"
            known = isinstance(error, TemporaryError | PermanentError)
            logger.warning("the log %s, records wait: %s", state, error, exc_info=None if known else error)

    def _note_success(self, flush: Flush) -> None:
        counts = self._counts
        rows, outcomes = self._drop_refused(flush.refused)
        counts.published_rows += flush.num_rows - rows
        counts.published_outcomes += flush.num_outcomes - outcomes
        counts.queued_rows -= flush.num_rows
        counts.queued_outcomes -= flush.num_outcomes
        self._queued_bytes -= flush.num_bytes
        counts.problem, counts.refused = None, False
        if self._failures:
            logger.info("the log is available again after %.0f s", self._timing.timer() - self._failing_since)
        self._failures = 0
        filled = max(counts.queued_rows, counts.queued_outcomes) / self._settings.max_queued
        filled = max(filled, self._queued_bytes / (ROWS_SHARE * self._settings.max_queued_bytes))
        if self._is_dropping and filled <= 0.5:
            self._is_dropping = False
            logger.warning(
                "the queue has room again; %d rows and %d outcomes were dropped since the start",
                counts.dropped_rows,
                counts.dropped_outcomes,
            )

    def _drop_refused(self, refused: Sequence[tuple[Record, Exception]]) -> tuple[int, int]:
        """Counts records that the log takes in no message; returns how many rows and outcomes they hold."""
        num_rows = num_outcomes = 0
        for record, error in refused:
            is_prediction = isinstance(record, PredictionBatch)
            kind = "rows" if is_prediction else "outcomes"
            logger.error("%d %s of record %s are dropped: %s", len(record), kind, record_id(record), error)
            num_rows += len(record) if is_prediction else 0
            num_outcomes += 0 if is_prediction else len(record)
        self._counts.dropped_rows += num_rows
        self._counts.dropped_outcomes += num_outcomes
        return num_rows, num_outcomes


class PartitionedPublisher:
    """Publishes to a log in partitions: everything about a request goes to the one that `partition_of` names.

    Each has a `RecordPublisher`, whose methods these are, with a queue of its own: while one is away the others go on.
    """

    def __init__(self, partitions: Sequence[RecordPublisher]) -> None:
        """`partitions`: one or more, in the order of their numbers."""
        self._partitions = partitions
        self.max_rows = partitions[0].max_rows

    def _of(self, request_id: str) -> RecordPublisher:
        return self._partitions[partition_of(request_id, len(self._partitions))]

    @property
    def counts(self) -> PublishingCounts:
        """The sums over the partitions, and the first problem."""
        first, *others = (partition.counts for partition in self._partitions)
        for counts in others:
            for name, *_ in _METRICS:
                setattr(first, name, getattr(first, name) + getattr(counts, name))
            first.problem, first.refused = first.problem or counts.problem, first.refused or counts.refused
        return first

    def add(self, prediction: PredictionBatch, outcomes: Sequence[Outcome] = ()) -> bool:
        """`outcomes` are of this prediction."""
        return self._of(prediction.request_id).add(prediction, outcomes)

    def add_outcome(self, outcome: Outcome) -> bool:
        """Queues it where its request's prediction goes."""
        return self._of(outcome.request_id).add_outcome(outcome)

    async def run(self) -> None:
        """Flushes all until `drain`."""
        await asyncio.gather(*(partition.run() for partition in self._partitions))

    async def drain(self) -> None:
        """A partition that cannot take its records keeps no other from it."""
        ended = await asyncio.gather(*(partition.drain() for partition in self._partitions), return_exceptions=True)
        lost = [each for each in ended if isinstance(each, Unpublished)]
        for error in ended:
            if isinstance(error, BaseException) and error not in lost:
                raise error
        if lost:
            rows, outcomes = sum(each.rows for each in lost), sum(each.outcomes for each in lost)
            raise Unpublished(rows=rows, outcomes=outcomes, reason=lost[0].reason)


def check_id(name: str, text: str) -> None:
    """Returns if `text` can name a request or a publisher in the log; ids of this length keep messages below 1 MB.

    Raises:
        ContractError: It is no text, empty, too long, or not printable ASCII.

    >>> check_id("request_id", "user-7/page-3")
    """
    is_text = isinstance(text, str) and text.isascii() and text.isprintable()
    if not is_text or not 0 < len(text) <= MAX_ID_CHARACTERS:
        raise ContractError(f"{name} is {text!r}, expected 1 to {MAX_ID_CHARACTERS} printable ASCII characters")
