"""A process that ends with the one that started it, whatever ends that, SIGKILL included."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

# PR_SET_PDEATHSIG (1), set in the child, which then becomes the command. The check is for a parent gone before.
_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def tethered(command: Sequence[str], death_signal: signal.Signals = signal.SIGTERM) -> list[str]:
    """The command line that runs `command` and sends it `death_signal` when this process is gone.

    To be started by a thread that lives as long as the command should: Linux counts the starting thread's end.
    """
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(int(death_signal)), *command]
