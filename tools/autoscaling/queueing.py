"""One Triton pod under requests: a bounded queue, instances that take batches from it, and the server's counters.

As Triton's dynamic batcher with no delay does it: an instance that becomes free takes what waits, as much as fits into
a batch; a request that finds the queue full is refused at once; one that waited too long is refused when its turn
comes (Triton also looks every half second, so it refuses up to half a second earlier or later). Exact, event by event.

How long an instance is taken by one batch is read from a JSON file of measured times with their provenance, as
`benchmarks/service_times.py` writes it. Times of a GPU were never measured in this project.
"""

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from heapq import heapify, heapreplace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.contracts.serving import MAX_BATCH_ROWS
from evergreen.runtime.errors import ContractError
from evergreen.serving.repository.triton_config import ServingOptions

SHIPPED = Path(__file__).with_name("measured_service_times")
"""Measured files that come with the project, by the network that was served; the shipped target is `demo`'s."""


@dataclass(frozen=True)
class ServiceTimes:
    """Seconds that a batch takes, by its rows, and how they spread."""

    rows: tuple[int, ...]
    """Ascending."""
    medians: tuple[float, ...]
    """Seconds at each of `rows`; linear between them, and beyond them by the last slope, which falls nowhere."""
    quantiles: tuple[tuple[float, float], ...] = ((0.0, 1.0), (1.0, 1.0))
    """(probability, multiple of the median), ascending; linear between them."""
    what: str = ""
    """What was measured, on what, when."""

    @cache  # noqa: B019 - one set of times lives as long as the command
    def of_rows(self, rows: int) -> float:
        """The median seconds of a batch of so many rows."""
        if rows > self.rows[-1] and len(self.rows) > 1:
            slope = (self.medians[-1] - self.medians[-2]) / (self.rows[-1] - self.rows[-2])
            return self.medians[-1] + max(slope, 0.0) * (rows - self.rows[-1])
        return float(np.interp(rows, self.rows, self.medians))

    def multiples(self, chances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Multiples of the median at probabilities in [0, 1)."""
        at, values = zip(*self.quantiles)
        return np.asarray(np.interp(chances, at, values), np.float64)

    @cached_property
    def mean_multiple(self) -> float:
        """The mean of the multiples."""
        at, values = (np.array(each) for each in zip(*self.quantiles))
        return float((np.diff(at) * (values[1:] + values[:-1]) / 2).sum())


def shipped_or_file(text: str) -> Path:
    """The file that `text` means: that of a shipped network by its name, or else a path."""
    shipped = SHIPPED / f"{text}-cpu.json"
    return shipped if shipped.is_file() else Path(text)


def read_service_times(path: Path) -> ServiceTimes:
    """The times of a file that `benchmarks/service_times.py` wrote.

    The spread is, for each probability, the median over the numbers of rows: one number of rows may have met other
    work on the machine; several rarely do all.

    Raises:
        ContractError: no such file, or one of another form.
    """
    try:
        document = json.loads(path.read_bytes())
        measured = [each["seconds"] for each in document["service_times"]]
        return ServiceTimes(
            tuple(int(each["rows"]) for each in document["service_times"]),
            tuple(float(each["0.5"]) for each in measured),
            tuple(
                (float(chance), float(np.median([each[chance] / each["0.5"] for each in measured])))
                for chance in sorted(measured[0], key=float)
            ),
            f"{document['what']}; measured {document['measured_at']}",
        )
    except OSError as error:
        raise ContractError(f"service times {path} cannot be read: {error.strerror}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ContractError(
            f"{path} is no file of service times ({error!r}); benchmarks.service_times writes them"
        ) from error


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
