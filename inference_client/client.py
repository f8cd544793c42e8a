"""Scores rows on a Triton server: the connection's owner, its settings, and the line before it.

Takes raw features as `contracts.serving` describes them and returns probabilities with the version that computed
them. Calls are `transport`'s, splitting what is too large and asking again is `asking`'s; who answers where there are
several models is `routing`'s.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from components.contracts.serving import MODEL_NAME
from inference_client.asking import Asking
from inference_client.errors import BadRequest, Overloaded
from inference_client.reply import check_rows
from inference_client.retry import RetryRule, Waits, shortened
from inference_client.scorer import Scored
from inference_client.transport import GrpcTransport

_SERVER = re.compile(r"(dns:///)?[^/\s]+:\d+")


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """How patient the client is."""

    model_name: str = MODEL_NAME
    deadline_seconds: float = 30.0
    """Of one `score`, all attempts and waits included. The caller gets its answer or an error by then; how a call is
    ended on the wire depends on the server (`transport`)."""
    max_attempts: int = RetryRule.max_attempts
    first_backoff_seconds: float = RetryRule.first_backoff_seconds
    max_backoff_seconds: float = RetryRule.max_backoff_seconds
    """See `retry.RetryRule`."""
    max_in_flight: int = 16
    """Requests on the wire at once, those included whose callers were told that their deadline expired."""
    max_waiting: int = 4096
    """Callers that may wait for their turn beyond `max_in_flight`; more are told `Overloaded` at once."""
    safe_to_cancel: bool | None = None
    """Whether the server bears expired and cancelled calls; None = it is asked for its version."""
    close_seconds: float = 10.0
    """How long `close` waits for calls in flight; closing cancels what is left."""

    def __post_init__(self) -> None:
        """Refuses settings that cannot work."""
        if not self.deadline_seconds > 0:
            raise BadRequest(f"deadline_seconds is {self.deadline_seconds}, expected more than 0")
        if self.max_in_flight < 1 or self.max_waiting < 0:
            raise BadRequest(
                f"max_in_flight is {self.max_in_flight} and max_waiting {self.max_waiting}, expected at least 1 and 0"
            )
        self.retry_rule()

    def retry_rule(self) -> RetryRule:
        """The rule of these settings."""
        return RetryRule(
            max_attempts=self.max_attempts,
            first_backoff_seconds=self.first_backoff_seconds,
            max_backoff_seconds=self.max_backoff_seconds,
        )


class ScoringClient:
    """A connection to one server or to its replicas; create, use and close it in one event loop."""

    def __init__(
        self,
        server: str,
        settings: ClientSettings | None = None,
        *,
        timer: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[float], float] = shortened,
    ) -> None:
        """Prepares the connection, which is made at the first request.

        Args:
            server: host:port of Triton's gRPC endpoint, or `dns:///name:port` for all replicas behind a name.
            settings: See `ClientSettings`.
            timer: Seconds, for the deadline over all attempts.
            sleep: Waits between attempts.
            jitter: The wait for a backoff.

        Raises:
            BadRequest: `server` names no port: gRPC would go to 443 and say that nobody answers.
        """
        if not _SERVER.fullmatch(server):
            raise BadRequest(f"server is {server!r}, expected host:port or dns:///name:port")
        self.server = server
        self._settings = settings or ClientSettings()
        self._rule, self._waits = self._settings.retry_rule(), Waits(timer, sleep, jitter)
        self.transport = GrpcTransport(
            server, max_in_flight=self._settings.max_in_flight, safe_to_cancel=self._settings.safe_to_cancel
        )
        self._callers = 0
        self._answered: set[str] = set()
        """Models that answered once: if one is absent now, it is being loaded again."""

    async def __aenter__(self) -> ScoringClient:
        """The client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connection."""
        await self.close()

    @property
    def has_line(self) -> bool:
        """Whether callers wait for their turn."""
        return self._callers > self._settings.max_in_flight

    @property
    def is_full(self) -> bool:
        """Whether another caller would have to wait."""
        return self._callers >= self._settings.max_in_flight

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
            dense: [n, 13] float32, NaN = missing; n >= 1.
            categorical: [n, 26] int64, -1 = missing.
            request_id: For `KeyedScorer`; one model answers every request alike.
            key: For `KeyedScorer` too.
            model_name: Instead of the settings'.
            max_attempts: Instead of the settings'.
            deadline_seconds: Instead of the settings'.

        Raises:
            BadRequest: shapes or dtypes differ from these, or the server refused them.
            WrongSchema: the server refused them because its model takes other tensors.
            ServerUnavailable: still unavailable after every attempt, or no time for another.
            Overloaded: too many callers wait already, or no turn came before the deadline; nothing was sent.
            DeadlineExpired: no answer in time.
            ModelAbsent: the server does not serve the model.
            BadReply: the answer is no probability per row.
            ServerFault: the server failed inside.
            VersionsMixed: the versions kept changing under a split request.
        """
        check_rows(dense, categorical)
        room = self._settings.max_in_flight + self._settings.max_waiting
        if self._callers >= room:
            raise Overloaded(f"server {self.server} has {self._callers} callers waiting, expected fewer than {room}")
        rule = self._rule if max_attempts is None else replace(self._rule, max_attempts=max_attempts)
        model, seconds = model_name or self._settings.model_name, deadline_seconds or self._settings.deadline_seconds
        asking = Asking(self.transport, model, rule, self._waits, seconds, self._answered)
        self._callers += 1
        try:
            return await asking.score(dense, categorical)
        finally:
            self._callers -= 1
