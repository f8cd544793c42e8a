"""Describe the machine of a measurement: processor, versions, limits, other work, memory."""

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

_BUSY_SHARE = 0.1
"""Figures are doubtful if unrelated processes use at least this share of the machine's processor
time."""


def facts() -> dict[str, Any]:
    """Return processor, memory, versions of important packages, git revision and load average."""
    revision, changed = _git("rev-parse", "--short=10", "HEAD"), _git("status", "--porcelain")
    return {
        "processor": _line_of("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": sys.version.split()[0],
        **_versions("torch", "numpy", "pyarrow", "pandas", "deepctr-torch", "nvtabular", "dask"),
        "revision": revision + (" with changes" if changed else "") if revision else None,
        "load_average": round(os.getloadavg()[0], 2),
    }


def _git(*arguments: str) -> str:
    """Return git's output for this checkout, or "" without git."""
    command = ["git", "-C", str(Path(__file__).resolve().parents[1]), *arguments]
    with suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def limits() -> dict[str, float]:
    """Measure the current limits of cores, memory and disk within two seconds.

    Each limit is the median of a few tries. The first limit is float32 matrix products by NumPy on
    all cores, in GFLOP/s. The second limit is a memory copy by one core, in GB/s of read and
    written bytes. The third limit is a write of 4 KiB with fsync, in milliseconds.
    """
    side, size = 2048, 2**27
    matrix, source = np.ones((side, side), np.float32), np.ones(size, np.uint8)
    target = np.empty_like(source)
    with tempfile.TemporaryFile() as file:

        def synced() -> None:
            os.write(file.fileno(), bytes(4096))
            os.fsync(file.fileno())

        return {
            "product_gflop_s": round(2 * side**3 / 1e9 / _seconds(lambda: matrix @ matrix), 1),
            "copy_gb_s": round(2 * size / 1e9 / _seconds(lambda: np.copyto(target, source)), 1),
            "fsync_ms": round(1e3 * _seconds(synced, 20), 3),
        }


def _seconds(work: Callable[[], object], times: int = 5) -> float:
    durations = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        durations.append(time.perf_counter() - began)
    return median(durations[1:])


class OtherWork:
    """Share of the machine's processor time used by unrelated processes."""

    def __init__(self) -> None:
        """Start the measurement."""
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def share(self) -> float:
        """Return the share since the start, in [0, 1]."""
        busy, own = _busy_seconds() - self._busy, _own_seconds() - self._own
        all_seconds = (os.cpu_count() or 1) * max(time.monotonic() - self._began, 1e-9)
        return min(1.0, max(0.0, busy - own) / all_seconds)

    def warning(self) -> str | None:
        """Return a warning if other processes used so much time that the figures are doubtful."""
        share = self.share()
        if share < _BUSY_SHARE:
            return None
        return (
            f"warning: other work took {share:.0%} of the machine. Ratios compare interleaved "
            "rounds, but other work slows threads that wait for each other most. Run the benchmark "
            "again on an idle machine"
        )


def _busy_seconds() -> float:
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, steal, *_ = map(float, file.readline().split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def own_memory(line: str) -> int:
    """Return the memory size in one line of `/proc/self/status`, in bytes.

    Useful lines are `RssAnon` (current memory) and `VmHWM` (maximum memory).
    """
    return 1024 * int((_line_of("/proc/self/status", line) or "0 kB").split()[0])


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _line_of(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
