"""The simulation: requests of a trace meet the pods, Prometheus scrapes them, the autoscaler reads and decides.

Clients choose among the ready pods at random, as many clients with a list of addresses do. Time advances from event to
event: scrapes, the autoscaler's syncs, pods that become ready, steps of the trace. Everything follows from the seed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from components.runtime.errors import ContractError
from k8s.scaling.cluster import Cluster, Pod, StartTimes
from k8s.scaling.hpa import SYNC_SECONDS, Autoscaler, Controller
from k8s.scaling.manifests import PENDING_METRIC, QUEUE_METRIC
from k8s.scaling.metrics import SCRAPE_SECONDS, Scraper, fleet_metrics
from k8s.scaling.queueing import Counters, PodQueue, PodSettings
from k8s.scaling.service_times import ServiceTimes
from k8s.scaling.traces import Trace, TraceRequests


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is simulated, beside trace and autoscaler."""

    service_times: ServiceTimes
    pod: PodSettings = PodSettings()
    starts: StartTimes = StartTimes()
    pods_per_node: int = 1
    initial_replicas: int | None = None
    """None = the autoscaler's least."""
    seed: int = 0


@dataclass(frozen=True)
class SyncState:
    """The state at one of the autoscaler's syncs."""

    seconds: float
    wanted: int
    ready: int
    metrics: dict[str, float | None]
    """None where no pod has the metric."""


@dataclass
class SimulatedRun:
    """What happened."""

    moments: list[SyncState] = field(default_factory=list)
    waits: list[tuple[float, NDArray[np.float32]]] = field(default_factory=list)
    """Queue seconds of the requests whose batch began before each of these times, since the one before."""
    num_arrived: int = 0
    num_homeless: int = 0
    """Requests that came while no pod was ready."""
    counters: Counters = field(default_factory=Counters)
    num_inside: int = 0
    """Requests that still waited or ran at the end."""
    seconds: float = 0.0
    pod_hours: float = 0.0
    node_hours: float = 0.0


class Simulation:
    """One run.

    Raises:
        ContractError: the trace ends before the autoscaler's first sync, or it has a metric that is not simulated.
    """

    def __init__(self, trace: Trace, spec: Autoscaler, settings: Settings) -> None:
        if trace.seconds < SYNC_SECONDS:
            raise ContractError(
                f"trace {trace.name} lasts {trace.seconds:g} s, expected at least the {SYNC_SECONDS:g} s between two "
                "syncs of the autoscaler"
            )
        known = (QUEUE_METRIC, PENDING_METRIC)
        if unknown := {metric.name for metric in spec.metrics}.difference(known):
            raise ContractError(f"metric is {min(unknown)}, expected one that is simulated: {', '.join(known)}")
        self._trace, self._settings = trace, settings
        self._controller = Controller(spec)
        offsets = np.random.default_rng([settings.seed, 1]).random(100_003) * SCRAPE_SECONDS
        self._cluster = Cluster(
            settings.starts,
            settings.pods_per_node,
            lambda now: PodQueue(settings.pod, settings.service_times.of_rows, now),
            lambda number: float(offsets[number % len(offsets)]),
        )
        self._wanted = spec.least if settings.initial_replicas is None else settings.initial_replicas
        self._scraper = Scraper()
        self.outcome = SimulatedRun()

    def run(self) -> SimulatedRun:
        """What happens over the whole trace."""
        cluster, outcome = self._cluster, self.outcome
        cluster.start_at_once(self._wanted)
        now, sync_at = 0.0, SYNC_SECONDS
        for step in range(len(self._trace.rates)):
            requests, end = self._trace.requests(step, self._settings.seed), float(self._trace.starts[step + 1])
            taken = 0
            outcome.num_arrived += len(requests.arrivals)
            while now < end:
                upcoming = min(chain([end, sync_at], self._ready_times(now), self._scrape_times(now)))
                taken = self._dispatch_requests(requests, taken, now=now, until=upcoming)
                now = upcoming
                self._scrape_pods(now)
                if now >= sync_at:
                    self._sync_autoscaler(now)
                    sync_at += SYNC_SECONDS
        self._advance_pods(now)
        outcome.seconds = now
        for pod in cluster.pods:
            self._add_to_outcome(pod)
        outcome.pod_hours, outcome.node_hours = cluster.pod_hours(now), cluster.node_hours(now)
        return outcome

    def _ready_times(self, now: float) -> Iterator[float]:
        return (pod.ready_at for pod in self._cluster.pods if pod.ready_at > now)

    def _scrape_times(self, now: float) -> Iterator[float]:
        return (self._scraper.next_after(pod, now) for pod in self._cluster.pods)

    def _dispatch_requests(self, requests: TraceRequests, taken: int, *, now: float, until: float) -> int:
        """Gives the requests that come before `until` to ready pods; how many of the step's are given then."""
        last = int(np.searchsorted(requests.arrivals, until))
        if last == taken:
            return taken
        at, ready = slice(taken, last), self._cluster.ready(now)
        if not ready:
            self.outcome.num_homeless += last - taken
            return last
        arrivals = requests.arrivals[at]
        multiples = self._settings.service_times.multiples(requests.service[at])
        chosen = (requests.chances[at] * len(ready)).astype(np.intp)
        for number, pod in enumerate(ready):
            own = chosen == number
            pod.queue.offer(arrivals[own].tolist(), requests.rows, multiples[own].tolist())
        return last

    def _scrape_pods(self, now: float) -> None:
        for pod in self._cluster.pods:
            if self._scraper.is_due(pod, now):
                pod.queue.advance(now)
                self._scraper.scrape(pod, now)

    def _advance_pods(self, now: float) -> None:
        for pod in self._cluster.pods:
            if pod.queue.now < now:
                pod.queue.advance(now)
        waits = [wait for pod in self._cluster.pods for wait in pod.queue.waits]
        self.outcome.waits.append((now, np.array(waits, np.float32)))
        for pod in self._cluster.pods:
            pod.queue.waits.clear()

    def _sync_autoscaler(self, now: float) -> None:
        cluster = self._cluster
        self._advance_pods(now)
        for pod in cluster.settle(now):
            self._add_to_outcome(pod)
        readings = fleet_metrics(self._scraper.visible(now), now)
        self._wanted = self._controller.sync(now, self._wanted, pods=cluster.counted(now), readings=readings)
        self.outcome.moments.append(SyncState(now, self._wanted, len(cluster.ready(now)), readings))
        cluster.scale(now, self._wanted)

    def _add_to_outcome(self, pod: Pod) -> None:
        self.outcome.counters.add(pod.queue.counters)
        self.outcome.num_inside += pod.queue.num_inside
