"""Scores rows on a Triton server over async gRPC: one connection, bounded work in flight, one retry rule.

Takes raw features as `contracts.serving` describes them and returns probabilities with the version that computed
them. What a failure means is `errors`'; ranking is `ranking`'s; publishing what was scored is `publisher`'s.

One answer has one version: where a request was split and the parts met a version switch, the parts that another
version answered are asked again, until all come from the version that answered last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from components.contracts.criteo import NUM_CATEGORICAL, NUM_DENSE
from components.contracts.serving import (
    CATEGORICAL_INPUT,
    DENSE_INPUT,
    GRPC_OPTIONS,
    MAX_BATCH_ROWS,
    MODEL_NAME,
    PROBABILITY_OUTPUT,
)
from inference_client.errors import BadReply, BadRequest, ServerUnavailable, VersionsMixed, translated

logger = logging.getLogger(__name__)

_CHANNEL_ARGUMENTS = [
    *GRPC_OPTIONS,
    # gRPC's default waits up to two minutes before it tries a restarted server again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


class Scored(NamedTuple):
    """Probabilities and who computed them."""

    scores: NDArray[np.float32]
    """[n] in [0, 1], in the order of the rows asked for."""
    model_version: int


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """How patient the client is."""

    model_name: str = MODEL_NAME
    deadline_seconds: float = 30.0
    """Per attempt. Generous on purpose: an expired or cancelled gRPC call can crash Triton before 26.04 (upstream
    fixes 7840, 8078, 8220, 8708), so a deadline is for a server that is gone, not for a slow answer. For the same
    reason a caller should let calls end and not cancel them."""
    max_attempts: int = 6
    """Tries of one request while the server is unavailable; scoring changes nothing, so it may be repeated."""
    first_backoff_seconds: float = 0.05
    max_backoff_seconds: float = 1.0
    """Waits double from the first to this: 1.55 s in all with the defaults."""
    max_in_flight: int = 16
    """Requests on the wire at once; more callers wait their turn."""

    def __post_init__(self) -> None:
        """Refuses settings that cannot work."""
        if self.deadline_seconds <= 0:
            raise BadRequest(f"deadline_seconds is {self.deadline_seconds}, expected more than 0")
        for name, value in (("max_attempts", self.max_attempts), ("max_in_flight", self.max_in_flight)):
            if value < 1:
                raise BadRequest(f"{name} is {value}, expected at least 1")


class ScoringClient:
    """A connection to one server; create, use and close it in one event loop."""

    def __init__(
        self,
        server: str,
        settings: ClientSettings | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepares the connection, which is made at the first request.

        Args:
            server: host:port of Triton's gRPC endpoint.
            settings: See `ClientSettings`.
            sleep: Waits between attempts.
        """
        self.server = server
        self._settings = settings or ClientSettings()
        self._sleep = sleep
        self._triton = InferenceServerClient(server, channel_args=_CHANNEL_ARGUMENTS)
        self._slots = asyncio.Semaphore(self._settings.max_in_flight)
        self._outputs = [InferRequestedOutput(PROBABILITY_OUTPUT.name)]

    async def __aenter__(self) -> ScoringClient:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connection."""
        await self.close()

    async def close(self) -> None:
        """Closes the connection."""
        await self._triton.close()

    async def score(self, dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> Scored:
        """Click probabilities of the rows, all by one model version.

        Args:
            dense: [n, 13] float32, NaN = missing; n >= 1.
            categorical: [n, 26] int64, -1 = missing.

        Raises:
            BadRequest: shapes or dtypes differ from these, or the server refused them.
            ServerUnavailable: still unavailable after every attempt.
            DeadlineExpired: no answer in time.
            ModelAbsent: the server does not serve the model.
            BadReply: the answer is no probability per row.
            ServerFault: the server failed inside.
            VersionsMixed: the versions kept changing under a split request.
        """
        _check_rows(dense, categorical)
        starts = range(0, len(dense), MAX_BATCH_ROWS)
        if len(starts) == 1:
            return await self._score_part(dense, categorical)
        parts: dict[int, Scored] = {}
        stale = list(starts)
        for _ in range(self._settings.max_attempts):
            newest = await self._score_parts(stale, parts, dense, categorical)
            stale = [start for start in starts if parts[start].model_version != newest]
            if not stale:
                return Scored(np.concatenate([parts[start].scores for start in starts]), newest)
        versions = sorted({part.model_version for part in parts.values()})
        raise VersionsMixed(f"server {self.server} answered one request of {len(dense)} rows by versions {versions}")

    async def _score_parts(
        self,
        starts: list[int],
        parts: dict[int, Scored],
        dense: NDArray[np.float32],
        categorical: NDArray[np.int64],
    ) -> int:
        """Fills `parts`; returns the version that answered last, which after a rollback is not the highest."""
        last = 0

        async def score(start: int) -> None:
            nonlocal last
            rows = slice(start, start + MAX_BATCH_ROWS)
            parts[start] = await self._score_part(dense[rows], categorical[rows])
            last = parts[start].model_version

        # Let every part end before the first failure is raised: a cancelled call can crash the server.
        outcomes = await asyncio.gather(*(score(start) for start in starts), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return last

    async def _score_part(self, dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> Scored:
        inputs = [_tensor(DENSE_INPUT, dense), _tensor(CATEGORICAL_INPUT, categorical)]
        backoff = self._settings.first_backoff_seconds
        for attempt in range(1, self._settings.max_attempts + 1):
            try:
                async with self._slots:
                    reply = await self._ask(inputs)
                return _read(reply, len(dense), self.server)
            except ServerUnavailable as error:
                if attempt == self._settings.max_attempts:
                    raise
                logger.debug("attempt %d failed, waiting %.2f s: %s", attempt, backoff, error)
            await self._sleep(backoff)
            backoff = min(2 * backoff, self._settings.max_backoff_seconds)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _ask(self, inputs: list[Any]) -> Any:
        name, deadline = self._settings.model_name, self._settings.deadline_seconds
        try:
            return await self._triton.infer(name, inputs, outputs=self._outputs, client_timeout=deadline)
        except InferenceServerException as error:
            raise translated(error, self.server, name, deadline) from error


def _check_rows(dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> None:
    wanted = (("dense", dense, np.float32, NUM_DENSE), ("categorical", categorical, np.int64, NUM_CATEGORICAL))
    for name, array, dtype, width in wanted:
        if array.dtype != dtype or array.ndim != 2 or array.shape[1] != width or not len(array):
            raise BadRequest(
                f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(dtype)} [n, {width}] with n >= 1"
            )
    if len(dense) != len(categorical):
        raise BadRequest(f"dense has {len(dense)} rows and categorical {len(categorical)}, expected the same number")


def _tensor(tensor: Any, rows: NDArray[Any]) -> Any:
    return InferInput(tensor.name, list(rows.shape), tensor.datatype).set_data_from_numpy(rows)


def _read(reply: Any, num_rows: int, server: str) -> Scored:
    """The checked content of one reply.

    Raises:
        BadReply: see `errors.BadReply`.
    """
    version = reply.get_response().model_version
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
    if not ((flat >= 0) & (flat <= 1)).all():
        bad = flat[~((flat >= 0) & (flat <= 1))]
        raise BadReply(f"server {server} sent {len(bad)} scores outside [0, 1], the first is {bad[0]}")
    if not version.isdigit():
        raise BadReply(f"server {server} names its version {version!r}, expected a number")
    return Scored(flat, int(version))
