"""Asks a model that nobody is served by: for the record, and never at the expense of those who are served.

A shadow request starts after its served answer came, takes none of the served requests' slots, is tried once, and is
dropped and counted where shadows are out already or served requests wait. Judging what it says is deployment's part.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.runtime.errors import ContractError, PermanentError, TemporaryError
from inference_client.client import ScoringClient
from inference_client.errors import Overloaded
from inference_client.scorer import Scored

logger = logging.getLogger(__name__)


class Shadows:
    """Shadow requests over a connection of their own; use in one event loop."""

    def __init__(self, client: ScoringClient) -> None:
        """Takes the connection over.

        Args:
            client: Of the shadow requests alone; its settings bound them.
        """
        self._client = client
        self._out: set[asyncio.Task[Scored | None]] = set()
        self.sent = self.answered = self.dropped = 0
        """Dropped ones were never sent."""
        self.failed: Counter[str] = Counter()
        """By kind of error."""

    def start(
        self, model_name: str, dense: NDArray[np.float32], categorical: NDArray[np.int64], *, under_pressure: bool
    ) -> asyncio.Future[Scored | None] | None:
        """Asks `model_name`; its answer or None once that is known, or None at once where it was dropped."""
        if under_pressure or self._client.is_full:
            self.dropped += 1
            return None
        self.sent += 1
        task = asyncio.get_running_loop().create_task(self._ask(model_name, dense, categorical))
        self._out.add(task)
        task.add_done_callback(self._out.discard)
        return task

    async def close(self) -> None:
        """Waits for shadows under way, each at most its deadline, and closes the connection."""
        if self._out:
            await asyncio.wait(set(self._out))
        await self._client.close()

    def summary(self) -> dict[str, Any]:
        """The counts, for JSON."""
        return {
            "sent": self.sent,
            "answered": self.answered,
            "dropped": self.dropped,
            "failed": dict(sorted(self.failed.items())),
        }

    async def _ask(self, model_name: str, dense: NDArray[np.float32], categorical: NDArray[np.int64]) -> Scored | None:
        try:
            answer = await self._client.score(dense, categorical, model_name=model_name)
        except Overloaded:
            self.sent -= 1
            self.dropped += 1
            return None
        except (TemporaryError, PermanentError, ContractError) as error:
            self.failed[type(error).__name__] += 1
            logger.debug("shadow request failed: %s", error)
            return None
        self.answered += 1
        return answer
