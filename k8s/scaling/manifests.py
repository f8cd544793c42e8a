"""The autoscaler and its queries as the manifests in k8s/ ship them, which are their only home.

The simulator and the tests read them here, so that no copy can differ from what a cluster runs. A rule
of prometheus-adapter is a Go template; of its fields the shipped rules use the two in `_template_values`, substituted
as the adapter's source does (pkg/naming/metrics_query.go, `Build`). The algorithm is `hpa`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from components.runtime.errors import ContractError
from k8s.scaling.hpa import DEFAULT_DOWN, DEFAULT_UP, Autoscaler, Metric, Rules, ScalingPolicy

NAMESPACE = "evergreen"
QUEUE_METRIC, PENDING_METRIC = "triton_queue_microseconds_per_request", "triton_pending_requests"
"""What Triton is scaled by; the manifests' rules publish them under these names."""
MANIFESTS = Path(__file__).resolve().parents[2] / "k8s"
ADAPTER = MANIFESTS / "components" / "prometheus-adapter"
HPA_MANIFEST = MANIFESTS / "base" / "triton" / "autoscaler.yaml"
_SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}
_TEMPLATE = re.compile(r"<<\s*(.*?)\s*>>")

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


def read_queries(path: Path, *, pods: Sequence[str] = ("triton-0",)) -> dict[str, str]:
    """PromQL by the name of its metric, as a cluster's autoscaler sends it.

    Args:
        path: A manifest or a folder of them: prometheus-adapter's rules, asked as the HPA asks (one series per pod,
            label `pod`), or a ScaledObject (one value; triggers of other types than `prometheus` have no query).
        pods: Names of the pods asked about, at least one; a ScaledObject's queries ask about all.

    Raises:
        ContractError: no queries there, or a template that the adapter would fill otherwise.
    """
    queries = dict(_find_queries(path, pods))
    if not queries:
        raise ContractError(f"{path} has neither rules of prometheus-adapter nor a ScaledObject")
    return queries


def substitute(template: str, *, namespace: str, pods: Sequence[str]) -> str:
    """The query that prometheus-adapter makes of a rule's `metricsQuery` for these pods.

    Raises:
        ContractError: the template has a field that is not filled here.

    >>> substitute("sum by (<<.GroupBy>>) (m{<<.LabelMatchers>>})", namespace="n", pods=["a", "b"])
    'sum by (pod) (m{namespace="n",pod=~"a|b"})'
    """
    matcher = "=~" if len(pods) > 1 else "="
    values = {".LabelMatchers": f'namespace="{namespace}",pod{matcher}"{"|".join(pods)}"', ".GroupBy": "pod"}

    def fill(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ContractError(f"the template has <<{match[1]}>>, expected one of {', '.join(values)}")
        return values[match[1]]

    return _TEMPLATE.sub(fill, template)


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


def _find_queries(path: Path, pods: Sequence[str]) -> Iterator[tuple[str, str]]:
    for document in _read_documents(path):
        if document.get("kind") == "ScaledObject":
            for trigger in document["spec"]["triggers"]:
                if trigger["type"] == "prometheus":
                    yield trigger["name"], trigger["metadata"]["query"]
        elif isinstance(document.get("rules"), list):
            for rule in document["rules"]:
                yield metric_name(rule), substitute(rule["metricsQuery"], namespace=NAMESPACE, pods=pods)


def _read_documents(path: Path) -> Iterator[Document]:
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    for file in files:
        try:
            documents = list(yaml.safe_load_all(file.read_text()))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ContractError(f"{file} is no manifest: {error}") from error
        yield from (document for document in documents if isinstance(document, dict))
