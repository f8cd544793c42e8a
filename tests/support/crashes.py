"""A simulated kill of a process during its work."""

from collections.abc import Callable


class Killed(BaseException):
    """Simulates SIGKILL. No `except Exception` of the product may catch it."""


def crash_at(point: str, visit: int = 1) -> Callable[[str], None]:
    """Return a checkpoint that raises `Killed` at the `visit`-th time of step `point`."""
    seen = 0

    def checkpoint(name: str) -> None:
        nonlocal seen
        seen += name == point
        if name == point and seen == visit:
            raise Killed

    return checkpoint
