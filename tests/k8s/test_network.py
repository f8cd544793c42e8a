"""Tests of network access: every required flow is allowed, and no other flow.

`tests.k8s.network` evaluates the rendered policies, with the labels of the rendered pods and of the
compiled pipeline's pods. The tests do not check whether a cluster's network plugin enforces the
policies.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from testing.paths import REPOSITORY
from tests.k8s.network import TCP, UDP, Endpoint, allowed
from tests.support.rendering import Manifest, pod_template, workloads
from tests.support.yaml_texts import documents

OVERLAYS = ("cpu", "gke", "gke-mig")
INTERNET, PRIVATE = Endpoint("142.250.74.10"), Endpoint("10.8.0.1")
METADATA, METADATA_CALICO, PRIVATE_GOOGLE = (
    Endpoint("169.254.169.254"),
    Endpoint("169.254.169.252"),
    Endpoint("199.36.153.9"),
)


def other_pod(
    namespace: str, labels: dict[str, str], address: str, **namespace_labels: str
) -> Endpoint:
    """Return a pod that does not belong to the project."""
    known = {"kubernetes.io/metadata.name": namespace, **namespace_labels}
    return Endpoint(address, namespace, labels, known)


def step(name: str) -> Endpoint:
    """Return a pod of the compiled pipeline. The platform specification has the pod's labels."""
    compiled = (REPOSITORY / "tests/pipelines/golden/retraining.yaml").read_text()
    executors = documents(compiled)[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return other_pod("kubeflow", executors[f"exec-{name}"]["podMetadata"]["labels"], "10.4.2.1")


CLIENT = Endpoint(
    "10.4.1.1",
    "shop",
    {},
    {"kubernetes.io/metadata.name": "shop", "evergreen.io/serving-client": "true"},
)
OTHERS = {
    "client": CLIENT,
    "stranger": other_pod("default", {"app.kubernetes.io/name": "prometheus"}, "10.4.1.2"),
    "prometheus": other_pod("monitoring", {"app.kubernetes.io/name": "prometheus"}, "10.4.1.3"),
    "grafana": other_pod("monitoring", {"app.kubernetes.io/name": "grafana"}, "10.4.1.4"),
    "dns": other_pod("kube-system", {"k8s-app": "kube-dns"}, "10.4.1.5"),
    "node dns": Endpoint("169.254.20.10"),
    "metrics server": other_pod("kube-system", {"k8s-app": "metrics-server"}, "10.4.1.6"),
    "kubeflow api": other_pod("kubeflow", {"app": "ml-pipeline"}, "10.4.1.7"),
    "kubeflow ui": other_pod("kubeflow", {"app": "ml-pipeline-ui"}, "10.4.1.8"),
    "kubeflow database": other_pod("kubeflow", {"app": "mysql"}, "10.4.1.9"),
    "broker": other_pod("kafka", {"app.kubernetes.io/name": "kafka"}, "10.4.1.10"),
    "deployment step": step("deployment"),
    "training step": step("training"),
    "extraction step": step("extraction"),
    "preprocessing step": step("preprocessing"),
    "internet": INTERNET,
    "private address": PRIVATE,
    "metadata": METADATA,
    "metadata by calico": METADATA_CALICO,
    "google privately": PRIVATE_GOOGLE,
}


class Flow(NamedTuple):
    """A connection from a source to a port of a destination."""

    source: str
    destination: str
    port: int
    protocol: str = TCP


NEEDED = {
    *(
        Flow(each, "dns", 53, protocol)
        for each in ("triton", "monitor", "release-controller")
        for protocol in (TCP, UDP)
    ),
    *(Flow(each, "node dns", 53, UDP) for each in ("triton", "monitor", "release-controller")),
    Flow("client", "triton", 8000),
    Flow("client", "triton", 8001),
    *(Flow("release-controller", "triton", port) for port in (8001, 8002)),
    Flow("prometheus", "triton", 8002),
    Flow("prometheus", "monitor", 9464),
    Flow("monitor", "kubeflow api", 8888),
}
ON_GOOGLE = {
    Flow(each, *where)
    for each in ("triton", "monitor", "release-controller")
    for where in (
        ("internet", 443),
        ("google privately", 443),
        ("metadata", 80),
        ("metadata by calico", 988),
    )
}
ON_CPU = NEEDED | {Flow("monitor", "broker", 9092), Flow("monitor", "broker", 9093)}
DASK_STEPS = ("extraction", "preprocessing")
DASK_PODS = [f"{step}-dask-{part}" for step in DASK_STEPS for part in ("scheduler", "worker")]
DASK = {
    *(
        Flow(f"{step}{end}", f"{step}-dask-scheduler", 8786)
        for step in DASK_STEPS
        for end in ("-dask-worker", " step")
    ),
    *(Flow(f"{step}-dask-scheduler", f"{step}-dask-worker", 8788) for step in DASK_STEPS),
    *(Flow(each, "dns", 53, protocol) for each in DASK_PODS for protocol in (TCP, UDP)),
    *(Flow(each, "node dns", 53, UDP) for each in DASK_PODS),
}
NEEDED_OF = {
    "cpu": ON_CPU,
    "cpu+dask-extraction+dask-preprocessing": ON_CPU | DASK,
    "gke": NEEDED | ON_GOOGLE,
    "gke-mig": NEEDED | ON_GOOGLE,
    "cpu+webhook": ON_CPU | {Flow("monitor", "internet", 443)},
}


def ends(manifests: list[Manifest]) -> dict[str, Endpoint]:
    """Return the possible ends of a flow by name: the project's rendered pods and other pods."""
    spaces = {
        m["metadata"]["name"]: m["metadata"].get("labels", {})
        for m in manifests
        if m["kind"] == "Namespace"
    }
    ours = {}
    for number, (workload, _) in enumerate(workloads(manifests)):
        template, namespace = pod_template(workload), workload["metadata"]["namespace"]
        assert template is not None
        ports = {
            p["name"]: p["containerPort"]
            for c in template["spec"]["containers"]
            for p in c.get("ports", ())
        }
        labels = {"kubernetes.io/metadata.name": namespace, **spaces[namespace]}
        ours[workload["metadata"]["name"]] = Endpoint(
            f"10.4.0.{number + 1}", namespace, template["metadata"]["labels"], labels, ports
        )
    return {**OTHERS, **ours}


def policies_of(manifests: list[Manifest]) -> list[Manifest]:
    return [m for m in manifests if m["kind"] == "NetworkPolicy"]


def passing(policies: list[Manifest], known: dict[str, Endpoint], flows: set[Flow]) -> set[Flow]:
    """Return the flows that the policies allow."""
    return {
        f
        for f in flows
        if allowed(policies, known[f.source], known[f.destination], f.port, f.protocol)
    }


@pytest.fixture(params=sorted(NEEDED_OF))
def case(request, rendered):
    """Policies, pods and required connections of one rendered overlay."""
    manifests = rendered(request.param)
    return policies_of(manifests), ends(manifests), NEEDED_OF[request.param]


def test_every_required_flow_is_allowed(case):
    policies, known, needed = case
    assert needed - passing(policies, known, needed) == set()


TOLERATED = {
    *(
        Flow(each, "node dns", 53, TCP)
        for each in ("triton", "monitor", "release-controller", *DASK_PODS)
    ),
    # Additional ports that GKE's data planes use: 8080, and port 987 for Cloud DNS.
    *(
        Flow(each, *where)
        for each in ("triton", "monitor", "release-controller")
        for where in (
            ("metadata", 8080),
            ("metadata", 53),
            ("metadata", 53, UDP),
            ("metadata by calico", 987),
        )
    ),
    # Google's services have public addresses, which the monitor may reach.
    Flow("monitor", "google privately", 443),
}
"""Flows that the policies allow although no program needs them."""


def test_no_other_flow_is_allowed(case):
    """Check all pairs of endpoints, for common ports, ports in the policies and adjacent ports."""
    policies, known, needed = case
    named = {n for n in _numbers([policy["spec"] for policy in policies]) if n > 1}
    tried = {22, 80, 443, 3000, 3306, 6443, 10250, 65535} | {
        n + step for n in named for step in (-1, 0, 1)
    }
    pairs = [(a, b) for a in known for b in known if a != b and {a, b} - OTHERS.keys()]
    flows = {
        Flow(a, b, port, protocol) for a, b in pairs for port in tried for protocol in (TCP, UDP)
    }
    assert passing(policies, known, flows) - needed - TOLERATED == set()


def _numbers(node) -> Iterator[int]:
    if isinstance(node, int):
        yield node
    for child in (
        node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    ):
        yield from _numbers(child)


def test_every_network_rule_is_needed(case):
    """If any rule of the policies is deleted, a required flow is denied."""
    policies, known, needed = case
    idle = []
    for number, policy in enumerate(policies):
        for key in ("ingress", "egress"):
            for index in range(len(policy["spec"].get(key) or ())):
                changed = copy.deepcopy(policies)
                del changed[number]["spec"][key][index]
                if passing(changed, known, needed) == needed:
                    idle.append(f"{policy['metadata']['name']} {key}[{index}]")
    assert idle == []


def test_every_own_pod_is_isolated_in_both_directions(variant):
    """Connections of a workload that is added later are denied, whatever its labels are."""
    policies = policies_of(variant)
    newcomer = Endpoint(
        "10.4.0.99", "evergreen", {"app": "new"}, {"kubernetes.io/metadata.name": "evergreen"}
    )
    for other in (INTERNET, PRIVATE, CLIENT, OTHERS["stranger"]):
        assert not allowed(policies, newcomer, other, 443)
        assert not allowed(policies, other, newcomer, 8080)


KUBEFLOWS_OWN = {
    "kind": "NetworkPolicy",
    "metadata": {"name": "default-allow-same-namespace", "namespace": "kubeflow"},
    "spec": {
        "podSelector": {},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {}}]}],
    },
}
"""Policies in newer manifests of Kubeflow Pipelines (manifests/kustomize/base/pipeline)."""


def test_closed_kubeflow_is_opened_to_other_namespaces_for_monitor_alone(rendered):
    known = ends(rendered("gke"))
    monitor, triton, api, ui = (
        known[name] for name in ("monitor", "triton", "kubeflow api", "kubeflow ui")
    )
    closed = [*policies_of(rendered("gke")), KUBEFLOWS_OWN]
    opened = [*policies_of(rendered("gke+kubeflow-network")), KUBEFLOWS_OWN]
    assert not allowed(closed, monitor, api, 8888)
    assert allowed(opened, monitor, api, 8888)
    assert allowed(opened, ui, api, 8888)
    assert not allowed(opened, triton, api, 8888)
    assert not allowed(opened, OTHERS["stranger"], api, 8888)
    assert not allowed(opened, monitor, ui, 3000)


# The following tests compare the evaluator with examples from the documentation.

A = Endpoint("10.0.0.1", "a", {"app": "a"}, {"team": "x"})
B = Endpoint("10.0.0.2", "b", {"app": "b"}, {"team": "y"}, {"web": 8080})
OF_TEAM_X = {"namespaceSelector": {"matchLabels": {"team": "x"}}}
OF_APP_B = {"podSelector": {"matchLabels": {"app": "b"}}}


def policy(namespace: str = "b", **spec) -> Manifest:
    return {"metadata": {"name": "p", "namespace": namespace}, "spec": {"podSelector": {}, **spec}}


@pytest.mark.parametrize(
    ("policies", "expected"),
    [
        ([], True),  # "By default, a pod is non-isolated"
        ([policy(policyTypes=["Ingress"])], False),  # default deny
        ([policy("a", policyTypes=["Egress"])], False),
        # Replies on an open connection are not ingress.
        ([policy("a", policyTypes=["Ingress"])], True),
        # A rule without fields allows everything.
        ([policy(policyTypes=["Ingress"], ingress=[{}])], True),
        # A podSelector without a namespaceSelector applies to the policy's namespace.
        ([policy(ingress=[{"from": [{"podSelector": {}}]}])], False),
        ([policy(ingress=[{"from": [OF_TEAM_X]}])], True),
        # A pod must match both selectors of an entry.
        ([policy(ingress=[{"from": [{**OF_TEAM_X, **OF_APP_B}]}])], False),
        # A pod that matches one of two entries is allowed.
        ([policy(ingress=[{"from": [OF_TEAM_X, OF_APP_B]}])], True),
        # A connection is allowed if one of several policies allows it.
        ([policy(policyTypes=["Ingress"]), policy(ingress=[{}])], True),
        # The policy selects another pod.
        ([policy(podSelector={"matchLabels": {"app": "c"}}, policyTypes=["Ingress"])], True),
        ([policy(ingress=[{"ports": [{"port": 8080}]}])], True),
        ([policy(ingress=[{"ports": [{"port": 8081}]}])], False),
        ([policy(ingress=[{"ports": [{"port": 8080, "protocol": "UDP"}]}])], False),
        ([policy(ingress=[{"ports": [{"port": "web"}]}])], True),
        ([policy(ingress=[{"ports": [{"port": "grpc"}]}])], False),
        ([policy(ingress=[{"ports": [{"port": 8000, "endPort": 8100}]}])], True),
        (
            [
                policy(
                    ingress=[
                        {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.0/24"]}}]}
                    ]
                )
            ],
            False,
        ),
        ([policy("a", egress=[{"to": [{"ipBlock": {"cidr": "10.0.0.2/32"}}]}])], True),
        (
            [
                policy("a", egress=[{"to": [{"ipBlock": {"cidr": "10.0.0.2/32"}}]}]),
                policy(policyTypes=["Ingress"]),
            ],
            False,
        ),
    ],
)
def test_evaluator_follows_documentation(policies, expected):
    assert allowed(policies, A, B, 8080) is expected
