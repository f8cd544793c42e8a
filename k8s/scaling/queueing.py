"""One Triton pod under requests: a bounded queue, instances that take batches from it, and the server's counters.

As Triton's dynamic batcher with no delay does it: an instance that becomes free takes what waits, as much as fits into
a batch; a request that finds the queue full is refused at once; one that waited too long is refused when its turn
comes (Triton also looks every half second, so it refuses up to half a second earlier or later). Exact, event by event.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from heapq import heapify, heapreplace
from typing import NamedTuple

from components.contracts.serving import MAX_BATCH_ROWS
from components.deployment.repository.triton_config import ServingOptions


@dataclass(frozen=True, kw_only=True)
class PodSettings:
    """How the model is served in one pod; the defaults are those that `config.pbtxt` is generated with."""

    instances: int = ServingOptions.instances
    max_queued: int = ServingOptions.max_queued_requests
    timeout_seconds: float = ServingOptions.queue_timeout_microseconds / 1e6
    max_batch_rows: int = MAX_BATCH_ROWS


@dataclass
class Counters:
    """Triton's counters of one model in one pod; times in seconds."""

    answered: int = 0
    queue_seconds: float = 0.0
    refused: int = 0
    """Requests that found the queue full."""
    timed_out: int = 0

    def add(self, other: "Counters") -> None:
        """Adds another pod's."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class _Batch(NamedTuple):
    """A batch that runs."""

    end: float
    requests: int
    queue_seconds: float


@dataclass
class PodQueue:
    """The pod's state; time only moves forward, by `advance`.

    `seconds_of` gives the median seconds of a batch of so many rows.
    """

    settings: PodSettings
    seconds_of: Callable[[int], float]
    now: float = 0.0
    counters: Counters = field(default_factory=Counters)
    waits: list[float] = field(default_factory=list)
    """Queue time of each request whose batch began since the caller last took them."""
    _arrivals: list[float] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _multiples: list[float] = field(default_factory=list)
    _head: int = 0
    _queue: deque[int] = field(default_factory=deque)
    _running: list[_Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = [self.now] * self.settings.instances
        heapify(self._free)

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def num_inside(self) -> int:
        """Requests that wait or run."""
        running = sum(batch.requests for batch in self._running)
        return running + len(self._queue) + len(self._arrivals) - self._head

    def offer(self, arrivals: Sequence[float], rows: int, multiples: Sequence[float]) -> None:
        """Requests that will come, ascending, none before the time reached; with the multiple of the median time."""
        self._arrivals.extend(arrivals)
        self._rows.extend([rows] * len(arrivals))
        self._multiples.extend(multiples)

    def advance(self, until: float) -> None:
        """Lets time pass up to `until`."""
        arrivals, queue = self._arrivals, self._queue
        free = self._free
        while True:
            if queue:
                first = arrivals[queue[0]]
            elif self._head < len(arrivals):
                first = arrivals[self._head]
            else:
                break
            start = first if first > free[0] else free[0]
            if start >= until:
                break
            self._admit_requests(start)
            self._start_batch(start)
        self._admit_requests(until)
        self._count_ended_batches(until)
        self._forget_past_requests()
        self.now = until

    def _admit_requests(self, until: float) -> None:
        """Lets requests into the queue that come up to `until`; between two batches it only grows, so this is exact."""
        arrivals, queue = self._arrivals, self._queue
        head, most = self._head, self.settings.max_queued
        while head < len(arrivals) and arrivals[head] <= until:
            if len(queue) < most:
                queue.append(head)
            else:
                self.counters.refused += 1
            head += 1
        self._head = head

    def _start_batch(self, start: float) -> None:
        arrivals, all_rows = self._arrivals, self._rows
        queue, settings = self._queue, self.settings
        rows = count = 0
        waited, multiple = 0.0, 1.0
        oldest = start - settings.timeout_seconds
        while queue:
            at = queue[0]
            if arrivals[at] < oldest:
                queue.popleft()
                self.counters.timed_out += 1
                continue
            if count and rows + all_rows[at] > settings.max_batch_rows:
                break
            queue.popleft()
            if not count:
                multiple = self._multiples[at]
            rows += all_rows[at]
            wait = start - arrivals[at]
            waited += wait
            count += 1
            self.waits.append(wait)
        if not count:
            return
        seconds = self.seconds_of(rows) * multiple
        heapreplace(self._free, start + seconds)
        self._running.append(_Batch(start + seconds, count, waited))

    def _count_ended_batches(self, until: float) -> None:
        """Counts the batches that ended: Triton counts a request when it is answered."""
        ended = [batch for batch in self._running if batch.end <= until]
        if not ended:
            return
        self._running = [batch for batch in self._running if batch.end > until]
        self.counters.answered += sum(batch.requests for batch in ended)
        self.counters.queue_seconds += sum(batch.queue_seconds for batch in ended)

    def _forget_past_requests(self) -> None:
        past = self._queue[0] if self._queue else self._head
        if past > 4096 or past == len(self._arrivals):
            del self._arrivals[:past], self._rows[:past], self._multiples[:past]
            self._head -= past
            self._queue = deque(at - past for at in self._queue)
