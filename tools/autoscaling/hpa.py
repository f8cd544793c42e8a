"""Simulation of Kubernetes' HorizontalPodAutoscaler with the shipped manifests.

The algorithm comes from the controller in Kubernetes 1.29 and later (pkg/controller/podautoscaler:
`replica_calculator.go`, `horizontal.go`). The simulation covers metrics of type External, which
KEDA and prometheus-adapter provide. This module reads the shipped ScaledObject, so that the
simulation uses the same configuration as a cluster. The module `simulation` provides pods and
metrics.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from evergreen.runtime.errors import ContractError

SYNC_SECONDS = 15.0
"""Seconds between two syncs. The value is the default of kube-controller-manager."""
_TOLERANCE = 0.1
"""Relative distance from the target within which the number of replicas stays the same. The value
is the controller's default."""


@dataclass(frozen=True)
class ScalingPolicy:
    """Maximum change of the number of pods within a period, in pods or per cent."""

    type: str
    value: int
    period_seconds: float


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules for scaling up or down, from the field `behavior`."""

    stabilization_seconds: float
    policies: tuple[ScalingPolicy, ...]
    select: str = "Max"


_DEFAULT_UP = Rules(
    stabilization_seconds=0,
    policies=(ScalingPolicy("Percent", 100, 15), ScalingPolicy("Pods", 4, 15)),
)
_DEFAULT_DOWN = Rules(stabilization_seconds=300, policies=(ScalingPolicy("Percent", 100, 15),))


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Name of a metric, and its target in the metric's unit."""

    name: str
    target: float
    is_average: bool = False
    """Whether the target applies to the value per pod (`AverageValue`). If False, the target
    applies to the total value (`Value`)."""


@dataclass(frozen=True, kw_only=True)
class Autoscaler:
    """Content of the manifest, which the API server has validated."""

    metrics: tuple[Metric, ...]
    min_replicas: int
    max_replicas: int
    up: Rules = _DEFAULT_UP
    down: Rules = _DEFAULT_DOWN


@dataclass(frozen=True, kw_only=True)
class PodCounts:
    """Counts of the Deployment's pods, as the controller counts them."""

    existing: int
    """Number of pods that are not being deleted."""
    ready: int
    """Number of running and ready pods. A pod that is being deleted counts until it has ended."""


@dataclass
class Controller:
    """State of the controller for one autoscaler."""

    spec: Autoscaler
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def sync(
        self, now: float, current: int, *, pods: PodCounts, readings: Mapping[str, float | None]
    ) -> int:
        """Return the number of replicas that the autoscaler requests now.

        Args:
            now: Time in seconds.
            current: Number of replicas that the Deployment requests.
            pods: Counts of the Deployment's pods.
            readings: Value of each metric by name. The value of an unavailable metric is None or
                absent.
        """
        if not self._recommended:
            self._recommended.append((now, current))
        if current == 0:
            return 0
        if not self.spec.min_replicas <= current <= self.spec.max_replicas:
            wanted = min(max(current, self.spec.min_replicas), self.spec.max_replicas)
        else:
            proposal = self._max_wanted_replicas(current, pods, readings)
            if proposal is None:
                return current
            wanted = self._within_policies(now, current, self._stabilised(now, current, proposal))
        if wanted != current:
            self._changes.append((now, wanted - current))
        return wanted

    def _max_wanted_replicas(
        self, current: int, pods: PodCounts, readings: Mapping[str, float | None]
    ) -> int | None:
        """Return the largest number of replicas that any metric requests.

        Returns None if too few metrics are known for a decision.
        """
        values = [(metric, readings.get(metric.name)) for metric in self.spec.metrics]
        known = [
            self._wanted_replicas(metric, value, current, pods=pods)
            for metric, value in values
            if value is not None
        ]
        # The missing metric might have required more replicas, so do not scale down without it.
        if not known or (len(known) < len(values) and max(known) < current):
            return None
        return max(known)

    def _wanted_replicas(
        self, metric: Metric, value: float, current: int, *, pods: PodCounts
    ) -> int:
        ratio = _thousandths(value) / _thousandths(metric.target)
        if metric.is_average:
            return pods.existing if self._is_within(ratio / pods.existing) else math.ceil(ratio)
        return current if self._is_within(ratio) else math.ceil(ratio * pods.ready)

    def _is_within(self, ratio: float) -> bool:
        return 1 - _TOLERANCE <= ratio <= 1 + _TOLERANCE

    def _stabilised(self, now: float, current: int, proposal: int) -> int:
        """Limit `current` to the range of all recent recommendations."""
        up_since = now - self.spec.up.stabilization_seconds
        down_since = now - self.spec.down.stabilization_seconds
        lowest = min([proposal, *(n for at, n in self._recommended if at > up_since)])
        highest = max([proposal, *(n for at, n in self._recommended if at > down_since)])
        oldest = min(up_since, down_since)
        self._recommended = [(at, n) for at, n in self._recommended if at >= oldest]
        self._recommended.append((now, proposal))
        return min(max(current, lowest), highest)

    def _within_policies(self, now: float, current: int, wanted: int) -> int:
        longest = max(
            policy.period_seconds
            for rules in (self.spec.up, self.spec.down)
            for policy in rules.policies
        )
        self._changes = [(at, change) for at, change in self._changes if at > now - longest]
        if wanted > current:
            limit = max(self._policy_limit(now, current, self.spec.up, sign=1), current)
            return min(wanted, limit, self.spec.max_replicas)
        if wanted < current:
            limit = min(self._policy_limit(now, current, self.spec.down, sign=-1), current)
            return max(wanted, limit, self.spec.min_replicas)
        return wanted

    def _policy_limit(self, now: float, current: int, rules: Rules, *, sign: int) -> int:
        if rules.select == "Disabled":
            return current
        limits = []
        for policy in rules.policies:
            start = current - sum(
                change for at, change in self._changes if at > now - policy.period_seconds
            )
            if policy.type == "Pods":
                limits.append(start + sign * policy.value)
            else:
                # Round up when scaling up, because one replica would otherwise stay one replica
                # forever. Round down when scaling down.
                share = start * (1 + sign * policy.value / 100)
                limits.append(math.ceil(share) if sign > 0 else int(share))
        widest = max if (rules.select == "Max") == (sign > 0) else min
        return widest(limits)


def _thousandths(value: float) -> int:
    """Return the value in thousandths, truncated as in the metrics APIs."""
    if math.isinf(value):
        raise ContractError(f"a query's value is {value}, expected a finite value")
    return int(value * 1000)


QUEUE_METRIC, PENDING_METRIC = "triton_queue_microseconds_per_request", "triton_pending_requests"
"""Names of the metrics that scale Triton. The rules in the manifests publish these names."""
SHIPPED_AUTOSCALER = (
    Path(__file__).resolve().parents[2] / "k8s" / "components" / "keda" / "scaled-object.yaml"
)


def read_autoscaler(path: Path) -> Autoscaler:
    """Return the HPA that KEDA creates for the ScaledObject in the file `path`.

    Missing fields get their defaults.

    Raises:
        ContractError: the file is not a ScaledObject, or has a feature that the simulation does not
            support.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ContractError(f"{path} is not a manifest: {error}") from error
    try:
        spec = document["spec"]
        if unknown := [each["type"] for each in spec["triggers"] if each["type"] != "prometheus"]:
            raise ContractError(f"a trigger of {path} is of type {unknown[0]}, expected prometheus")
        behavior = (
            spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior", {})
        )
        return Autoscaler(
            metrics=tuple(
                Metric(
                    name=each["name"],
                    target=float(each["metadata"]["threshold"]),
                    is_average=each.get("metricType") != "Value",
                )
                for each in spec["triggers"]
            ),
            min_replicas=int(spec.get("minReplicaCount", 1)),
            max_replicas=int(spec.get("maxReplicaCount", 100)),
            up=_rules(behavior.get("scaleUp", {}), _DEFAULT_UP),
            down=_rules(behavior.get("scaleDown", {}), _DEFAULT_DOWN),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ContractError(
            f"{path} is not a ScaledObject that can be simulated: {error!r}"
        ) from error


def _rules(given: Mapping[str, Any], default: Rules) -> Rules:
    """Return the rules of one direction, with Kubernetes' defaults for missing fields."""
    policies = [
        ScalingPolicy(p["type"], int(p["value"]), float(p["periodSeconds"]))
        for p in given.get("policies") or ()
    ]
    return Rules(
        stabilization_seconds=float(
            given.get("stabilizationWindowSeconds", default.stabilization_seconds)
        ),
        policies=tuple(policies) or default.policies,
        select=given.get("selectPolicy", default.select),
    )


def with_queue_target(spec: Autoscaler, target: float) -> Autoscaler:
    """Return a copy of the autoscaler with another target for the queue time, in microseconds.

    Raises:
        ContractError: the autoscaler does not scale by queue time.
    """
    if QUEUE_METRIC not in [each.name for each in spec.metrics]:
        raise ContractError(
            f"the autoscaler has no metric {QUEUE_METRIC}, expected this metric for a target of "
            "the queue time"
        )
    metrics = (
        replace(each, target=target) if each.name == QUEUE_METRIC else each for each in spec.metrics
    )
    return replace(spec, metrics=tuple(metrics))
