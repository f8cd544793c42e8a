"""Virtual clocks, which move only when tasks sleep."""

import asyncio

from inference_client.timing import Timing


class VirtualTime:
    """A clock that moves to the earliest wake-up time when every task waits.

    Cancelled sleeps do not move the clock.
    """

    def __init__(self) -> None:
        self.now = 5000.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._slept = 0

    def clock(self) -> float:
        return self.now

    def timing(self) -> Timing:
        return Timing(clock=self.clock, timer=self.clock, sleep=self.sleep, jitter=float)

    async def sleep(self, seconds: float) -> None:
        self._slept += 1
        sleeper = (self.now + seconds, self._slept, asyncio.Event())
        self._sleepers.append(sleeper)
        try:
            await sleeper[2].wait()
        finally:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)

    async def _advance(self) -> None:
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            if self._sleepers:
                first = min(self._sleepers)
                self._sleepers.remove(first)
                self.now = max(self.now, first[0])
                first[2].set()

    def run(self, main):
        """Run a coroutine in virtual time until it ends."""

        async def both():
            advancing = asyncio.create_task(self._advance())
            try:
                return await main
            finally:
                advancing.cancel()

        return asyncio.run(both())


class SteppedTime:
    """A clock that a sleep advances without waiting.

    Each wake-up of a task calls the actions in `at_wake`.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now, self.at_wake = now, []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for action in self.at_wake:
            action()
        await asyncio.sleep(0)

    def timing(self) -> Timing:
        return Timing(clock=self.clock, timer=self.clock, sleep=self.sleep, jitter=float)
