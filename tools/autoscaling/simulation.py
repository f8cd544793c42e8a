"""Simulate a trace of requests with pods, Prometheus and the autoscaler.

Each request goes to a random ready pod, as if many clients had a list of the pods' addresses.
Simulated time advances from event to event. Events are scrapes, syncs of the autoscaler, pods that
become ready, and steps of the trace. The result depends only on the settings and the seed.

The two metrics that scale Triton come from the counters that Prometheus scrapes. Queue time per
request is the growth of all pods' queue time divided by the growth of their answered requests.
Growth is measured with PromQL's `rate` over a minute, and at least one request per minute is
assumed. Pending requests are the sum of the pods' means over the minute. The shipped queries
compute the same values. A test compares this module with a real Prometheus.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergreen.runtime.errors import ContractError
from tools.autoscaling.cluster import SCRAPE_SECONDS, Cluster, Pod, StartTimes
from tools.autoscaling.hpa import PENDING_METRIC, QUEUE_METRIC, SYNC_SECONDS, Autoscaler, Controller
from tools.autoscaling.queueing import Counters, PodQueue, PodSettings, ServiceTimes
from tools.autoscaling.traces import Trace, TraceRequests

_WINDOW_SECONDS = 60
"""Time range of the shipped queries, in seconds."""
_LAG_SECONDS = 1.0
"""Seconds from a scrape until a query sees its samples."""
_LOWEST_RATE = 1 / _WINDOW_SECONDS


class Sample(NamedTuple):
    """Values from one scrape of one pod."""

    milliseconds: int
    queue_microseconds: float
    answered: float
    pending: float


def fleet_metrics(samples: Mapping[str, Iterable[Sample]], now: float) -> dict[str, float | None]:
    """Return the value of each metric over all pods.

    A value is None if no pod has enough samples in the window.

    Args:
        samples: Samples of each pod that was scraped in the window, in ascending time. Removed pods
            are included.
        now: Time in seconds.
    """
    last = round(now * 1000)
    first = last - _WINDOW_SECONDS * 1000
    within = [
        [each for each in of_pod if first <= each.milliseconds <= last]
        for of_pod in samples.values()
    ]
    queue, answered = (
        sum(
            _counter_rate([(each[0], each[column]) for each in of_pod], first, last)
            for of_pod in within
            if of_pod[1:]
        )
        for column in (1, 2)
    )
    pending = [sum(each.pending for each in of_pod) / len(of_pod) for of_pod in within if of_pod]
    return {
        QUEUE_METRIC: queue / max(answered, _LOWEST_RATE)
        if any(of_pod[1:] for of_pod in within)
        else None,
        PENDING_METRIC: sum(pending) if pending else None,
    }


def _counter_rate(samples: Sequence[tuple[int, float]], first: int, last: int) -> float:
    """Return PromQL's `rate`: the growth of a counter per second, extrapolated to the window.

    The result equals the result of Prometheus 2.42. Prometheus 3 excludes the left end of the
    window. The difference matters only for a sample at exactly that millisecond.

    Args:
        samples: Pairs of a time in milliseconds and a value. At least two pairs are needed, in
            ascending order and within the window.
        first: Start of the window in milliseconds.
        last: End of the window in milliseconds.

    >>> _counter_rate([(0, 0.0), (30_000, 60.0), (60_000, 120.0)], 0, 60_000)
    2.0
    """
    (start, start_value), (end, end_value) = samples[0], samples[-1]
    # If a counter fell, it was reset. A counter that was reset grew to its last value before the
    # reset, and then grew again from 0.
    growth = end_value - start_value + sum(a for (_, a), (_, b) in pairwise(samples) if b < a)
    covered = sampled = (end - start) / 1000
    spacing = sampled / (len(samples) - 1)
    to_start, to_end = (start - first) / 1000, (last - end) / 1000
    if growth > 0 and start_value >= 0:
        # A counter is never negative, so the extrapolation does not go back beyond the time when
        # the counter would be 0.
        to_start = min(to_start, sampled * start_value / growth)
    for gap in (to_start, to_end):
        covered += gap if gap < spacing * 1.1 else spacing / 2
    return growth * covered / sampled / ((last - first) / 1000)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a simulation, apart from the trace and the autoscaler."""

    service_times: ServiceTimes
    pod: PodSettings = PodSettings()
    starts: StartTimes = StartTimes()
    initial_replicas: int | None = None
    """Initial number of replicas. None means the autoscaler's minimum."""
    seed: int = 0


@dataclass(frozen=True)
class SyncState:
    """State of the simulation at one sync of the autoscaler."""

    seconds: float
    wanted: int
    ready: int
    metrics: dict[str, float | None]
    """Value of each metric. None if no pod has reported the metric."""


@dataclass
class SimulatedRun:
    """Result of a simulation."""

    moments: list[SyncState] = field(default_factory=list)
    waits: list[NDArray[np.float32]] = field(default_factory=list)
    """Queue times in seconds, one array per sync. Each array contains the requests whose batch
    started since the previous sync. The last array contains the requests after the last sync."""
    num_arrived: int = 0
    num_without_pod: int = 0
    """Number of requests that arrived while no pod was ready."""
    counters: Counters = field(default_factory=Counters)
    num_inside: int = 0
    """Number of requests that were waiting or running at the end."""
    seconds: float = 0.0
    pod_hours: float = 0.0


class Simulation:
    """One simulation.

    Raises:
        ContractError: the trace ends before the autoscaler's first sync, or one of its metrics is
            not simulated.
    """

    def __init__(self, trace: Trace, spec: Autoscaler, settings: Settings) -> None:
        if trace.seconds < SYNC_SECONDS:
            raise ContractError(
                f"trace {trace.name} lasts {trace.seconds:g} s, expected at least {SYNC_SECONDS:g} "
                "s, the time between two syncs of the autoscaler"
            )
        known = (QUEUE_METRIC, PENDING_METRIC)
        if unknown := {metric.name for metric in spec.metrics}.difference(known):
            raise ContractError(
                f"metric is {min(unknown)}, expected one of the simulated metrics "
                f"{', '.join(known)}"
            )
        self._trace, self._settings = trace, settings
        self._controller = Controller(spec)
        offsets = np.random.default_rng([settings.seed, 1]).random(100_003) * SCRAPE_SECONDS
        self._cluster = Cluster(
            settings.starts,
            lambda now: PodQueue(settings.pod, settings.service_times.of_rows, now),
            lambda number: float(offsets[number % len(offsets)]),
        )
        self._wanted = (
            spec.min_replicas if settings.initial_replicas is None else settings.initial_replicas
        )
        self._samples: dict[str, deque[Sample]] = {}
        """Newest samples of each pod, as many as a query can use."""
        self.outcome = SimulatedRun()

    def run(self) -> SimulatedRun:
        """Simulate the complete trace, and return the result."""
        cluster, outcome = self._cluster, self.outcome
        cluster.start_at_once(self._wanted)
        now, sync_at = 0.0, SYNC_SECONDS
        for step in range(len(self._trace.rates)):
            requests, end = (
                self._trace.requests(step, self._settings.seed),
                float(self._trace.starts[step + 1]),
            )
            num_dispatched = 0
            outcome.num_arrived += len(requests.arrivals)
            while now < end:
                ready_times = [pod.ready_at for pod in cluster.pods if pod.ready_at > now]
                upcoming = min(
                    [end, sync_at, *ready_times, *(pod.scrape_at for pod in cluster.pods)]
                )
                num_dispatched = self._dispatch_requests(
                    requests, num_dispatched, now=now, until=upcoming
                )
                now = upcoming
                self._scrape_pods(now)
                if now >= sync_at:
                    self._sync_autoscaler(now)
                    sync_at += SYNC_SECONDS
        self._advance_pods(now)
        outcome.seconds = now
        for pod in cluster.pods:
            self._add_to_outcome(pod)
        outcome.pod_hours = cluster.pod_hours(now)
        return outcome

    def _dispatch_requests(
        self, requests: TraceRequests, num_dispatched: int, *, now: float, until: float
    ) -> int:
        """Send the requests that arrive before `until` to the ready pods.

        Returns the number of requests of this step that have been sent so far.
        """
        last = int(np.searchsorted(requests.arrivals, until))
        if last == num_dispatched:
            return num_dispatched
        at, ready = slice(num_dispatched, last), self._cluster.ready(now)
        if not ready:
            self.outcome.num_without_pod += last - num_dispatched
            return last
        arrivals = requests.arrivals[at]
        multiples = self._settings.service_times.multiples(requests.service[at])
        chosen = (requests.uniforms[at] * len(ready)).astype(np.intp)
        for number, pod in enumerate(ready):
            own = chosen == number
            pod.queue.offer(arrivals[own].tolist(), requests.rows, multiples[own].tolist())
        return last

    def _scrape_pods(self, now: float) -> None:
        """Scrape all pods whose next scrape is due.

        Durations are whole microseconds, as in Triton.
        """
        for pod in self._cluster.pods:
            if pod.scrape_at <= now:
                pod.queue.advance(now)
                pod.scrape_at += SCRAPE_SECONDS
                counters = pod.queue.counters
                queue = float(round(counters.queue_seconds * 1e6))
                sample = Sample(
                    round(now * 1000), queue, float(counters.answered), float(pod.queue.num_queued)
                )
                num_samples = int((_WINDOW_SECONDS + _LAG_SECONDS) / SCRAPE_SECONDS) + 2
                self._samples.setdefault(pod.name, deque(maxlen=num_samples)).append(sample)

    def _advance_pods(self, now: float) -> None:
        for pod in self._cluster.pods:
            if pod.queue.now < now:
                pod.queue.advance(now)
        waits = [wait for pod in self._cluster.pods for wait in pod.queue.waits]
        self.outcome.waits.append(np.array(waits, np.float32))
        for pod in self._cluster.pods:
            pod.queue.waits.clear()

    def _sync_autoscaler(self, now: float) -> None:
        cluster = self._cluster
        self._advance_pods(now)
        for pod in cluster.settle(now):
            self._add_to_outcome(pod)
        oldest, newest = round((now - _WINDOW_SECONDS) * 1000), (now - _LAG_SECONDS) * 1000
        self._samples = {
            pod: samples
            for pod, samples in self._samples.items()
            if samples[-1].milliseconds >= oldest
        }
        seen = {
            pod: [each for each in samples if each.milliseconds <= newest]
            for pod, samples in self._samples.items()
        }
        readings = fleet_metrics(seen, now)
        self._wanted = self._controller.sync(
            now, self._wanted, pods=cluster.counted(now), readings=readings
        )
        self.outcome.moments.append(SyncState(now, self._wanted, len(cluster.ready(now)), readings))
        cluster.scale(now, self._wanted)

    def _add_to_outcome(self, pod: Pod) -> None:
        self.outcome.counters.add(pod.queue.counters)
        self.outcome.num_inside += pod.queue.num_inside
