"""Tests of the life of a Triton pod with the manifest's arguments and probes, on the real server.

The tests start the pod before any release, with a model, with a canary, with a version in parity
check, with a broken model, and without a repository. Each test checks whether the pod gets traffic,
whether it would be killed, and whether a release can reach it. The end of a pod must not lose
started work or fail a client's request. Kubernetes removes a deleted pod from its Service, runs the
preStop hook, and only then sends SIGTERM. During the preStop hook, a gRPC client would keep its
connection to the deleted pod. The server limits the age of connections, so clients open new
connections to other pods. The preStop hook waits longer than the maximum age. A forwarder replaces
the Service. Existing connections do not move when the forwarder's target changes.
"""

import asyncio
import os
import re
import selectors
import signal
import socket
import stat
import subprocess
import threading
from contextlib import suppress

import numpy as np
import pytest

from controller.release import ReleaseSettings
from demo.stack import LOOPBACK
from demo.triton import DEFAULT_VENV, prepare
from evergreen.config.release import QUEUE_MICROSECONDS
from evergreen.serving.repository.triton_config import ServingOptions
from evergreen.serving.servers import Triton
from inference_client.scoring import ClientSettings, ScoringClient
from testing.processes import wait_for
from testing.served_names import CANARY_NAME, CANDIDATE_NAME, MODEL_NAME
from tests.k8s.pod import TritonPod, expanded, flag, triton_container, variables
from tests.support.deployments import release
from tests.support.real_servers import RetryingTraffic
from tests.support.rendering import find, pod_template, workloads
from tests.support.stored_models import make_candidate, make_parts, raw_rows  # noqa: F401  fixtures
from tests.support.triton import write_model
from tools.autoscaling.cluster import STOP_SECONDS

# ruff: noqa: F811  a fixture is imported under the name of the argument

pytestmark = pytest.mark.e2e

BROKEN = (
    "class TritonPythonModel:\n    def initialize(self, args):\n        raise "
    "ValueError('half a table')\n"
)
HALF_COPIED = "class TritonPythonModel:\n    def execute(self, requ"


@pytest.fixture
def repository(tmp_path):
    """Empty model repository, as the setup creates it before the first pod starts."""
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder


@pytest.fixture
def pod(rendered, repository, tmp_path):
    """`pod()` returns the Triton pod of the overlay `cpu`, with the test's repository.

    One overlay suffices, because Triton has the same arguments in all overlays.
    """
    return lambda **more: TritonPod(rendered("cpu"), repository, tmp_path / "pod", **more)


def loaded(pod, name):
    return pod.get(f"/v2/models/{name}/ready") == 200


@pytest.fixture(scope="module")
def help_text(tmp_path_factory):
    """The real binary's help about its flags."""
    wheel = prepare(DEFAULT_VENV, tmp_path_factory.mktemp("runtime"))
    done = subprocess.run(
        [wheel.binary, "--help"],
        env={**os.environ, **wheel.variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout + done.stderr


def known_flags(help_text):
    current, _, _ = help_text.partition("DEPRECATED:")
    return set(re.findall(r"^  --([a-z0-9-]+)", current, re.MULTILINE))


def test_every_argument_is_flag_of_real_binary_and_none_is_deprecated(variant, help_text):
    used = {
        argument.partition("=")[0].removeprefix("--")
        for argument in triton_container(variant)["args"][1:]
    }
    assert len(known_flags(help_text)) > 60
    assert used <= known_flags(help_text)


def test_models_and_ports_are_those_that_clients_and_releases_use(manifests, rendered):
    container = triton_container(manifests)
    assert container["args"] == triton_container(rendered("cpu"))["args"], (
        "the tests below use the arguments of the overlay cpu"
    )
    # Releases must reach pods that are not ready yet, but clients must not.
    assert find(manifests, "Service", "triton-headless")["spec"]["publishNotReadyAddresses"] is True
    assert find(manifests, "Service", "triton-headless")["spec"]["clusterIP"] == "None"
    assert not find(manifests, "Service", "triton")["spec"].get("publishNotReadyAddresses", False)
    words = [expanded(argument, variables(manifests, container)) for argument in container["args"]]
    asked_for = [
        word.removeprefix("--load-model=") for word in words if word.startswith("--load-model=")
    ]
    assert asked_for == [MODEL_NAME, CANARY_NAME]
    assert container["readinessProbe"]["httpGet"]["path"] == f"/v2/models/{MODEL_NAME}/ready"
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert named == {
        name: int(flag(container, f"{name}-port")) for name in ("http", "grpc", "metrics")
    }


def test_pod_without_model_stays_unready_and_is_reached_by_first_release(
    pod, repository, tmp_path, make_candidate
):
    with pod(until="startupProbe") as started:
        assert started.passes("livenessProbe")
        assert not started.passes("readinessProbe")
        assert started.get("/v2/health/ready") == 200, (
            "the server is ready without a model, so the probe must not use this URL"
        )
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


def test_triton_reads_release_as_another_user(rendered, repository, tmp_path, make_candidate):
    """The release controller writes the model's files, and Triton reads them.

    Both run as different users, without a common group.
    """
    settings = ReleaseSettings(
        store=tmp_path / "store",
        repository=repository.as_uri(),
        options=ServingOptions(instances=1),
    )
    release(*make_candidate(settings.store, 1), settings=settings)
    written = [path for path in repository.rglob("*") if not path.name.startswith(".")]
    assert [path for path in written if path.name == "model.onnx"]
    hidden = [
        p for p in written if not p.stat().st_mode & (stat.S_IXOTH if p.is_dir() else stat.S_IROTH)
    ]
    assert not hidden
    users = {
        spec.get("securityContext", {}).get("runAsUser")
        for workload, spec in workloads(rendered("cpu"))
        if workload["metadata"]["name"] in ("triton", "release-controller")
    }
    assert len(users) == 2


def test_over_bucket_pod_needs_first_object_and_then_starts_without_model(
    rendered, cloud_storage, tmp_path
):
    """The setup of a cluster writes an object below the prefix before the first apply."""
    from evergreen.storage.bucket import BucketObjects

    host = cloud_storage.host
    environment = {"CLOUD_STORAGE_EMULATOR_ENDPOINT": host, "STORAGE_EMULATOR_HOST": host}
    uri = "gs://models/repository"
    with TritonPod(rendered("gke"), uri, tmp_path / "early", environment=environment) as early:
        wait_for(lambda: early.get("/v2/health/live"))
        assert not early.passes("startupProbe"), (
            "a kubelet restarts the pod until the object exists"
        )
    BucketObjects(uri).write("README", b"")
    with TritonPod(rendered("gke"), uri, tmp_path / "late", environment=environment) as late:
        late.wait_for("startupProbe")
        assert late.passes("livenessProbe")
        assert not late.passes("readinessProbe")


def test_pod_without_its_repository_is_restarted_instead_of_staying(pod, repository):
    repository.rmdir()
    with pod() as started:
        wait_for(lambda: started.get("/v2/health/live"))
        assert not started.passes("startupProbe")
        repository.mkdir()
        assert not started.passes("startupProbe"), (
            "the running server must not find the new repository"
        )
    with pod() as again:
        again.wait_for("startupProbe")


def test_broken_canary_does_not_stop_traffic_of_live_model(pod, repository):
    write_model(repository)
    write_model(repository, CANARY_NAME, code=BROKEN)
    # For a parity check, a release copies its candidate to the name CANDIDATE_NAME.
    write_model(repository, CANDIDATE_NAME, code=HALF_COPIED)
    with pod(until="readinessProbe") as started:
        assert not loaded(started, CANARY_NAME)
        assert CANDIDATE_NAME not in started.log
        assert started.get("/v2/health/ready") != 200, (
            "a probe of the whole server would remove every pod"
        )


def test_pod_with_broken_model_is_unready_and_alive_and_healed_by_load(pod, repository):
    write_model(repository, code=BROKEN)
    with pod(until="startupProbe") as started:
        assert started.passes("livenessProbe")
        assert not started.passes("readinessProbe")
        write_model(repository, version=2)
        client = Triton(started.grpc_url)
        client.load(MODEL_NAME)
        client.close()
        started.wait_for("readinessProbe")


JITTER = 1.1
"""gRPC can exceed the maximum age of a connection by this factor."""
SECONDS_TO_FORGET = 5
"""Maximum time until all nodes have removed an ending pod from its Service. Until a node has
removed the pod, new connections can still reach the pod."""
QUEUE_SECONDS = QUEUE_MICROSECONDS / 1e6 + 0.5
"""Longest wait of an accepted request before it is computed. Triton checks the queue timeout every
half second."""
ROW = np.zeros((1, 2), np.float32), np.zeros((1, 8), np.int64)


def spec_of_triton(manifests):
    return next(
        spec for workload, spec in workloads(manifests) if workload["metadata"]["name"] == "triton"
    )


def pre_stop_seconds(container):
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    return float(seconds)


def test_pod_outlasts_any_connection_and_has_time_left_to_end(variant):
    container = triton_container(variant)
    age = int(flag(container, "grpc-max-connection-age")) / 1000
    assert not any("connection-age-grace" in argument for argument in container["args"]), (
        "a grace period would cancel running calls"
    )
    waits, drains = pre_stop_seconds(container), int(flag(container, "exit-timeout-secs"))
    assert waits == STOP_SECONDS, "the autoscaler's simulator must use the same pause"
    assert waits >= age * JITTER + SECONDS_TO_FORGET
    assert drains >= QUEUE_SECONDS + 10
    assert spec_of_triton(variant)["terminationGracePeriodSeconds"] >= waits + drains + 5


def test_image_has_fix_of_batchers_lost_instances(variant):
    year, month = re.search(r":(\d+)\.(\d+)-py3", triton_container(variant)["image"]).groups()
    assert (int(year), int(month)) >= (26, 8), (
        "older images lack the fix of triton-inference-server/server#8870"
    )


def test_update_starts_new_pod_before_it_stops_old_pod(variant):
    (triton,) = [w for w, _ in workloads(variant) if w["metadata"]["name"] == "triton"]
    assert triton["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    start = pod_template(triton)["spec"]["containers"][0]["startupProbe"]
    assert (
        triton["spec"]["progressDeadlineSeconds"]
        > start["periodSeconds"] * start["failureThreshold"]
    )


class Service:
    """A TCP forwarder that counts the connections of each target.

    Tests can change the forwarder's `target`.
    """

    def __init__(self, target: int) -> None:
        self.target, self.open = target, dict.fromkeys([target], 0)
        self._listener = socket.create_server((LOOPBACK, 0))
        self._listener.settimeout(0.05)
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept)]

    @property
    def url(self) -> str:
        return f"{LOOPBACK}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "Service":
        self._threads[0].start()
        return self

    def __exit__(self, *_) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            with suppress(TimeoutError):
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._forward, args=(client, self.target))
                self._threads.append(thread)
                thread.start()

    def _forward(self, client: socket.socket, target: int) -> None:
        with client, suppress(OSError), socket.create_connection((LOOPBACK, target)) as server:
            self._count(target, 1)
            try:
                with selectors.DefaultSelector() as ready:
                    ready.register(client, selectors.EVENT_READ, server)
                    ready.register(server, selectors.EVENT_READ, client)
                    while not self._is_over.is_set():
                        for key, _ in ready.select(0.05):
                            if not (data := key.fileobj.recv(65536)):
                                return
                            key.data.sendall(data)
            finally:
                self._count(target, -1)

    def _count(self, target: int, change: int) -> None:
        with self._lock:
            self.open[target] = self.open.get(target, 0) + change


@pytest.fixture
def make_pod(rendered, tmp_path):
    """`make_pod(name, seconds=)` returns a ready pod whose model needs `seconds` for a request.

    The maximum age of connections is longer than a request.
    """
    opened = []

    def make(name, *, seconds=0.0):
        repository = tmp_path / name / "repository"
        write_model(
            repository,
            work=f"Path({str(tmp_path / name / 'begun')!r}).touch()\ntime.sleep({seconds})",
        )
        pod = TritonPod(
            rendered("cpu"),
            repository,
            tmp_path / name,
            change={"grpc-max-connection-age": "1000" if not seconds else "30000"},
            until="readinessProbe",
        )
        opened.append(pod.__enter__())
        return pod

    yield make
    for pod in opened:
        pod.__exit__()


def test_pod_is_replaced_under_load_and_no_request_fails(make_pod):
    old, new = make_pod("old"), make_pod("new")
    with (
        Service(old.ports.grpc) as service,
        RetryingTraffic(service.url, ROW, attempts=1) as traffic,
    ):
        traffic.more(20)
        service.target = new.ports.grpc
        # The preStop hook only waits until connections have reached their maximum age.
        wait_for(
            lambda: service.open[old.ports.grpc] == 0 and service.open.get(new.ports.grpc, 0) > 0
        )
        traffic.more(20)
        old.process.send_signal(signal.SIGTERM)
        old.process.wait(120)
        traffic.more(20)
        assert not traffic.failures
        assert old.process.returncode == 0


def waiting(pod) -> int:
    """Return the number of requests in the server's queue, without the request in computation."""
    with suppress(OSError):
        return sum(
            int(n)
            for n in re.findall(r"nv_inference_pending_request_count\{[^}]*\} (\d+)", pod.metrics())
        )
    return 0


def test_requests_started_before_signal_are_answered(make_pod, tmp_path):
    begun = tmp_path / "slow" / "begun"
    pod = make_pod("slow", seconds=2.0)

    async def three_and_the_signal() -> list[object]:
        async with ScoringClient(
            pod.grpc_url, MODEL_NAME, ClientSettings(max_attempts=1)
        ) as client:
            calls = [asyncio.ensure_future(client.score(*ROW))]
            # Wait until the first request is computed, because three requests at once could form
            # one batch.
            await asyncio.to_thread(wait_for, begun.exists)
            calls += [asyncio.ensure_future(client.score(*ROW)) for _ in range(2)]
            await asyncio.to_thread(wait_for, lambda: waiting(pod) == 2 or calls[0].done())
            pod.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(three_and_the_signal())
    assert [getattr(answer, "model_version", answer) for answer in answers] == [1, 1, 1]
    assert pod.process.wait(60) == 0
