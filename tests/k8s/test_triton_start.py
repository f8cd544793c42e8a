"""What a pod of Triton does when it starts, by its manifest's own arguments and probes, with the real server.

Before any release, with a model, with a canary, with a version in rehearsal, with a broken one, without a repository:
whether it takes traffic, whether it would be killed, and whether a release can reach it.
"""

import os
import re
import stat
import subprocess

import pytest

from components.deployment.release import ReleaseSettings, release
from components.deployment.repository.triton_config import ServingOptions
from components.deployment.servers import Triton
from pipelines.local.triton import DEFAULT_VENV, prepare
from tests.k8s.pod import TritonPod, expanded, flag, triton_container, variables
from tests.support.processes import wait_for
from tests.support.rendering import find, workloads
from tests.support.served_names import CANARY_NAME, CANDIDATE_NAME, MODEL_NAME
from tests.support.stored_models import make_candidate, make_parts, raw_rows  # noqa: F401  fixtures
from tests.support.triton import write_model

# ruff: noqa: F811  a fixture is imported by the name that its users ask for

pytestmark = pytest.mark.e2e

BROKEN = "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('half a table')\n"
HALF_COPIED = "class TritonPythonModel:\n    def execute(self, requ"


@pytest.fixture
def repository(tmp_path):
    """An empty model repository, as it is made before the first pod starts."""
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder


@pytest.fixture
def pod(rendered, repository, tmp_path):
    """`pod()`: a pod of the cpu overlay over the repository; the arguments of all overlays are the same."""
    return lambda **more: TritonPod(rendered("cpu"), repository, tmp_path / "pod", **more)


def loaded(pod, name):
    return pod.get(f"/v2/models/{name}/ready") == 200


@pytest.fixture(scope="module")
def help_text(tmp_path_factory):
    """What the real binary says of its flags."""
    wheel = prepare(DEFAULT_VENV, tmp_path_factory.mktemp("runtime"))
    done = subprocess.run(
        [wheel.binary, "--help"], env={**os.environ, **wheel.variables}, capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr


def known_flags(help_text):
    current, _, _ = help_text.partition("DEPRECATED:")
    return set(re.findall(r"^  --([a-z0-9-]+)", current, re.MULTILINE))


def test_every_argument_is_a_flag_of_the_real_binary_and_none_a_deprecated_one(variant, help_text):
    used = {argument.partition("=")[0].removeprefix("--") for argument in triton_container(variant)["args"][1:]}
    assert len(known_flags(help_text)) > 60
    assert used <= known_flags(help_text)


def test_models_and_ports_are_those_that_clients_and_releases_use(manifests, rendered):
    container = triton_container(manifests)
    assert container["args"] == triton_container(rendered("cpu"))["args"], "a pod is started below by cpu's"
    # Releases reach pods that are not ready; clients do not.
    assert find(manifests, "Service", "triton-headless")["spec"]["publishNotReadyAddresses"] is True
    assert find(manifests, "Service", "triton-headless")["spec"]["clusterIP"] == "None"
    assert not find(manifests, "Service", "triton")["spec"].get("publishNotReadyAddresses", False)
    words = [expanded(argument, variables(manifests, container)) for argument in container["args"]]
    asked_for = [word.removeprefix("--load-model=") for word in words if word.startswith("--load-model=")]
    assert asked_for == [MODEL_NAME, CANARY_NAME]
    assert container["readinessProbe"]["httpGet"]["path"] == f"/v2/models/{MODEL_NAME}/ready"
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert named == {name: int(flag(container, f"{name}-port")) for name in ("http", "grpc", "metrics")}


def test_without_a_model_a_pod_stays_takes_no_traffic_and_is_reached_by_the_first_release(
    pod, repository, tmp_path, make_candidate
):
    with pod(until="startupProbe") as started:
        assert started.passes("livenessProbe")
        assert not started.passes("readinessProbe")
        assert started.get("/v2/health/ready") == 200, "which is why readiness does not ask this"
        settings = ReleaseSettings(
            store=tmp_path / "store",
            repository=repository.as_uri(),
            triton_urls=(started.grpc_url,),
            options=ServingOptions(instances=1),
        )
        released = release(*make_candidate(settings.store, 1), settings=settings)
        assert released.version == 1
        assert started.passes("readinessProbe")
        assert started.passes("livenessProbe")
        assert 'nv_inference_request_success{model="click_model",version="1"}' in started.metrics()


def test_what_a_release_writes_can_be_read_by_triton_who_is_another_user(
    rendered, repository, tmp_path, make_candidate
):
    """On the share a release writes as our images' user; Triton has its own, and no group with it."""
    settings = ReleaseSettings(
        store=tmp_path / "store", repository=repository.as_uri(), options=ServingOptions(instances=1)
    )
    release(*make_candidate(settings.store, 1), settings=settings)
    written = [path for path in repository.rglob("*") if not path.name.startswith(".")]
    assert [path for path in written if path.name == "model.onnx"]
    hidden = [p for p in written if not p.stat().st_mode & (stat.S_IXOTH if p.is_dir() else stat.S_IROTH)]
    assert not hidden
    users = {
        spec.get("securityContext", {}).get("runAsUser")
        for workload, spec in workloads(rendered("cpu"))
        if workload["metadata"]["name"] in ("triton", "release-controller")
    }
    assert len(users) == 2


def test_over_a_bucket_a_first_object_is_needed_and_then_a_pod_starts_without_a_model(
    rendered, cloud_storage, tmp_path
):
    """Why the setup of a cluster writes one object below the repository's prefix before the first apply."""
    from components.storage.bucket import BucketObjects

    host = cloud_storage.host
    environment = {"CLOUD_STORAGE_EMULATOR_ENDPOINT": host, "STORAGE_EMULATOR_HOST": host}
    uri = "gs://models/repository"
    with TritonPod(rendered("gke"), uri, tmp_path / "early", environment=environment) as early:
        wait_for(lambda: early.get("/v2/health/live") is not None)
        assert not early.passes("startupProbe"), "a kubelet starts it anew, until the object is there"
    BucketObjects(uri).write("README", b"")
    with TritonPod(rendered("gke"), uri, tmp_path / "late", environment=environment) as late:
        late.wait_for("startupProbe")
        assert late.passes("livenessProbe")
        assert not late.passes("readinessProbe")


def test_a_pod_without_its_repository_is_started_anew_instead_of_staying_useless(pod, repository):
    repository.rmdir()
    with pod() as started:
        wait_for(lambda: started.get("/v2/health/live") is not None)
        assert not started.passes("startupProbe")
        repository.mkdir()
        assert not started.passes("startupProbe"), "this server never sees it"
    with pod() as again:
        again.wait_for("startupProbe")


def test_a_broken_canary_does_not_keep_the_live_model_from_its_traffic(pod, repository):
    write_model(repository)
    write_model(repository, CANARY_NAME, code=BROKEN)
    write_model(repository, CANDIDATE_NAME, code=HALF_COPIED)  # in rehearsal by a release under way
    with pod(until="readinessProbe") as started:
        assert not loaded(started, CANARY_NAME)
        assert CANDIDATE_NAME not in started.log
        assert started.get("/v2/health/ready") != 200, "readiness of the whole server would take every pod away"


def test_a_pod_with_a_broken_model_takes_no_traffic_lives_and_is_healed_by_a_load(pod, repository):
    write_model(repository, code=BROKEN)
    with pod(until="startupProbe") as started:
        assert started.passes("livenessProbe")
        assert not started.passes("readinessProbe")
        write_model(repository, version=2)
        client = Triton(started.grpc_url)
        client.load(MODEL_NAME)
        client.close()
        started.wait_for("readinessProbe")
