"""Tests that every workload is confined, limited, monitored and private, and uses known images.

The rules of Pod Security's `restricted` profile are from Kubernetes' documentation ("Pod Security
Standards"). The project adds rules about limits, images and monitoring.
"""

import re

from evergreen.runtime.onnx_runtime import SILENT
from tests.support.rendering import Manifest, containers, title, workloads

RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
UNPROBED = {
    "uploader": "serves nothing; it ends when it cannot go on, and its lag has an alert",
    "traffic": "serves nothing; it ends when it cannot go on",
}
IMAGE = re.compile(
    r"(?P<name>[a-z0-9.:/_-]+?)(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]*))?(@sha256:(?P<digest>[0-9a-f]{64}))?"
)
MUTABLE_TAGS = {"latest", "dev", "main", "master", "stable", "edge", "nightly"}
ONNX_RUNTIME_IMAGES = re.compile(r"(^|/)(tritonserver|evergreen-(deployment|evaluation))[:@]")
"""Images whose programs open ONNX graphs."""
SECRET_WORDS = re.compile(
    r"(password|passwd|secret|token|api_?key|webhook|credential)", re.IGNORECASE
)


def refusals(workload: Manifest, spec: Manifest) -> list[str]:
    """Return every rule that the workload's pods break, as text."""
    claims = [
        {"name": each["metadata"]["name"]}
        for each in workload["spec"].get("volumeClaimTemplates", ())
    ]
    spec = {**spec, "volumes": [*spec.get("volumes", ()), *claims]}
    found = [f"{title(workload)}: {text}" for text in _of_pod(spec)]
    for container in containers(spec):
        where = f"{title(workload)} container {container['name']}"
        found += [
            f"{where}: {text}"
            for text in (*_of_container(container, spec), *_of_resources(container))
        ]
        found += [
            f"{where}: {text}"
            for text in (*_of_image(container["image"]), *_of_environment(container))
        ]
    found += [
        f"{title(workload)} container {c['name']}: {t}"
        for c in spec["containers"]
        for t in _of_telemetry(c)
    ]
    if workload["kind"] in ("Deployment", "StatefulSet", "DaemonSet"):
        found += [
            f"{title(workload)} container {c['name']}: {t}"
            for c in spec["containers"]
            for t in _of_probes(c)
        ]
    return found


def _of_pod(spec: Manifest) -> list[str]:
    """Return the pod's violations of the restricted profile, and mounted service-account tokens."""
    security = spec.get("securityContext", {})
    found = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    found += [
        f"volume {v['name']} is of a kind that the restricted profile refuses"
        for v in spec.get("volumes", ())
        if not (set(v) - {"name"}) <= RESTRICTED_VOLUMES
    ]
    if security.get("runAsNonRoot") is not True or security.get("runAsUser", 1) == 0:
        found.append("does not run as non-root")
    if security.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        found.append("has no seccomp profile")
    if spec.get("automountServiceAccountToken") is not False:
        found.append("mounts a service-account token")
    if spec.get("serviceAccountName", "default") == "default":
        found.append("runs as the default service account")
    if not spec.get("priorityClassName"):
        found.append("has no priority class")
    return found


def _of_container(container: Manifest, spec: Manifest) -> list[str]:
    security = container.get("securityContext", {})
    found = []
    if security.get("allowPrivilegeEscalation") is not False:
        found.append("may escalate privileges")
    if security.get("privileged"):
        found.append("is privileged")
    capabilities = security.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or capabilities.get("add"):
        found.append("keeps capabilities")
    if security.get("readOnlyRootFilesystem") is not True:
        found.append("has a writable root filesystem")
    if security.get("runAsNonRoot") is False or security.get("runAsUser", 1) == 0:
        found.append("runs as root")
    if any("hostPort" in port for port in container.get("ports", ())):
        found.append("takes a port of its node")
    known = {v["name"] for v in spec.get("volumes", ())}
    found += [
        f"mounts unknown volume {m['name']}"
        for m in container.get("volumeMounts", ())
        if m["name"] not in known
    ]
    return found


def _of_resources(container: Manifest) -> list[str]:
    """Return missing requests and limits of a container.

    Memory and disk need a limit, because they cannot be reclaimed. CPU time needs no limit, because
    the kernel can reclaim CPU time at any moment.
    """
    resources = container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    found = [f"requests no {name}" for name in ("cpu", "memory") if name not in requests]
    return [*found, *(["has no memory limit"] if "memory" not in limits else [])]


def _of_image(image: str) -> list[str]:
    match = IMAGE.fullmatch(image)
    if match is None:
        return [f"image {image!r} is no image reference"]
    if match["digest"]:
        return []
    return (
        [f"image {image!r} has no immutable tag"]
        if not match["tag"] or match["tag"] in MUTABLE_TAGS
        else []
    )


def _of_environment(container: Manifest) -> list[str]:
    """Return variables that have a secret's name but whose value is not from a Secret."""
    return [
        f"variable {entry['name']} holds what belongs in a Secret"
        for entry in container.get("env", ())
        if SECRET_WORDS.search(entry["name"])
        and entry.get("value", "").strip()
        and "/" not in entry["value"]
    ]


def _of_telemetry(container: Manifest) -> list[str]:
    """Return a fault if ONNX Runtime's telemetry is not turned off."""
    given = {entry["name"]: entry.get("value") for entry in container.get("env", ())}
    if ONNX_RUNTIME_IMAGES.search(container["image"]) and not SILENT.items() <= given.items():
        return ["lets ONNX Runtime send telemetry"]
    return []


def _of_probes(container: Manifest) -> list[str]:
    if container["name"] in UNPROBED:
        return []
    wanted = ("startupProbe", "readinessProbe", "livenessProbe")
    return [f"has no {probe}" for probe in wanted if probe not in container]


def test_every_workload_obeys_every_rule(variant):
    checked = list(workloads(variant))
    assert len(checked) >= 2
    assert not [text for workload, spec in checked for text in refusals(workload, spec)]


def test_nothing_is_reachable_from_outside_cluster(variant):
    assert not [
        title(m) for m in variant if m["kind"] in ("Ingress", "Gateway", "HTTPRoute", "GRPCRoute")
    ]
    for service in (m for m in variant if m["kind"] == "Service"):
        assert service["spec"].get("type", "ClusterIP") == "ClusterIP", title(service)
        assert "externalIPs" not in service["spec"], title(service)


def test_no_secret_is_in_manifests(variant):
    assert not [
        title(m)
        for m in variant
        if m["kind"] == "Secret" and (m.get("data") or m.get("stringData"))
    ]


def test_namespace_of_our_pods_refuses_what_is_not_restricted(variant):
    others = {"evergreen-simulation", "kafka"}
    homes = {w["metadata"]["namespace"] for w, _ in workloads(variant)}
    enforced = {
        m["metadata"]["name"]
        for m in variant
        if m["kind"] == "Namespace"
        and m["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    }
    assert homes == enforced
    assert homes - others == {"evergreen"}
