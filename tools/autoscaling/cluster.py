"""Pods of the Deployment and the nodes they need: what happens from a replica's creation to its first answer.

Scheduling is simple: a pod has a node, or a slice of one, to itself: one that stands idle, or else a new one. What a
pod does with requests is `queueing`'s.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tools.autoscaling import hpa
from tools.autoscaling.queueing import PodQueue

READINESS_SECONDS = 5.0
"""From a loaded model to the first request: the probe's period and the endpoints' way to clients."""
STOP_SECONDS = 40.0
"""Pause between a pod's leaving the Service and its stop: the preStop hook's, while clients learn of it."""
IDLE_NODE_SECONDS = 600.0
"""How long a node stays without a pod: Cluster Autoscaler's default scale-down-unneeded-time, 10 minutes."""
SCRAPE_SECONDS = 15.0
"""Between two scrapes of a pod: the PodMonitor's."""


@dataclass(frozen=True, kw_only=True)
class StartTimes:
    """Seconds that starts take. Nothing of it was measured on a cluster: assumptions, to be replaced by yours."""

    node: float = 330.0
    """From an unschedulable pod to a node with the image: 150 for a Ready node (GKE's documentation gives minutes, and
    GPU nodes with drivers take longer than others), 180 for Triton's image, some 8 GB compressed, at 50 MB/s."""
    pod: float = 15.0
    """From the container's start to a loaded model: Triton's start (0.4 s of the laptop's wheel, docs/serving.md), the
    read of the model from the bucket, warm-up; generous."""


@dataclass
class Pod:
    """One replica."""

    name: str
    created_at: float
    node_at: float
    """Its node is up and has the image."""
    ready_at: float
    queue: PodQueue
    scrape_at: float
    """When it is scraped next."""
    leaving_at: float = math.inf


@dataclass
class Cluster:
    """The Deployment's pods, wished for by `scale`; `scrape_offset` gives the seconds of a pod's number."""

    times: StartTimes
    new_queue: Callable[[float], PodQueue]
    scrape_offset: Callable[[int], float]
    pods: list[Pod] = field(default_factory=list)
    """Those that were not stopped yet."""
    _idle_nodes: list[tuple[float, float]] = field(default_factory=list)
    """When each was, or will be, up with the image, and since when it has no pod."""
    _number: int = 0
    _seconds_of_gone: float = 0.0

    def staying(self) -> list[Pod]:
        """Pods that are not being deleted."""
        return [pod for pod in self.pods if pod.leaving_at == math.inf]

    def counted(self, now: float) -> hpa.PodCounts:
        """The pods as the autoscaler's controller counts them."""
        return hpa.PodCounts(existing=len(self.staying()), ready=sum(pod.ready_at <= now for pod in self.pods))

    def ready(self, now: float) -> list[Pod]:
        """Pods that requests go to."""
        return [pod for pod in self.pods if pod.ready_at <= now < pod.leaving_at]

    def start_at_once(self, count: int) -> None:
        """The pods with which the simulation begins: ready at 0."""
        for _ in range(count):
            self._create(0.0, node_at=0.0, serving_at=0.0)
            self.pods[-1].ready_at = 0.0

    def scale(self, now: float, wanted: int) -> None:
        """Creates pods, or begins to take some away: unready ones first, then the newest."""
        staying = self.staying()
        for _ in range(wanted - len(staying)):
            idle = min(self._idle_nodes, default=None)
            if idle:
                self._idle_nodes.remove(idle)
            node_at = idle[0] if idle else now + self.times.node
            self._create(now, node_at=node_at, serving_at=max(now, node_at) + self.times.pod)
        going = sorted(reversed(staying), key=lambda pod: pod.ready_at <= now)
        for pod in going[: max(0, len(staying) - wanted)]:
            pod.leaving_at = now

    def settle(self, now: float) -> list[Pod]:
        """Lets pods go that have answered all they had, and nodes that were idle for long; the pods that went."""
        gone = [
            pod
            for pod in self.pods
            if pod.leaving_at < math.inf
            and (now < pod.ready_at or (now >= pod.leaving_at + STOP_SECONDS and not pod.queue.num_inside))
        ]
        for pod in gone:
            self._seconds_of_gone += now - pod.created_at
            self.pods.remove(pod)
            self._idle_nodes.append((pod.node_at, now))
        self._idle_nodes = [node for node in self._idle_nodes if now - node[1] < IDLE_NODE_SECONDS]
        return gone

    def pod_hours(self, now: float) -> float:
        """Hours of pods, from creation to stop."""
        return (self._seconds_of_gone + sum(now - pod.created_at for pod in self.pods)) / 3600

    def _create(self, now: float, *, node_at: float, serving_at: float) -> None:
        offset = self.scrape_offset(self._number)
        turns = math.floor((serving_at - offset) / SCRAPE_SECONDS) + 1
        self.pods.append(
            Pod(
                name=f"triton-{self._number}",
                created_at=now,
                node_at=node_at,
                ready_at=serving_at + READINESS_SECONDS,
                queue=self.new_queue(serving_at),
                scrape_at=offset + turns * SCRAPE_SECONDS,
            )
        )
        self._number += 1
