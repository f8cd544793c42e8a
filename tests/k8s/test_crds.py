"""The compact schemas of custom resources refuse what a cluster would refuse, and what it would silently drop."""

from __future__ import annotations

import copy

import pytest
import yaml

from tests.k8s.crds import CRD_KINDS, validate_crd
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
    ("PodMonitor", "spec.selector", None, "selector"),
    ("PodMonitor", "apiVersion", "monitoring.coreos.com/v1beta1", "apiVersion"),
    ("PrometheusRule", "spec.groups.0.rules.0.record", "a:b", "oneOf|more than one|valid under each"),
    ("PrometheusRule", "spec.groups.0.rules.0.annotations", {"value": 3}, "string"),
    ("ScaledObject", "spec.triggers.0.metadata.threshold", 2000, "string"),
    ("ScaledObject", "spec.triggers.0.metadata.treshold", "2000", "treshold"),
    ("ScaledObject", "spec.triggers.0.type", "cron", "desiredReplicas"),
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
