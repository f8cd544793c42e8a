"""The ways in which HugeCTR does not return from a call.

A failed check aborts the process. If a reader's thread ends with an error, `train` waits for ever
for the reader's next batch. A waiting `train` holds the interpreter's lock. A test that runs the
test double in its own process calls `raise_instead` first.
"""

import ctypes
import logging
import os

logger = logging.getLogger("hugectr")
MAX_HANG_SECONDS = 120
"""Time after which a hang ends the process, so that no test leaves a process behind."""
HANG_CODE = 97
"""Exit code of a process whose hang lasted `MAX_HANG_SECONDS`."""


class Died(BaseException):
    """Error that `abort` and `hang` raise after a call of `raise_instead`."""


deaths: list[str] = []
"""Reasons of the aborts and hangs that happened after the call of `raise_instead`."""
_raises = False


def raise_instead() -> None:
    """Raise `Died` from now on, instead of ending or blocking this process."""
    global _raises
    _raises = True
    deaths.clear()


def _die_in_test(reason: str) -> None:
    if _raises:
        deaths.append(reason)
        raise Died(reason)


def abort(reason: str) -> None:
    """End the process as `HCTR_CHECK_HINT` does."""
    _die_in_test(reason)
    logger.error("Expression check failed! %s", reason)
    os.abort()


def hang(reason: str) -> None:
    """Wait without releasing the interpreter's lock."""
    _die_in_test(reason)
    logger.error("%s", reason)
    for _ in range(MAX_HANG_SECONDS):
        ctypes.PyDLL(None).usleep(1_000_000)
    os._exit(HANG_CODE)
