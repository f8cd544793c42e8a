"""The compact schemas of custom resources refuse what a cluster would refuse, and what it would silently drop."""

from __future__ import annotations

import copy

import jsonschema
import pytest
import yaml

from tests.k8s.crds import CRD_KINDS, SCHEMAS, validate_crd
from tests.support.rendering import K8S

VALID = {
    (kind := "PodMonitor"): {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": kind,
        "metadata": {"name": "triton", "namespace": "evergreen", "labels": {"release": "prometheus"}},
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": "triton"}},
            "podMetricsEndpoints": [
                {"port": "metrics", "interval": "15s", "relabelings": [{"action": "drop", "sourceLabels": ["job"]}]}
            ],
        },
    },
    (kind := "PrometheusRule"): {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": kind,
        "metadata": {"name": "alerts"},
        "spec": {"groups": [{"name": "g", "rules": [{"alert": "A", "expr": "up == 0", "for": "1h30m"}]}]},
    },
    (kind := "ScaledObject"): {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": kind,
        "metadata": {"name": "triton"},
        "spec": {
            "scaleTargetRef": {"name": "triton"},
            "minReplicaCount": 0,
            "triggers": [
                {
                    "type": "prometheus",
                    "metricType": "AverageValue",
                    "metadata": {"serverAddress": "http://prometheus:9090", "query": "up", "threshold": "2000"},
                }
            ],
        },
    },
}

FAULTS = [
    ("PodMonitor", "spec.podMetricEndpoints", [], "podMetricEndpoints"),
    ("PodMonitor", "spec.podMetricsEndpoints.0.interval", "15 s", "15 s"),
    ("PodMonitor", "spec.podMetricsEndpoints.0.interval", 15, "15"),
    ("PodMonitor", "spec.podMetricsEndpoints.0.port", 8002, "8002"),
    ("PodMonitor", "spec.podMetricsEndpoints.0.scheme", "grpc", "grpc"),
    ("PodMonitor", "spec.podMetricsEndpoints.0.relabelings.0.action", "delete", "delete"),
    ("PodMonitor", "spec.selector.matchLabels.tier", 1, "string"),
    ("PodMonitor", "spec.selector", None, "selector"),
    ("PodMonitor", "apiVersion", "monitoring.coreos.com/v1beta1", "apiVersion"),
    ("PodMonitor", "metadata.name", "Triton", "Triton"),
    ("PrometheusRule", "spec.groups.0.rules.0.for", "2 hours", "2 hours"),
    ("PrometheusRule", "spec.groups.0.rules.0.record", "a:b", "oneOf|more than one|valid under each"),
    ("PrometheusRule", "spec.groups.0.rules.0.severity", "page", "severity"),
    ("PrometheusRule", "spec.groups.0.rules.0.annotations", {"value": 3}, "string"),
    ("PrometheusRule", "spec.groups.0.rules.0.expr", None, "expr"),
    ("PrometheusRule", "spec.groups.0.name", None, "name"),
    ("ScaledObject", "spec.minReplicas", 1, "minReplicas"),
    ("ScaledObject", "spec.minReplicaCount", "1", "integer"),
    ("ScaledObject", "spec.maxReplicaCount", 0, "minimum"),
    ("ScaledObject", "spec.triggers.0.metricType", "Average", "Average"),
    ("ScaledObject", "spec.triggers.0.metadata.threshold", 2000, "string"),
    ("ScaledObject", "spec.triggers.0.metadata.treshold", "2000", "treshold"),
    ("ScaledObject", "spec.triggers.0.metadata.query", None, "query"),
    ("ScaledObject", "spec.triggers.0.type", "cron", "desiredReplicas"),
    ("ScaledObject", "spec.triggers.0.type", "Prometheus", "prometheus"),
    ("ScaledObject", "spec.scaleTargetRef", None, "scaleTargetRef"),
]


def with_value(manifest, path, value):
    """The manifest with `value` at the path; None takes the field away."""
    changed = copy.deepcopy(manifest)
    *way, last = path.split(".")
    place = changed
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return changed


@pytest.mark.parametrize("kind", CRD_KINDS)
def test_a_valid_object_of_each_kind_is_taken(kind):
    validate_crd(VALID[kind])


@pytest.mark.parametrize(("kind", "path", "value", "told"), FAULTS, ids=[f"{k}-{p}-{v}" for k, p, v, _ in FAULTS])
def test_a_fault_is_refused_and_named(kind, path, value, told):
    with pytest.raises(AssertionError, match=told):
        validate_crd(with_value(VALID[kind], path, value))


def test_an_unknown_kind_is_refused():
    with pytest.raises(AssertionError, match="no schema of this kind"):
        validate_crd({"apiVersion": "monitoring.coreos.com/v1", "kind": "Probe", "metadata": {"name": "x"}})


def objects_of(node):
    """Every schema inside a schema that describes an object with named fields."""
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield node
        for child in node.values():
            yield from objects_of(child)
    elif isinstance(node, list):
        for child in node:
            yield from objects_of(child)


@pytest.mark.parametrize("kind", CRD_KINDS)
def test_each_schema_is_sound_closed_and_names_its_source(kind):
    schema = SCHEMAS[kind]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert "commit" in schema["$comment"]
    assert schema["properties"]["kind"] == {"const": kind}
    for described in objects_of(schema):
        closed = described["additionalProperties"]
        assert closed is False or closed["type"] in ("string", "array"), described


def test_every_custom_resource_among_the_files_has_a_schema():
    """Also those of a component that no overlay of ours takes in."""
    kinds = set()
    for path in K8S.rglob("*.yaml"):
        for manifest in yaml.safe_load_all(path.read_text()):
            group = manifest.get("apiVersion", "") if isinstance(manifest, dict) else ""
            if group.startswith(("monitoring.", "keda.")) and "$patch" not in manifest:
                kinds.add(manifest["kind"])
    assert kinds <= set(CRD_KINDS)
    assert kinds >= {"PodMonitor", "ScaledObject"}
