"""Work divided among forked processes: each has what this one imported, and none of it is imported again.

Used by the steps that divide their rows among the cores, extraction, validation and preprocessing: their imports take
seconds of processor time, which a new interpreter per process would spend again. Which work is divided, and that
results do not depend on how, is the callers' business.

`concurrent.futures.ProcessPoolExecutor` will not do: where its caller is stopped it waits until the work that runs is
done, longer than a cluster waits for a pod; and it waits for ever where a process is killed while it sends its result,
for its processes share one pipe.
"""

import ctypes
import math
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from components.runtime.errors import TemporaryError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_PROCESSES = 8
"""Of one step, by `usual_processes`: each holds a part of the rows in memory."""
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_PR_SET_PDEATHSIG = 1
_WAIT_SECONDS = 1.0


def available_cores() -> int:
    """Cores that this process may use: those it is bound to, and no more than its container's limit, rounded up."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_MAX.read_text().split()
        return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def usual_processes() -> int:
    """Processes of one step where nobody says otherwise: one for each core, at most `MAX_PROCESSES`."""
    return min(available_cores(), MAX_PROCESSES)


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
    workers: dict[Connection, BaseProcess] = {}
    try:
        for number in range(processes):
            connection, process = _fork_worker(function, items[number::processes])
            workers[connection] = process
        answers = _receive_answers(list(workers))
    finally:
        for connection, process in workers.items():
            process.kill()
            process.join()
            connection.close()
    results: list[Any] = [None] * len(items)
    errors: dict[int, Exception] = {}
    for number, (done, error) in enumerate(answers):
        if error is None:
            results[number::processes] = done
        else:
            errors[number + len(done) * processes] = error
    if errors:
        raise errors[min(errors)]
    return results


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


class _RemoteTraceback(Exception):
    """Where in another process an error was raised: the text of its traceback."""


def _fork_worker(function: Callable[[Any], Any], items: Sequence[Any]) -> tuple[Connection, BaseProcess]:
    """A process that runs the items and sends one answer, and this process's end of its pipe."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with theirs:
        # A daemon, so that the interpreter's end does not wait for one that a signal kept from being remembered here.
        process = context.Process(
            target=_work, args=(function, items, theirs), kwargs={"parent": os.getpid()}, daemon=True
        )
        process.start()
    return ours, process


def _receive_answers(workers: Sequence[Connection]) -> list[tuple[list[Any], Exception | None]]:
    """Each worker's results, up to its first error, and that error."""
    answers: dict[Connection, tuple[list[Any], Exception | None]] = {}
    while len(answers) < len(workers):
        # In turns: a signal that arrives just before a wait is handled after it.
        for connection in wait([each for each in workers if each not in answers], timeout=_WAIT_SECONDS):
            assert isinstance(connection, Connection)
            try:
                results, error, trace = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError) as broken:
                raise TemporaryError(
                    f"one of {len(workers)} processes was killed; fewer processes or smaller parts take less memory"
                ) from broken
            if error is not None:
                error.__cause__ = _RemoteTraceback(f"\n{trace}")
            answers[connection] = (results, error)
    return [answers[connection] for connection in workers]


def _work(function: Callable[[Any], Any], items: Sequence[Any], theirs: Connection, *, parent: int) -> None:
    # If the parent were killed, nobody would end this process: it would stay, with all its memory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # A terminal interrupts both, and the parent ends this one. What the parent does at SIGTERM is not this one's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # One process per core already; threads of each would only wait for each other.
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].set_cpu_count(1)
    results: list[Any] = []
    try:
        for item in items:
            results.append(function(item))
        answer = pickle.dumps((results, None, ""))
    except Exception as error:
        answer = _pickle_error(len(results), error, traceback.format_exc())
    theirs.send_bytes(answer)


def _pickle_error(num_done: int, error: Exception, trace: str) -> bytes:
    done = [None] * num_done
    try:
        answer = pickle.dumps((done, error, trace))
        pickle.loads(answer)
    except Exception:  # what cannot be pickled, or not be made again
        return pickle.dumps((done, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return answer
