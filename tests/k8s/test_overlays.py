"""Tests of the overlays: values of `cluster.env`, and the hardware of Triton.

The tests use the names of resources from GKE's and NVIDIA's documentation, and no cluster.
"""

import itertools
import re

import pytest
import yaml

from pipelines.placement import read_values
from tests.k8s.environment import environment_of
from tests.k8s.pod import expanded, triton_container, variables
from tests.support.rendering import (
    K8S,
    find,
    pod_spec,
    pod_template,
    render_edited,
    render_variant,
    title,
    workloads,
)
from tests.support.yaml_texts import documents

PLACEHOLDER = re.compile(r"\bmy-[a-z]")
GPU_RESOURCES = re.compile(r"nvidia\.com/.*")


@pytest.fixture
def changed(tmp_path):
    """`changed(overlay, values)` renders the overlay after a user edited its `cluster.env`."""
    copies = itertools.count()
    return lambda overlay, values: render_edited(overlay, values, tmp_path / f"k8s-{next(copies)}")


def filled(values):
    """Return a user's values, with every placeholder replaced."""
    return {key: re.sub(PLACEHOLDER, "our-p", value) for key, value in values.items()}


def test_edit_of_one_file_replaces_all_placeholders(overlay, rendered, changed):
    values = read_values(K8S / "overlays" / overlay / "cluster.env")
    assert any(PLACEHOLDER.search(value) for value in values.values())
    assert PLACEHOLDER.search(yaml.safe_dump_all(rendered(overlay)))
    left = [
        title(m) for m in changed(overlay, filled(values)) if PLACEHOLDER.search(yaml.safe_dump(m))
    ]
    assert not left


def test_every_value_of_cluster_env_reaches_manifests(overlay, changed):
    values = filled(read_values(K8S / "overlays" / overlay / "cluster.env"))
    # Give each value a unique ending, which no text in the shipped manifests has.
    marked = {key: f"{value}q{number}q" for number, (key, value) in enumerate(values.items())}
    sent = yaml.safe_dump_all(changed(overlay, marked), width=10_000)
    assert not [key for key, value in marked.items() if value not in sent], (
        "these values do not occur in the manifests"
    )


@pytest.mark.parametrize(
    "registry", ["registry.example/team/evergreen", "registry.example:5000/evergreen"]
)
def test_every_own_image_comes_from_registry_with_tag(registry, overlay, changed):
    objects = changed(overlay, {"REGISTRY": registry, "TAG": "3f2a9c1"})
    images = [
        container["image"]
        for _, spec in workloads(objects)
        for container in (*spec.get("initContainers", ()), *spec["containers"])
    ]
    others = {image for image in images if not image.startswith(registry)}
    assert others == {"nvcr.io/nvidia/tritonserver:26.10-py3"}
    ours = {
        image.removeprefix(f"{registry}/evergreen-")
        for image in images
        if image.startswith(registry)
    }
    assert ours >= {"monitoring:3f2a9c1", "deployment:3f2a9c1"}
    assert all(re.fullmatch(r"[a-z-]+:3f2a9c1", image) for image in ours)


def lakes(objects):
    """Return the paths of the lake that the uploader and the release controller use."""
    uploader = environment_of(objects, find(objects, "Deployment", "monitor"), "uploader")
    (controller,) = pod_spec(find(objects, "Deployment", "release-controller"))["containers"]
    assert "--lake=$(LAKE)" in controller["args"]
    return {uploader["EVERGREEN_UPLOADER_LAKE"], variables(objects, controller)["LAKE"]}


@pytest.mark.parametrize("overlay", ["gke", "gke-mig"], indirect=False)
def test_on_gke_models_are_in_bucket_and_each_account_is_of_project(overlay, changed):
    objects = changed(overlay, {"PROJECT": "shop-7", "BUCKET": "shop-models"})
    assert (
        variables(objects, triton_container(objects))["MODEL_REPOSITORY"]
        == "gs://shop-models/repository"
    )
    assert lakes(objects) == {"gs://my-lake-bucket/lake"}, (
        "the lake must have a separate bucket, because Triton reads the models' bucket"
    )
    assert lakes(changed(overlay, {"LAKE_BUCKET": "shop-clicks"})) == {"gs://shop-clicks/lake"}
    accounts = {
        m["metadata"]["name"]: m["metadata"]
        .get("annotations", {})
        .get("iam.gke.io/gcp-service-account")
        for m in objects
        if m["kind"] == "ServiceAccount"
    }
    assert accounts.pop("collect") is None, "the job needs no permission in the cloud"
    assert accounts == {
        name: f"evergreen-{name.removeprefix('evergreen-')}@shop-7.iam.gserviceaccount.com"
        for name in accounts
    }
    assert {"triton", "monitor", "release-controller", "evergreen-pipeline"} <= set(accounts)


def test_triton_loads_recommender_and_is_ready_with_it(overlay, changed):
    container = triton_container(changed(overlay, {"RECOMMENDER": "shop"}))
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/models/shop/ready"
    settings = variables(changed(overlay, {"RECOMMENDER": "shop"}), container)
    assert expanded("--load-model=$(RECOMMENDER)_canary", settings) == "--load-model=shop_canary"


def test_changed_setting_is_new_template_and_so_rolls_out(changed):
    def template(bucket):
        return pod_template(find(changed("gke", {"BUCKET": bucket}), "Deployment", "triton"))

    assert template("one") == template("one")
    assert template("one") != template("two")


def gpus(manifests):
    limits = triton_container(manifests)["resources"]["limits"]
    return {name: int(count) for name, count in limits.items() if GPU_RESOURCES.fullmatch(name)}


def selector(manifests):
    return find(manifests, "Deployment", "triton")["spec"]["template"]["spec"].get(
        "nodeSelector", {}
    )


def test_without_gpu_models_are_on_share_which_triton_may_only_read(rendered):
    manifests = rendered("cpu")
    assert gpus(manifests) == {}
    assert selector(manifests) == {}
    container = triton_container(manifests)
    folder = variables(manifests, container)["MODEL_REPOSITORY"]
    (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == folder]
    assert mount["readOnly"] is True
    assert mount["subPath"] == "repository", "Triton must not read the other folders of the share"


def test_on_gke_pod_has_complete_gpu_of_pool(rendered, changed):
    assert gpus(rendered("gke")) == {"nvidia.com/gpu": 1}
    assert selector(rendered("gke")) == {"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}
    assert selector(changed("gke", {"ACCELERATOR": "nvidia-l4"})) == {
        "cloud.google.com/gke-accelerator": "nvidia-l4"
    }


def test_slice_is_gpu_on_partitioned_gke_nodes_and_resource_elsewhere(changed, tmp_path):
    manifests = changed("gke-mig", {"PARTITION": "3g.20gb"})
    assert gpus(manifests) == {"nvidia.com/gpu": 1}
    assert selector(manifests)["cloud.google.com/gke-gpu-partition-size"] == "3g.20gb"
    by_nvidias_plugin = documents(render_variant("cpu+nvidia-mig-1g.5gb", tmp_path))
    assert gpus(by_nvidias_plugin) == {"nvidia.com/mig-1g.5gb": 1}
    assert selector(by_nvidias_plugin) == {}
