"""Simulation of the Deployment's pods and their nodes, from creation to readiness.

Scheduling is simple: each pod gets its own node, or its own slice of a node. A pod gets an idle
node if there is one, or else a new node. `queueing` simulates the requests in a pod.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tools.autoscaling import hpa
from tools.autoscaling.queueing import PodQueue

_READINESS_SECONDS = 5.0
"""Seconds from the time when a pod has loaded its model until its first request. These seconds
cover the probe's period, and the time until clients see the endpoint."""
STOP_SECONDS = 40.0
"""Seconds from a pod's removal from the Service to its stop. The preStop hook waits this long, so
that clients notice the removal."""
_IDLE_NODE_SECONDS = 600.0
"""Seconds until a node without a pod is removed. The value is Cluster Autoscaler's default
scale-down-unneeded-time."""
SCRAPE_SECONDS = 15.0
"""Seconds between two scrapes of a pod, as in the PodMonitor."""


@dataclass(frozen=True, kw_only=True)
class StartTimes:
    """Times until nodes and pods are ready, in seconds.

    The default times are assumptions, and were not measured on a cluster. Use times that you
    measured on your cluster instead.
    """

    node: float = 330.0
    """Time from the creation of an unschedulable pod until a node with the image is ready. The
    default consists of 150 s until the node is ready and 180 s to pull Triton's image, about 8 GB
    compressed at 50 MB/s. According to GKE's documentation, a node takes minutes, and a node with
    GPU drivers takes longer."""
    pod: float = 15.0
    """Time from the container's start to a loaded model: Triton's start, the download of the model
    from the bucket, and warm-up. Triton's own start takes 0.4 s with the laptop's wheel
    (docs/design/performance.md), so the default leaves enough time."""


@dataclass
class Pod:
    """One replica. Times are in seconds since the start of the simulation."""

    name: str
    created_at: float
    node_at: float
    """Time when the pod's node is ready and has the image."""
    ready_at: float
    queue: PodQueue
    scrape_at: float
    """Time of the pod's next scrape."""
    leaving_at: float = math.inf


@dataclass
class Cluster:
    """The Deployment's pods. The method `scale` changes the number of pods.

    `scrape_offset` receives the number of a pod, and returns the offset of its scrapes in seconds.
    """

    times: StartTimes
    new_queue: Callable[[float], PodQueue]
    scrape_offset: Callable[[int], float]
    pods: list[Pod] = field(default_factory=list)
    """Pods that have not stopped yet."""
    _idle_nodes: list[tuple[float, float]] = field(default_factory=list)
    """Nodes without a pod. For each node, there are two times: when the node and the image were
    ready, and when the node lost its pod."""
    _number: int = 0
    _seconds_of_gone: float = 0.0

    def remaining_pods(self) -> list[Pod]:
        """Return the pods that are not being deleted."""
        return [pod for pod in self.pods if pod.leaving_at == math.inf]

    def counted(self, now: float) -> hpa.PodCounts:
        """Return the counts of pods as the autoscaler's controller counts them."""
        return hpa.PodCounts(
            existing=len(self.remaining_pods()), ready=sum(pod.ready_at <= now for pod in self.pods)
        )

    def ready(self, now: float) -> list[Pod]:
        """Return the pods that receive requests."""
        return [pod for pod in self.pods if pod.ready_at <= now < pod.leaving_at]

    def start_at_once(self, count: int) -> None:
        """Create the initial pods, which are ready at time 0."""
        for _ in range(count):
            self._create(0.0, node_at=0.0, serving_at=0.0)
            self.pods[-1].ready_at = 0.0

    def scale(self, now: float, wanted: int) -> None:
        """Create or delete pods.

        Pods that are not ready are deleted first, and then the newest pods.
        """
        remaining_pods = self.remaining_pods()
        for _ in range(wanted - len(remaining_pods)):
            idle = min(self._idle_nodes, default=None)
            if idle:
                self._idle_nodes.remove(idle)
            node_at = idle[0] if idle else now + self.times.node
            self._create(now, node_at=node_at, serving_at=max(now, node_at) + self.times.pod)
        going = sorted(reversed(remaining_pods), key=lambda pod: pod.ready_at <= now)
        for pod in going[: max(0, len(remaining_pods) - wanted)]:
            pod.leaving_at = now

    def settle(self, now: float) -> list[Pod]:
        """Remove finished pods, and nodes that were idle for too long, and return the removed pods.

        A deleted pod is finished when it has processed all its requests.
        """
        gone = [
            pod
            for pod in self.pods
            if pod.leaving_at < math.inf
            and (
                now < pod.ready_at
                or (now >= pod.leaving_at + STOP_SECONDS and not pod.queue.num_inside)
            )
        ]
        for pod in gone:
            self._seconds_of_gone += now - pod.created_at
            self.pods.remove(pod)
            self._idle_nodes.append((pod.node_at, now))
        self._idle_nodes = [node for node in self._idle_nodes if now - node[1] < _IDLE_NODE_SECONDS]
        return gone

    def pod_hours(self, now: float) -> float:
        """Return the total hours of all pods, from the creation of each pod to its stop."""
        return (self._seconds_of_gone + sum(now - pod.created_at for pod in self.pods)) / 3600

    def _create(self, now: float, *, node_at: float, serving_at: float) -> None:
        offset = self.scrape_offset(self._number)
        turns = math.floor((serving_at - offset) / SCRAPE_SECONDS) + 1
        self.pods.append(
            Pod(
                name=f"triton-{self._number}",
                created_at=now,
                node_at=node_at,
                ready_at=serving_at + _READINESS_SECONDS,
                queue=self.new_queue(serving_at),
                scrape_at=offset + turns * SCRAPE_SECONDS,
            )
        )
        self._number += 1
