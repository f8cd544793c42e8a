"""Tests of the commands in docs/kubernetes/gke.md: pods fit nodes, and files are preserved.

Google is never contacted. The sizes of machines, and GKE's reservations on them, are from GKE's
documentation.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass

import pytest
import yaml

from pipelines.placement import NEEDS, read_placement, read_values
from testing.paths import REPOSITORY
from tests.support.documents import blocks
from tests.support.rendering import K8S, find, pod_spec

GUIDE = REPOSITORY / "docs" / "kubernetes" / "gke.md"
POOL = {"gke": "gpu", "gke-mig": "mig"}
"""Maps an overlay to the node pool that the guide creates for it."""
MACHINES = {"e2-standard-8": (8, 32.0), "e2-standard-16": (16, 64.0), "a2-highgpu-1g": (12, 85.0)}
"""Number of cores and GiB of memory by machine type."""
SLICES = {"": 1, "1g.5gb": 7, "3g.20gb": 2}
"""Maps the size of a slice to the number of such slices on a GPU with 40 GB."""
SYSTEM_CORES, SYSTEM_GIB = 1.0, 2.0
"""Upper bound for the resources of the node's own pods (network, logs, metrics, drivers)."""


def command(start: str) -> str:
    """Return the only command of the guide that starts with the text `start`.

    Continued lines are joined.
    """
    (found,) = [line for line in commands() if line.startswith(start)]
    return found


def commands() -> list[str]:
    return [line.strip() for block in blocks(GUIDE) for line in block.commands]


def flag(line: str, name: str) -> str:
    (found,) = re.findall(rf"--{name}=(\S+)", line)
    return found


@dataclass(frozen=True)
class Node:
    cores: float
    gib: float


def room(machine: str) -> Node:
    """Return the resources that the project's pods may request on an empty node."""
    cores, gib = MACHINES[machine]
    kept_cores = sum(
        share * max(0, min(cores, upper) - lower)
        for share, lower, upper in ((0.06, 0, 1), (0.01, 1, 2), (0.005, 2, 4), (0.0025, 4, 1e9))
    )
    kept_gib = 100 / 1024 + sum(
        share * max(0.0, min(gib, upper) - lower)
        for share, lower, upper in (
            (0.25, 0, 4),
            (0.2, 4, 8),
            (0.1, 8, 16),
            (0.06, 16, 128),
            (0.02, 128, 1e9),
        )
    )
    return Node(cores - kept_cores - SYSTEM_CORES, gib - kept_gib - SYSTEM_GIB)


def cores(text: str) -> float:
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def gib(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(Mi|Gi)", text).groups()
    return float(number) / (1024 if unit == "Mi" else 1)


def requests_of(manifests) -> Node:
    """Return the requests of one of Triton's pods."""
    requests = pod_spec(find(manifests, "Deployment", "triton"))["containers"][0]["resources"][
        "requests"
    ]
    return Node(cores(requests["cpu"]), gib(requests["memory"]))


@pytest.mark.parametrize("overlay", POOL)
def test_every_step_of_pipeline_fits_empty_node_of_its_pool(overlay):
    placement = read_placement(K8S / "overlays" / overlay / "placement.yaml", {})
    for step in NEEDS:
        needs = placement.needs_of(step)
        start = (
            f"gcloud container node-pools create {POOL[overlay]} "
            if needs.gpu
            else "gcloud container clusters create"
        )
        node = room(flag(command(start), "machine-type"))
        assert cores(needs.cpu) <= node.cores, (step, node)
        assert gib(needs.memory) <= node.gib, (step, node)


@pytest.mark.parametrize("overlay", POOL)
def test_all_slices_of_gpu_nodes_can_be_used(rendered, overlay):
    line = command(f"gcloud container node-pools create {POOL[overlay]} ")
    (partition,) = re.findall(r"gpu-partition-size=([\w.]+)", line) or [""]
    node, pod = room(flag(line, "machine-type")), requests_of(rendered(overlay))
    assert pod.cores * SLICES[partition] <= node.cores
    assert pod.gib * SLICES[partition] <= node.gib


@pytest.mark.parametrize("overlay", POOL)
def test_pool_can_grow_to_all_replicas_one_surge_pod_and_training_step(rendered, overlay):
    line = command(f"gcloud container node-pools create {POOL[overlay]} ")
    (partition,) = re.findall(r"gpu-partition-size=([\w.]+)", line) or [""]
    manifests = rendered(overlay)
    most = find(manifests, "ScaledObject", "triton")["spec"]["maxReplicaCount"]
    surge = find(manifests, "Deployment", "triton")["spec"]["strategy"]["rollingUpdate"]["maxSurge"]
    assert most + surge + 1 <= int(flag(line, "max-nodes")) * SLICES[partition]


def test_subscriptions_retain_messages_for_maximum_of_pubsub():
    for name in ("evergreen-records-monitor", "evergreen-records-monitor-dead-letters"):
        line = command(f"gcloud pubsub subscriptions create {name} ")
        assert flag(line, "message-retention-duration") == "31d"
        assert flag(line, "expiration-period") == "never"
    line = command("gcloud pubsub subscriptions create evergreen-records-monitor ")
    assert int(flag(line, "max-delivery-attempts")) == 100, "100 is Pub/Sub's maximum"
    assert flag(line, "dead-letter-topic") == "evergreen-records-monitor-dead-letters"


@pytest.mark.parametrize("overlay", POOL)
def test_sed_of_guide_fills_in_all_but_address_of_runbook(tmp_path, overlay):
    folder = tmp_path / "k8s" / "overlays" / overlay
    shutil.copytree(K8S / "overlays" / overlay, folder)
    names = "\n".join(
        re.sub(r" TAG=.*", " TAG=0123abc", line)
        for line in commands()
        if line.startswith("export PROJECT")
    )
    registry = command("export BUCKET=").replace("$(git rev-parse HEAD)", "0123abc")
    script = "\n".join(
        [
            names.replace("my-project", "a-project").replace("OVERLAY=gke", f"OVERLAY={overlay}"),
            registry,
            "export FILESTORE_IP=10.0.0.2",
            command("sed -i"),
        ]
    )
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (folder / "cluster.env").read_text().splitlines()
    left = [line.partition("=")[0] for line in lines if not line.startswith("#") and "my-" in line]
    assert left == ["RUNBOOK_URL"]
    settings = read_values(folder / "cluster.env")
    assert (
        settings["LOG_URL"]
        == "pubsub://a-project/evergreen-records?subscription=evergreen-records-monitor"
    )
    assert settings["REGISTRY"] == "europe-west4-docker.pkg.dev/a-project/evergreen"


def test_cpu_page_fills_in_all_but_address_of_runbook(tmp_path):
    folder = tmp_path / "k8s" / "overlays" / "cpu"
    shutil.copytree(K8S / "overlays" / "cpu", folder)
    (settings,) = [
        block
        for block in blocks(REPOSITORY / "docs" / "kubernetes" / "any-cluster.md")
        if block.run_by
    ]
    script = settings.text.replace("$(git rev-parse HEAD)", "0123abc")
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    settings = read_values(folder / "cluster.env")
    assert [name for name, value in settings.items() if "my-" in value or not value] == [
        "RUNBOOK_URL"
    ]
    assert settings["TAG"] == "0123abc"
    assert settings["LOG_URL"].startswith(
        "kafka://broker.kafka.svc.cluster.local:9092/evergreen-records?"
    )


def test_kustomization_names_every_manifest_in_its_folder():
    for kustomization in K8S.rglob("kustomization.yaml"):
        text = kustomization.read_text()
        for path in kustomization.parent.glob("*.yaml"):
            if path != kustomization and isinstance(
                first := next(yaml.safe_load_all(path.read_text())), dict
            ):
                is_manifest = "kind" in first and "apiVersion" in first
                assert not is_manifest or path.name in text, (
                    f"{path.relative_to(K8S)} is in no kustomization"
                )
