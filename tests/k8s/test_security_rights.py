"""Tests that the project requests nothing from Kubernetes, and only permitted things from Kubeflow.

The checks of a multi-user Kubeflow Pipelines API server are in its source (run_server.go,
experiment_server.go and pipeline_server.go below backend/src/apiserver/server). Each HTTP request
counts as one verb on one resource. A request that creates a run needs three permissions: to create
the run, to read its pipeline, and to act as its service account.
"""

import re
import shutil

import pytest

from monitoring.retraining.triggers import KubeflowSettings, KubeflowTrigger
from tests.k8s.environment import environment_of
from tests.support.kfp_server import KfpServer
from tests.support.monitors import retrain_request
from tests.support.rendering import K8S, Manifest, find, render_variant, title, workloads
from tests.support.yaml_texts import documents

KFP = "pipelines.kubeflow.org"
Right = tuple[str, str, str]
"""Kubernetes permission: API group, resource and verb."""

CALLS: list[tuple[str, str, Right]] = [
    ("GET", r"experiments", (KFP, "experiments", "list")),
    ("POST", r"experiments", (KFP, "experiments", "create")),
    ("GET", r"experiments/[^/]+", (KFP, "experiments", "get")),
    ("GET", r"runs", (KFP, "runs", "list")),
    ("POST", r"runs", (KFP, "runs", "create")),
    ("GET", r"runs/[^/:]+", (KFP, "runs", "get")),
    ("POST", r"runs/[^/:]+:terminate", (KFP, "runs", "terminate")),
    ("GET", r"pipelines", (KFP, "pipelines", "list")),
    ("GET", r"pipelines/[^/]+", (KFP, "pipelines", "get")),
    ("GET", r"pipelines/[^/]+/versions", (KFP, "pipelines", "list")),
]


def right(method: str, path: str) -> Right:
    """Return the Kubernetes permission that the Kubeflow server checks for a call."""
    name = path.removeprefix("/apis/v2beta1/")
    (found,) = [
        each for known, pattern, each in CALLS if known == method and re.fullmatch(pattern, name)
    ]
    return found


def granted(role: Manifest) -> set[Right]:
    return {
        (g, r, v)
        for rule in role["rules"]
        for g in rule["apiGroups"]
        for r in rule["resources"]
        for v in rule["verbs"]
    }


def used(kubeflow: KfpServer, settings: KubeflowSettings) -> set[Right]:
    """Return all permissions that the trigger uses through the real client."""
    trigger, other = KubeflowTrigger(settings, store=None), KubeflowTrigger(settings, store=None)
    assert trigger.state("drift-0").state == "unknown"
    assert trigger.submit(retrain_request("drift-1")) == "started"
    assert trigger.submit(retrain_request("drift-2")) == "busy"
    assert trigger.state("drift-1").state == "running"
    kubeflow.runs[0]["state"] = "SUCCEEDED"

    def submit_first(body) -> None:
        kubeflow.before_create = lambda body: None
        assert other.submit(retrain_request("drift-3")) == "started"

    kubeflow.before_create = submit_first
    assert trigger.submit(retrain_request("drift-4")) == "busy"
    found = {right(method, path) for method, path in kubeflow.requests}
    created = [run["body"] for run in kubeflow.runs]
    if any("pipeline_version_reference" in body for body in created):
        found.add((KFP, "pipelines", "get"))
    if any(body.get("service_account") for body in created):
        found.add(("", "serviceaccounts", "use"))
    return found


def test_every_verb_granted_at_kubeflow_is_used_and_every_used_is_granted(rendered, kubeflow):
    manifests = rendered("gke+kubeflow-multi-user")
    variables = environment_of(manifests, find(manifests, "Deployment", "monitor"), "monitor")
    kubeflow.pipelines[0]["display_name"] = variables["EVERGREEN_MONITOR_PIPELINE_NAME"]
    settings = KubeflowSettings(
        kubeflow_host=kubeflow.url,
        pipeline_name=variables["EVERGREEN_MONITOR_PIPELINE_NAME"],
        kubeflow_service_account=variables["EVERGREEN_MONITOR_KUBEFLOW_SERVICE_ACCOUNT"],
    )
    assert granted(find(manifests, "Role", "evergreen-monitor")) == used(kubeflow, settings)


def test_monitor_is_bound_to_namespace_of_runs_in_its_settings(rendered):
    manifests = rendered("gke+kubeflow-multi-user")
    namespace = find(manifests, "ConfigMap", "monitor-settings")["data"][
        "EVERGREEN_MONITOR_KUBEFLOW_NAMESPACE"
    ]
    for kind in ("Role", "RoleBinding"):
        assert find(manifests, kind, "evergreen-monitor")["metadata"]["namespace"] == namespace
    (rule,) = [
        r
        for r in find(manifests, "Role", "evergreen-monitor")["rules"]
        if "serviceaccounts" in r["resources"]
    ]
    assert rule["resourceNames"] == ["evergreen-pipeline"]
    (subject,) = find(manifests, "RoleBinding", "evergreen-monitor")["subjects"]
    assert (subject["name"], subject["namespace"]) == ("monitor", "evergreen")


def named(value, word: str, path: str = "") -> set[str]:
    """Return the paths in a manifest at which a complete value equals `word`."""
    if isinstance(value, dict):
        return set().union(*(named(each, word, f"{path}/{key}") for key, each in value.items()))
    if isinstance(value, list):
        return set().union(*(named(each, word, path) for each in value))
    return {path} if value == word else set()


@pytest.mark.parametrize("overlay", ["cpu", "gke"])
def test_multi_user_profile_is_set_in_one_file(tmp_path, monkeypatch, overlay):
    shutil.copytree(K8S, tmp_path / "k8s")
    monkeypatch.setattr("tests.support.rendering.K8S", tmp_path / "k8s")
    (tmp_path / "k8s" / "components" / "kubeflow-multi-user" / "profile.env").write_text(
        "PROFILE=team-a\n"
    )
    others = "dask-extraction+dask-preprocessing+kubeflow-trainer+kubeflow-network"
    manifests = documents(
        render_variant(f"{overlay}+{others}+kubeflow-multi-user", tmp_path / "rendered")
    )
    left = {(title(each), path) for each in manifests for path in named(each, "kubeflow")}
    # MONITOR_TRIGGER is the name of a program and not a namespace.
    left = {each for each in left if not each[1].endswith("MONITOR_TRIGGER")}
    to = "/spec/egress/to/namespaceSelector/matchLabels/kubernetes.io/metadata.name"
    assert left == {
        ("NetworkPolicy evergreen/monitor-to-kubeflow", to),
        ("NetworkPolicy kubeflow/ml-pipeline-from-monitor", "/metadata/namespace"),
    }, "the API server remains in the namespace kubeflow"
    moved = {
        title(each).replace(" team-a/", " ")
        for each in manifests
        if each["metadata"].get("namespace") == "team-a"
    }
    assert moved == {
        "PersistentVolumeClaim evergreen",
        "ServiceAccount evergreen-pipeline",
        "RoleBinding evergreen-pipeline",
        *(
            f"{kind} evergreen-{what}"
            for kind in ("Role", "RoleBinding")
            for what in ("monitor", "train-jobs")
        ),
        "TrainingRuntime evergreen-torch",
    }
    policies = {
        title(each)
        for each in manifests
        if each["kind"] == "NetworkPolicy" and named(each, "team-a")
    }
    assert policies == {
        f"NetworkPolicy evergreen/{name}"
        for name in (
            "extraction-dask-scheduler",
            "preprocessing-dask-scheduler",
        )
    }
    for name in ("evergreen-pipeline", "evergreen-train-jobs"):
        assert named(find(manifests, "RoleBinding", name)["subjects"], "team-a") == {"/namespace"}
    assert named(find(manifests, "PersistentVolume", "evergreen-share-kubeflow"), "team-a") == {
        "/spec/claimRef/namespace"
    }
    settings = find(manifests, "ConfigMap", "monitor-settings")["data"]
    assert settings["EVERGREEN_MONITOR_KUBEFLOW_NAMESPACE"] == "team-a"


def test_only_pipeline_account_has_kubeflow_rights_and_no_workload(variant):
    """No workload of ours calls the API server, so no workload has permissions."""
    kinds = ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
    (binding,) = [m for m in variant if m["kind"] in kinds]
    assert title(binding) == "RoleBinding kubeflow/evergreen-pipeline"
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": "pipeline-runner",
    }
    assert [(s["namespace"], s["name"]) for s in binding["subjects"]] == [
        ("kubeflow", "evergreen-pipeline")
    ]
    accounts = {
        (w["metadata"]["namespace"], spec["serviceAccountName"]) for w, spec in workloads(variant)
    }
    assert ("kubeflow", "evergreen-pipeline") not in accounts


def test_no_token_for_kubernetes_api_reaches_pod(variant):
    for workload, spec in workloads(variant):
        assert spec["automountServiceAccountToken"] is False, title(workload)
        for volume in spec.get("volumes", ()):
            for source in volume.get("projected", {}).get("sources", ()):
                audience = source.get("serviceAccountToken", {"audience": "none"}).get("audience")
                assert audience, (
                    f"{title(workload)}: a token without an audience is for the API server"
                )
