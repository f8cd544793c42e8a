"""Processes of a server that is tested from outside: which run still; waiting without a fixed time; threads at once."""

import threading
import time
import urllib.request
from pathlib import Path

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Requests without the proxy that the environment may name."""


def running_in_group(group):
    """Process ids of a server and its stubs; a process that ended and was not asked for is not running."""
    found = []
    for folder in (each for each in Path("/proc").iterdir() if each.name.isdigit()):
        try:
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(folder.name))
    return found


def wait_for(condition, what="the condition", *, seconds=120.0):
    """The first true answer of `condition()`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.02)
    return found


def at_once(num, do):
    """Runs `do(me)` in `num` threads that begin together."""
    start = threading.Barrier(num)
    threads = [threading.Thread(target=lambda me=me: (start.wait(120), do(me))) for me in range(num)]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
