"""Tests that each overlay's placement of the pipeline agrees with its manifests."""

import re

import pytest

from cli.__main__ import main
from evergreen.runtime.kubeflow import SERVICE_ACCOUNT
from pipelines.images import DOCKERFILES
from testing.paths import REPOSITORY
from tests.support.compiled import STEPS, Compiled
from tests.support.rendering import K8S, find

KUBEFLOW = "kubeflow"
"""Namespace of the pipeline's pods."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """`compiled(overlay)` compiles the pipeline like a user, with only the flag `revision`."""
    known: dict[str, Compiled] = {}

    def make(overlay: str) -> Compiled:
        if overlay not in known:
            path = tmp_path_factory.mktemp("compiled") / "retraining.yaml"
            placement = K8S / "overlays" / overlay / "placement.yaml"
            assert (
                main(
                    [
                        "compile",
                        "--output",
                        str(path),
                        "--placement",
                        str(placement),
                        "--tag",
                        "3f2a9c1",
                    ]
                )
                == 0
            )
            known[overlay] = Compiled(path)
        return known[overlay]

    return make


def in_kubeflow(manifests, kind: str) -> list[dict]:
    return [
        m for m in manifests if m["kind"] == kind and m["metadata"].get("namespace") == KUBEFLOW
    ]


def triton(manifests) -> dict:
    return find(manifests, "Deployment", "triton")["spec"]["template"]["spec"]


def tolerates(toleration: dict, taint: dict) -> bool:
    """Return whether a pod's toleration covers another toleration, by Kubernetes' rule."""
    same_value = toleration.get("operator", "Equal") == "Exists" or (
        taint.get("operator", "Equal") == "Equal"
        and toleration.get("value", "") == taint.get("value", "")
    )
    return (
        toleration["key"] == taint["key"] and toleration["effect"] == taint["effect"] and same_value
    )


def test_every_step_mounts_claim_of_pipeline_namespace_for_many_writers(
    compiled, manifests, overlay
):
    claims = {
        m["metadata"]["name"]: m["spec"]["accessModes"]
        for m in in_kubeflow(manifests, "PersistentVolumeClaim")
    }
    for step in STEPS:
        (mount,) = compiled(overlay).platform(step)["pvcMount"]
        assert "ReadWriteMany" in claims[mount["pvcNameParameter"]["runtimeValue"]["constant"]]


def test_training_runs_on_gpu_nodes_of_servers(compiled, manifests, overlay):
    limits = triton(manifests)["containers"][0]["resources"]["limits"]
    gpus = {name for name in limits if name.startswith("nvidia.com/")}
    accelerator = compiled(overlay).executor("training")["resources"].get("accelerator")
    assert ({accelerator["resourceType"]} if accelerator else set()) == gpus
    platform = compiled(overlay).platform("training")
    assert platform.get("nodeSelector", {}).get("labels", {}) == triton(manifests).get(
        "nodeSelector", {}
    )
    mine = platform.get("tolerations", [])
    for needed in triton(manifests).get("tolerations", []):
        assert any(tolerates(each, needed) for each in mine), needed


def test_no_step_sees_model_repository(compiled, overlay):
    for step in STEPS:
        covered = [m["mountPath"] for m in compiled(overlay).platform(step)["emptyDirMounts"]]
        assert "/evergreen/repository" in covered


def test_pipeline_has_paths_and_device_of_manifests(compiled, manifests, overlay):
    settings = {
        m["metadata"]["name"].rpartition("-")[0]: m["data"]
        for m in manifests
        if m["kind"] == "ConfigMap"
    }
    limits = triton(manifests)["containers"][0]["resources"]["limits"]
    expected = {
        "store": find(manifests, "ConfigMap", "monitor-settings")["data"][
            "EVERGREEN_MONITOR_STORE"
        ],
        "lake": settings["uploader-settings"]["EVERGREEN_UPLOADER_LAKE"],
        "server": "onnxruntime",
        "device": "gpu" if any(name.startswith("nvidia.com/") for name in limits) else "cpu",
    }
    places = compiled(overlay).locations
    assert {name: places[name] for name in expected} == expected


def test_service_account_of_runs_exists_in_their_namespace(manifests):
    assert SERVICE_ACCOUNT in {
        m["metadata"]["name"] for m in in_kubeflow(manifests, "ServiceAccount")
    }
    settings = find(manifests, "ConfigMap", "monitor-settings")["data"]
    assert settings["EVERGREEN_MONITOR_KUBEFLOW_SERVICE_ACCOUNT"] == SERVICE_ACCOUNT


def test_images_of_steps_come_from_registry_of_monitor(compiled, manifests, overlay):
    monitor = find(manifests, "Deployment", "monitor")["spec"]["template"]["spec"]["containers"][0][
        "image"
    ]
    registry, _, name = monitor.rpartition("/")
    assert name.startswith("evergreen-monitoring:")
    for step in STEPS:
        image = compiled(overlay).executor(step)["image"]
        assert image.startswith(f"{registry}/evergreen-{step.replace('_', '-')}:")
        assert image.endswith(":3f2a9c1")


def test_steps_run_as_user_of_their_images(compiled, overlay):
    for step in STEPS:
        users = re.findall(
            r"^USER (\d+)", (REPOSITORY / DOCKERFILES[step]).read_text(), re.MULTILINE
        )
        context = compiled(overlay).platform(step)["securityContext"]
        assert (context["runAsUser"], context["runAsNonRoot"]) == (users[-1], True)


def test_only_exit_handler_sees_webhook_address_and_secret_is_optional(compiled, overlay):
    for step in STEPS:
        secrets = compiled(overlay).platform(step).get("secretAsEnv", [])
        assert [each["secretName"] for each in secrets] == (
            ["evergreen-notifications"] if step == "run_outcome" else []
        )
        assert all(each["optional"] for each in secrets)
