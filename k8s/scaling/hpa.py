"""Kubernetes' HorizontalPodAutoscaler: how many replicas it asks for at each of its syncs, by the shipped manifests.

The algorithm is the controller's of Kubernetes 1.29 and later (pkg/controller/podautoscaler: `replica_calculator.go`,
`horizontal.go`), for metrics of type External, which KEDA and prometheus-adapter serve. The manifests in k8s/ are the
autoscaler's only home, be it KEDA's or Kubernetes' own; they are read here, so that no copy can differ from what a
cluster runs. Pods and metrics are `simulation`'s.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from components.runtime.errors import ContractError

SYNC_SECONDS = 15.0
"""Between two syncs; kube-controller-manager's default."""
TOLERANCE = 0.1
"""Within so much of the target nothing is changed; the controller's default."""


@dataclass(frozen=True)
class ScalingPolicy:
    """A limit of change: so many pods, or per cent, in a period."""

    type: str
    value: int
    period_seconds: float


@dataclass(frozen=True, kw_only=True)
class Rules:
    """`behavior` in one direction."""

    stabilization_seconds: float
    policies: tuple[ScalingPolicy, ...]
    select: str = "Max"
    tolerance: float = TOLERANCE


DEFAULT_UP = Rules(stabilization_seconds=0, policies=(ScalingPolicy("Percent", 100, 15), ScalingPolicy("Pods", 4, 15)))
DEFAULT_DOWN = Rules(stabilization_seconds=300, policies=(ScalingPolicy("Percent", 100, 15),))


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric and its target, in the metric's unit."""

    name: str
    target: float
    is_average: bool = False
    """Whether the target is of the value divided by the pods (`AverageValue`) or of the value itself (`Value`)."""


@dataclass(frozen=True, kw_only=True)
class Autoscaler:
    """What the manifest says; the API server has judged it."""

    metrics: tuple[Metric, ...]
    least: int
    most: int
    up: Rules = DEFAULT_UP
    down: Rules = DEFAULT_DOWN


@dataclass(frozen=True, kw_only=True)
class PodCounts:
    """The Deployment's pods as the controller counts them."""

    existing: int
    """Pods that are not being deleted."""
    ready: int
    """Pods that run and are ready; one that is being deleted counts until it has ended."""


@dataclass
class Controller:
    """The controller's memory of one autoscaler."""

    spec: Autoscaler
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def sync(self, now: float, current: int, *, pods: PodCounts, readings: Mapping[str, float | None]) -> int:
        """Replicas that it asks for now.

        The Deployment is asked for `current` replicas now; a reading is None or absent where it could not be had.
        """
        if not self._recommended:
            self._recommended.append((now, current))
        if current == 0:
            return 0
        if not self.spec.least <= current <= self.spec.most:
            wanted = min(max(current, self.spec.least), self.spec.most)
        else:
            proposal = self._largest_wish(current, pods, readings)
            if proposal is None:
                return current
            wanted = self._within_policies(now, current, self._stabilised(now, current, proposal))
        if wanted != current:
            self._changes.append((now, wanted - current))
        return wanted

    def _largest_wish(self, current: int, pods: PodCounts, readings: Mapping[str, float | None]) -> int | None:
        """The largest wish of all metrics; None where too little is known to act."""
        values = [(metric, readings.get(metric.name)) for metric in self.spec.metrics]
        known = [self._wish(metric, value, current, pods=pods) for metric, value in values if value is not None]
        # A metric that is missing might have asked for more: without it nothing is taken away.
        if not known or (len(known) < len(values) and max(known) < current):
            return None
        return max(known)

    def _wish(self, metric: Metric, value: float, current: int, *, pods: PodCounts) -> int:
        ratio = _thousandths(value) / _thousandths(metric.target)
        if metric.is_average:
            return pods.existing if self._is_within(ratio / pods.existing) else math.ceil(ratio)
        return current if self._is_within(ratio) else math.ceil(ratio * pods.ready)

    def _is_within(self, ratio: float) -> bool:
        return 1 - self.spec.down.tolerance <= ratio <= 1 + self.spec.up.tolerance

    def _stabilised(self, now: float, current: int, proposal: int) -> int:
        """The current number, moved only as far as every recent recommendation agrees."""
        up_since = now - self.spec.up.stabilization_seconds
        down_since = now - self.spec.down.stabilization_seconds
        lowest = min([proposal, *(n for at, n in self._recommended if at > up_since)])
        highest = max([proposal, *(n for at, n in self._recommended if at > down_since)])
        oldest = min(up_since, down_since)
        self._recommended = [(at, n) for at, n in self._recommended if at >= oldest]
        self._recommended.append((now, proposal))
        return min(max(current, lowest), highest)

    def _within_policies(self, now: float, current: int, wanted: int) -> int:
        longest = max(policy.period_seconds for rules in (self.spec.up, self.spec.down) for policy in rules.policies)
        self._changes = [(at, change) for at, change in self._changes if at > now - longest]
        if wanted > current:
            limit = max(self._policy_limit(now, current, self.spec.up, sign=1), current)
            return min(wanted, limit, self.spec.most)
        if wanted < current:
            limit = min(self._policy_limit(now, current, self.spec.down, sign=-1), current)
            return max(wanted, limit, self.spec.least)
        return wanted

    def _policy_limit(self, now: float, current: int, rules: Rules, *, sign: int) -> int:
        if rules.select == "Disabled":
            return current
        limits = []
        for policy in rules.policies:
            start = current - sum(change for at, change in self._changes if at > now - policy.period_seconds)
            if policy.type == "Pods":
                limits.append(start + sign * policy.value)
            else:
                # Upwards rounded up, or one replica could never become two; downwards cut off.
                share = start * (1 + sign * policy.value / 100)
                limits.append(math.ceil(share) if sign > 0 else int(share))
        widest = max if (rules.select == "Max") == (sign > 0) else min
        return widest(limits)


def _thousandths(value: float) -> int:
    """Thousandths, cut off: how the metrics APIs carry numbers."""
    if math.isinf(value):
        raise ContractError(f"a query's value is {value}, which no quantity holds; expected a finite one")
    return int(value * 1000)


QUEUE_METRIC, PENDING_METRIC = "triton_queue_microseconds_per_request", "triton_pending_requests"
"""What Triton is scaled by; the manifests' rules publish them under these names."""
SHIPPED_AUTOSCALER = Path(__file__).resolve().parents[1] / "components" / "keda" / "scaled-object.yaml"
_SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}

Document = dict[str, Any]
"""One YAML document of a manifest."""


def read_autoscaler(path: Path) -> Autoscaler:
    """The one ScaledObject or HorizontalPodAutoscaler of a manifest or a folder of manifests.

    What it leaves out has the default.

    Raises:
        ContractError: there is not exactly one, or it cannot be simulated; names what.
    """
    readers = {"ScaledObject": _scaled_object, "HorizontalPodAutoscaler": _autoscaler}
    scalers = [each for each in _read_documents(path) if each.get("kind") in readers]
    if len(scalers) != 1:
        raise ContractError(f"{path} holds {len(scalers)} of {', '.join(readers)}, expected 1")
    kind = scalers[0]["kind"]
    try:
        return readers[kind](scalers[0]["spec"])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ContractError(f"{path} is no {kind} that can be simulated: {error!r}") from error


def with_targets(spec: Autoscaler, targets: Mapping[str, float]) -> Autoscaler:
    """The same autoscaler with other targets.

    Raises:
        ContractError: a metric that the autoscaler does not have.
    """
    if unknown := targets.keys() - {metric.name for metric in spec.metrics}:
        known = ", ".join(metric.name for metric in spec.metrics)
        raise ContractError(f"metric is {sorted(unknown)[0]}, expected one of {known}")
    return replace(spec, metrics=tuple(replace(m, target=targets.get(m.name, m.target)) for m in spec.metrics))


def quantity(given: object) -> float:
    """The number of a Kubernetes quantity.

    Raises:
        ValueError: it is none.

    >>> quantity("1500m"), quantity("2k")
    (1.5, 2000.0)
    """
    text = str(given)
    digits = text.rstrip("".join(_SUFFIXES))
    return float(digits) * _SUFFIXES[text[len(digits) :] or ""]


def _scaled_object(spec: Document) -> Autoscaler:
    """What the HPA says that KEDA makes of a ScaledObject; a schedule's trigger is not simulated."""
    metrics = []
    for trigger in spec["triggers"]:
        if trigger["type"] != "prometheus":
            raise ContractError(f"a trigger is of type {trigger['type']}, expected prometheus")
        target, is_average = float(trigger["metadata"]["threshold"]), trigger.get("metricType") != "Value"
        metrics.append(Metric(name=trigger["name"], target=target, is_average=is_average))
    least, most = int(spec.get("minReplicaCount", 1)), int(spec.get("maxReplicaCount", 100))
    behavior = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior", {})
    return _with_behavior(behavior, metrics=metrics, least=least, most=most)


def _autoscaler(spec: Document) -> Autoscaler:
    metrics = []
    for metric in spec["metrics"]:
        if metric["type"] != "External":
            raise ContractError(f"a metric is of type {metric['type']}, expected External")
        target = metric["external"]["target"]
        is_average = target["type"] == "AverageValue"
        value = quantity(target["averageValue" if is_average else "value"])
        metrics.append(Metric(name=metric["external"]["metric"]["name"], target=value, is_average=is_average))
    least, most = int(spec.get("minReplicas", 1)), int(spec["maxReplicas"])
    return _with_behavior(spec.get("behavior", {}), metrics=metrics, least=least, most=most)


def _with_behavior(behavior: Document, *, metrics: list[Metric], least: int, most: int) -> Autoscaler:
    up, down = _rules(behavior.get("scaleUp"), DEFAULT_UP), _rules(behavior.get("scaleDown"), DEFAULT_DOWN)
    return Autoscaler(metrics=tuple(metrics), least=least, most=most, up=up, down=down)


def _rules(given: Mapping[str, Any] | None, default: Rules) -> Rules:
    """Rules of one direction; what is not given is Kubernetes' default."""
    given = given or {}
    policies = [
        ScalingPolicy(p["type"], int(p["value"]), float(p["periodSeconds"])) for p in given.get("policies") or ()
    ]
    return Rules(
        stabilization_seconds=float(given.get("stabilizationWindowSeconds", default.stabilization_seconds)),
        policies=tuple(policies) or default.policies,
        select=given.get("selectPolicy", default.select),
        tolerance=quantity(given.get("tolerance", default.tolerance)),
    )


def _read_documents(path: Path) -> Iterator[Document]:
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    for file in files:
        try:
            documents = list(yaml.safe_load_all(file.read_text()))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ContractError(f"{file} is no manifest: {error}") from error
        yield from (document for document in documents if isinstance(document, dict))
