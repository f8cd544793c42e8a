"""The one retry rule of the client: what is asked again, after which waits, and until when.

Scoring changes nothing, so a request may be repeated. Repeated is what a moment may heal: no server there, a full
queue, a version switch (`ServerUnavailable`), and a model that answered this client before and is gone now, because it
is being loaded again. Not repeated: what another try would meet again (`BadRequest`, `BadReply`, `WrongSchema`,
`ServerFault`), and an expired deadline, which is the end of the caller's time. Waits double, chance shortens each, so
that the clients of a server that comes back do not all come back at once, and the deadline ends them all.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from inference_client.errors import BadRequest, ServerUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RetryRule:
    """How often, and with which waits."""

    max_attempts: int = 8
    first_backoff_seconds: float = 0.05
    max_backoff_seconds: float = 1.0
    """Waits double from the first to this: 3.55 s in all with the defaults, before chance shortens them."""

    def __post_init__(self) -> None:
        """Refuses a rule that never asks, or never waits."""
        if self.max_attempts < 1:
            raise BadRequest(f"max_attempts is {self.max_attempts}, expected at least 1")
        if not 0 < self.first_backoff_seconds <= self.max_backoff_seconds:
            raise BadRequest(
                f"backoffs are {self.first_backoff_seconds} and {self.max_backoff_seconds}, expected 0 < first <= max"
            )


def shortened(seconds: float) -> float:
    """`seconds` less a random part of up to a half."""
    return seconds * random.uniform(0.5, 1.0)


class Waits(NamedTuple):
    """Time and chance, as retries see them."""

    timer: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep
    jitter: Callable[[float], float] = shortened
    """The wait for a backoff."""


async def retried(call: Callable[[], Awaitable[T]], rule: RetryRule, waits: Waits, *, give_up_at: float) -> T:
    """The first answer of `call`.

    Args:
        call: One attempt; bounds its own time.
        rule: How often, and with which waits.
        waits: Time and chance.
        give_up_at: On the timer: no attempt begins after it.

    Raises:
        ServerUnavailable: the last attempt's; whatever else `call` raises is passed on at once.
    """
    backoff = rule.first_backoff_seconds
    for attempt in range(1, rule.max_attempts + 1):
        try:
            return await call()
        except ServerUnavailable as error:
            wait = waits.jitter(backoff)
            if attempt == rule.max_attempts or waits.timer() + wait >= give_up_at:
                raise
            logger.debug("attempt %d failed, waiting %.2f s: %s", attempt, wait, error)
        await waits.sleep(wait)
        backoff = min(2 * backoff, rule.max_backoff_seconds)
    raise AssertionError("unreachable: the last attempt returns or raises")
