"""Scores matrices of features on a Triton server: one connection, its line of callers, and what is asked again.

A request that is too large is split; where its parts met a version switch, the parts that another version answered are
asked again until one version has answered all of them. A version says in its configuration which columns it takes, and
gets those. Scoring changes nothing, so a request may be repeated; repeated is what time may heal: no server, a full
queue, a version switch (`ServerUnavailable`), and a model that answered this client before and is being loaded again.
What another try would meet again is raised at once, and so is an expired deadline. Calls on the wire are `transport`'s
job; which of several models is asked is `routing`'s; logging is `recommender`'s.
"""

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferInput, InferRequestedOutput

from evergreen.contracts.records import MAX_VERSION
from evergreen.contracts.serving import (
    COLUMNS,
    INPUT_TYPES,
    MAX_BATCH_ROWS,
    PROBABILITY_OUTPUT,
    ColumnMap,
    named_inputs,
)
from inference_client.access import ServerAccess
from inference_client.errors import (
    BadReply,
    BadRequest,
    ModelAbsent,
    Overloaded,
    ServerUnavailable,
    UnusableScores,
    VersionsMixed,
)
from inference_client.timing import Timing
from inference_client.transport import GrpcTransport

logger = logging.getLogger(__name__)

_SERVER = re.compile(r"(dns:///)?[^/\s]+:\d+")
_MAX_COLUMNS = 3
"""Versions of other columns that one try of a request may meet, while servers switch."""
_OUTPUTS = [InferRequestedOutput(PROBABILITY_OUTPUT.name)]


class Scored(NamedTuple):
    """Probabilities and who computed them."""

    scores: NDArray[np.float32]
    """[n] in [0, 1], in the order of the rows asked for."""
    model_version: int
    """The version that answered, as the reply says."""
    canary: bool = False
    """Whether the traffic plan's canary answered."""
    shadow: "asyncio.Future[Scored | None] | None" = None
    """The scores of the plan's other arm for the same rows, for the record only: known some time later, None if that
    request failed. It never raises, and nobody has to wait for it."""


class KeyedScorer(Protocol):
    """A scorer of feature matrices; different models may answer different requests."""

    async def score(
        self,
        dense: NDArray[np.float32],
        categorical: NDArray[np.int64],
        *,
        request_id: str | None = None,
        key: str | None = None,
    ) -> Scored:
        """The rows' scores; the same key (a user, else the request) is answered by the same model.

        Raises:
            TemporaryError, PermanentError, ContractError: The rows were not scored.
        """


async def shadow_of(scored: Scored, seconds: float) -> Scored | None:
    """The shadow's answer, if there is one and it comes within `seconds`."""
    if scored.shadow is None:
        return None
    await asyncio.wait({scored.shadow}, timeout=seconds)
    answer = scored.shadow.result() if scored.shadow.done() and not scored.shadow.cancelled() else None
    # With both arms at one version (during a promotion) a model would be compared with itself.
    return None if answer is None or answer.model_version == scored.model_version else answer


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """How patiently a model is asked."""

    deadline_seconds: float = 30.0
    """Of one request, all attempts and waits included. The caller gets its answer or an error by then; a call on the
    wire goes on (`transport`)."""
    max_attempts: int = 8
    first_backoff_seconds: float = 0.05
    max_backoff_seconds: float = 1.0
    """Waits double from the first to this: 3.55 s in all with the defaults, before jitter shortens them."""
    max_in_flight: int = 16
    """Requests to each replica at once whose callers wait. Four times as many may be on the wire, with those whose
    callers have already got `DeadlineExpired`."""
    max_waiting: int = 4096
    """Callers that may wait for their turn beyond `max_in_flight`; further ones get `Overloaded` at once."""
    close_seconds: float = 10.0
    """How long `close` waits for calls in flight; closing cancels what is left."""
    access: ServerAccess = field(default_factory=ServerAccess)
    """TLS and token; see `ServerAccess`."""

    def __post_init__(self) -> None:
        if not self.deadline_seconds > 0:
            raise BadRequest(f"deadline_seconds is {self.deadline_seconds}, expected more than 0")
        if self.max_in_flight < 1 or self.max_waiting < 0:
            raise BadRequest(
                f"max_in_flight is {self.max_in_flight} and max_waiting {self.max_waiting}, expected at least 1 and 0"
            )
        if self.max_attempts < 1:
            raise BadRequest(f"max_attempts is {self.max_attempts}, expected at least 1")
        if not 0 < self.first_backoff_seconds <= self.max_backoff_seconds:
            raise BadRequest(
                f"backoffs are {self.first_backoff_seconds} and {self.max_backoff_seconds}, expected 0 < first <= max"
            )


class _Request(NamedTuple):
    """One request of any number of rows."""

    model: str
    max_attempts: int
    seconds: float
    """Its deadline, which an error names."""
    give_up_at: float


class ScoringClient:
    """A connection to one server or to its replicas; create, use and close it in one event loop."""

    def __init__(
        self,
        server: str,
        model_name: str,
        settings: ClientSettings | None = None,
        *,
        columns: Mapping[str, Sequence[str]] | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Prepares the connection, which is made at the first request.

        Args:
            server: host:port of Triton's gRPC endpoint, or `dns:///name:port` for all replicas behind a name.
            model_name: As which the recommender is served: its own name.
            settings: See `ClientSettings`.
            columns: Those of the rows (`Features.columns`). A version that takes others gets the rows in its own form:
                each column is found by its name, and one that the rows lack is missing. None = every version takes the
                rows as they are.
            timing: Clocks and waits.

        Raises:
            BadRequest: `server` names no port: gRPC would try 443 and report that nobody answers.
            ContractError: A file of `settings.access` cannot be read.
        """
        if not _SERVER.fullmatch(server):
            raise BadRequest(f"server is {server!r}, expected host:port or dns:///name:port")
        self.server, self._model_name = server, model_name
        self._settings = settings or ClientSettings()
        self._timing = timing or Timing()
        self.transport = GrpcTransport(server, max_in_flight=self._settings.max_in_flight, access=self._settings.access)
        self._callers = 0
        self._answered: set[str] = set()
        """Models that answered once: if one is absent now, it is being loaded again."""
        self._own_columns = columns
        self._columns: dict[tuple[str, int], ColumnMap] = {}
        """What each version of a model takes, as far as it was asked."""
        self._newest: dict[str, ColumnMap] = {}
        """What the version takes by which a model answered last, or was asked about since."""

    async def __aenter__(self) -> "ScoringClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def has_line(self) -> bool:
        """Whether callers wait for their turn."""
        return self._callers > self.transport.num_slots

    @property
    def is_full(self) -> bool:
        """Whether another caller would have to wait."""
        return self._callers >= self.transport.num_slots

    async def close(self) -> None:
        """Waits for calls in flight, at most `close_seconds`, and closes the connection."""
        await self.transport.close(self._settings.close_seconds)

    async def score(
        self,
        dense: NDArray[np.float32],
        categorical: NDArray[np.int64],
        *,
        request_id: str | None = None,
        key: str | None = None,
        model_name: str | None = None,
        max_attempts: int | None = None,
        deadline_seconds: float | None = None,
    ) -> Scored:
        """Click probabilities of the rows, all by one model version.

        Args:
            dense: [n, d] float32, the numeric features of the model, NaN = missing; n >= 1.
            categorical: [n, c] int64, its categorical ones, -1 = missing.
            request_id: For `KeyedScorer`; one model answers every request alike.
            key: For `KeyedScorer` too.
            model_name: Instead of the client's own.
            max_attempts: Instead of the settings', as the one below; see `ClientSettings`.
            deadline_seconds: See `ClientSettings`.

        Raises:
            BadRequest: Shapes or dtypes differ from these, or the server refused them.
            ServerUnavailable: Still unavailable after every attempt, or no time is left for another.
            Overloaded: Too many callers wait already, or no turn came before the deadline; nothing was sent.
            DeadlineExpired: No answer in time.
            ModelAbsent: The server does not serve the model.
            BadReply: The answer is not a probability per row.
            ServerFault: The server failed inside.
            VersionsMixed: The versions kept changing under a split request.
        """
        settings = self._settings
        _check_rows(dense, categorical)
        room = self.transport.num_slots + settings.max_waiting
        if self._callers >= room:
            raise Overloaded(f"server {self.server} has {self._callers} callers waiting, expected fewer than {room}")
        seconds = deadline_seconds or settings.deadline_seconds
        request = _Request(
            model=model_name or self._model_name,
            max_attempts=max_attempts or settings.max_attempts,
            seconds=seconds,
            give_up_at=self._timing.timer() + seconds,
        )
        self._callers += 1
        try:
            if len(dense) <= MAX_BATCH_ROWS:
                return await self._score_part(request, dense, categorical)
            return await self._score_in_parts(request, dense, categorical)
        finally:
            self._callers -= 1

    async def _score_in_parts(
        self, request: _Request, dense: NDArray[np.float32], categorical: NDArray[np.int64]
    ) -> Scored:
        parts: dict[int, Scored] = {}
        """By first row, in the order in which they were answered: after a rollback the newest is not the highest."""
        stale = list(range(0, len(dense), MAX_BATCH_ROWS))
        backoff = self._settings.first_backoff_seconds

        async def ask_part(start: int) -> None:
            rows = slice(start, start + MAX_BATCH_ROWS)
            parts[start] = await self._score_part(request, dense[rows], categorical[rows])

        for attempt in range(request.max_attempts):
            if attempt:
                await self._timing.sleep(min(self._timing.jitter(backoff), self._seconds_left(request)))
                backoff = min(2 * backoff, self._settings.max_backoff_seconds)
            parts = {start: part for start, part in parts.items() if start not in stale}
            # Let every part end before the first failure is raised: nobody would wait for the others.
            for outcome in await asyncio.gather(*map(ask_part, stale), return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
            newest = next(reversed(parts.values())).model_version
            stale = [start for start, part in parts.items() if part.model_version != newest]
            if not stale:
                return Scored(np.concatenate([parts[start].scores for start in sorted(parts)]), newest)
        versions = sorted({part.model_version for part in parts.values()})
        raise VersionsMixed(f"server {self.server} answered one request of {len(dense)} rows by versions {versions}")

    async def _score_part(
        self, request: _Request, dense: NDArray[np.float32], categorical: NDArray[np.int64]
    ) -> Scored:
        """The first answer; an unavailable server is asked again, with growing waits."""
        backoff = self._settings.first_backoff_seconds
        for attempt in range(1, request.max_attempts + 1):
            try:
                reply = await self._ask_version(request, dense, categorical)
                return _read_reply(reply, len(dense), self.server)
            except ServerUnavailable as error:
                wait = self._timing.jitter(backoff)
                if attempt == request.max_attempts or self._timing.timer() + wait >= request.give_up_at:
                    raise
                logger.debug("attempt %d failed, waiting %.2f s: %s", attempt, wait, error)
            await self._timing.sleep(wait)
            backoff = min(2 * backoff, self._settings.max_backoff_seconds)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _ask_version(self, request: _Request, dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> Any:
        """The reply of a version that got the columns that it takes."""
        if self._own_columns is None:
            return await self._ask_server(request, _input_tensors(dense, categorical))
        for _ in range(_MAX_COLUMNS):
            sent = self._newest.get(request.model) or await self._ask_columns(request)
            try:
                reply = await self._ask_server(request, _input_tensors(*sent.rows(dense, categorical)))
            except BadRequest:
                if (await self._ask_columns(request)).takes == sent.takes:
                    raise
                continue
            version = (request.model, _version_of(reply, self.server))
            if version not in self._columns:
                await self._ask_columns(request)
            taken = self._columns.get(version)
            if taken is not None and taken.takes == sent.takes:
                return reply
            if taken is not None:
                self._newest[request.model] = taken
        raise ServerUnavailable(f"server {self.server} switches between versions of {request.model} of other columns")

    async def _ask_columns(self, request: _Request) -> ColumnMap:
        """What the model takes that is loaded now."""
        assert self._own_columns is not None
        config = await self.transport.config(
            request.model, seconds=self._seconds_left(request), deadline_seconds=request.seconds
        )
        stated = config.parameters[COLUMNS].string_value if COLUMNS in config.parameters else None
        try:
            newest = ColumnMap(self._own_columns, json.loads(stated) if stated else self._own_columns)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            said = f"server {self.server} says that {request.model} takes {str(stated)[:80]!r}"
            raise BadReply(f"{said}, expected the columns of its inputs as JSON") from error
        for version in config.version_policy.specific.versions:
            self._columns[request.model, version] = newest
        self._newest[request.model] = newest
        return newest

    async def _ask_server(self, request: _Request, inputs: list[Any]) -> Any:
        try:
            reply = await self.transport.infer(
                request.model,
                inputs,
                _OUTPUTS,
                seconds=self._seconds_left(request),
                deadline_seconds=request.seconds,
            )
        except ModelAbsent as error:
            if request.model in self._answered:
                raise ServerUnavailable(f"{error} (it did a moment ago)") from error
            raise
        self._answered.add(request.model)
        return reply

    def _seconds_left(self, request: _Request) -> float:
        return max(0.0, request.give_up_at - self._timing.timer())


def _check_rows(dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> None:
    for name, array, dtype in (("dense", dense, np.float32), ("categorical", categorical, np.int64)):
        if array.dtype != dtype or array.ndim != 2 or not len(array):
            raise BadRequest(
                f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} [n, columns] with n >= 1"
            )
    if len(dense) != len(categorical):
        raise BadRequest(f"dense has {len(dense)} rows and categorical {len(categorical)}, expected the same number")


def _input_tensors(dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> list[Any]:
    return [
        InferInput(name, list(rows.shape), INPUT_TYPES[name]).set_data_from_numpy(rows)
        for name, rows in named_inputs(dense, categorical).items()
    ]


def _version_of(reply: Any, server: str) -> int:
    """The model version that answered; raises BadReply where it is none of a record."""
    text = reply.get_response().model_version
    if text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_VERSION)) and int(text) <= MAX_VERSION:
        return int(text)
    raise BadReply(f"server {server} names its version {text[:40]!r}, expected a number from 0 to {MAX_VERSION}")


def _read_reply(reply: Any, num_rows: int, server: str) -> Scored:
    """The checked content of one reply; raises BadReply."""
    version = _version_of(reply, server)
    try:
        scores = reply.as_numpy(PROBABILITY_OUTPUT.name)
    except ValueError as error:
        raise BadReply(f"server {server} sent a reply whose bytes do not fill its shape: {error}") from error
    if scores is None:
        raise BadReply(f"server {server} sent no output {PROBABILITY_OUTPUT.name}")
    if scores.dtype != np.float32 or scores.shape != (num_rows, PROBABILITY_OUTPUT.width):
        raise BadReply(
            f"server {server} sent {scores.dtype} {list(scores.shape)}, "
            f"expected float32 {[num_rows, PROBABILITY_OUTPUT.width]}"
        )
    flat = scores[:, 0]
    # NaN fails both comparisons.
    is_usable = (flat >= 0) & (flat <= 1)
    if len(bad := flat[~is_usable]):
        raise UnusableScores(
            f"server {server} sent {len(bad)} scores outside [0, 1], the first is {bad[0]}",
            scores=np.where(is_usable, flat, np.float32(np.nan)),
            model_version=version,
        )
    return Scored(flat, version)
