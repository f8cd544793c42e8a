"""The one fake clock of the tests: it stands still until a test moves it."""

from datetime import datetime, timezone


class Clock:
    """Seconds that only a test moves: called, it tells the time; `sleep` moves it and remembers what was slept."""

    def __init__(self, now: float = 1_760_000_000.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def moment(self) -> datetime:
        """The time with its zone."""
        return datetime.fromtimestamp(self.now, timezone.utc)

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
