"""How far a pass is, for people: a bar where somebody looks at a terminal, a line now and then elsewhere.

Numbers for programs go to `metrics_sink`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_SAY_EVERY_SECONDS = 30.0


class Progress(Protocol):
    """Is told of each pass."""

    def begin(self, name: str, num_batches: int, done: int) -> None:
        """A pass of `num_batches` batches begins, or goes on after `done` of them."""

    def advance(self, done: int, loss: float) -> None:
        """`done` batches of the pass are made; `loss` is the mean log loss of the newest, in nats."""

    def end(self) -> None:
        """The pass ended, or was broken off."""


class LogLines:
    """One log line every half minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Makes one that reads seconds from `clock`."""
        self._clock = clock

    def begin(self, name: str, num_batches: int, done: int) -> None:
        """See `Progress`."""
        self._name, self._num_batches, self._said = name, num_batches, self._clock()

    def advance(self, done: int, loss: float) -> None:
        """See `Progress`."""
        if self._clock() - self._said >= _SAY_EVERY_SECONDS:
            self._said = self._clock()
            logger.info("%s: batch %d of %d, loss %.5f", self._name, done, self._num_batches, loss)

    def end(self) -> None:
        """See `Progress`."""


class Bar:
    """A bar of tqdm on a terminal; it is gone when its pass is."""

    _bar: Any

    def begin(self, name: str, num_batches: int, done: int) -> None:
        """See `Progress`."""
        from tqdm import tqdm

        self._bar = tqdm(desc=name, total=num_batches, initial=done, unit="batch", leave=False)

    def advance(self, done: int, loss: float) -> None:
        """See `Progress`."""
        self._bar.set_postfix_str(f"loss {loss:.5f}", refresh=False)
        self._bar.update(done - self._bar.n)

    def end(self) -> None:
        """See `Progress`."""
        self._bar.close()


def progress_on(stream: Any = None) -> Progress:
    """A bar where `stream` (None = stderr) is a terminal and tqdm is in the environment, else log lines."""
    is_bar = (stream or sys.stderr).isatty() and find_spec("tqdm") is not None
    return Bar() if is_bar else LogLines()
