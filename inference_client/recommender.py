"""Score rows or rank candidates, log the predictions, and report the outcomes.

`RecommenderClient` is for services with an event loop. `SyncRecommenderClient` offers the same
methods to code without an event loop. Only this module builds prediction records. A request does
not wait for the event log: its record is queued after the answer, and another thread writes the
record. `scoring` and `routing` score the rows, and `publisher` publishes the records.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from evergreen.config.features import Features
from evergreen.config.spec import Recommender
from evergreen.contracts.exploration import check_share, explored
from evergreen.contracts.records import MAX_ROWS_PER_RECORD, PredictionBatch
from evergreen.events.event_log import Publisher
from evergreen.events.locations import open_publisher, partition_urls
from evergreen.registry.recommenders import recommender_at
from evergreen.runtime.errors import ContractError
from inference_client.errors import UnusableScores
from inference_client.publisher import (
    Outcome,
    PartitionedPublisher,
    PublisherSettings,
    PublishingCounts,
    RecordPublisher,
    Unpublished,
    check_id,
)
from inference_client.routing import PlannedClient, open_scorer
from inference_client.rows import FeatureRows, RowsByName, feature_rows
from inference_client.scoring import ClientSettings, KeyedScorer, Scored, ScoringClient, shadow_of
from inference_client.timing import Timing

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_SHADOW_WAIT_SECONDS = 2.0
"""Seconds that a record waits for its shadow scores. Then the record is logged without shadow
scores. The caller of `score` or `rank` does not wait for shadow scores."""
_REMEMBERED_IDS = 100_000
"""Number of newest request ids that a client remembers. The ids take about 25 MB of memory. The
monitor detects later duplicates and duplicates of other clients
(`records_total{outcome="reused_id"}`)."""


class RequestIds:
    """Request ids that this client has used recently. Use an object in one event loop only.

    The event log joins clicks to rows by request id. If two requests had the same id, a click on
    the second request would be attributed to the first request.
    """

    def __init__(self, remembered: int = _REMEMBERED_IDS) -> None:
        self._remembered = remembered
        self._taken: OrderedDict[str, None] = OrderedDict()

    def take(self, request_id: str) -> None:
        """Reserve the id of a request that will be logged.

        Raises:
            ContractError: a recent request has the same id.
        """
        if request_id in self._taken:
            raise ContractError(
                f"request_id {request_id!r} was used by an earlier request of this client, "
                "expected a new id for each request, because clicks are joined by the id"
            )
        self._taken[request_id] = None
        if len(self._taken) > self._remembered:
            self._taken.popitem(last=False)

    def release(self, request_id: str) -> None:
        """Release the id of a request that failed and was not logged."""
        self._taken.pop(request_id, None)


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredRows:
    """Click probabilities of rows, with the request id for reporting their outcomes."""

    request_id: str
    scores: NDArray[np.float32]
    """[n] probabilities in [0, 1], in the order of the rows."""
    model_version: int
    canary: bool
    """Whether the traffic plan's canary answered."""
    time: float
    """Time of the answer in seconds since the epoch."""
    logged: bool
    """Whether the prediction is logged or queued. False if `log=False`, if there is no event log,
    or if the queue is full."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """Candidates with the highest scores, in display order.

    The best candidate is first, but exploration may swap two neighbours.
    """

    request_id: str
    """Request id of the outcomes. In an outcome, row i is the candidate at position i + 1 of the
    ranking."""
    candidates: NDArray[np.int64]
    """[k] index of each ranked candidate among the candidates that the caller passed."""
    scores: NDArray[np.float32]
    """[k] click probabilities."""
    propensities: NDArray[np.float64]
    """[k] probability that each candidate is at its position (`contracts.exploration`). Without
    exploration, each probability is 1."""
    model_version: int
    canary: bool
    logged: bool

    @property
    def positions(self) -> NDArray[np.int32]:
        """[k] position of each candidate in the ranking, from 1 to k."""
        return _positions_of(len(self.scores))


def _positions_of(count: int) -> NDArray[np.int32]:
    """Return the positions 1 to `count` of a list, shape [count]."""
    return np.arange(1, count + 1, dtype=np.int32)


def _check_key(key: object) -> None:
    """Check that a key is a text.

    A traffic plan needs the key as text, so the type is checked even before there is a plan.
    """
    if key is not None and not isinstance(key, str):
        raise ContractError(f"key is {key!r}, expected a text, or None")


def _candidate_rows(
    candidates: RowsByName | FeatureRows,
    context: RowsByName | FeatureRows | None,
    features: Features,
) -> FeatureRows:
    rows = feature_rows(candidates, features, may_lack_columns=context is not None)
    if not len(rows):
        raise ContractError("there are no candidates, expected at least 1")
    if context is None:
        return rows
    if isinstance(context, Mapping):
        context = {
            name: [value] if isinstance(value, str) or not hasattr(value, "__len__") else value
            for name, value in context.items()
        }
    one = feature_rows(context, features, may_lack_columns=True)
    if len(one) != 1:
        raise ContractError(f"context has {len(one)} rows, expected 1")
    return rows.filled_from(one, features)


class RecommenderClient:
    """Client that scores rows and logs the predictions.

    Use the client in an `async with` block, in one event loop only. At the end of the block, the
    client publishes its queue.

    An unavailable event log never makes a request fail. Records wait in memory up to a limit
    (`PublisherSettings`). At the limit, the newest records are dropped and counted (`log_counts`).
    """

    def __init__(
        self,
        server: str | KeyedScorer,
        *,
        recommender: Recommender | Path | str,
        log: str | Publisher | None,
        plan_uri: str | None = None,
        settings: ClientSettings | None = None,
        publishing: PublisherSettings | None = None,
        source: str | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Store the settings without opening a connection.

        Args:
            server: host:port of Triton's gRPC endpoint, `dns:///name:port` for all replicas behind
                a name, or a custom scorer.
            recommender: Description of the columns and the model's name, or its location
                (`evergreen.registry.recommenders.recommender_at`).
            log: URL of the event log (`evergreen.events.locations`), which may have partitions, or
                a publisher. None = nothing is logged.
            plan_uri: Model repository with the traffic plan to follow. None = all requests use the
                recommender's one model.
            settings: See `ClientSettings`.
            publishing: See `PublisherSettings`.
            source: Name of this client in the ids of outcome records. A random part is appended
                each time the client is opened.
            timing: Clocks and waits.

        Raises:
            ContractError: there is no recommender's description at that location.
        """
        self.recommender = (
            recommender
            if isinstance(recommender, Recommender)
            else recommender_at(Path(recommender))
        )
        self._digest = self.recommender.digest
        self._server, self._log = server, log
        self._plan_uri = plan_uri
        self._settings = settings or ClientSettings()
        self._publishing, self._timing = publishing or PublisherSettings(), timing or Timing()
        self._source = source or "client"
        self._scorer: KeyedScorer | None = None
        self._publisher: PartitionedPublisher | None = None
        self._run: asyncio.Task[None] | None = None
        self._resources = AsyncExitStack()
        self._awaiting_shadow: dict[str, list[Outcome]] = {}
        """Outcomes of requests whose records wait for their shadow scores."""
        self._recording: set[asyncio.Task[None]] = set()
        self._ids = RequestIds()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._is_open = False

    async def __aenter__(self) -> "RecommenderClient":
        """Open the event log, and start to publish and to follow the plan.

        Raises:
            ContractError: the server's address, the event log's URL or the plan's folder is
                invalid.
            TemporaryError, PermanentError: the event log cannot be opened.
        """
        async with AsyncExitStack() as resources:
            # The event log is opened first, because a client that cannot log must not answer.
            if self._log is not None:
                logs = [self._log] if not isinstance(self._log, str) else []
                for url in partition_urls(self._log) if isinstance(self._log, str) else ():
                    logs.append(open_publisher(url))
                    resources.callback(logs[-1].close)
                features, settings = self.recommender.features, self._publishing.share(len(logs))
                self._publisher = PartitionedPublisher(
                    [
                        RecordPublisher(
                            log,
                            features=features,
                            source=f"{self._source[:100]}-{uuid4().hex[:12]}",
                            settings=settings,
                            timing=self._timing,
                        )
                        for log in logs
                    ]
                )
            if isinstance(self._server, str):
                scorer: ScoringClient | PlannedClient = open_scorer(
                    self._server, self.recommender, self._settings, plan_uri=self._plan_uri
                )
                self._scorer = await resources.enter_async_context(scorer)
            else:
                self._scorer = self._server
            self._resources = resources.pop_all()
        if self._publisher is not None:
            self._run = asyncio.get_running_loop().create_task(self._publisher.run())
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the client.

        If the block already ends with another exception, lost records are only logged.
        """
        try:
            await self.close()
        except Unpublished as loss:
            if error is None:
                raise
            logger.error("records were lost when the client was closed: %s", loss)

    @property
    def log_counts(self) -> PublishingCounts:
        """Number of records that were published, queued and dropped until now.

        All counts are 0 without an event log.
        """
        return PublishingCounts() if self._publisher is None else self._publisher.counts

    async def score(
        self,
        rows: RowsByName | FeatureRows,
        *,
        request_id: str | None = None,
        key: str | None = None,
        log: bool = True,
    ) -> ScoredRows:
        """Score and log the rows. All returned click probabilities are from one model version.

        Args:
            rows: Dict of columns, list of dicts, Arrow table, or `FeatureRows`.
            request_id: Unique id of the request in the event log. None = random. Do not pass an id
                that several requests share, such as a session's.
            key: User for whom the rows are scored. A traffic plan routes the same key to the same
                model.
            log: Whether to log the request. Pass False for rows that are shown to nobody, such as a
                warm-up's.

        Raises:
            ContractError: a row is invalid, or a logged request has too many rows
                (`MAX_ROWS_PER_RECORD`, or fewer if rows are wide). The error is also raised if one
                of the last `_REMEMBERED_IDS` logged requests has the same id.
            TemporaryError, PermanentError: the rows were not scored, see `ScoringClient.score`. A
                failure of the event log never raises an error.
        """
        features = feature_rows(rows, self.recommender.features)
        _check_key(key)
        request_id, logs = self._checked_id(request_id), self._logs(len(features), log)
        scored = await self._score(features, request_id, key, logs=logs)
        now = self._timing.clock()
        return ScoredRows(
            request_id=request_id,
            scores=scored.scores,
            model_version=scored.model_version,
            canary=scored.canary,
            time=now,
            logged=logs and self._record(features, scored, request_id=request_id, time=now),
        )

    async def rank(
        self,
        candidates: RowsByName | FeatureRows,
        k: int,
        *,
        context: RowsByName | FeatureRows | None = None,
        request_id: str | None = None,
        key: str | None = None,
        log: bool = True,
        explore: float = 0.0,
    ) -> Ranking:
        """Return and log the `k` candidates with the highest click probability.

        Candidates with equal scores stay in the given order. Only the k displayed rows are logged,
        with their positions, because users can click no other row.

        Args:
            candidates: n rows, n >= 1. Columns that are present in the context may be absent here.
            k: Maximum number of results. If there are fewer candidates, all are returned.
            context: One row, such as the user's features. The values of this row replace missing
                values of each candidate. In a dict, a value may be written without a list: `{"age":
                31}` is `{"age": [31]}`. A list feature is the exception: its value stays in a list
                of one row.
            request_id: Unique id of the list in the event log. None = random.
            key: User who sees the list. A traffic plan routes the same key to the same model.
            log: Whether to log the list. Pass False for lists that are shown to nobody.
            explore: Share of the lists, in [0, 0.5), in which two random neighbours are swapped
                (`contracts.exploration`). With the logged propensities, the quality of other orders
                can be estimated.

        Raises:
            ContractError: k is outside 1..`MAX_ROWS_PER_RECORD`, or too large for one message of
                the event log. The error is also raised for invalid arguments: `explore` outside [0,
                0.5), a context of several rows, no candidates, an invalid row, or a request id that
                is not new.
            TemporaryError, PermanentError: as in `score`.
        """
        if not 1 <= k <= MAX_ROWS_PER_RECORD:
            raise ContractError(f"k is {k}, expected 1..{MAX_ROWS_PER_RECORD}")
        check_share(explore)
        features = _candidate_rows(candidates, context, self.recommender.features)
        _check_key(key)
        request_id, logs = self._checked_id(request_id), self._logs(min(k, len(features)), log)
        scored = await self._score(features, request_id, key, logs=logs)
        best = np.argsort(-scored.scores, kind="stable")[:k]
        best, propensities = explored(best, explore, self._timing.uniform())
        logged = logs and self._record(
            features.take(best),
            scored,
            request_id=request_id,
            time=self._timing.clock(),
            ranked=best,
            propensities=propensities if explore else None,
        )
        return Ranking(
            request_id=request_id,
            candidates=best,
            scores=scored.scores[best],
            propensities=propensities,
            model_version=scored.model_version,
            canary=scored.canary,
            logged=logged,
        )

    def report(self, outcome: Outcome) -> bool:
        """Log an outcome of a row, without waiting.

        Any client of the same event log may have scored the row.

        Returns:
            Whether the outcome was accepted for logging. False if the queue is full.

        Raises:
            ContractError: the client has no event log or is closed, or the time of the outcome is
                too far in the future.
        """
        if self._publisher is None or not self._is_open:
            raise ContractError(
                "the client is closed or has no event log, expected an open client with log=URL"
            )
        if (waiting := self._awaiting_shadow.get(outcome.request_id)) is not None:
            waiting.append(outcome)
            return True
        return self._publisher.add_outcome(outcome)

    async def close(self) -> None:
        """Wait for requests in flight, publish the queue and close the connections.

        Outcomes that are due within `PublisherSettings.close_seconds` are published at their time.

        Raises:
            Unpublished: the event log rejected the records, or was unavailable for
                `PublisherSettings.close_seconds`.
        """
        if not self._is_open:
            return
        self._is_open = False
        async with self._resources:
            while self._in_flight:
                self._idle.clear()
                await self._idle.wait()
            while self._recording:
                await asyncio.wait(set(self._recording))
            if self._publisher is not None and self._run is not None:
                try:
                    await self._publisher.drain()
                finally:
                    await self._run

    def _checked_id(self, request_id: str | None) -> str:
        if request_id is None:
            return uuid4().hex
        check_id("request_id", request_id)
        return request_id

    def _logs(self, num_rows: int, log: bool) -> bool:
        """Return whether a request of `num_rows` rows is logged."""
        if not log or self._publisher is None:
            return False
        if num_rows > self._publisher.max_rows:
            raise ContractError(
                f"the logged request has {num_rows} rows, expected at most "
                f"{self._publisher.max_rows}, or log=False"
            )
        return True

    async def _score(
        self, features: FeatureRows, request_id: str, key: str | None, *, logs: bool
    ) -> Scored:
        """Score the rows. If some scores are unusable, the request is logged and fails.

        The id of a logged request is reserved. If no record was logged, the id is released again.
        """
        if self._scorer is None or not self._is_open:
            raise ContractError(
                "the client is not open, expected `async with RecommenderClient(...)`"
            )
        if logs:
            self._ids.take(request_id)
        is_logged = False
        self._in_flight += 1
        try:
            scored = await self._scorer.score(
                features.dense, features.categorical, request_id=request_id, key=key
            )
            is_logged = logs
            return scored
        except UnusableScores as error:
            # If a request was split, the scores of only one part are known.
            if logs and len(error.scores) == len(features):
                failed = Scored(error.scores, error.model_version)
                self._record(features, failed, request_id=request_id, time=self._timing.clock())
                is_logged = True
            raise
        finally:
            if logs and not is_logged:
                self._ids.release(request_id)
            self._in_flight -= 1
            self._idle.set()

    def _record(
        self,
        shown: FeatureRows,
        scored: Scored,
        *,
        request_id: str,
        time: float,
        ranked: NDArray[np.int64] | None = None,
        propensities: NDArray[np.float64] | None = None,
    ) -> bool:
        """Queue the record of the displayed rows, and return whether it was queued.

        `ranked` contains the position of each displayed row among the scored rows. If the shadow
        scores of a record are pending, the record and its outcomes wait for them in the background.
        """
        assert self._publisher is not None
        publisher, selection = self._publisher, slice(None) if ranked is None else ranked
        record = PredictionBatch(
            request_id=request_id,
            time=time,
            model_version=scored.model_version,
            dense=shown.dense,
            categorical=shown.categorical,
            scores=scored.scores[selection],
            positions=None if ranked is None else _positions_of(len(ranked)),
            propensities=propensities,
            canary=scored.canary,
            recommender=self.recommender.name,
            recommender_digest=self._digest,
        )
        if scored.shadow is None:
            return publisher.add(record)
        self._awaiting_shadow[request_id] = []

        async def add_with_shadow() -> None:
            complete = record
            try:
                if (shadow := await shadow_of(scored, _SHADOW_WAIT_SECONDS)) is not None:
                    version, scores = shadow.model_version, shadow.scores[selection]
                    complete = replace(record, shadow_version=version, shadow_scores=scores)
            except (
                Exception
            ) as error:  # served scores are logged even if the shadow request raises an error
                logger.warning("request %s is logged without shadow scores: %r", request_id, error)
            publisher.add(complete, self._awaiting_shadow.pop(request_id))

        task = asyncio.get_running_loop().create_task(add_with_shadow())
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)
        return True


class SyncRecommenderClient:
    """`RecommenderClient` for code without an event loop.

    The arguments and methods are the same as in `RecommenderClient`. The methods can be called from
    any thread.

    The asynchronous client runs on an event loop in a separate thread, so that records are also
    published between calls. `RecommenderClient` has the shorter name because it suits services that
    score for many users.
    """

    def __init__(
        self,
        server: str | KeyedScorer,
        *,
        recommender: Recommender | Path | str,
        log: str | Publisher | None,
        **options: Any,
    ) -> None:
        self._client = RecommenderClient(server, recommender=recommender, log=log, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="recommender client", daemon=True
        )

    def __enter__(self) -> "SyncRecommenderClient":
        self._thread.start()
        try:
            self._call(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._call(self._client.__aexit__(kind, error, trace))
        finally:
            self._stop()

    @property
    def recommender(self) -> Recommender:
        """Description of the rows' columns."""
        return self._client.recommender

    @property
    def log_counts(self) -> PublishingCounts:
        """See `RecommenderClient.log_counts`."""
        return self._client.log_counts

    def score(self, rows: RowsByName | FeatureRows, **options: Any) -> ScoredRows:
        """See `RecommenderClient.score`."""
        return self._call(self._client.score(rows, **options))

    def rank(self, candidates: RowsByName | FeatureRows, k: int, **options: Any) -> Ranking:
        """See `RecommenderClient.rank`."""
        return self._call(self._client.rank(candidates, k, **options))

    def report(self, outcome: Outcome) -> bool:
        """See `RecommenderClient.report`."""

        async def report() -> bool:
            return self._client.report(outcome)

        return self._call(report())

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if not self._thread.is_alive():
            coroutine.close()
            raise ContractError(
                "the client is not open, expected `with SyncRecommenderClient(...)`"
            )
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
