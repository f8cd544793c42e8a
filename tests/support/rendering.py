"""The manifests as a cluster receives them (`kubectl kustomize`), and helpers for them."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.placement import read_values
from testing.paths import REPOSITORY
from tests.support.yaml_texts import documents

K8S = REPOSITORY / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir() if path.is_dir())
_DASK = "cpu+dask-extraction+dask-preprocessing"
VARIANTS = (*OVERLAYS, "cpu+simulation", "cpu+second-recommender", "cpu+archivers", _DASK, "kind")
"""Variants that the manifests' tests check: overlays, overlays with optional components, and the
variant of `make kind`."""
RENDERED = REPOSITORY / "build" / "manifests"

Manifest = dict[str, Any]
"""One Kubernetes object, or a part of it."""


def render(folder: Path) -> str:
    """Return what `kubectl apply -k` would send, as YAML. The test is skipped without kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: manifests cannot be rendered")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"kubectl kustomize {folder}: {done.stderr}"
    return done.stdout


def render_variant(variant: str, scratch: Path) -> str:
    """Render `<overlay>` or `<overlay>+<component>...`.

    An overlay with components needs a kustomization, which is written into `scratch`. The names
    `base` and `kind` are allowed instead of an overlay. `base` is the common base of all overlays,
    and `kind` is the variant of `make kind`.
    """
    overlay, *components = variant.split("+")
    source = K8S / overlay if overlay in ("base", "kind") else K8S / "overlays" / overlay
    if not components:
        return render(source)
    folder = scratch / variant
    folder.mkdir(parents=True, exist_ok=True)
    kustomization = {
        "resources": [os.path.relpath(source.resolve(), folder.resolve())],
        "components": [
            os.path.relpath((K8S / "components" / name).resolve(), folder.resolve())
            for name in components
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return render(folder)


def render_edited(overlay: str, values: dict[str, str], copy: Path) -> list[Manifest]:
    """Copy the folder `k8s` to `copy`, edit `cluster.env` there, and render the overlay."""
    shutil.copytree(K8S, copy)
    path = copy / "overlays" / overlay / "cluster.env"
    path.write_text("".join(f"{k}={v}\n" for k, v in {**read_values(path), **values}.items()))
    return documents(render(path.parent))


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return the one object of kind `kind` and name `name`.

    The object's name may end with kustomize's content hash.
    """
    hashed = re.compile(rf"{re.escape(name)}(-[2456789bcdfghkmt]{{10}})?")
    (found,) = [
        m for m in manifests if m["kind"] == kind and hashed.fullmatch(m["metadata"]["name"])
    ]
    return found


def title(manifest: Manifest) -> str:
    """Return the object's kind, namespace and name for messages."""
    metadata = manifest["metadata"]
    return f"{manifest['kind']} {metadata.get('namespace', '-')}/{metadata['name']}"


def pod_template(manifest: Manifest) -> Manifest | None:
    """Return metadata and spec of a workload's pods, or None for an object that creates no pods."""
    kind, spec = manifest["kind"], manifest.get("spec", {})
    if kind == "CronJob":
        template: Manifest = spec["jobTemplate"]["spec"]["template"]
        return template
    return spec["template"] if kind in ("Deployment", "StatefulSet", "DaemonSet", "Job") else None


def pod_spec(manifest: Manifest) -> Manifest | None:
    """Return the spec of a workload's pods, or None for an object that creates no pods."""
    template = pod_template(manifest)
    return template and template["spec"]


def workloads(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield each workload with its pods' spec."""
    for manifest in manifests:
        if (spec := pod_spec(manifest)) is not None:
            yield manifest, spec


def containers(spec: Manifest) -> list[Manifest]:
    """Return all containers of a pod, including init containers."""
    return [*spec.get("initContainers", ()), *spec["containers"]]


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """Return whether a LabelSelector selects an object labelled `labels`.

    An empty selector matches every object.

    Raises:
        ValueError: the selector has an operator that Kubernetes does not know.
    """
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for term in selector.get("matchExpressions") or ():
        key, operator, values = term["key"], term["operator"], term.get("values", [])
        if operator == "In":
            holds = labels.get(key) in values
        elif operator == "NotIn":
            holds = labels.get(key) not in values
        elif operator == "Exists":
            holds = key in labels
        elif operator == "DoesNotExist":
            holds = key not in labels
        else:
            raise ValueError(
                f"operator is {operator!r}, expected In, NotIn, Exists or DoesNotExist"
            )
        if not holds:
            return False
    return True
