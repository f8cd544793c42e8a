"""How far a transfer has come, said in the log at bounded intervals."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

SECONDS = 10.0
"""Between two lines."""


class Progress:
    """Counts what arrives; safe for several threads.

    Args:
        name: What is transferred.
        num_files: To bring.
        num_bytes: To bring.
        seconds: Least time between two lines.
        clock: Seconds from any start.
    """

    def __init__(
        self,
        name: str,
        *,
        num_files: int,
        num_bytes: int,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._num_files, self._num_bytes = name, num_files, num_bytes
        self._seconds, self._clock = seconds, clock
        self._lock = threading.Lock()
        self._began = self._told = clock()
        self.num_done = 0
        """Files that are whole."""
        self.num_arrived = 0
        """Bytes that arrived and were not given up."""

    def arrived(self, num_bytes: int) -> None:
        """Counts bytes; less than 0 where they were given up."""
        with self._lock:
            self.num_arrived += num_bytes
            if (now := self._clock()) - self._told >= self._seconds:
                self._told = now
                logger.info("%s", self.line())

    def finish_file(self) -> None:
        """Counts one file."""
        with self._lock:
            self.num_done += 1

    def line(self) -> str:
        """Files, bytes, speed (MB/s, 10^6 bytes) since the beginning, and seconds left at that speed."""
        seconds = self._clock() - self._began
        left = self._num_bytes - self.num_arrived
        speed = self.num_arrived / seconds if seconds > 0 else 0.0
        rest = f", {left / speed:.0f} s left" if left > 0 and speed > 0 else ""
        return (
            f"{self._name}: {self.num_done} of {self._num_files} files, {self.num_arrived / 1e6:.1f} of "
            f"{self._num_bytes / 1e6:.1f} MB in {seconds:.1f} s, {speed / 1e6:.1f} MB/s{rest}"
        )

    def close(self) -> None:
        """Says how it ended."""
        logger.info("%s", self.line())
