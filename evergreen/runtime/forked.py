"""Division of work among forked processes, which inherit all imports of this process.

Extraction, validation and preprocessing use this module to divide their rows among the cores. The
imports of these steps take seconds of processor time, and every new interpreter would spend that
time again. The callers decide how the work is divided, and ensure that the division does not change
the results.

`concurrent.futures.ProcessPoolExecutor` has two drawbacks for this use. If the process that uses
the executor is stopped, the executor waits for running work, and this wait may be longer than a
cluster waits for a stopping pod. When a process is killed while it sends its result, the executor
waits forever, because its processes share one pipe.
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

from evergreen.runtime.errors import TemporaryError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_PROCESSES = 8
"""Highest number that `usual_processes` returns. The number is limited because each process holds a
part of the rows in memory."""
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_PR_SET_PDEATHSIG = 1
_WAIT_SECONDS = 1.0


def available_cores() -> int:
    """Return the number of cores that this process may use.

    The result is the smaller of the CPU affinity and the CPU limit of the container. A fractional
    CPU limit is rounded up.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_MAX.read_text().split()
        return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


def usual_processes() -> int:
    """Return the default number of processes of one step: one per core, at most `MAX_PROCESSES`."""
    return min(available_cores(), MAX_PROCESSES)


def run_all(
    function: Callable[[Item], Result], items: Iterable[Item], *, processes: int
) -> list[Result]:
    """Return the function's results in the order of the items.

    A single item is processed in this process. If one process is requested, all items are processed
    here. With more processes, the items are processed in new forked processes. Forked processes
    share the memory of this process, so the function, the items and their data are not copied.
    Results are pickled. The function must not need a lock or a thread of the calling process. An
    exception of the function is raised again in this process. If several items fail, the first
    item's error is raised. When the call ends, all processes are stopped immediately.

    Raises:
        TemporaryError: a process was killed, usually because memory ran out.
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


def shares(
    items: Sequence[Item], number: int, *, weight: Callable[[Item], float] = lambda _: 1
) -> list[list[Item]]:
    """Divide the items into at most `number` consecutive shares of nearly equal weight.

    Every share contains at least one item, so there may be fewer than `number` shares. Weights are
    positive, and the default weight of an item is 1. Imagine the items as intervals on a line, each
    as long as its weight, and the line divided into `number` equal parts. An item belongs to the
    part that contains the midpoint of its interval.

    >>> shares("abcde", 2), shares("a", 3), shares([1, 1, 1, 9], 2, weight=float)
    ([['a', 'b'], ['c', 'd', 'e']], [['a']], [[1, 1, 1], [9]])
    """
    ends = list(accumulate(map(weight, items)))
    chosen: list[list[Item]] = [[] for _ in range(number)]
    for item, end in zip(items, ends):
        chosen[int(number * (end - weight(item) / 2) / ends[-1])].append(item)
    return [share for share in chosen if share]


class _RemoteTraceback(Exception):
    """Traceback of an error in another process, as text."""


def _fork_worker(
    function: Callable[[Any], Any], items: Sequence[Any]
) -> tuple[Connection, BaseProcess]:
    """Start a process that applies the function to the items and sends back one message.

    Returns the process, and the local end of the pipe to it.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with theirs:
        # A signal may interrupt the registration of the process here. The process is a daemon, so
        # it does not block the exit of the interpreter after such an interruption.
        process = context.Process(
            target=_work,
            args=(function, items, theirs),
            kwargs={"parent": os.getpid()},
            daemon=True,
        )
        process.start()
    return ours, process


def _receive_answers(workers: Sequence[Connection]) -> list[tuple[list[Any], Exception | None]]:
    """Return each worker's results, and the error at which the worker stopped, if any."""
    answers: dict[Connection, tuple[list[Any], Exception | None]] = {}
    while len(answers) < len(workers):
        # Wait with a timeout, because a signal that arrives just before a wait is handled only
        # after the wait.
        for connection in wait(
            [each for each in workers if each not in answers], timeout=_WAIT_SECONDS
        ):
            assert isinstance(connection, Connection)
            try:
                results, error, trace = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError) as broken:
                raise TemporaryError(
                    f"one of {len(workers)} processes was killed; fewer processes or smaller parts "
                    "take less memory"
                ) from broken
            if error is not None:
                error.__cause__ = _RemoteTraceback(f"\n{trace}")
            answers[connection] = (results, error)
    return [answers[connection] for connection in workers]


def _work(
    function: Callable[[Any], Any], items: Sequence[Any], theirs: Connection, *, parent: int
) -> None:
    # End this process if the parent is killed. Otherwise, an orphaned process would continue and
    # occupy memory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # Ctrl-C reaches parent and child, and the parent ends the child. The child must not run the
    # parent's SIGTERM handler.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # There is one process per core, so additional threads in a process would only wait for each
    # other.
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
    except Exception:  # the result cannot be pickled or unpickled
        return pickle.dumps((done, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return answer
