"""Polls the traffic plan and keeps the last good one when reading fails.

The plan's content is defined in `store.traffic_plan`; following it with requests is `routing`'s job.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from components.runtime.errors import ContractError, PermanentError, TemporaryError
from components.storage.objects import Objects, Stored
from components.store.traffic_plan import PLAN_POLL_SECONDS, TRAFFIC_FILE, TrafficPlan

logger = logging.getLogger(__name__)

READ_SECONDS = 5.0
"""A read that takes longer is reported as a problem; no other read starts until it has ended."""
MIN_REFRESH_SECONDS = 0.1
"""Least time between reads caused by a missing canary, of which every request of its keys would cause one."""


class PlanFollower:
    """The plan below one root; enter it to follow, in one event loop."""

    def __init__(
        self,
        objects: Objects,
        *,
        interval_seconds: float = PLAN_POLL_SECONDS,
        read_seconds: float = READ_SECONDS,
        timer: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        """Reads nothing yet.

        Args:
            objects: Where `TRAFFIC_FILE` lies.
            interval_seconds: Between two reads.
            read_seconds: See `READ_SECONDS`.
            timer: Seconds.
            sleep: Waits between reads.
        """
        self._objects = objects
        self._interval, self._read_seconds = interval_seconds, read_seconds
        self._timer, self._sleep = timer, sleep
        self.source = f"{objects.uri}/{TRAFFIC_FILE}"
        self.current: TrafficPlan | None = None
        """The last good plan; None = there is none, or none could be read yet: everyone asks the stable model."""
        self.problem: str | None = None
        """Why `current` may be old; None while reading succeeds."""
        self._generation: int | None = None
        self._reading: asyncio.Future[Stored | None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._hurried: asyncio.Task[None] | None = None
        self._last_read = float("-inf")

    async def __aenter__(self) -> PlanFollower:
        """Reads the plan once and follows it from then on."""
        await self.refresh()
        self._polling = asyncio.get_running_loop().create_task(self._poll())
        self._polling.add_done_callback(self._ended)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Follows no more."""
        tasks = {task for task in (self._polling, self._hurried) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def refresh(self) -> None:
        """Reads the plan now, or joins the read under way. A failed read sets `problem` and raises nothing."""
        if self._reading is None or self._reading.done():
            self._last_read = self._timer()
            self._reading = _read_in_thread(lambda: self._objects.read(TRAFFIC_FILE))
        reading = self._reading
        await asyncio.wait({reading}, timeout=self._read_seconds)
        try:
            if not reading.done():
                raise TemporaryError(f"{self.source} was not read within {self._read_seconds:g} s")
            self._take(reading.result())
        except (TemporaryError, PermanentError, ContractError) as error:
            if self.problem != str(error):
                logger.warning("the traffic plan stays as it is (%s): %s", _describe(self.current), error)
            self.problem = str(error)
            return
        if self.problem is not None:
            logger.info("the traffic plan can be read again: %s", _describe(self.current))
        self.problem = None

    def refresh_soon(self) -> None:
        """Starts to read the plan, unless it was read a moment ago; the caller does not wait."""
        if self._timer() - self._last_read >= MIN_REFRESH_SECONDS and (self._hurried is None or self._hurried.done()):
            self._hurried = asyncio.get_running_loop().create_task(self.refresh())

    def _take(self, stored: Stored | None) -> None:
        if stored is None:
            plan, generation = None, None
        elif stored.generation == self._generation:
            return
        else:
            plan, generation = TrafficPlan.loads(stored.content, source=self.source), stored.generation
        if plan != self.current:
            logger.info("traffic plan: %s, was %s", _describe(plan), _describe(self.current))
        self.current, self._generation = plan, generation

    def _ended(self, polling: asyncio.Task[None]) -> None:
        if not polling.cancelled() and (error := polling.exception()) is not None:
            self.problem = f"{self.source} is not followed any more: {error!r}"
            logger.error("the traffic plan stays as it is (%s): %s", _describe(self.current), self.problem)

    async def _poll(self) -> None:
        while True:
            await self._sleep(self._interval)
            await self.refresh()


def _read_in_thread(read: Callable[[], Stored | None]) -> asyncio.Future[Stored | None]:
    """The result of `read` in a daemon thread; the loop's own threads would delay the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Stored | None] = loop.create_future()
    # Asking for the exception tells asyncio that it is not lost: its reader may be gone.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def settle(answer: Stored | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer)

    def work() -> None:
        answer: Stored | None = None
        error: BaseException | None = None
        try:
            answer = read()
        except BaseException as raised:
            error = raised
        # A RuntimeError says that the loop has ended.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, answer, error)

    threading.Thread(target=work, name="traffic plan", daemon=True).start()
    return future


def _describe(plan: TrafficPlan | None) -> str:
    if plan is None:
        return "none"
    if plan.canary is None:
        return f"{plan.sequence}, version {plan.stable.version} alone"
    return (
        f"{plan.sequence}, version {plan.canary.version} answers {plan.canary_share:.1%} beside {plan.stable.version}, "
        f"shadow {plan.shadow_share:.1%}"
    )
