"""The autoscaler as the manifests in k8s/ ship it, which are its only home.

The simulator reads it here, so that no copy can differ from what a cluster runs. The algorithm is `hpa`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from components.runtime.errors import ContractError
from k8s.scaling.hpa import DEFAULT_DOWN, DEFAULT_UP, Autoscaler, Metric, Rules, ScalingPolicy

QUEUE_METRIC, PENDING_METRIC = "triton_queue_microseconds_per_request", "triton_pending_requests"
"""What Triton is scaled by; the manifests' rules publish them under these names."""
HPA_MANIFEST = Path(__file__).resolve().parents[1] / "base" / "triton" / "autoscaler.yaml"
_SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}

Document = dict[str, Any]
"""One YAML document of a manifest."""


def read_autoscaler(path: Path) -> Autoscaler:
    """The one HorizontalPodAutoscaler of a manifest or a folder of manifests; what it leaves out has the default.

    Raises:
        ContractError: there is not exactly one, or it cannot be simulated; names what.
    """
    scalers = [each for each in _read_documents(path) if each.get("kind") == "HorizontalPodAutoscaler"]
    if len(scalers) != 1:
        raise ContractError(f"{path} holds {len(scalers)} HorizontalPodAutoscalers, expected 1")
    try:
        return _autoscaler(scalers[0]["spec"])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ContractError(f"{path} is no autoscaler of autoscaling/v2: {error!r}") from error


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


def _autoscaler(spec: Document) -> Autoscaler:
    metrics = []
    for metric in spec["metrics"]:
        if metric["type"] != "Pods":
            raise ContractError(f"a metric is of type {metric['type']}, expected Pods")
        target = quantity(metric["pods"]["target"]["averageValue"])
        metrics.append(Metric(name=metric["pods"]["metric"]["name"], target=target))
    behavior = spec.get("behavior", {})
    return Autoscaler(
        metrics=tuple(metrics),
        least=int(spec.get("minReplicas", 1)),
        most=int(spec["maxReplicas"]),
        up=_rules(behavior.get("scaleUp"), DEFAULT_UP),
        down=_rules(behavior.get("scaleDown"), DEFAULT_DOWN),
    )


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
