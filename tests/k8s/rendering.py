"""The manifests as a cluster gets them, by `kubectl kustomize`, and how to find one's way in them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
K8S = REPOSITORY / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir() if path.is_dir())
RENDERED = REPOSITORY / "build" / "manifests"

Manifest = dict[str, Any]
"""One Kubernetes object."""


def render(folder: Path) -> str:
    """What `kubectl apply -k` would send, as YAML; the test is skipped where there is no kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: manifests cannot be rendered")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"kubectl kustomize {folder}: {done.stderr}"
    return done.stdout


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one object of that kind and name."""
    (found,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def pod_spec(manifest: Manifest) -> Manifest | None:
    """The pod that a workload makes; None if it makes none."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "Pod":
        return spec
    if kind == "CronJob":
        return spec["jobTemplate"]["spec"]["template"]["spec"]
    return spec["template"]["spec"] if kind in ("Deployment", "StatefulSet", "DaemonSet", "Job") else None
