"""Helpers for servers tested from outside: pages, processes, waits and parallel threads."""

import contextlib
import glob
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Sends requests without the proxy of the environment."""


class Answer(NamedTuple):
    """Response of an HTTP server."""

    status: int
    """HTTP status, or 0 without a response."""
    text: str
    headers: Mapping[str, str]


def http_get(url: str, *, timeout: float = 60.0) -> Answer:
    """Return the answer, whatever its status."""
    try:
        with DIRECT.open(url, timeout=timeout) as answer:
            return Answer(answer.status, answer.read().decode(), answer.headers)
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode(), error.headers)
    except OSError:
        return Answer(0, "", {})


def running_in_group(group):
    """Return the process ids of a server and its stubs, without zombie processes."""
    return sorted({process for process, state in _threads_of_group(group) if state != "Z"})


def freeze_group(group):
    """Stop a server and its stubs with SIGSTOP, and wait until none of their threads runs.

    The stop takes about 20 ms on a busy machine.
    """
    os.killpg(group, signal.SIGSTOP)
    wait_for(
        lambda: all(state in "TZ" for _, state in _threads_of_group(group)),
        "the stop of all threads",
    )


def _threads_of_group(group):
    """Yield process id and state (a letter of /proc) of each thread."""
    for stat in glob.glob("/proc/[0-9]*/task/*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = Path(stat).read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group:
                yield int(stat.split("/")[2]), state


def runs(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_for(condition, what="the condition", *, seconds=120.0):
    """Wait until `condition()` returns a true value, and return this value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)
    return found


def at_once(num, do):
    """Run `do(me)` in `num` threads that start together."""
    start = threading.Barrier(num)
    threads = [
        threading.Thread(target=lambda me=me: (start.wait(120), do(me))) for me in range(num)
    ]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
