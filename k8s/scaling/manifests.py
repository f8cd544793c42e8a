"""The autoscaler as the manifests in k8s/ ship it, which are its only home, be it KEDA's or Kubernetes' own.

The simulator reads it here, so that no copy can differ from what a cluster runs. The algorithm is `hpa`'s.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from components.runtime.errors import ContractError
from k8s.scaling.hpa import DEFAULT_DOWN, DEFAULT_UP, Autoscaler, Metric, Rules, ScalingPolicy

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
