"""The queries, targets and bounds of autoscaling, read from the manifests that ship: k8s/ is their only home.

Tests and the simulator evaluate what is read here, so that no copy of a query can differ from the one a cluster runs.
Evaluating is theirs. A rule of prometheus-adapter is a Go template; of its fields the rules here use the two that
`_FIELDS` names, substituted as the adapter's source does (pkg/naming/metrics_query.go, `Build`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from components.runtime.errors import ContractError

NAMESPACE = "evergreen"
QUEUE_METRIC, PENDING_METRIC = "triton_queue_microseconds_per_request", "triton_pending_requests"
"""What Triton is scaled by; the manifests' rules publish them under these names."""
MANIFESTS = Path(__file__).resolve().parents[2] / "k8s"
ADAPTER = MANIFESTS / "components" / "prometheus-adapter"
_FIELDS = ("LabelMatchers", "GroupBy")
_SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}
_TEMPLATE = re.compile(r"<<\s*(.*?)\s*>>")

Document = dict[str, Any]
"""One YAML document of a manifest."""


class Target(NamedTuple):
    """What an autoscaler holds one metric at."""

    value: float
    """In the metric's unit: microseconds, requests."""
    is_per_pod: bool
    """Whether it is compared with the mean over pods (AverageValue); otherwise with the value itself (Value)."""


class Bounds(NamedTuple):
    """How many replicas there may be."""

    least: int
    most: int


def read_queries(path: Path, *, namespace: str = NAMESPACE, pods: Sequence[str] = ("triton-0",)) -> dict[str, str]:
    """PromQL by the name of its metric, as a cluster's autoscaler sends it.

    Args:
        path: A manifest or a folder of them: prometheus-adapter's rules, asked as the HPA asks (one series per pod,
            label `pod`), or a ScaledObject (one value; triggers of other types than `prometheus` have no query).
        namespace: Namespace of the pods; a ScaledObject's queries name their own.
        pods: Names of the pods asked about, at least one; a ScaledObject's queries ask about all.

    Raises:
        ContractError: no queries there, two of one name, or a template that the adapter would fill otherwise.
    """
    if not pods:
        raise ContractError("no pods are named, and the adapter asks about at least one")
    queries: dict[str, str] = {}
    for name, query in _found(path, namespace, pods):
        if name in queries:
            raise ContractError(f"{path}: two queries are named {name}")
        queries[name] = query
    if not queries:
        raise ContractError(f"{path} has neither rules of prometheus-adapter nor a ScaledObject")
    return queries


def read_targets(path: Path) -> dict[str, Target]:
    """Targets by metric of the one HorizontalPodAutoscaler or ScaledObject of `path` (a manifest, or a folder).

    Raises:
        ContractError: there is not exactly one, or a metric that is neither per pod nor a Prometheus query.
    """
    scaler = _scaler(path)
    if scaler["kind"] == "ScaledObject":
        return {
            trigger["name"]: Target(
                quantity(trigger["metadata"]["threshold"]), trigger.get("metricType", "AverageValue") == "AverageValue"
            )
            for trigger in _prometheus_triggers(scaler)
        }
    targets: dict[str, Target] = {}
    for metric in scaler["spec"]["metrics"]:
        if metric["type"] != "Pods":
            raise ContractError(f"{path}: a metric of type {metric['type']}, expected Pods")
        targets[metric["pods"]["metric"]["name"]] = Target(quantity(metric["pods"]["target"]["averageValue"]), True)
    return targets


def read_bounds(path: Path) -> Bounds:
    """The least and the most replicas of the one autoscaler of `path`; what it leaves out as Kubernetes and KEDA do.

    Raises:
        ContractError: there is not exactly one.
    """
    scaler = _scaler(path)
    spec = scaler["spec"]
    if scaler["kind"] == "ScaledObject":
        return Bounds(int(spec.get("minReplicaCount", 0)), int(spec.get("maxReplicaCount", 100)))
    return Bounds(int(spec.get("minReplicas", 1)), int(spec["maxReplicas"]))


def read_behaviour(path: Path) -> Document:
    """`behavior` of the one autoscaler of `path`, as autoscaling/v2 defines it; empty where it says none.

    Raises:
        ContractError: there is not exactly one.
    """
    spec = _scaler(path)["spec"]
    if "advanced" in spec:
        spec = spec["advanced"].get("horizontalPodAutoscalerConfig", {})
    behaviour: Document = spec.get("behavior", {})
    return behaviour


def substitute(template: str, *, namespace: str, pods: Sequence[str]) -> str:
    """The query that prometheus-adapter makes of a rule's `metricsQuery` for these pods.

    Raises:
        ContractError: the template has a field that is not filled here.
    """
    names = "|".join(pods)
    values = {
        "LabelMatchers": f'namespace="{namespace}",pod{"=~" if len(pods) > 1 else "="}"{names}"',
        "GroupBy": "pod",
    }

    def value(match: re.Match[str]) -> str:
        field = match[1].removeprefix(".")
        if field not in _FIELDS or not match[1].startswith("."):
            raise ContractError(f"the template has <<{match[1]}>>, expected one of {', '.join(_FIELDS)}")
        return values[field]

    return _TEMPLATE.sub(value, template)


def metric_name(rule: Mapping[str, Any]) -> str:
    """The name under which an adapter's rule publishes; Go's `$0`, `$1` in it are not used here.

    Raises:
        ContractError: the series of the rule's query is not one that its name matches.
    """
    series = str(rule["seriesQuery"]).partition("{")[0]
    if not re.search(rule["name"]["matches"], series):
        raise ContractError(f"series {series} does not match {rule['name']['matches']}: the rule publishes nothing")
    return str(rule["name"]["as"])


def quantity(given: object) -> float:
    """The number of a Kubernetes quantity, such as `1500m` or `2k`.

    Raises:
        ValueError: it is none.
    """
    text = str(given)
    digits = text.rstrip("".join(_SUFFIXES))
    return float(digits) * _SUFFIXES[text[len(digits) :] or ""]


def _found(path: Path, namespace: str, pods: Sequence[str]) -> Iterator[tuple[str, str]]:
    for document in _documents(path):
        if document.get("kind") == "ScaledObject":
            for trigger in _prometheus_triggers(document):
                yield trigger["name"], trigger["metadata"]["query"]
        elif isinstance(document.get("rules"), list):
            for rule in document["rules"]:
                yield metric_name(rule), substitute(rule["metricsQuery"], namespace=namespace, pods=pods)


def _scaler(path: Path) -> Document:
    scalers = [d for d in _documents(path) if d.get("kind") in ("HorizontalPodAutoscaler", "ScaledObject")]
    if len(scalers) != 1:
        raise ContractError(f"{path} has {len(scalers)} autoscalers, expected 1")
    return scalers[0]


def _prometheus_triggers(scaled: Document) -> list[Document]:
    return [trigger for trigger in scaled["spec"]["triggers"] if trigger["type"] == "prometheus"]


def _documents(path: Path) -> Iterator[Document]:
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    for file in files:
        try:
            documents = list(yaml.safe_load_all(file.read_text()))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ContractError(f"{file} is no manifest: {error}") from error
        yield from (document for document in documents if isinstance(document, dict))
