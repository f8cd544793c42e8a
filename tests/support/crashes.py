"""A process killed in the middle of its work, as a test can raise it."""

from collections.abc import Callable


class Killed(BaseException):
    """Stands for SIGKILL: no `except Exception` of the product may catch it."""


def crash_at(point: str, visit: int = 1) -> Callable[[str], None]:
    """A checkpoint that kills where the step `point` is reached for the `visit`-th time."""
    seen = 0

    def checkpoint(name: str) -> None:
        nonlocal seen
        seen += name == point
        if name == point and seen == visit:
            raise Killed

    return checkpoint
