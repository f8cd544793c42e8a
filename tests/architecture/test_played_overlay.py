"""Test of the rendered cpu overlay, whose pods `podman kube play` runs.

The test starts with an empty share, and ends when the monitor has archived traffic. `make
test-images` runs this module. Pods share the address 127.0.0.1 of a separate network, to which the
cluster's names resolve. `playable` documents what podman 4.3 does not accept from a manifest and
how it is replaced. The test itself runs the probes of the manifests. A laptop's tritonserver
replaces NVIDIA's image, and librdkafka's mock cluster replaces Kafka. Each Deployment has one
replica and there is no kubelet. The module does not test Services and policies, and it does not
restart, surge or drain pods.
"""

import copy
import ctypes
import json
import os
import subprocess
import sys

import pytest
import yaml

from demo import runner
from demo.environments import python_of
from demo.log_server import LogLocation
from demo.plan import DemoSettings, Services, plan_for_simulator
from demo.summary import count_served_rows
from evergreen.registry.runs import find_outcome
from pipelines.images import ENVIRONMENT_OF_STEP
from pipelines.package import compile_pipeline
from pipelines.placement import read_placement
from testing.paths import REPOSITORY
from testing.processes import http_get, wait_for
from testing.recommenders import accept_into
from tests.k8s.pod import expanded, variables
from tests.support.containers import (
    CONFINED,
    SERVED_AT,
    TAG,
    TRITON,
    USER,
    give_to_user,
    in_containers,
)
from tests.support.kafka_cluster import KafkaCluster
from tests.support.rendering import containers, find, pod_spec, render_edited

pytestmark = [pytest.mark.images, pytest.mark.timeout(5400)]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
LAPTOP_TRITON = """\
FROM docker.io/library/python:3.11.15-bookworm
COPY . /usr/local/lib/python3.11/dist-packages
RUN cd /usr/local/lib/python3.11/dist-packages/pytriton/tritonserver \\
 && mkdir -p /opt/tritonserver/backends && cp -r backends/python /opt/tritonserver/backends \\
 && cp python_backend_stubs/3.11/* /opt/tritonserver/backends/python \\
 && ln -s $PWD/bin/tritonserver /usr/bin/python3.11 /usr/local/bin && ln -s python3.11 /usr/local/bin/python3
ENV LD_LIBRARY_PATH=/usr/local/lib/python3.11/dist-packages/nvidia_pytriton.libs
CMD ["sh", "-c", "trap exit TERM; sleep infinity & wait"]
"""  # noqa: E501
"""Dockerfile with the laptop's serving environment over a stand-in base. Server and backend have
the same paths as in NVIDIA's image."""
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
TRAFFIC = "evergreen-played-traffic"


@pytest.fixture(scope="module")
def triton_image(podman, images, tmp_path_factory):
    """Builds the stand-in that replaces NVIDIA's image."""
    dockerfile = tmp_path_factory.mktemp("triton") / "Dockerfile"
    dockerfile.write_text(LAPTOP_TRITON)
    (packages,) = python_of("serving", REPOSITORY).parents[1].glob("lib/python3.11/site-packages")
    command = [
        "podman",
        "build",
        "--quiet",
        f"--file={dockerfile}",
        f"--tag={TRITON}",
        str(packages),
    ]
    subprocess.run(command, env=podman("build"), check=True)


@pytest.fixture
def network(triton_image):
    """Builds the images, and then moves this thread to a network namespace with only loopback."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    assert libc.unshare(NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    try:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield
    finally:
        assert libc.setns(before, NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
        os.close(before)


def playable(manifests, workload, claims):
    """Convert the Deployment and its ConfigMaps for podman 4.3.

    The function expands variables, and replaces volumes. A mounted sub-folder becomes a separate
    volume. A claim becomes the folder in `claims`. A projected token becomes an empty folder.
    Volume names include the Deployment, because podman shares an emptyDir among pods by its name.
    Probes and hooks are removed, because they need systemd or a kubelet. Ports are removed, because
    pods share one network. /dev/shm is removed, because podman provides it.
    """
    workload = copy.deepcopy(workload)
    # Podman 4.3 waits 20 s for an init container that has ended, and fails if the container must be
    # removed.
    workload["metadata"]["annotations"] = {"io.podman.annotations.init.container.type": "always"}
    spec = pod_spec(workload)
    spec["hostNetwork"] = True
    claimed = {
        v["name"]: claims[c["claimName"]]
        for v in spec["volumes"]
        if (c := v.get("persistentVolumeClaim"))
    }
    volumes = {}
    for container in containers(spec):
        values = variables(manifests, container)
        for key in {"command", "args"} & container.keys():
            container[key] = [expanded(word, values) for word in container[key]]
        for key in (*PROBES, "ports", "lifecycle"):
            container.pop(key, None)
        container["volumeMounts"] = [
            m for m in container["volumeMounts"] if m["mountPath"] != "/dev/shm"
        ]
        for mount in container["volumeMounts"]:
            folder, part = claimed.get(mount["name"]), mount.pop("subPath", "")
            if (
                folder and not (folder / part).exists()
            ):  # a kubelet creates the folder with the volume's group
                (folder / part).mkdir(parents=True)
                give_to_user(folder)
            mount["name"] = "-".join(
                filter(None, (workload["metadata"]["name"], mount["name"], part))
            )
            source_volume = (
                {"hostPath": {"path": str(folder / part), "type": "Directory"}}
                if folder
                else {"emptyDir": {}}
            )
            volumes[mount["name"]] = {"name": mount["name"], **source_volume}
    spec["volumes"] = list(volumes.values())
    return yaml.safe_dump_all([*(m for m in manifests if m["kind"] == "ConfigMap"), workload])


class PlayedPod:
    """The running pod of one Deployment."""

    def __init__(self, podman, manifests, name, *, claims, folder) -> None:
        self.workload = find(manifests, "Deployment", name)
        self.file, self.name, self._podman = folder / f"{name}.yaml", name, podman
        self.file.write_text(playable(manifests, self.workload, claims))

    def run(self, *words, check=True):
        done = subprocess.run(
            ["podman", *words], env=self._podman("run"), capture_output=True, text=True
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def play(self):
        self.run("kube", "play", "--network=host", str(self.file))

    def delete(self):
        """Delete the pod with SIGTERM and its grace period.

        `podman kube down` alone ignores the grace period.
        """
        seconds = pod_spec(self.workload)["terminationGracePeriodSeconds"]
        self.run("pod", "stop", "--ignore", f"--time={seconds}", f"{self.name}-pod-0", check=False)
        self.run("kube", "down", str(self.file), check=False)

    def passes(self, probe):
        """Return whether every container with the probe passes it now, as a kubelet would check."""
        return all(
            self._passes(c, c[probe]) for c in pod_spec(self.workload)["containers"] if probe in c
        )

    def _passes(self, container, probe):
        if action := probe.get("exec"):
            words = ["exec", f"{self.name}-pod-0-{container['name']}", *action["command"]]
            return self.run(*words, check=False).returncode == 0
        (port,) = [
            p["containerPort"] for p in container["ports"] if p["name"] == probe["httpGet"]["port"]
        ]
        url = f"http://127.0.0.1:{port}{probe['httpGet']['path']}"
        return http_get(url, timeout=probe["timeoutSeconds"]).status in range(200, 400)

    def wait_for(self, *probes):
        for probe in probes:
            try:
                wait_for(lambda probe=probe: self.passes(probe), seconds=300)
            except AssertionError:
                logs = self.run("pod", "logs", "--tail=20", f"{self.name}-pod-0", check=False)
                pytest.fail(
                    f"the {probe} of {self.name} does not pass: "
                    f"{(logs.stdout + logs.stderr)[-3000:]}"
                )


@pytest.fixture
def site(podman, network, volume):
    """The overlay rendered for this machine, its pods by name, and their folders."""
    volume.chmod(0o755)
    share, state = volume / "share", volume / "state"
    for folder in (share, state):
        folder.mkdir()
    with KafkaCluster() as kafka:
        kafka.create_topic("evergreen-records", partitions=16)
        log = f"kafka://{kafka.brokers}/evergreen-records?group=evergreen-monitor"
        values = {"REGISTRY": "localhost", "TAG": TAG, "LOG_URL": log}
        manifests = render_edited("cpu", values, volume / "k8s")
        claims = {"evergreen": share, "monitor-state": state}
        names = ("monitor", "release-controller", "triton")
        pods = {
            name: PlayedPod(podman, manifests, name, claims=claims, folder=volume) for name in names
        }
        try:
            yield pods, runner.LocalFolders(root=share), log
        finally:
            subprocess.run(
                ["podman", "rm", "--force", "--ignore", TRAFFIC],
                env=podman("run"),
                stdout=sys.stderr,
            )
            for pod in pods.values():
                pod.delete()


def release_first(podman, images, monkeypatch, folders):
    """Run the overlay's pipeline in containers that mount the pods' shared folder.

    The model is small enough for any machine.
    """
    root = folders.root.parent
    package, steps = root / "retraining.yaml", []
    compile_pipeline(package, read_placement(root / "k8s/overlays/cpu/placement.yaml", {}))
    mounts = [f"--volume={root}:{root}", f"--volume={folders.root}:/evergreen", "--network=host"]
    monkeypatch.setattr(runner, "_run_step", in_containers(podman, images, steps, *mounts))
    settings = (
        "preprocessing.frequency_threshold=1 model.embedding_dim=4 model.tower=[8] gate.min_auc=0"
    )
    arguments, paths_by_name = {"settings": settings, "trigger_id": "first"}, {"server": "python"}
    pythons = {name: python_of(name, REPOSITORY) for name in set(ENVIRONMENT_OF_STEP.values())}
    paths = {"root": root / "artifacts", "logs": root / "logs", "source": REPOSITORY}
    previous = os.umask(0)  # KFP creates output folders as root before the task starts.
    try:
        runner.run_pipeline(
            package, arguments, locations=paths_by_name, name="first", pythons=pythons, **paths
        )
    except runner.PipelineFailed:
        pytest.fail(
            "\n".join(
                f"{log.name}: {log.read_text()[-1500:]}"
                for log in sorted((root / "logs").glob("*"))
            )
        )
    finally:
        os.umask(previous)
    assert find_outcome(folders.store, "first").state == "released"


def test_overlay_serves_traffic_and_archives_every_record(podman, images, site, monkeypatch):
    pods, folders, log = site
    triton, monitor, controller = pods["triton"], pods["monitor"], pods["release-controller"]
    root = folders.root
    settings = DemoSettings(folder=root, rows=20_000)
    plan = plan_for_simulator(settings)
    url = f"dns:///{SERVED_AT[0]}:8001"
    services = Services(
        settings=settings,
        plan=plan,
        folders=folders,
        triton_url=url,
        metrics_url="",
        log=LogLocation(url=log),
    )

    def client(*words):
        mount = f"--volume={root}:{root}"
        flags = [*CONFINED, "--network=host", mount, "--interactive", f"--name={TRAFFIC}"]
        return ["podman", "run", "--rm", *flags, images["inference_client"], *words]

    accept_into(folders.store, plan.recommender())
    give_to_user(root.parent)
    monitor.play()
    monitor.wait_for(*PROBES)
    triton.play()
    triton.wait_for("startupProbe", "livenessProbe")
    assert not triton.passes("readinessProbe"), "the pod is ready without a model"
    controller.play()
    controller.wait_for(*PROBES)
    days = ["--days=4", "--last-day=2026-01-04", f"--seed={settings.seed}"]
    simulator, drifted = (
        f"--simulator={root}/simulator.json",
        f"--output={root}/drifted_simulator.json",
    )
    lake = [f"--lake={folders.lake}", f"--rows={settings.rows}", *days]
    subprocess.run(client("lake", simulator, *lake), env=podman("run"), check=True)
    subprocess.run(
        client("drift", simulator, drifted, f"--seed={settings.seed}"),
        env=podman("run"),
        check=True,
    )
    release_first(podman, images, monkeypatch, folders)
    triton.wait_for("readinessProbe")

    command = client(*services.replay_command()[3:])
    traffic = subprocess.Popen(command, env=podman("run"), stdin=subprocess.PIPE, text=True)
    sent = root / "traffic.jsonl"

    def rows_on(more):
        """Wait until the client has sent `more` rows."""
        before = rows_sent()
        wait_for(
            lambda: traffic.poll() is not None or rows_sent() >= before + more,
            "traffic",
            seconds=300,
        )
        assert traffic.poll() is None, "the traffic process ended"

    def rows_sent():
        lines = sent.read_text().splitlines() if sent.exists() else []
        return sum(json.loads(line)["rows"] for line in lines if line.endswith("}"))

    rows_on(20_000)
    for pod in (monitor, controller):
        pod.delete()
        rows_on(2_000)
        pod.play()
        pod.wait_for(*PROBES)
    rows_on(20_000)
    traffic.communicate("stop\n", timeout=120)
    assert traffic.returncode == 0
    found = json.loads((root / "traffic_summary.json").read_text())
    assert found["requests"]["failed"] == found["dropped_rows"] == 0
    assert found["published_rows"] == found["rows"] >= 44_000

    def is_settled():
        status = json.loads(http_get("http://127.0.0.1:9464/status").text or '{"log_backlog": 1}')
        return not status["log_backlog"] and status["pending_rows"] == 0

    wait_for(is_settled, "the last labels", seconds=300)
    # The next pod uploads the records that the monitor archived during its shutdown.
    for pod in (monitor, triton):
        pod.delete()
        pod.play()
        pod.wait_for(*PROBES)
    wait_for(lambda: count_served_rows(folders.lake) >= found["rows"], "the archive", seconds=300)
    assert count_served_rows(folders.lake) == found["rows"]
    assert {path.stat().st_uid for path in folders.lake.rglob("part-*")} == {USER}
    print(
        f"\n{found['requests']['sent']:,} requests, 0 failed; {found['rows']:,} rows published and "
        "archived"
    )
