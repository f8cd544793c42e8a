"""Work divided among forked processes: each has what this one imported, and none of it is imported again.

A Dask LocalCluster would import NVTabular in every worker, 1.5 s of each one's processor time. Which work is divided,
and that results do not depend on how, is the callers'.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from components.contracts.errors import TemporaryError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_PROCESSES = 8
"""Of one step, where nobody says otherwise: each holds a partition in memory."""
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_adopted: Callable[[Any], Any] | None = None


def available_cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than its container's limit, rounded up."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_MAX.read_text().split()
        return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def run_all(function: Callable[[Item], Result], items: Iterable[Item], *, processes: int) -> list[Result]:
    """The function's results, in the order of the items.

    Items are run in this process where one process is asked for or there is one item. Otherwise in processes forked
    now: the function and all that it refers to are theirs without being copied; items and results are pickled. The
    caller must hold no lock and run no thread that the function needs.

    Raises:
        TemporaryError: a process was killed; mostly, for want of memory.
    """
    items = list(items)
    if min(processes, len(items)) <= 1:
        return [function(item) for item in items]
    context = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(min(processes, len(items)), context, _adopt, (function,)) as pool:
            return list(pool.map(_run, items))
    except BrokenProcessPool as error:
        raise TemporaryError(
            f"one of {processes} processes was killed: {error}; fewer processes or smaller partitions take less memory"
        ) from error


def shares(items: Sequence[Item], number: int) -> list[list[Item]]:
    """The items in at most `number` consecutive shares, none empty, as equal as can be.

    >>> shares("abcde", 2), shares("a", 3)
    ([['a', 'b', 'c'], ['d', 'e']], [['a']])
    """
    number = min(number, len(items))
    ends = [math.ceil(len(items) * (k + 1) / number) for k in range(number)]
    return [list(items[begin:end]) for begin, end in zip([0, *ends], ends)]


def _adopt(function: Callable[[Any], Any]) -> None:
    """What a new process begins with."""
    import pyarrow as pa

    global _adopted
    _adopted = function
    # One process per core already; threads of each would only wait for each other.
    pa.set_cpu_count(1)


def _run(item: Any) -> Any:
    assert _adopted is not None
    return _adopted(item)
