"""The call that a site makes: score rows or rank candidates, log what was answered, and report what came of it.

`RecommenderClient` is for services with an event loop; `SyncRecommenderClient` offers the same to code without one. The
one place where a prediction record is built. Logging is never waited for: a record is queued after the answer is there,
and the publisher writes it from another thread. Scoring is `scoring`'s job and `routing`'s, publishing `publisher`'s.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine
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
from inference_client.request_ids import RequestIds
from inference_client.routing import PlannedClient, open_scorer
from inference_client.rows import FeatureRows, RowsByName, feature_rows
from inference_client.scoring import ClientSettings, KeyedScorer, Scored, ScoringClient, shadow_of
from inference_client.timing import Timing

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHADOW_WAIT_SECONDS = 2.0
"""How long a record waits for its shadow's scores before it is logged without them; nobody else waits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredRows:
    """Click probabilities, and the name under which outcomes of these rows are reported."""

    request_id: str
    scores: NDArray[np.float32]
    """[n] in [0, 1], in the order of the rows."""
    model_version: int
    canary: bool
    """Whether the traffic plan's canary answered."""
    time: float
    """Seconds since the epoch, when the answer came."""
    logged: bool
    """Whether a record is in the log or on its way; False with `log=False`, without a log, or if the queue was full."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranking:
    """The best candidates in the order to show them: best first, but for two neighbours that exploring may swap."""

    request_id: str
    """Row i of its outcomes is the candidate at position i + 1."""
    candidates: NDArray[np.int64]
    """[k] row of each among the candidates given."""
    scores: NDArray[np.float32]
    """[k]"""
    propensities: NDArray[np.float64]
    """[k] probability with which each stands at its place (`contracts.exploration`); 1 without exploring."""
    model_version: int
    canary: bool
    logged: bool

    @property
    def positions(self) -> NDArray[np.int32]:
        """[k] place in the list, from 1."""
        return positions_of(len(self.scores))


def positions_of(count: int) -> NDArray[np.int32]:
    """[count] places in a list, from 1."""
    return np.arange(1, count + 1, dtype=np.int32)


def _check_key(key: object) -> None:
    """Refuses a key that a traffic plan could not read, also while there is no plan."""
    if key is not None and not isinstance(key, str):
        raise ContractError(f"key is {key!r}, expected a text, or None")


def _candidate_rows(
    candidates: RowsByName | FeatureRows, context: RowsByName | FeatureRows | None, features: Features
) -> FeatureRows:
    rows = feature_rows(candidates, features, may_lack_columns=context is not None)
    if not len(rows):
        raise ContractError("there are no candidates, expected at least 1")
    if context is None:
        return rows
    one = feature_rows(context, features, may_lack_columns=True)
    if len(one) != 1:
        raise ContractError(f"context has {len(one)} rows, expected 1")
    return rows.filled_from(one, features)


class RecommenderClient:
    """Scores and logs; enter it before use, in one event loop, and leave it to publish what is still queued.

    A log that is unavailable, for however long, fails no request: records wait in memory up to a bound
    (`PublisherSettings`), then the newest are dropped and counted (`log_counts`).
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
        """Connects to nothing yet.

        Args:
            server: host:port of Triton's gRPC endpoint, `dns:///name:port` for all replicas behind a name, or a scorer
                of your own.
            recommender: What the rows' columns are, and as which the model is served: a description, or where one is
                (`evergreen.registry.recommenders.recommender_at`).
            log: URL of the log (`evergreen.events.locations`), which may be in partitions, or its writing end; None =
                nothing is logged.
            plan_uri: Model repository whose traffic plan is followed; None = every request asks the one model.
            settings: See `ClientSettings`.
            publishing: See `PublisherSettings`.
            source: Names this client in the ids of outcome records, beside what is drawn at each opening.
            timing: Clocks and waits.

        Raises:
            ContractError: There is no description of a recommender at that place.
        """
        self.recommender = recommender if isinstance(recommender, Recommender) else recommender_at(Path(recommender))
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
        """Outcomes of requests whose records wait for their shadows."""
        self._recording: set[asyncio.Task[None]] = set()
        self._ids = RequestIds()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._is_open = False

    async def __aenter__(self) -> "RecommenderClient":
        """Opens the log and starts to publish and to follow the plan.

        Raises:
            ContractError: The server's address, the log's URL or the plan's folder cannot be right.
            TemporaryError, PermanentError: The log cannot be opened.
        """
        async with AsyncExitStack() as resources:
            # The log comes first: a client that cannot log is not to answer.
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes; while another exception ends the block, a loss of records is logged and that one raised."""
        try:
            await self.close()
        except Unpublished as loss:
            if error is None:
                raise
            logger.error("the client was closed with a loss: %s", loss)

    @property
    def log_counts(self) -> PublishingCounts:
        """What became of everything that was logged so far; zeros without a log."""
        return PublishingCounts() if self._publisher is None else self._publisher.counts

    async def score(
        self,
        rows: RowsByName | FeatureRows,
        *,
        request_id: str | None = None,
        key: str | None = None,
        log: bool = True,
    ) -> ScoredRows:
        """Click probabilities of the rows, all by one model version; they are logged.

        Args:
            rows: A dict of columns, a list of dicts, an Arrow table, or `FeatureRows`.
            request_id: Names the request in the log, to which it must be new; random without one. What two requests
                have in common, such as a session's id, names neither.
            key: The user for whom the rows are scored: the same key meets the same model of a traffic plan.
            log: False for rows that are shown to nobody, such as a warm-up's.

        Raises:
            ContractError: A row is not as the model takes it, or a logged request has more of them than a message of
                the log holds: `MAX_ROWS_PER_RECORD`, fewer of wide rows. Or its id names one of the newest
                `REMEMBERED_IDS` requests that this client logged.
            TemporaryError, PermanentError: The rows were not scored; see `ScoringClient.score`. Never for the log.
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
        """The `k` candidates of highest click probability; the list is logged with its positions.

        Equal scores keep the order given. Only the k rows shown are logged: nobody can click what was not shown.

        Args:
            candidates: n rows, n >= 1; columns that all of them lack may be absent where a context has them.
            k: At most this many; fewer where there are fewer candidates.
            context: One row; its features fill those that a candidate lacks (the user's side of the row).
            request_id: Names the list in the log, to which it must be new; random without one.
            key: Whose list it is: the same key meets the same model of a traffic plan.
            log: False for lists that are shown to nobody.
            explore: Share of the lists, in [0, 0.5), of which two random neighbours change places, so that the log can
                tell what another order is worth; the rule is `contracts.exploration`'s. The propensities are logged.

        Raises:
            ContractError: k is outside 1..`MAX_ROWS_PER_RECORD`, or more than a message of the log holds, `explore`
                outside [0, 0.5), the context is not one row, there are no candidates, or a row is not as the model
                takes it. Or the id, as of `score`.
            TemporaryError, PermanentError: As `score`.
        """
        if not 1 <= k <= MAX_ROWS_PER_RECORD:
            raise ContractError(f"k is {k}, expected 1..{MAX_ROWS_PER_RECORD}")
        check_share(explore)
        features = _candidate_rows(candidates, context, self.recommender.features)
        _check_key(key)
        request_id, logs = self._checked_id(request_id), self._logs(min(k, len(features)), log)
        scored = await self._score(features, request_id, key, logs=logs)
        best = np.argsort(-scored.scores, kind="stable")[:k]
        best, propensities = explored(best, explore, self._timing.chance())
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

    def tell(self, outcome: Outcome) -> bool:
        """Logs what came of a row that this client or another one of the same log scored; never waits.

        Returns:
            Whether it is in the log or on its way; False where too many outcomes wait already.

        Raises:
            ContractError: This client has no log or is closed, or the outcome's time lies too far in the future.
        """
        if self._publisher is None or not self._is_open:
            raise ContractError("an outcome needs an open client with a log, expected log=URL")
        if (waiting := self._awaiting_shadow.get(outcome.request_id)) is not None:
            waiting.append(outcome)
            return True
        return self._publisher.add_outcome(outcome)

    async def close(self) -> None:
        """Waits for requests in flight, publishes everything that is queued and closes the connections.

        Outcomes whose time is still to come are waited for.

        Raises:
            Unpublished: The log refused, or stayed unavailable for `PublisherSettings.close_seconds`.
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
        """Whether an answer of so many rows is logged, if the caller wants it."""
        if not log or self._publisher is None:
            return False
        if num_rows > self._publisher.max_rows:
            raise ContractError(
                f"the logged request has {num_rows} rows, expected at most {self._publisher.max_rows}, or log=False"
            )
        return True

    async def _score(self, features: FeatureRows, request_id: str, key: str | None, *, logs: bool) -> Scored:
        """The scores; a request some of whose rows got none is logged, if it is to be, and fails.

        The id of a logged request names no second one; that of a request that left no record is free again.
        """
        if self._scorer is None or not self._is_open:
            raise ContractError("the client is not open, expected `async with RecommenderClient(...)`")
        if logs:
            self._ids.take(request_id)
        is_logged = False
        self._in_flight += 1
        try:
            scored = await self._scorer.score(features.dense, features.categorical, request_id=request_id, key=key)
            is_logged = logs
            return scored
        except UnusableScores as error:
            # Of a request that was split, only a part's scores are known.
            if logs and len(error.scores) == len(features):
                failed = Scored(error.scores, error.model_version)
                self._record(features, failed, request_id=request_id, time=self._timing.clock())
                is_logged = True
            raise
        finally:
            if logs and not is_logged:
                self._ids.give_back(request_id)
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
        """Queues the record of the rows that were shown, `ranked` among those scored; False where it was dropped.

        A record whose shadow is not known yet waits for it, in nobody's way; its outcomes wait with it.
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
            positions=None if ranked is None else positions_of(len(ranked)),
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
                if (shadow := await shadow_of(scored, SHADOW_WAIT_SECONDS)) is not None:
                    version, scores = shadow.model_version, shadow.scores[selection]
                    complete = replace(record, shadow_version=version, shadow_scores=scores)
            except Exception as error:  # whatever a shadow answers, what was served is logged
                logger.warning("request %s is logged without its shadow: %r", request_id, error)
            publisher.add(complete, self._awaiting_shadow.pop(request_id))

        task = asyncio.get_running_loop().create_task(add_with_shadow())
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)
        return True


class SyncRecommenderClient:
    """`RecommenderClient` for code without an event loop: same arguments, same calls, callable from any thread.

    The asynchronous client has the plain name, since a service that scores for many users at once wants it. This one
    runs it on an event loop in a thread of its own, so that records are published between calls too.
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
        self._thread = threading.Thread(target=self._loop.run_forever, name="recommender client", daemon=True)

    def __enter__(self) -> "SyncRecommenderClient":
        self._thread.start()
        try:
            self._call(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call(self._client.__aexit__(kind, error, trace))
        finally:
            self._stop()

    @property
    def recommender(self) -> Recommender:
        """What the rows' columns are."""
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

    def tell(self, outcome: Outcome) -> bool:
        """See `RecommenderClient.tell`."""

        async def tell() -> bool:
            return self._client.tell(outcome)

        return self._call(tell())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            coroutine.close()
            raise ContractError("the client is not open, expected `with SyncRecommenderClient(...)`")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
