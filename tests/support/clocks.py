"""The fake clock of the tests. The time changes only when a test changes it."""

from datetime import datetime, timezone


class Clock:
    """A clock in seconds that only a test moves.

    A call returns the time. `sleep` moves the clock and records how long it slept.
    """

    def __init__(self, now: float = 1_760_000_000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def moment(self) -> datetime:
        """Return the time as an aware datetime."""
        return datetime.fromtimestamp(self.now, timezone.utc)

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
