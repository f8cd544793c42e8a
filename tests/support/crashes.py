"""The harness of all crash tests: a process that is killed at a chosen step of its work.

A step is a checkpoint of the product, or a call of a watched function such as `os.rename`. At one
step, `Kill` ends the process: it raises `Killed` in this process, and uses SIGKILL in a forked
process. After the kill, every further step fails too, so cleanup handlers write nothing.
`every_kill` runs a function repeatedly, and kills it at its first step, then at its second step,
until it completes.
"""

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any


class Killed(BaseException):
    """Simulates SIGKILL. The product's `except Exception` must not catch this exception."""


def sigkill(name: str) -> None:
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(name: str) -> None:
    raise Killed(name)


class Kill:
    """Counts the steps of a process, and kills the process at a chosen step.

    As a context manager it catches `Killed`, and restores the watched functions.

    Args:
        at: Names or numbers (from 0) of the steps at which the process is killed. If `at` is empty,
            the process is not killed.
        visit: Occurrence of a named step at which the process is killed, counted from 1.
        end: Function that ends the process, called with the step's name.
        report: Function that is called with the name of each step before the kill.
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
        """Names of the steps so far, in order."""
        self.is_dead = False
        self.is_paused = False
        """Whether steps are ignored. Test doubles set `is_paused` during their own calls."""
        self._real: list[tuple[object, str, Any]] = []

    def reach(self, name: str) -> None:
        """Enter the step `name`, and kill the process there if requested.

        The code under test reports each checkpoint through its function `checkpoint`.
        """
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
        """Count each call of the functions `names` of `owner` as a step, until the context ends.

        Args:
            owner: Module or class that contains the functions.
            names: Functions of `owner`.
            after: Whether the end of each call is a step too.
            where: Function that describes a call's arguments in the step's name.
        """
        for name in names:
            real = getattr(owner, name)
            self._real.append((owner, name, real))
            setattr(owner, name, self.around(name, real, after=after, where=where))
        return self

    def around(self, name: str, real, *, after: bool = False, where=lambda *_: ""):
        """Wrap the function with a step before each call, and optionally after each call."""

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
    """Yield a kill at step `first`, a kill at the next step, and so on.

    The iterator ends after the first run that was not killed.
    """
    for number in count(first):
        kill = Kill(number)
        yield kill
        if not kill.is_dead:
            return
