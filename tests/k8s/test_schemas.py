"""Tests that every object is valid in every Kubernetes from 1.29 on, by the published schemas.

`kubernetes-validate` checks Kubernetes' own kinds with the API's schemas in strict form: an unknown
field is refused. `tests.k8s.crds` checks custom resources.
"""

import ast
import functools
import re

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.k8s.crds import CRD_KINDS, validate_crd
from tests.support.rendering import K8S, Manifest, title

OLDEST = (1, 29)
VERSIONS = [v for v in utils.all_versions() if tuple(map(int, v.split(".")[:2])) >= OLDEST]
BUILT_IN_GROUPS = re.compile(r"^(v1|(apps|autoscaling|batch|policy)/.+|[a-z.]+\.k8s\.io/.+)$")
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")


@pytest.fixture(autouse=True, scope="session")
def read_each_schema_once():
    """Caches the schemas, because the library parses 1.5 MB of definitions for every object.

    Without the cache, 300 objects and nine versions would take minutes.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
    yield
    patch.undo()


def is_built_in(manifest: Manifest) -> bool:
    return bool(BUILT_IN_GROUPS.match(manifest["apiVersion"]))


def validate(manifest: Manifest, version: str) -> None:
    """Raise the library's error for an object that the Kubernetes version `version` rejects."""
    kubernetes_validate.validate(manifest, version, strict=True)


def test_schemas_cover_oldest_promised_version_to_recent_one():
    assert VERSIONS[0].startswith("1.29.")
    assert len(VERSIONS) >= 9


@pytest.mark.parametrize("version", VERSIONS)
def test_every_built_in_object_is_valid_in_kubernetes(version, variant):
    built_in = [m for m in variant if is_built_in(m)]
    assert len(built_in) > 10
    for manifest in built_in:
        try:
            validate(manifest, version)
        except (
            kubernetes_validate.ValidationError,
            kubernetes_validate.SchemaNotFoundError,
        ) as error:
            pytest.fail(f"{title(manifest)} in Kubernetes {version}: {error.message}")


def test_every_custom_resource_is_valid_by_its_definitions_facts(variant):
    for manifest in variant:
        if not is_built_in(manifest):
            validate_crd(manifest)


def _walk(node, path=""):
    yield path, node
    children = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, child in children:
        yield from _walk(child, f"{path}.{key}")


def test_names_labels_and_quantities_are_accepted_by_api(variant):
    """The API server checks names, labels and quantities.

    The published schemas accept any string.
    """
    for manifest in variant:
        where = title(manifest)
        assert NAME.fullmatch(manifest["metadata"]["name"]), where
        assert len(manifest["metadata"]["name"]) <= 63, where
        for path, node in _walk(manifest):
            if (
                path.endswith(".labels")
                and isinstance(node, dict)
                and manifest["kind"] != "PrometheusRule"
            ):
                bad = {
                    k: v
                    for k, v in node.items()
                    if not LABEL_VALUE.fullmatch(str(v)) or len(str(v)) > 63
                }
                assert not bad, f"{where}{path}: {bad}"
            if (
                path.endswith((".requests", ".limits"))
                and isinstance(node, dict)
                and is_built_in(manifest)
            ):
                bad = {k: v for k, v in node.items() if not QUANTITY.fullmatch(str(v))}
                assert not bad, f"{where}{path}: {bad}"


def test_no_object_occurs_twice(variant):
    keys = [(m["apiVersion"].split("/")[0], title(m)) for m in variant]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("kind", "old", "new", "words"),
    [
        ("PodMonitor", "podMetricsEndpoints", "podMetricEndpoints", "podMetricEndpoints"),
        ("PodMonitor", "'15s'", "'15 s'", "15 s"),
        ("PrometheusRule", "'expr'", "'expression'", "expression"),
        ("ScaledObject", "'threshold'", "'treshold'", "treshold"),
    ],
)
def test_fault_in_custom_resource_is_refused_and_named(rendered, kind, old, new, words):
    manifest = next(m for m in rendered("gke") if m["kind"] == kind)
    changed = ast.literal_eval(repr(manifest).replace(old, new))
    assert changed != manifest
    with pytest.raises(AssertionError, match=words):
        validate_crd(changed)


def test_every_custom_resource_among_files_has_schema():
    """The test reads all files, so it includes a component that no shipped overlay uses."""
    kinds = set()
    for path in K8S.rglob("*.yaml"):
        for manifest in yaml.safe_load_all(path.read_text()):
            group = manifest.get("apiVersion", "") if isinstance(manifest, dict) else ""
            if group.startswith(("monitoring.", "keda.", "trainer.")) and "$patch" not in manifest:
                kinds.add(manifest["kind"])
    assert {"PodMonitor", "ScaledObject"} <= kinds <= set(CRD_KINDS)
