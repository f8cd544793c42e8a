"""Work divided among forked processes: each has what this one imported, and none of it is imported again.

Joins the steps that divide their rows among the cores, preprocessing and validation: what these import takes seconds of
processor time, which a new interpreter per process would pay again. Which work is divided, and that results do not
depend on how, is the callers'.

`concurrent.futures.ProcessPoolExecutor` will not do: where its caller is stopped it waits until the work that runs is
done, longer than a cluster waits for a pod; and it waits for ever where a process is killed while it sends its result,
for its processes share one pipe.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from components.runtime.errors import TemporaryError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_PROCESSES = 8
"""Of one step, where nobody says otherwise: each holds a part of the rows in memory."""
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_PR_SET_PDEATHSIG = 1


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
    now: the function, the items and all that they refer to are theirs without being copied; results are pickled. The
    caller must hold no lock and run no thread that the function needs. What the function raises is raised here, of
    several items' errors the first one's. However the call ends, its processes end with it, at once.

    Raises:
        TemporaryError: a process was killed; mostly, for want of memory.
    """
    items = list(items)
    processes = min(processes, len(items))
    if processes <= 1:
        return [function(item) for item in items]
    running: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(processes):
            ours, process = _fork(function, items)
            running[ours] = process
        return _gather(list(running), len(items))
    except _Broken as error:
        raise TemporaryError(
            f"one of {processes} processes was killed; fewer processes or smaller parts take less memory"
        ) from error
    finally:
        for ours, process in running.items():
            process.kill()
            process.join()
            ours.close()


def shares(items: Sequence[Item], number: int, *, weight: Callable[[Item], float] = lambda _: 1) -> list[list[Item]]:
    """The items in at most `number` consecutive shares, none empty, of nearly equal weight (positive; 1 = each item's).

    An item goes to the share in which its middle lies, so that no share is off by more than half an item at each end.

    >>> shares("abcde", 2), shares("a", 3), shares([1, 1, 1, 9], 2, weight=float)
    ([['a', 'b'], ['c', 'd', 'e']], [['a']], [[1, 1, 1], [9]])
    """
    ends = list(accumulate(map(weight, items)))
    chosen: list[list[Item]] = [[] for _ in range(number)]
    for item, end in zip(items, ends):
        chosen[int(number * (end - weight(item) / 2) / ends[-1])].append(item)
    return [share for share in chosen if share]


class _Broken(Exception):
    """A process is gone."""


class _Elsewhere(Exception):
    """Where in another process an error was raised: the text of its traceback."""


def _fork(function: Callable[[Any], Any], items: Sequence[Any]) -> tuple[Connection, BaseProcess]:
    """A process that runs the items whose numbers it is sent, and the end of its pipe that is ours."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with theirs:
        # A daemon, so that the interpreter's end does not wait for one that a signal kept from being remembered here.
        process = context.Process(
            target=_work, args=(function, items, theirs), kwargs={"parent": os.getpid()}, daemon=True
        )
        process.start()
    return ours, process


def _gather(workers: Sequence[Connection], number: int) -> list[Any]:
    """Deals out the numbers of all items, and gives the results in their order."""
    results: dict[int, Any] = {}
    failed: dict[int, Exception] = {}
    numbers = iter(range(number))
    at: dict[Connection, int] = {}
    for ours in workers:
        _deal(ours, numbers, at)
    while at:
        ready = wait(list(at))
        for ours in [each for each in at if each in ready]:
            done = at.pop(ours)
            results[done], error = _receive(ours)
            if error is not None:
                failed[done], numbers = error, iter(())
            _deal(ours, numbers, at)
        # Which error is raised must not depend on which process was faster.
        at = {ours: n for ours, n in at.items() if not failed or n < min(failed)}
    if failed:
        raise failed[min(failed)]
    return [results[i] for i in range(number)]


def _deal(ours: Connection, numbers: Iterator[int], at: dict[Connection, int]) -> None:
    """Sends a process its next number, None where there is none."""
    following = next(numbers, None)
    if following is not None:
        at[ours] = following
    try:
        ours.send(following)
    except OSError as error:
        raise _Broken from error


def _receive(ours: Connection) -> tuple[Any, Exception | None]:
    """A result, or the error in its place."""
    try:
        answer = ours.recv_bytes()
    except (EOFError, OSError) as error:
        raise _Broken from error
    result, raised, trace = pickle.loads(answer)
    if raised is not None:
        raised.__cause__ = _Elsewhere(f"\n{trace}")
    return result, raised


def _work(function: Callable[[Any], Any], items: Sequence[Any], theirs: Connection, *, parent: int) -> None:
    """What a new process does."""
    # Where the parent was killed nobody would end this one: it would stay, with all its memory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # A terminal interrupts both, and the parent ends this one. What the parent does at SIGTERM is not this one's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # One process per core already; threads of each would only wait for each other.
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].set_cpu_count(1)
    while (number := theirs.recv()) is not None:
        theirs.send_bytes(_answer(function, items[number]))


def _answer(function: Callable[[Any], Any], item: Any) -> bytes:
    """Pickled: the result, the error in its place, and the text of its traceback."""
    try:
        return pickle.dumps((function(item), None, ""))
    except Exception as error:
        trace = traceback.format_exc()
        try:
            answer = pickle.dumps((None, error, trace))
            pickle.loads(answer)
        except Exception:  # what cannot be pickled, or not be made again
            return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), trace))
        return answer
