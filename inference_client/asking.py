"""One request: split where it is too large, asked again where the retry rule says so, answered by one version.

Where a request was split and the parts met a version switch, the parts that another version answered are asked again,
until all come from the version that answered last. Tensors are `reply`'s, what a failure means is `errors`', which of
them may be repeated is `retry`'s.
"""

from __future__ import annotations

import asyncio

import numpy as np
from numpy.typing import NDArray

from components.contracts.serving import MAX_BATCH_ROWS
from components.runtime.errors import PermanentError, TemporaryError
from inference_client.errors import BadRequest, ModelAbsent, ServerUnavailable, VersionsMixed, WrongSchema
from inference_client.reply import OUTPUTS, read_reply, schema_fault, tensors
from inference_client.retry import RetryRule, Waits, retried
from inference_client.scorer import Scored
from inference_client.transport import GrpcTransport


class Asking:
    """One request of any number of rows: its model, its rule and its deadline."""

    def __init__(
        self, transport: GrpcTransport, model: str, rule: RetryRule, waits: Waits, seconds: float, answered: set[str]
    ) -> None:
        """Begins the deadline; asks nothing yet.

        Args:
            transport: The connection.
            model: Triton's name of the model.
            rule: What is asked again.
            waits: Time and chance.
            seconds: From now to the deadline, all attempts and waits included.
            answered: Models that answered over this connection, kept by its owner; this one is added when it does.
        """
        self._transport, self._model, self._rule, self._waits = transport, model, rule, waits
        self._seconds, self._answered, self._server = seconds, answered, transport.server
        self._give_up_at = waits.timer() + seconds

    async def score(self, dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> Scored:
        """The rows' scores, all by one version; see `client.ScoringClient.score` for errors."""
        starts = range(0, len(dense), MAX_BATCH_ROWS)
        if len(starts) == 1:
            return await self._score_part(dense, categorical)
        parts: dict[int, Scored] = {}
        stale = list(starts)
        backoff = self._rule.first_backoff_seconds
        for attempt in range(self._rule.max_attempts):
            if attempt:
                await self._waits.sleep(min(self._waits.jitter(backoff), self._left))
                backoff = min(2 * backoff, self._rule.max_backoff_seconds)
            newest = await self._score_parts(stale, parts, dense, categorical)
            stale = [start for start in starts if parts[start].model_version != newest]
            if not stale:
                return Scored(np.concatenate([parts[start].scores for start in starts]), newest)
        versions = sorted({part.model_version for part in parts.values()})
        raise VersionsMixed(f"server {self._server} answered one request of {len(dense)} rows by versions {versions}")

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

        # Let every part end before the first failure is raised: nobody would wait for the others.
        outcomes = await asyncio.gather(*(score(start) for start in starts), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return last

    async def _score_part(self, dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> Scored:
        inputs = tensors(dense, categorical)

        async def attempt() -> Scored:
            try:
                reply = await self._transport.infer(
                    self._model, inputs, OUTPUTS, seconds=self._left, told=self._seconds
                )
            except ModelAbsent as error:
                if self._model in self._answered:
                    raise ServerUnavailable(f"{error} (it did a moment ago)") from error
                raise
            except BadRequest as error:
                await self._blame_schema(error)
                raise
            scored = read_reply(reply, len(dense), self._server)
            self._answered.add(self._model)
            return scored

        return await retried(attempt, self._rule, self._waits, give_up_at=self._give_up_at)

    @property
    def _left(self) -> float:
        return max(0.0, self._give_up_at - self._waits.timer())

    async def _blame_schema(self, refusal: BadRequest) -> None:
        """Raises WrongSchema if the refusal is the served model's fault."""
        try:
            metadata = await self._transport.metadata_of(self._model, seconds=self._left)
        except (TemporaryError, PermanentError, BadRequest):
            return
        if fault := schema_fault(metadata):
            raise WrongSchema(f"server {self._server} serves model {self._model} whose {fault}") from refusal
