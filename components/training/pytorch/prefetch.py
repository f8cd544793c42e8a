"""Runs an iterator in a thread of its own, a few items ahead of whoever takes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import TypeVar

Item = TypeVar("Item")

_WAIT_SECONDS = 0.1
"""Between looks, while the queue is full, at whether anyone still takes items."""


def ahead(source: Iterator[Item], depth: int) -> Generator[Item, None, None]:
    """The items of `source` in their order, up to `depth` of them made before they are asked for.

    Closing this iterator ends the thread; what `source` raises is raised here, in the place of its next item.
    """
    made: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(depth)
    closed = threading.Event()

    def put(item: Item | None, error: BaseException | None) -> None:
        is_made = False
        while not (is_made or closed.is_set()):
            with suppress(queue.Full):
                made.put((item, error), timeout=_WAIT_SECONDS)
                is_made = True

    def run() -> None:
        try:
            for item in source:
                put(item, None)
                if closed.is_set():
                    return
        except BaseException as error:
            put(None, error)
        else:
            put(None, StopIteration())

    thread = threading.Thread(target=run, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            assert item is not None, "an item without an error is one of the source's"
            yield item
    finally:
        closed.set()
        thread.join()
