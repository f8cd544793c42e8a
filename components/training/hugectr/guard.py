"""End the step with an exit code if HugeCTR aborts or does not return.

A failed check of HugeCTR aborts the process, and no exception is raised. After an error in one of
HugeCTR's reading threads, a call of HugeCTR waits for ever and holds the interpreter's lock.
Therefore the step runs in a child process, whose end this module reports. In the child, a watchdog
limits the duration of each call. With several nodes, MPI starts and observes one process on each
node. These processes have the watchdog, but `run_guarded` is not used.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from evergreen.runtime.errors import Preempted, TemporaryError

GUARDED = "EVERGREEN_HUGECTR_GUARDED"
"""Environment variable that is set in the child process."""
_STANDARD_ERROR = 2
_WATCHDOG_CODE = 1
"""Exit code with which `faulthandler` ends a process. No failure of the training step has this
code."""
_STOP_SECONDS = 30.0


@contextmanager
def bounded(minutes: float) -> Iterator[Callable[[], None]]:
    """End this process if the body takes longer than `minutes`.

    The traceback of all threads is written to standard error first. `faulthandler` measures the
    time in a thread that does not need the interpreter's lock. Each call of the yielded function
    restarts the timer.
    """

    def restart() -> None:
        faulthandler.dump_traceback_later(60 * minutes, exit=True, file=_STANDARD_ERROR)

    restart()
    try:
        yield restart
    finally:
        faulthandler.cancel_dump_traceback_later()


def is_guarded() -> bool:
    """Return whether `run_guarded` started this process."""
    return GUARDED in os.environ


def run_guarded(arguments: Sequence[str]) -> int:
    """Run `python -m components.training` in a child process and return its exit code.

    Temporary files of the child are in a folder that is always deleted afterwards. SIGTERM is
    forwarded to the child.

    Args:
        arguments: Flags of the step.

    Raises:
        TemporaryError: HugeCTR aborted, a call took too long, or the child was killed.
        Preempted: SIGTERM arrived before the child handled it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hugectr-", ignore_cleanup_errors=True) as scratch,
        _sigterm_forwarded() as forward,
    ):
        child = subprocess.Popen(
            [sys.executable, "-m", "components.training", *arguments],
            env={**os.environ, GUARDED: "1", "TMPDIR": scratch},
        )
        forward.to(child)
        try:
            code = child.wait()
        finally:
            _stop(child)
    if code == -signal.SIGTERM and forward.came:
        raise Preempted("SIGTERM arrived while no fit was running")
    if code == _WATCHDOG_CODE:
        raise TemporaryError(
            "a call of HugeCTR took longer than solver.call_minutes, so the step was ended "
            "(traceback above). The last lines of HugeCTR's log name the reason. The same "
            "command continues from the last save"
        )
    if code < 0:
        raise TemporaryError(
            f"the process of HugeCTR was killed by {signal.Signals(-code).name}; the last lines of "
            "HugeCTR's log name the reason if HugeCTR aborted; the same command continues from the "
            "last save"
        )
    return code


class _Forward:
    """Handler that forwards a signal to a child process."""

    def __init__(self) -> None:
        self.came = False
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self, signum: int, _frame: Any) -> None:
        self.came = True
        if self._child is not None:
            self._child.send_signal(signum)

    def to(self, child: "subprocess.Popen[bytes]") -> None:
        """Forward signals to this child from now on.

        A signal that has already arrived is forwarded too.
        """
        self._child = child
        if self.came:
            child.send_signal(signal.SIGTERM)


@contextmanager
def _sigterm_forwarded() -> Iterator[_Forward]:
    forward = _Forward()
    if threading.current_thread() is not threading.main_thread():
        yield forward  # Only the main thread can set a handler.
        return
    before = signal.signal(signal.SIGTERM, forward)
    try:
        yield forward
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """End a child that still runs, for example after Ctrl-C."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
