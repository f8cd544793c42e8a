"""Simulate one Triton pod: a bounded queue, instances that process batches, and counters.

The model is Triton's dynamic batcher without delay. A free instance takes as many waiting requests
as fit into a batch. A request that finds the queue full is refused at once. If a request has waited
too long, it is refused when its turn comes. Triton checks the waiting requests every half second
too, so the times of its refusals differ by up to half a second. The simulation handles each event
at its exact time.

The duration of a batch comes from a JSON file of measured times, written by
`benchmarks/service_times.py`. No times were measured on a GPU in this project.
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

from evergreen.config.release import QUEUE_MICROSECONDS, QUEUED_REQUESTS
from evergreen.contracts.serving import MAX_BATCH_ROWS
from evergreen.runtime.errors import ContractError
from evergreen.serving.repository.triton_config import ServingOptions

SHIPPED = Path(__file__).with_name("measured_service_times")
"""Folder with the project's own measurements, one file for each network. The queue target in the
shipped manifest was chosen for the network `demo`."""


@dataclass(frozen=True)
class ServiceTimes:
    """Durations of batches in seconds by number of rows, and their distribution."""

    rows: tuple[int, ...]
    """Numbers of rows, ascending."""
    medians: tuple[float, ...]
    """Median seconds at each of `rows`, interpolated linearly. Beyond the last number in `rows`,
    the last two medians are extrapolated linearly. Extrapolated times never decrease."""
    quantiles: tuple[tuple[float, float], ...] = ((0.0, 1.0), (1.0, 1.0))
    """Pairs of a probability and a multiple of the median, in ascending order. Values in between
    are interpolated linearly."""
    what: str = ""
    """Description of how the times were measured."""

    @cache  # noqa: B019 - one set of times lives as long as the command
    def of_rows(self, rows: int) -> float:
        """Return the median seconds of a batch with this number of rows."""
        if rows > self.rows[-1] and len(self.rows) > 1:
            slope = (self.medians[-1] - self.medians[-2]) / (self.rows[-1] - self.rows[-2])
            return self.medians[-1] + max(slope, 0.0) * (rows - self.rows[-1])
        return float(np.interp(rows, self.rows, self.medians))

    def multiples(self, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return service times as multiples of the median, at the given probabilities in [0, 1)."""
        at, values = zip(*self.quantiles)
        return np.asarray(np.interp(probabilities, at, values), np.float64)

    @cached_property
    def mean_multiple(self) -> float:
        """Mean of the service time, as a multiple of the median."""
        at, values = (np.array(each) for each in zip(*self.quantiles))
        return float((np.diff(at) * (values[1:] + values[:-1]) / 2).sum())


def shipped_or_file(text: str) -> Path:
    """Return the file of the shipped network named `text`.

    If no shipped network has this name, return `text` as a path.
    """
    shipped = SHIPPED / f"{text}-cpu.json"
    return shipped if shipped.is_file() else Path(text)


def read_service_times(path: Path) -> ServiceTimes:
    """Return the times of a file of `benchmarks/service_times.py`.

    The multiple for each probability is the median over all measured numbers of rows. Other work on
    the machine may disturb the measurement for one number of rows, but rarely for most of the
    numbers.

    Raises:
        ContractError: the file cannot be read, or is not in the format of `ServiceTimes`.
    """
    try:
        document = json.loads(path.read_bytes())
        measured = [each["seconds"] for each in document["service_times"]]
        return ServiceTimes(
            tuple(int(each["rows"]) for each in document["service_times"]),
            tuple(float(each["0.5"]) for each in measured),
            tuple(
                (
                    float(probability),
                    float(np.median([each[probability] / each["0.5"] for each in measured])),
                )
                for probability in sorted(measured[0], key=float)
            ),
            f"{document['what']}; measured {document['measured_at']}",
        )
    except OSError as error:
        raise ContractError(f"service times {path} cannot be read: {error.strerror}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ContractError(
            f"{path} is not a file of service times ({error!r}), expected one of "
            "benchmarks.service_times"
        ) from error


@dataclass(frozen=True, kw_only=True)
class PodSettings:
    """Settings of the served model in a pod.

    The default values come from the `config.pbtxt` of an image.
    """

    instances: int = ServingOptions.instances
    max_queued: int = QUEUED_REQUESTS
    timeout_seconds: float = QUEUE_MICROSECONDS / 1e6
    max_batch_rows: int = MAX_BATCH_ROWS


@dataclass
class Counters:
    """Triton's counters of one model in one pod. Times are in seconds."""

    answered: int = 0
    queue_seconds: float = 0.0
    refused: int = 0
    """Number of requests that found the queue full."""
    timed_out: int = 0

    def add(self, other: "Counters") -> None:
        """Add the counters of another pod."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class _Batch(NamedTuple):
    """A running batch."""

    end: float
    requests: int
    queue_seconds: float


@dataclass
class PodQueue:
    """Queue and instances of one simulated pod. `advance` simulates the pod up to a later time.

    `seconds_of` returns the median seconds of a batch with the given number of rows.
    """

    settings: PodSettings
    seconds_of: Callable[[int], float]
    now: float = 0.0
    counters: Counters = field(default_factory=Counters)
    waits: list[float] = field(default_factory=list)
    """Queue times of the requests whose batch has started. The caller clears the list."""
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
        """Number of waiting requests."""
        return len(self._queue)

    @property
    def num_inside(self) -> int:
        """Number of requests that are waiting, running or announced."""
        running = sum(batch.requests for batch in self._running)
        return running + len(self._queue) + len(self._arrivals) - self._head

    def offer(self, arrivals: Sequence[float], rows: int, multiples: Sequence[float]) -> None:
        """Add future requests.

        Args:
            arrivals: Arrival times in seconds, ascending and not before the current time.
            rows: Rows of each request.
            multiples: For each request, its service time as a multiple of the median.
        """
        self._arrivals.extend(arrivals)
        self._rows.extend([rows] * len(arrivals))
        self._multiples.extend(multiples)

    def advance(self, until: float) -> None:
        """Simulate all events up to the time `until`."""
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
        """Move all requests that arrive up to `until` into the queue.

        The result is exact, because requests leave the queue only when a batch starts.
        """
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
        """Count the requests of the batches that ended.

        Triton also counts a request when it has responded.
        """
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
