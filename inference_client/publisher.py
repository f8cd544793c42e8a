"""Publish predictions and their outcomes to the event log at least once, even after an outage.

Adding a record only appends it to a queue. A separate thread encodes the queued records and
publishes them in few commits. Outcomes wait until they are due, and an outcome is never published
before its prediction. A failed flush is repeated with the same ids, so that readers recognize
duplicates.

While the event log is unavailable, records wait in memory up to a limit. When the limit is reached,
the newest records are dropped and counted. Older records are not dropped, because they may already
be half published, and because one gap in the log is better than many. Every change of state is
logged in one line.
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
"""Maximum outcomes per message. After an outage, all waiting outcomes are due at the same time.
Each outcome takes up to 300 bytes of the 1 MB limit for a message."""
_MAX_ROWS_PER_FLUSH, _MAX_BYTES_PER_FLUSH = 50_000, 14_000_000
"""Limits of one flush. Without a limit, the flush after an outage could exceed the log's timeout
again and again."""
_MAX_OUTCOMES_PER_FLUSH = 10_000
"""Maximum outcomes per flush. Removing this number of outcomes from the queue blocks the event loop
for 30 ms."""
_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.1, 2.0
"""First and longest wait in seconds between failed flushes. Each further failure doubles the
wait."""
_MAX_AHEAD_SECONDS = 86_400.0
"""Maximum seconds between now and an outcome's time. A time further in the future is an error, for
example a time in milliseconds."""
_RECORD_BYTES, _ARRAY_BYTES, _OUTCOME_BYTES = 975, 125, 325
"""Bytes of memory that Python objects in the queue take: a record with three arrays, each further
array, and an outcome."""
_ROWS_SHARE = 0.75


@dataclass(frozen=True, kw_only=True, order=True)
class Outcome:
    """Event that followed a scored row, such as a click."""

    time: float = 0.0
    """Time of the event in seconds since the epoch. 0 = now. A datetime or pandas Timestamp with a
    time zone, and a NumPy datetime64 in UTC, are converted to seconds. The outcome is published at
    the time of the event. For simulated users, the time can be in the future."""
    request_id: str
    """Id of the request that contains the row."""
    row: int = 0
    """Number of the row in its request, counted from 0. For a ranked list, the number is the
    position minus 1."""
    event: str = CLICK
    """`click` or `conversion`."""

    def __post_init__(self) -> None:
        if self.event not in EVENTS:
            raise ContractError(f"outcome event is {self.event!r}, expected one of {EVENTS}")
        is_row = isinstance(self.row, int | np.integer) and not isinstance(self.row, bool)
        if not is_row or not 0 <= self.row < MAX_ROWS_PER_RECORD:
            raise ContractError(
                f"outcome row is {self.row!r}, expected 0..{MAX_ROWS_PER_RECORD - 1}"
            )
        check_id("request_id", self.request_id)
        object.__setattr__(self, "time", _seconds_of(self.time))


def _seconds_of(time: object) -> float:
    """Return the seconds since the epoch of an outcome's time.

    Raises:
        ContractError: the value is neither a number nor a time with a known zone.
    """
    if not is_missing(time):
        if isinstance(time, np.datetime64) and not np.isnat(time):
            return float(time.astype("datetime64[us]").astype(np.int64)) / 1e6
        # A time without a zone would mean different moments on machines in different zones.
        if isinstance(time, datetime) and time.utcoffset() is not None:
            return time.timestamp()
    if isinstance(time, int | float | np.integer | np.floating) and not isinstance(time, bool):
        try:
            return float(time)
        except OverflowError:
            pass
    raise ContractError(
        f"outcome time is {time!r}, expected seconds since the epoch, a datetime with a time zone, "
        "or a datetime64"
    )


def _memory_bytes(queued: PredictionBatch | Outcome) -> int:
    """Return an upper bound in bytes of the memory that a queued record or outcome takes."""
    if isinstance(queued, Outcome):
        return _OUTCOME_BYTES + len(queued.request_id)
    num_bytes = _RECORD_BYTES + len(queued.request_id)
    num_bytes += queued.dense.nbytes + queued.categorical.nbytes + queued.scores.nbytes
    for array in (queued.positions, queued.propensities, queued.shadow_scores):
        if array is not None:
            num_bytes += _ARRAY_BYTES + array.nbytes
    return num_bytes


@dataclass(kw_only=True)
class PublishingCounts:
    """Numbers of published, queued and dropped records."""

    published_rows: int = 0
    """Rows of predictions that are in the event log."""
    published_outcomes: int = 0
    queued_rows: int = 0
    """Rows that wait in the queue. The queue grows while the event log is unavailable."""
    queued_outcomes: int = 0
    """Outcomes that wait in the queue. Some of these outcomes are not due yet."""
    dropped_rows: int = 0
    """Number of lost rows. Rows are lost if the queue is full, the event log rejects the message,
    or the client closes."""
    dropped_outcomes: int = 0
    problem: str | None = None
    """Reason why the event log is unavailable. None while it accepts records."""
    refused: bool = False
    """Whether the event log rejects records permanently, for example without a topic or permission.
    False while the event log accepts records or is unreachable."""


METRICS = (
    ("published_rows", "_total", "Rows of published predictions."),
    ("published_outcomes", "_total", "Published outcomes."),
    ("dropped_rows", "_total", "Rows of lost predictions."),
    ("dropped_outcomes", "_total", "Lost outcomes."),
    ("queued_rows", "", "Rows of predictions that wait for the event log."),
    ("queued_outcomes", "", "Outcomes that wait for their time or for the event log."),
)
"""Metrics. Each entry consists of a field of `PublishingCounts`, the suffix of the metric's name,
and the help text."""


def metrics_text(counts: Mapping[str, PublishingCounts]) -> str:
    """Format the counts in Prometheus' text format, for a service's /metrics page.

    Args:
        counts: For each client of the service, the name of its recommender and its counts.

    >>> metrics_text({"shop": PublishingCounts(dropped_rows=3)}).splitlines()[-1]
    'evergreen_client_log_available{recommender="shop"} 1'
    """
    families = [
        (
            name + end,
            "counter" if end else "gauge",
            text,
            {of: getattr(each, name) for of, each in counts.items()},
        )
        for name, end, text in METRICS
    ]
    available = {of: int(each.problem is None) for of, each in counts.items()}
    families.append(
        ("available", "gauge", "1 while the event log accepts records, else 0.", available)
    )
    lines = []
    for name, kind, text, values in families:
        full_name = f"evergreen_client_log_{name}"
        lines += [f"# HELP {full_name} {text}", f"# TYPE {full_name} {kind}"]
        lines += [f'{full_name}{{recommender="{of}"}} {value}' for of, value in values.items()]
    return "\n".join([*lines, ""])


class Unpublished(TemporaryError):
    """Records were lost when the publisher was closed, because the event log was unavailable."""

    def __init__(self, *, rows: int, outcomes: int, reason: str) -> None:
        super().__init__(
            f"{rows} rows and {outcomes} outcomes could not be published and are lost: {reason}"
        )
        self.rows, self.outcomes, self.reason = rows, outcomes, reason


@dataclass(frozen=True, kw_only=True)
class PublisherSettings:
    """Flush interval and limits of the queue."""

    interval_seconds: float = 0.15
    """Seconds between two flushes. Each flush is one commit. A shorter interval publishes records
    sooner, and a longer interval costs less."""
    close_seconds: float = 30.0
    """Seconds that closing waits for an unavailable event log before it drops the queue."""
    max_queued: int = 500_000
    """Maximum number of queued rows, and of queued outcomes."""
    max_queued_bytes: int = 250_000_000
    """Maximum memory of the queue in bytes, including its Python objects. Rows may use three
    quarters of this memory, and outcomes may use the rest. With 39 columns, the default is enough
    for 150,000 requests of one row, or for all `max_queued` rows in requests of 64. During a flush,
    the client needs about 40 MB more."""

    def __post_init__(self) -> None:
        names = ("interval_seconds", "close_seconds", "max_queued", "max_queued_bytes")
        expect(self, "more than 0", lambda value: value > 0, *names)

    def share(self, count: int) -> "PublisherSettings":
        """Return the settings of one publisher if `count` publishers share these limits."""
        queued, num_bytes = max(self.max_queued // count, 1), max(self.max_queued_bytes // count, 1)
        return replace(self, max_queued=queued, max_queued_bytes=num_bytes)


class RecordPublisher:
    """Queue of predictions and outcomes, which publishes the records that are due.

    Use a publisher in one event loop only.
    """

    def __init__(
        self,
        log: Publisher,
        *,
        features: Features,
        source: str,
        settings: PublisherSettings | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Create an empty queue.

        Args:
            log: Event log to publish to.
            features: Features of the recommender.
            source: Name of this publisher in the ids of outcomes, unique per event log.
            settings: Flush interval and limits.
            timing: Clocks and sleep.
        """
        check_id("source", source)
        self._log, self._form, self._source = log, RecordFormat(features), source
        self._settings, self._timing = settings or PublisherSettings(), timing or Timing()
        self.max_rows = min(MAX_ROWS_PER_RECORD, self._form.max_rows(MAX_MESSAGE_BYTES))
        """Maximum rows of one prediction, because its record must fit into one message."""
        self._queued_bytes = 0
        self._max_flushed_rows = min(
            _MAX_ROWS_PER_FLUSH, _MAX_BYTES_PER_FLUSH // self._form.row_bytes
        )
        self._counts = PublishingCounts()
        self._predictions: list[PredictionBatch] = []
        self._outcomes: list[tuple[float, int, Outcome]] = []
        """Heap of outcomes, each with its time and a unique number. The unique number avoids
        comparisons of outcomes, which makes the heap 7 times faster."""
        self._numbers = itertools.count()
        self._pending: Flush | None = None
        """Flush that is running. A failed flush is repeated before any other flush."""
        self._flushing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1)
        """Separate thread, so that an unavailable event log does not occupy the executor of the
        service's event loop."""
        self._outcome_batches = 0
        self._stopping = False
        self._failures = 0
        """Number of consecutive failed flushes."""
        self._failing_since = 0.0
        self._is_dropping = False

    @property
    def counts(self) -> PublishingCounts:
        """Copy of the current counts."""
        return replace(self._counts)

    def add(self, prediction: PredictionBatch, outcomes: Sequence[Outcome] = ()) -> bool:
        """Queue a prediction with its known outcomes, without waiting.

        Returns False if the queue is full. The prediction and its outcomes are then dropped.
        """
        queued, num_bytes = self._counts.queued_rows, _memory_bytes(prediction)
        has_room = queued + len(prediction) <= self._settings.max_queued and (
            self._queued_bytes + num_bytes <= _ROWS_SHARE * self._settings.max_queued_bytes
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
        """Queue an outcome of a request, without waiting.

        Any publisher of this event log may have published the prediction of the request. Returns
        False if the queue is full.

        Raises:
            ContractError: the outcome's time is before 1970, or more than `_MAX_AHEAD_SECONDS` in
                the future.
        """
        now = self._timing.clock()
        if not 0 <= outcome.time <= now + _MAX_AHEAD_SECONDS:
            raise ContractError(
                f"outcome time is {outcome.time}, expected seconds since the epoch, about {now:.0f}"
            )
        num_bytes = _memory_bytes(outcome)
        is_too_large = self._queued_bytes + num_bytes > self._settings.max_queued_bytes
        if (
            is_too_large and self._queued_bytes
        ) or self._counts.queued_outcomes >= self._settings.max_queued:
            self._drop(rows=0, outcomes=1)
            return False
        if not outcome.time:
            outcome = replace(outcome, time=now)
        heapq.heappush(self._outcomes, (outcome.time, next(self._numbers), outcome))
        self._counts.queued_outcomes += 1
        self._queued_bytes += num_bytes
        return True

    async def flush(self) -> None:
        """Publish the queued predictions, and then the outcomes that are due, in one commit.

        If the previous flush failed, its messages are published again, and no other messages are
        published. A flush contains at most `_MAX_ROWS_PER_FLUSH` rows and `_MAX_BYTES_PER_FLUSH`
        bytes from the start of the queue.

        Raises:
            Exception: any error of the event log. The next flush repeats the same messages.
        """
        async with self._flushing:
            self._pending = self._pending or self._next_flush()
            if self._pending is None:
                return
            try:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, self._pending.publish, self._log)
            except Exception as error:
                self._record_failure(error)
                raise
            self._record_success(self._pending)
            self._pending = None

    async def run(self) -> None:
        """Flush in every interval until `drain` is called, whatever the event log raises."""
        while not self._stopping:
            await self._timing.sleep(await self._flush_or_backoff())

    async def drain(self) -> None:
        """Publish everything that is queued, and let `run` end.

        Outcomes that are due within `close_seconds` are published at their time. Later outcomes are
        published immediately.

        Raises:
            Unpublished: the event log rejected the records, or was unavailable for `close_seconds`.
                The records in the queue are dropped.
        """
        self._stopping = True
        latest = self._timing.clock() + self._settings.close_seconds
        self._outcomes = [
            (at if at <= latest else 0.0, number, outcome) for at, number, outcome in self._outcomes
        ]
        heapq.heapify(self._outcomes)
        give_up_at = None
        while True:
            wait = await self._flush_or_backoff()
            now = self._timing.timer()
            if not self._failures:
                give_up_at = None
                if not (self._predictions or self._outcomes or self._pending):
                    self._log_dropped()
                    return
                if not self._predictions:
                    wait = max(wait, self._outcomes[0][0] - self._timing.clock())
            else:
                give_up_at = (
                    now + self._settings.close_seconds if give_up_at is None else give_up_at
                )
                if self._counts.refused or now >= give_up_at:
                    raise self._give_up()
            await self._timing.sleep(wait)

    def _log_dropped(self) -> None:
        counts = self._counts
        if counts.dropped_rows or counts.dropped_outcomes:
            logger.warning(
                "closed; %d rows and %d outcomes are in the log, %d rows and %d outcomes were "
                "dropped",
                counts.published_rows,
                counts.published_outcomes,
                counts.dropped_rows,
                counts.dropped_outcomes,
            )

    async def _flush_or_backoff(self) -> float:
        """Try to flush, and return the seconds until the next attempt."""
        try:
            await self.flush()
        except Exception as error:
            # Event log libraries raise many kinds of errors. The records stay queued for the next
            # attempt. The method `_record_failure` has already logged the error.
            logger.debug("flush %d in a row failed: %s", self._failures, error)
            return min(
                _FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures - 1, 30), _MAX_BACKOFF_SECONDS
            )
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
        """Take the next flush from the queues, or return None if nothing is due.

        A flush contains at most `_max_flushed_rows` rows. A prediction with more rows is flushed
        alone.
        """
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
        now, left = self._timing.clock(), _MAX_OUTCOMES_PER_FLUSH
        # An outcome may belong to a queued prediction. Outcomes are therefore not published while
        # predictions are queued.
        while not self._predictions and self._outcomes and self._outcomes[0][0] <= now and left:
            *_, outcome = heapq.heappop(self._outcomes)
            due.setdefault(outcome.event, []).append(outcome)
            left -= 1
        for outcomes in due.values():
            for start in range(0, len(outcomes), MAX_OUTCOMES_PER_MESSAGE):
                records.append(
                    self._outcome_batch(outcomes[start : start + MAX_OUTCOMES_PER_MESSAGE])
                )
        num_outcomes = sum(len(outcomes) for outcomes in due.values())
        num_bytes = sum(map(_memory_bytes, predictions)) + sum(
            sum(map(_memory_bytes, each)) for each in due.values()
        )
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

    def _record_failure(self, error: Exception) -> None:
        self._failures += 1
        self._counts.problem = str(error) or repr(error)
        was_refused, self._counts.refused = self._counts.refused, isinstance(error, PermanentError)
        if self._failures == 1:
            self._failing_since = self._timing.timer()
        if self._failures == 1 or was_refused != self._counts.refused:
            state = "refuses records" if self._counts.refused else "is unavailable"
            known = isinstance(error, TemporaryError | PermanentError)
            logger.warning(
                "the event log %s, and records stay queued: %s",
                state,
                error,
                exc_info=None if known else error,
            )

    def _record_success(self, flush: Flush) -> None:
        counts = self._counts
        rows, outcomes = self._drop_refused(flush.refused)
        counts.published_rows += flush.num_rows - rows
        counts.published_outcomes += flush.num_outcomes - outcomes
        counts.queued_rows -= flush.num_rows
        counts.queued_outcomes -= flush.num_outcomes
        self._queued_bytes -= flush.num_bytes
        counts.problem, counts.refused = None, False
        if self._failures:
            logger.info(
                "the log is available again after %.0f s",
                self._timing.timer() - self._failing_since,
            )
        self._failures = 0
        filled = max(counts.queued_rows, counts.queued_outcomes) / self._settings.max_queued
        filled = max(filled, self._queued_bytes / (_ROWS_SHARE * self._settings.max_queued_bytes))
        if self._is_dropping and filled <= 0.5:
            self._is_dropping = False
            logger.warning(
                "the queue has room again; %d rows and %d outcomes were dropped since the start",
                counts.dropped_rows,
                counts.dropped_outcomes,
            )

    def _drop_refused(self, refused: Sequence[tuple[Record, Exception]]) -> tuple[int, int]:
        """Count and log the rejected records.

        Returns the number of rows and the number of outcomes in these records.
        """
        num_rows = num_outcomes = 0
        for record, error in refused:
            is_prediction = isinstance(record, PredictionBatch)
            kind = "rows" if is_prediction else "outcomes"
            logger.error(
                "%d %s of record %s are dropped: %s", len(record), kind, record_id(record), error
            )
            num_rows += len(record) if is_prediction else 0
            num_outcomes += 0 if is_prediction else len(record)
        self._counts.dropped_rows += num_rows
        self._counts.dropped_outcomes += num_outcomes
        return num_rows, num_outcomes


class PartitionedPublisher:
    """Publisher to a partitioned event log.

    The function `partition_of` returns the partition of a request.

    Each partition has its own `RecordPublisher` with the same methods. If one partition is
    unavailable, the other partitions continue.
    """

    def __init__(self, partitions: Sequence[RecordPublisher]) -> None:
        """Combine one or more publishers, in the order of the partition numbers."""
        self._partitions = partitions
        self.max_rows = partitions[0].max_rows

    def _of(self, request_id: str) -> RecordPublisher:
        return self._partitions[partition_of(request_id, len(self._partitions))]

    @property
    def counts(self) -> PublishingCounts:
        """Sums over the partitions.

        If several partitions have a problem, the problem of the first of them is reported.
        """
        first, *others = (partition.counts for partition in self._partitions)
        for counts in others:
            for name, *_ in METRICS:
                setattr(first, name, getattr(first, name) + getattr(counts, name))
            first.problem, first.refused = (
                first.problem or counts.problem,
                first.refused or counts.refused,
            )
        return first

    def add(self, prediction: PredictionBatch, outcomes: Sequence[Outcome] = ()) -> bool:
        """Queue a prediction with its known outcomes in its partition."""
        return self._of(prediction.request_id).add(prediction, outcomes)

    def add_outcome(self, outcome: Outcome) -> bool:
        """Queue an outcome in the partition of its request."""
        return self._of(outcome.request_id).add_outcome(outcome)

    async def run(self) -> None:
        """Flush all partitions until `drain` is called."""
        await asyncio.gather(*(partition.run() for partition in self._partitions))

    async def drain(self) -> None:
        """Publish the queues of all partitions, even if one of them fails."""
        ended = await asyncio.gather(
            *(partition.drain() for partition in self._partitions), return_exceptions=True
        )
        lost = [each for each in ended if isinstance(each, Unpublished)]
        for error in ended:
            if isinstance(error, BaseException) and error not in lost:
                raise error
        if lost:
            rows, outcomes = sum(each.rows for each in lost), sum(each.outcomes for each in lost)
            raise Unpublished(rows=rows, outcomes=outcomes, reason=lost[0].reason)


def check_id(name: str, text: str) -> None:
    """Check that `text` is a valid id of a request or publisher.

    The length limit keeps messages below 1 MB.

    Raises:
        ContractError: the id is not a text, is empty or too long, or is not printable ASCII.

    >>> check_id("request_id", "user-7/page-3")
    """
    is_text = isinstance(text, str) and text.isascii() and text.isprintable()
    if not is_text or not 0 < len(text) <= MAX_ID_CHARACTERS:
        raise ContractError(
            f"{name} is {text!r}, expected 1 to {MAX_ID_CHARACTERS} printable ASCII characters"
        )
