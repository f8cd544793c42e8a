"""Pods of the Deployment and the nodes they need: what happens from a replica's creation to its first answer.

Scheduling is simple: a pod takes a free place on a node, or a node is started for it. What a pod does with requests is
`queueing`'s.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from k8s.scaling import hpa
from k8s.scaling.queueing import PodQueue


@dataclass(frozen=True, kw_only=True)
class StartTimes:
    """Seconds that starts take. Nothing of it was measured on a cluster; each default says where it is from."""

    node: float = 150.0
    """From an unschedulable pod to a Ready node. GKE's documentation gives minutes; GPU nodes with drivers
    take longer than others. An assumption to be replaced by your cluster's."""
    image: float = 180.0
    """Pull of the image onto a fresh node: Triton's image is about 8 GB compressed, at some 50 MB/s. An assumption."""
    pod: float = 15.0
    """From the container's start to a loaded model: Triton's start (0.4 s of the laptop's wheel, docs/serving.md), the
    read of the model from the bucket, warm-up. An assumption, generous."""
    readiness: float = 5.0
    """From a loaded model to the first request: the probe's period (5 s) and the endpoints' way to clients."""
    idle_node: float = 600.0
    """How long a node stays without pods: Cluster Autoscaler's default scale-down-unneeded-time, 10 minutes."""
    stop: float = 40.0
    """Pause between a pod's leaving the Service and its stop: the preStop hook's, while clients learn of it."""


@dataclass
class Node:
    """A machine with places for pods."""

    ready_at: float
    started_at: float
    pods: int = 0
    image_at: float = math.inf
    """When the image is on it; infinite until a pod has asked for it."""
    idle_since: float = math.inf
    removed_at: float = math.inf


@dataclass
class Pod:
    """One replica."""

    name: str
    node: Node
    created_at: float
    serving_at: float
    """Its server answers; its metrics can be scraped."""
    ready_at: float
    queue: PodQueue
    scrape_offset: float
    leaving_at: float = math.inf


@dataclass
class Cluster:
    """The Deployment's pods, wished for by `scale`.

    `pods_per_node` are places on a node, GPUs of it or MIG slices; `scrape_offset` gives the seconds of a pod's number.
    """

    times: StartTimes
    pods_per_node: int
    new_queue: Callable[[float], PodQueue]
    scrape_offset: Callable[[int], float]
    pods: list[Pod] = field(default_factory=list)
    """Those that were not stopped yet."""
    nodes: list[Node] = field(default_factory=list)
    _number: int = 0
    _pod_seconds: float = 0.0

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
        self.scale(0.0, count)
        for pod in self.pods:
            pod.serving_at = pod.ready_at = pod.node.ready_at = 0.0
            pod.queue = self.new_queue(0.0)
            pod.node.image_at = 0.0

    def scale(self, now: float, wanted: int) -> None:
        """Creates pods, or begins to take some away: unready ones first, then the newest."""
        staying = self.staying()
        for _ in range(wanted - len(staying)):
            self._create(now)
        going = sorted(staying, key=lambda pod: (pod.ready_at <= now, -pod.created_at, -int(pod.name.split("-")[1])))
        for pod in going[: max(0, len(staying) - wanted)]:
            pod.leaving_at = now

    def settle(self, now: float) -> list[Pod]:
        """Lets pods go that have answered all they had, and nodes that were idle for long; the pods that went."""
        gone = [
            pod
            for pod in self.pods
            if pod.leaving_at < math.inf
            and (now < pod.ready_at or (now >= pod.leaving_at + self.times.stop and not pod.queue.num_inside))
        ]
        for pod in gone:
            self._pod_seconds += now - pod.created_at
            self.pods.remove(pod)
            pod.node.pods -= 1
            if not pod.node.pods:
                pod.node.idle_since = now
        for node in self.nodes:
            if not node.pods and now - node.idle_since >= self.times.idle_node:
                node.removed_at = min(node.removed_at, now)
        return gone

    def pod_hours(self, now: float) -> float:
        """Hours of pods, from creation to stop."""
        return (self._pod_seconds + sum(now - pod.created_at for pod in self.pods)) / 3600

    def node_hours(self, now: float) -> float:
        """Hours of nodes, from their start to their removal."""
        return sum(min(node.removed_at, now) - node.started_at for node in self.nodes) / 3600

    def _create(self, now: float) -> None:
        places = [n for n in self.nodes if n.removed_at == math.inf and n.pods < self.pods_per_node]
        # One that is up before one that starts; the fullest first, so that others may become idle.
        node = min(places, key=lambda n: (n.ready_at > now, -n.pods, n.ready_at), default=None)
        if node is None:
            node = Node(ready_at=now + self.times.node, started_at=now)
            self.nodes.append(node)
        # The first pod pulls the image; one that comes meanwhile waits for the same pull.
        node.image_at = min(node.image_at, max(now, node.ready_at) + self.times.image)
        serving = max(now, node.image_at) + self.times.pod
        node.pods, node.idle_since = node.pods + 1, math.inf
        self.pods.append(
            Pod(
                name=f"triton-{self._number}",
                node=node,
                created_at=now,
                serving_at=serving,
                ready_at=serving + self.times.readiness,
                queue=self.new_queue(serving),
                scrape_offset=self.scrape_offset(self._number),
            )
        )
        self._number += 1
