"""Tests that every name in a manifest exists, such as maps, accounts and ports.

Kubernetes accepts a Service that selects no pod, or a probe of an absent port, and the pod just
never becomes ready. If an object such as a Secret is optional, its reference must contain
`optional: true`.
"""

import re

import pytest

from tests.support.rendering import (
    Manifest,
    containers,
    find,
    matches,
    pod_template,
    title,
    workloads,
)

GIVEN = {
    ("Role", "kubeflow", "pipeline-runner"): "Kubeflow Pipelines standalone brings it",
    ("ServiceAccount", "kubeflow", "pipeline-runner"): "Kubeflow Pipelines standalone brings it",
    ("PriorityClass", "", "system-cluster-critical"): "Kubernetes brings it",
}
"""Objects that manifests use but do not define, with their origin."""


class Cluster:
    """The objects of one rendering, which are searched for referenced names."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.manifests = manifests
        self._known = {
            (m["kind"], m["metadata"].get("namespace", ""), m["metadata"]["name"]): m
            for m in manifests
        }

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self._known.get((kind, namespace, name))

    def has(self, kind: str, namespace: str, name: str) -> bool:
        return (kind, namespace, name) in self._known or (kind, namespace, name) in GIVEN

    def pods(self, namespace: str, selector: Manifest) -> list[Manifest]:
        """Return the pod templates that a LabelSelector selects in the namespace."""
        return [
            template
            for workload in self.manifests
            if (template := pod_template(workload))
            and workload["metadata"]["namespace"] == namespace
            if matches(selector, template["metadata"].get("labels", {}))
        ]


@pytest.fixture
def cluster(variant) -> Cluster:
    return Cluster(variant)


def ports(template: Manifest) -> dict[str, int]:
    """Return the named ports of a pod."""
    return {
        p["name"]: p["containerPort"]
        for c in template["spec"]["containers"]
        for p in c.get("ports", ())
    }


def _maps_and_secrets(spec: Manifest):
    """Yield kind, name, key (or None) and optionality for each ConfigMap and Secret of a pod."""
    for volume in spec.get("volumes", ()):
        if "configMap" in volume:
            yield (
                "ConfigMap",
                volume["configMap"]["name"],
                None,
                volume["configMap"].get("optional", False),
            )
        if "secret" in volume:
            yield (
                "Secret",
                volume["secret"]["secretName"],
                None,
                volume["secret"].get("optional", False),
            )
        for source in volume.get("projected", {}).get("sources", ()):
            for kind, field in (("ConfigMap", "configMap"), ("Secret", "secret")):
                if field in source:
                    yield kind, source[field]["name"], None, source[field].get("optional", False)
    for container in containers(spec):
        for source in container.get("envFrom", ()):
            for kind, field in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
                if field in source:
                    yield kind, source[field]["name"], None, source[field].get("optional", False)
        for entry in container.get("env", ()):
            for kind, field in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
                if found := entry.get("valueFrom", {}).get(field):
                    yield kind, found["name"], found["key"], found.get("optional", False)


def test_config_maps_and_secrets_that_pods_read_exist_or_may_be_absent(cluster):
    for workload, spec in workloads(cluster.manifests):
        for kind, name, key, optional in _maps_and_secrets(spec):
            found = cluster.get(kind, workload["metadata"]["namespace"], name)
            assert found or optional, f"{title(workload)} reads {kind} {name}, which does not exist"
            assert not (found and key) or key in found["data"], (
                f"{title(workload)} reads {key} of {kind} {name}"
            )


def test_claims_accounts_and_priority_classes_exist(cluster):
    for workload, spec in workloads(cluster.manifests):
        namespace = workload["metadata"]["namespace"]
        for volume in spec.get("volumes", ()):
            if claim := volume.get("persistentVolumeClaim"):
                assert cluster.has("PersistentVolumeClaim", namespace, claim["claimName"]), title(
                    workload
                )
        assert cluster.has("ServiceAccount", namespace, spec["serviceAccountName"]), title(workload)
        assert cluster.has("PriorityClass", "", spec["priorityClassName"]), title(workload)


def test_probes_and_hooks_use_ports_that_their_container_has(cluster):
    num_checked = 0
    for workload, spec in workloads(cluster.manifests):
        for container in containers(spec):
            own = {p["name"] for p in container.get("ports", ())} | {
                p["containerPort"] for p in container.get("ports", ())
            }
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                for how in ("httpGet", "tcpSocket", "grpc"):
                    if how in container.get(name, {}):
                        num_checked += 1
                        assert container[name][how]["port"] in own, f"{title(workload)} {name}"
    assert num_checked >= 6


def test_services_select_pods_that_have_their_ports(cluster):
    services = [m for m in cluster.manifests if m["kind"] == "Service"]
    assert len(services) >= 3
    for service in services:
        selected = cluster.pods(
            service["metadata"]["namespace"], {"matchLabels": service["spec"]["selector"]}
        )
        assert len(selected) == 1, f"{title(service)} selects {len(selected)} workloads"
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            known = ports(selected[0])
            assert target in known or target in known.values(), (
                f"{title(service)}: no container has the port {port}"
            )


def test_workloads_select_only_their_own_pods(cluster):
    for workload, _ in workloads(cluster.manifests):
        if selector := workload["spec"].get("selector"):
            assert cluster.pods(workload["metadata"]["namespace"], selector) == [
                pod_template(workload)
            ]


def test_triton_has_one_scaler_or_states_its_replicas(cluster):
    """`kubectl apply` of a Deployment with `replicas` would undo the scaler's change."""
    scalers = [
        m for m in cluster.manifests if m["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
    ]
    targets = [(m["metadata"]["namespace"], m["spec"]["scaleTargetRef"]) for m in scalers]
    is_stated = "replicas" in find(cluster.manifests, "Deployment", "triton")["spec"]
    assert [ref["name"] for _, ref in targets] == ([] if is_stated else ["triton"])
    for namespace, ref in targets:
        assert cluster.get(ref.get("kind", "Deployment"), namespace, ref["name"])


def test_role_bindings_name_roles_and_accounts_that_exist(cluster):
    for binding in (
        m for m in cluster.manifests if m["kind"] in ("RoleBinding", "ClusterRoleBinding")
    ):
        namespace = binding["metadata"].get("namespace", "")
        role = binding["roleRef"]
        assert cluster.has(
            role["kind"], namespace if role["kind"] == "Role" else "", role["name"]
        ), title(binding)
        for subject in binding["subjects"]:
            assert cluster.has(subject["kind"], subject["namespace"], subject["name"]), title(
                binding
            )


def test_variables_in_arguments_are_defined(cluster):
    """If NAME is undefined, Kubernetes leaves `$(NAME)` in the argument as it is."""
    for workload, spec in workloads(cluster.manifests):
        for container in containers(spec):
            used = set(
                re.findall(
                    r"\$\((\w+)\)",
                    " ".join([*container.get("command", ()), *container.get("args", ())]),
                )
            )
            defined = {entry["name"] for entry in container.get("env", ())}
            for source in container.get("envFrom", ()):
                name = source.get("configMapRef", {}).get("name", "")
                found = cluster.get("ConfigMap", workload["metadata"]["namespace"], name)
                defined |= set(found["data"]) if found else set()
            assert used <= defined, f"{title(workload)}: {sorted(used - defined)}"
