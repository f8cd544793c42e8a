"""Work done ahead by threads, handed over in order: unpacking and parsing go on while the caller writes.

zlib, pyarrow and most of numpy let go of the interpreter while they work. Memory is bounded by a few items, and an
error comes where it would come without threads: after all that lies before it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

MAX_THREADS = 4
"""That parse: unpacking is one thread's work and keeps no more of them busy."""
_END: Any = object()


def in_order(items: Iterator[T], work: Callable[[T], R], *, num_threads: int | None = None) -> Iterator[R]:
    """`work(item)` of each of `items`, in their order.

    One thread draws the items, `num_threads` (default: the cores there are, `MAX_THREADS` at most) work on them. At
    most `num_threads` + 2 items exist at a time. All threads have ended when the iterator has: at its end, at an error
    and when it is closed early.

    Raises:
        Exception: what `items` or `work` raised first in order; nothing after it is handed over.
    """
    num_threads = num_threads or min(len(os.sched_getaffinity(0)), MAX_THREADS)
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(num_threads + 1, thread_name_prefix="ahead") as pool:
        try:
            drawn = pool.submit(next, items, _END)
            failure: Exception | None = None
            while True:
                try:
                    item = drawn.result()
                except Exception as error:
                    failure = error
                    break
                if item is _END:
                    break
                drawn = pool.submit(next, items, _END)
                pending.append(pool.submit(work, item))
                if len(pending) > num_threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
            if failure is not None:
                raise failure
        finally:
            for future in pending:
                future.cancel()
