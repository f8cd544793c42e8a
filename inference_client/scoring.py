"""Score feature matrices on a Triton server: one connection, a queue of callers, and retries.

A request that is too large is split. If versions are switched meanwhile, different versions may
answer the parts of one request. In this case, the client sends the parts again that the older
version answered. The client repeats this until all answers come from one version. The configuration
of a version lists the version's columns, and the rows are sent with these columns.

Scoring has no side effects, so a request may be repeated. These temporary failures are retried: an
unreachable server, a full queue, a version switch (`ServerUnavailable`), and a known model that is
being loaded again. All other failures and an expired deadline are raised immediately, because a
retry would not help. `transport` makes the calls, `routing` chooses between models, and
`recommender` logs the answers.
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
"""Maximum number of versions whose columns one attempt sends during a version switch."""
_OUTPUTS = [InferRequestedOutput(PROBABILITY_OUTPUT.name)]


class Scored(NamedTuple):
    """Scores of rows, with the version that computed them."""

    scores: NDArray[np.float32]
    """[n] probabilities in [0, 1], in the order of the requested rows."""
    model_version: int
    """Version that the server's reply names."""
    canary: bool = False
    """Whether the traffic plan's canary answered."""
    shadow: "asyncio.Future[Scored | None] | None" = None
    """Future with the scores that the other arm computes for the same rows. The future's scores are
    only logged. The future's result is None if the shadow request failed. The future never raises
    an error and need not be awaited."""


class KeyedScorer(Protocol):
    """Scorer of feature matrices that may use different models for different requests."""

    async def score(
        self,
        dense: NDArray[np.float32],
        categorical: NDArray[np.int64],
        *,
        request_id: str | None = None,
        key: str | None = None,
    ) -> Scored:
        """Score the rows. Requests with the same key (user, or else request id) use the same model.

        Raises:
            TemporaryError, PermanentError, ContractError: the rows were not scored.
        """


async def shadow_of(scored: Scored, seconds: float) -> Scored | None:
    """Return the shadow scores, or None if there are none within `seconds`."""
    if scored.shadow is None:
        return None
    await asyncio.wait({scored.shadow}, timeout=seconds)
    answer = (
        scored.shadow.result() if scored.shadow.done() and not scored.shadow.cancelled() else None
    )
    # During a promotion, both arms can have the same version. Two scores of one version are not a
    # comparison.
    return None if answer is None or answer.model_version == scored.model_version else answer


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Client timeout, retries and limits."""

    deadline_seconds: float = 30.0
    """Seconds for one request, including all attempts and waits. The caller gets an answer or an
    error within this time. A call that was sent continues in the background (`transport`)."""
    max_attempts: int = 8
    """Maximum number of attempts of one request."""
    first_backoff_seconds: float = 0.05
    """Wait in seconds after the first failed attempt."""
    max_backoff_seconds: float = 1.0
    """Longest wait in seconds between attempts. Each wait is twice as long as the previous wait, up
    to this maximum. With the defaults, the waits have a sum of about 4 s before jitter shortens
    them."""
    max_in_flight: int = 16
    """For each replica, maximum number of concurrent requests whose callers are waiting. Callers
    that got `DeadlineExpired` no longer wait, but the server may still process their calls. A
    replica has at most four times this number of unanswered calls."""
    max_waiting: int = 4096
    """Maximum number of callers that wait for a free slot. Further callers get `Overloaded`
    immediately."""
    close_seconds: float = 10.0
    """Seconds that `close` waits for calls in flight. Remaining calls are cancelled."""
    access: ServerAccess = field(default_factory=ServerAccess)
    """Options for TLS and a token."""

    def __post_init__(self) -> None:
        if not self.deadline_seconds > 0:
            raise BadRequest(f"deadline_seconds is {self.deadline_seconds}, expected more than 0")
        if self.max_in_flight < 1 or self.max_waiting < 0:
            raise BadRequest(
                f"max_in_flight is {self.max_in_flight} and max_waiting {self.max_waiting}, "
                "expected at least 1 and 0"
            )
        if self.max_attempts < 1:
            raise BadRequest(f"max_attempts is {self.max_attempts}, expected at least 1")
        if not 0 < self.first_backoff_seconds <= self.max_backoff_seconds:
            raise BadRequest(
                f"backoffs are {self.first_backoff_seconds} and {self.max_backoff_seconds}, "
                "expected 0 < first <= max"
            )


class _Request(NamedTuple):
    """Request with any number of rows."""

    model: str
    max_attempts: int
    seconds: float
    """Deadline in seconds, for error messages."""
    give_up_at: float


class ScoringClient:
    """Connection to one server or to its replicas. Use the client in one event loop only."""

    def __init__(
        self,
        server: str,
        model_name: str,
        settings: ClientSettings | None = None,
        *,
        columns: Mapping[str, Sequence[str]] | None = None,
        timing: Timing | None = None,
    ) -> None:
        """Prepare the connection, which is opened at the first request.

        Args:
            server: host:port of Triton's gRPC endpoint, or `dns:///name:port` for all replicas
                behind a name.
            model_name: Name of the served model, which is the recommender's name.
            settings: See `ClientSettings`.
            columns: Columns of the rows (`Features.columns`). If a version has other columns, the
                client rearranges the rows by column name, and fills absent columns with missing
                values. None = the client sends the rows unchanged to every version.
            timing: Clocks and waits.

        Raises:
            BadRequest: the address in `server` has no port. Without this check, gRPC would try port
                443 and report an unreachable server.
            ContractError: a file of `settings.access` cannot be read.
        """
        if not _SERVER.fullmatch(server):
            raise BadRequest(f"server is {server!r}, expected host:port or dns:///name:port")
        self.server, self._model_name = server, model_name
        self._settings = settings or ClientSettings()
        self._timing = timing or Timing()
        self.transport = GrpcTransport(
            server, max_in_flight=self._settings.max_in_flight, access=self._settings.access
        )
        self._callers = 0
        self._answered: set[str] = set()
        """Names of models that have answered before. If a known model is absent now, it is being
        loaded again."""
        self._own_columns = columns
        self._columns: dict[tuple[str, int], ColumnMap] = {}
        """Columns of each known version. The key is the model's name and the version number."""
        self._newest: dict[str, ColumnMap] = {}
        """For each model, the columns of the newest known version. A version is the newest if it
        answered last, or if its configuration was read after the last answer."""

    async def __aenter__(self) -> "ScoringClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def has_line(self) -> bool:
        """Whether callers wait for a free slot."""
        return self._callers > self.transport.num_slots

    @property
    def is_full(self) -> bool:
        """Whether the next caller would have to wait."""
        return self._callers >= self.transport.num_slots

    async def close(self) -> None:
        """Wait at most `close_seconds` for calls in flight, and close the connection."""
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
        """Return the click probabilities of the rows, all from one model version.

        Args:
            dense: [n, d] float32, the model's numeric features, NaN = missing, n >= 1.
            categorical: [n, c] int64, the model's categorical features, -1 = missing.
            request_id: Ignored, part of `KeyedScorer`.
            key: Ignored, part of `KeyedScorer`.
            model_name: Name of the model, if it is not the client's own model.
            max_attempts: Maximum number of attempts, in place of the setting.
            deadline_seconds: Deadline in seconds, in place of the setting.

        Raises:
            BadRequest: a shape or dtype is wrong, or the server rejected the rows.
            ServerUnavailable: the server was unavailable in every attempt, or there is no time for
                another attempt.
            Overloaded: too many callers are waiting, or no slot was free before the deadline.
                Nothing was sent.
            DeadlineExpired: no answer in time.
            ModelAbsent: the server does not serve the model.
            BadReply: the answer does not contain one probability per row.
            ServerFault: internal error of the server.
            VersionsMixed: the version changed repeatedly during a split request.
        """
        settings = self._settings
        _check_rows(dense, categorical)
        room = self.transport.num_slots + settings.max_waiting
        if self._callers >= room:
            raise Overloaded(
                f"server {self.server} has {self._callers} callers waiting, expected fewer than "
                f"{room}"
            )
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
        """Answered parts of the request by the number of their first row, in the order of the
        answers. The newest version is the version of the last answer, and not the highest number,
        because a rollback can make a lower number live."""
        stale = list(range(0, len(dense), MAX_BATCH_ROWS))
        backoff = self._settings.first_backoff_seconds

        async def score_part(start: int) -> None:
            rows = slice(start, start + MAX_BATCH_ROWS)
            parts[start] = await self._score_part(request, dense[rows], categorical[rows])

        for attempt in range(request.max_attempts):
            if attempt:
                await self._timing.sleep(
                    min(self._timing.jitter(backoff), self._seconds_left(request))
                )
                backoff = min(2 * backoff, self._settings.max_backoff_seconds)
            parts = {start: part for start, part in parts.items() if start not in stale}
            # Wait for every part before the first error is raised. Otherwise, a part would continue
            # after its caller has failed.
            for outcome in await asyncio.gather(*map(score_part, stale), return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
            newest = next(reversed(parts.values())).model_version
            stale = [start for start, part in parts.items() if part.model_version != newest]
            if not stale:
                return Scored(
                    np.concatenate([parts[start].scores for start in sorted(parts)]), newest
                )
        versions = sorted({part.model_version for part in parts.values()})
        raise VersionsMixed(
            f"server {self.server} answered one request of {len(dense)} rows from versions "
            f"{versions}, expected one version"
        )

    async def _score_part(
        self, request: _Request, dense: NDArray[np.float32], categorical: NDArray[np.int64]
    ) -> Scored:
        """Return the first valid answer to one part of a request.

        If the server is unavailable, the part is sent again after increasing waits.
        """
        backoff = self._settings.first_backoff_seconds
        for attempt in range(1, request.max_attempts + 1):
            try:
                reply = await self._call_version(request, dense, categorical)
                return _read_reply(reply, len(dense), self.server)
            except ServerUnavailable as error:
                wait = self._timing.jitter(backoff)
                if (
                    attempt == request.max_attempts
                    or self._timing.timer() + wait >= request.give_up_at
                ):
                    raise
                logger.debug("attempt %d failed, waiting %.2f s: %s", attempt, wait, error)
            await self._timing.sleep(wait)
            backoff = min(2 * backoff, self._settings.max_backoff_seconds)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _call_version(
        self, request: _Request, dense: NDArray[np.float32], categorical: NDArray[np.int64]
    ) -> Any:
        """Send the feature columns that the newest version expects, and return the reply."""
        if self._own_columns is None:
            return await self._call_server(request, _input_tensors(dense, categorical))
        for _ in range(_MAX_COLUMNS):
            sent = self._newest.get(request.model) or await self._read_columns(request)
            try:
                reply = await self._call_server(
                    request, _input_tensors(*sent.rows(dense, categorical))
                )
            except BadRequest:
                if (await self._read_columns(request)).takes == sent.takes:
                    raise
                continue
            version = (request.model, _version_of(reply, self.server))
            if version not in self._columns:
                await self._read_columns(request)
            taken = self._columns.get(version)
            if taken is not None and taken.takes == sent.takes:
                return reply
            if taken is not None:
                self._newest[request.model] = taken
        raise ServerUnavailable(
            f"server {self.server} switches between versions of {request.model} with different "
            "columns"
        )

    async def _read_columns(self, request: _Request) -> ColumnMap:
        """Read the columns of the loaded model from its configuration."""
        assert self._own_columns is not None
        config = await self.transport.config(
            request.model, seconds=self._seconds_left(request), deadline_seconds=request.seconds
        )
        stated = config.parameters[COLUMNS].string_value if COLUMNS in config.parameters else None
        try:
            newest = ColumnMap(
                self._own_columns, json.loads(stated) if stated else self._own_columns
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reported = (
                f"server {self.server} reports the columns {str(stated)[:80]!r} of {request.model}"
            )
            raise BadReply(f"{reported}, expected JSON") from error
        for version in config.version_policy.specific.versions:
            self._columns[request.model, version] = newest
        self._newest[request.model] = newest
        return newest

    async def _call_server(self, request: _Request, inputs: list[Any]) -> Any:
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
                raise ServerUnavailable(f"{error} (it was served before)") from error
            raise
        self._answered.add(request.model)
        return reply

    def _seconds_left(self, request: _Request) -> float:
        return max(0.0, request.give_up_at - self._timing.timer())


def _check_rows(dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> None:
    for name, array, dtype in (
        ("dense", dense, np.float32),
        ("categorical", categorical, np.int64),
    ):
        if array.dtype != dtype or array.ndim != 2 or not len(array):
            raise BadRequest(
                f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} [n, "
                "columns] with n >= 1"
            )
    if len(dense) != len(categorical):
        raise BadRequest(
            f"dense has {len(dense)} rows and categorical {len(categorical)}, expected the same "
            "number"
        )


def _input_tensors(dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> list[Any]:
    return [
        InferInput(name, list(rows.shape), INPUT_TYPES[name]).set_data_from_numpy(rows)
        for name, rows in named_inputs(dense, categorical).items()
    ]


def _version_of(reply: Any, server: str) -> int:
    """Return the version that answered, or raise BadReply if it is not a valid number."""
    text = reply.get_response().model_version
    if (
        text.isascii()
        and text.isdecimal()
        and len(text) <= len(str(MAX_VERSION))
        and int(text) <= MAX_VERSION
    ):
        return int(text)
    raise BadReply(
        f"server {server} sent the version {text[:40]!r}, expected a number from 0 to {MAX_VERSION}"
    )


def _read_reply(reply: Any, num_rows: int, server: str) -> Scored:
    """Return the checked scores of one reply, or raise BadReply."""
    version = _version_of(reply, server)
    try:
        scores = reply.as_numpy(PROBABILITY_OUTPUT.name)
    except ValueError as error:
        raise BadReply(
            f"server {server} sent a reply whose bytes do not match its shape: {error}"
        ) from error
    if scores is None:
        raise BadReply(f"server {server} sent no output {PROBABILITY_OUTPUT.name}")
    if scores.dtype != np.float32 or scores.shape != (num_rows, PROBABILITY_OUTPUT.width):
        raise BadReply(
            f"server {server} sent {scores.dtype} {list(scores.shape)}, expected float32 "
            f"{[num_rows, PROBABILITY_OUTPUT.width]}"
        )
    flat = scores[:, 0]
    # For NaN, both of the following comparisons are False.
    is_usable = (flat >= 0) & (flat <= 1)
    if len(bad := flat[~is_usable]):
        raise UnusableScores(
            f"server {server} sent {len(bad)} scores outside [0, 1], the first is {bad[0]}",
            scores=np.where(is_usable, flat, np.float32(np.nan)),
            model_version=version,
        )
    return Scored(flat, version)
