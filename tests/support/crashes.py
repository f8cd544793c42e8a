"""The harness of all crash tests: a process that is killed at a chosen step of its work.

A step is a checkpoint of the product, or a call of a watched function such as `os.rename`. `Kill`
ends the process at one step: in this process by `Killed`, or by SIGKILL in a forked process. After
the kill every further step fails too, so cleanup handlers write nothing. `every_kill` kills a
repeated run at its first step, then at its second step, until the run completes.
"""

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any


class Killed(BaseException):
    """Simulates SIGKILL. No `except Exception` of the product may catch it."""


def sigkill(name: str) -> None:
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(name: str) -> None:
    raise Killed(name)


class Kill:
    """A kill at the `visit`-th step whose name, or number from 0, is in `at`.

    As a context manager it catches `Killed` and unwatches the functions.

    Args:
        at: Names or numbers of steps. Without any, the process survives.
        visit: For names, the occurrence from 1 that kills.
        end: Ends the process at the step of this name.
        report: Called with the name of each step before the kill.
    """

    def __init__(
        self,
        *at: str | int | None,
        visit: int = 1,
        end: Callable[[str], None] = _raise,
        report: Callable[[str], Any] = lambda name: None,
    ) -> None:
        self.at, self.visit, self._end, self._report = at, visit, end, report
        self.steps: list[str] = []
        """Names of the steps that were reached, in order."""
        self.is_dead = False
        self.is_paused = False
        """Whether steps are ignored, for the work of a double."""
        self._real: list[tuple[object, str, Any]] = []

    def reach(self, name: str) -> None:
        """Enter the step `name`. This is a checkpoint of the product."""
        if self.is_paused:
            return
        if not self.is_dead:
            self._report(name)
            self.steps.append(name)
            is_named = name in self.at and self.steps.count(name) == self.visit
            self.is_dead = is_named or len(self.steps) - 1 in self.at
        if self.is_dead:
            self._end(name)

    def watch(self, owner: object, *names: str, after: bool = False, where=lambda *_: "") -> "Kill":
        """Make every call of these functions of `owner` a step, until the context ends.

        Args:
            owner: A module or a class.
            names: Functions of `owner`.
            after: Whether a step follows each call too.
            where: Describes the arguments of a call in the name of the step.
        """
        for name in names:
            real = getattr(owner, name)
            self._real.append((owner, name, real))
            setattr(owner, name, self.around(name, real, after=after, where=where))
        return self

    def around(self, name: str, real, *, after: bool = False, where=lambda *_: ""):
        """Return the function with a step before it, and optionally after it."""

        def call(*arguments, **more):
            full = f"{name}{where(*arguments)}"
            self.reach(f"before {full}" if after else full)
            answer = real(*arguments, **more)
            if after:
                self.reach(f"after {full}")
            return answer

        return call

    def __enter__(self) -> "Kill":
        return self

    def __exit__(self, kind, error, trace) -> bool:
        for owner, name, real in reversed(self._real):
            setattr(owner, name, real)
        return kind is Killed


def every_kill(first: int = 0) -> Iterator[Kill]:
    """Yield a kill at step `first`, then at the next step, until a run was not killed."""
    for number in count(first):
        kill = Kill(number)
        yield kill
        if not kill.is_dead:
            return
