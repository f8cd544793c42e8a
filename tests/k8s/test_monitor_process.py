"""Tests of the real monitor and uploader as the manifests start them.

The tests run without a cluster and change some values. Mounts are below a temporary folder, the
port is a free one on 127.0.0.1, Kubeflow is absent, and the log is a SQLite file. All other values
are those of the rendered manifests. If the kernel allows it, the root file system is read-only, as
in the pod.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from evergreen.events.sqlite import SqliteLog
from testing.paths import REPOSITORY
from testing.processes import Answer, http_get, wait_for
from testing.recommenders import accept_into, shop_with
from tests.k8s.environment import command, container, environment_of, mounted
from tests.support.monitors import clicks, prediction, publish
from tests.support.rendering import Manifest, find

pytestmark = pytest.mark.e2e

DOCKERFILE = "monitoring/Dockerfile"
# Remount the folder on itself to keep it writable, and make everything else read-only.
READ_ONLY_ROOT = [
    "unshare",
    "-Urm",
    "sh",
    "-c",
    'mount --bind "$0" "$0" && mount -o remount,ro,bind / && exec "$@"',
]


class Pod:
    """Processes of the monitor's pod on this machine."""

    def __init__(self, manifests: list[Manifest], root: Path, prefix: list[str]) -> None:
        self.root, self.prefix, self._manifests = root, prefix, manifests
        self.deployment = find(manifests, "Deployment", "monitor")
        self.started: list[subprocess.Popen[bytes]] = []
        for name in ("monitor", "uploader"):
            for mount in container(self.deployment, name)["volumeMounts"]:
                (root / mount["mountPath"].lstrip("/")).mkdir(parents=True, exist_ok=True)
        self.log = SqliteLog(root / "log.db")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    @property
    def grace_seconds(self) -> float:
        return float(self.deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])

    def variables(self, name: str) -> dict[str, str]:
        found = environment_of(self._manifests, self.deployment, name)
        found = {
            key: mounted(self.deployment, name, value, self.root) for key, value in found.items()
        }
        if name == "monitor":
            found["EVERGREEN_MONITOR_LOG"] = f"sqlite:///{self.root / 'log.db'}"
            found["EVERGREEN_MONITOR_HTTP_HOST"] = "127.0.0.1"
            found["EVERGREEN_MONITOR_HTTP_PORT"] = str(self.port)
            # No process listens at 127.0.0.1:9. A name that does not resolve could take half a
            # minute.
            found["EVERGREEN_MONITOR_KUBEFLOW_HOST"] = "http://127.0.0.1:9"
        return found

    def start(self, name: str, **changes: str) -> subprocess.Popen[bytes]:
        argv = [
            mounted(self.deployment, name, word, self.root)
            for word in command(self.deployment, name, DOCKERFILE)
        ]
        argv = [sys.executable, *argv[1:]] if argv[0] == "python" else argv
        # The process inherits only PATH, because a pod has no other variable of this session.
        variables = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with open(self.root / f"{name}.log", "ab") as lines:
            process = subprocess.Popen(
                [*self.prefix, *([str(self.root)] if self.prefix else []), *argv],
                cwd="/",
                env={**variables, **self.variables(name), **changes},
                stderr=lines,
            )
        self.started.append(process)
        return process

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        process.send_signal(signal.SIGTERM)
        return process.wait(self.grace_seconds)

    def probe(self, name: str) -> int:
        """Return the HTTP status of the probe of that name, or 0 without an answer."""
        probe = container(self.deployment, "monitor")[name]["httpGet"]
        ports = {
            p["name"]: p["containerPort"] for p in container(self.deployment, "monitor")["ports"]
        }
        assert ports[probe["port"]] == 9464  # on this machine, the process listens at self.port
        return self.get(probe["path"]).status

    def get(self, path: str) -> Answer:
        return http_get(f"http://127.0.0.1:{self.port}{path}")

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.root / f"{name}.log").read_text().splitlines()]

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        self.log.close()


@pytest.fixture
def make_pod(tmp_path):
    pods = []

    def make(manifests: list[Manifest], prefix: list[str] | None = None) -> Pod:
        pods.append(Pod(manifests, tmp_path / f"pod-{len(pods)}", prefix or []))
        return pods[-1]

    (tmp_path / "pod-0").mkdir()
    yield make
    for pod in pods:
        pod.close()


def _lives(pod: Pod) -> None:
    """Run the pod from its init container to SIGTERM, while records are in progress."""
    assert pod.start("folders").wait(120) == 0
    accept_into(
        pod.root / "evergreen/store", shop_with(monitor={"attribution_window_seconds": 0.2})
    )
    monitor = pod.start("monitor")
    uploader = pod.start("uploader", EVERGREEN_UPLOADER_INTERVAL_SECONDS="0.1")
    wait_for(lambda: pod.probe("startupProbe") == 200, "the startup probe")
    wait_for(lambda: pod.probe("readinessProbe") == 200, "the readiness probe")
    batch = prediction("r1", 64, time=time.time())
    publish(pod.log, batch, clicks("o1", [("r1", 3, batch.time)]))
    wait_for(lambda: '"matured": 64' in pod.get("/status").text, "the labels")
    assert list(text_string_to_metric_families(pod.get("/metrics").text))
    assert pod.probe("livenessProbe") == 200
    assert pod.stop(monitor) == 0
    lake = pod.root / "evergreen/lake"
    wait_for(lambda: list(lake.glob("day=*/part-*.parquet")), "the lake's file")
    assert pod.stop(uploader) == 0
    assert not list((pod.root / "var/lib/evergreen/archive").glob("day=*/part-*.parquet"))
    assert [
        line["message"] for line in pod.lines("monitor") if line["message"].startswith("stopped")
    ]
    assert [
        line["message"]
        for line in pod.lines("uploader")
        if line["message"].startswith("moved day=")
    ]


def test_pod_lives_from_its_probes_to_its_stop(rendered, make_pod):
    _lives(make_pod(rendered("cpu")))


def test_pod_lives_on_read_only_root(rendered, make_pod, tmp_path):
    probe = subprocess.run(
        [
            *READ_ONLY_ROOT,
            str(tmp_path),
            "sh",
            "-c",
            f"touch '{tmp_path}/in' && ! touch /evergreen-test 2>/dev/null",
        ],
        capture_output=True,
        text=True,
    )
    if probe.returncode != 0:
        pytest.skip(
            f"this kernel allows no read-only root: {probe.stderr.strip() or probe.returncode}"
        )
    # All overlays take the read-only root from the base. The lake of the overlay cpu is a folder,
    # so the test can check its content.
    _lives(make_pod(rendered("cpu"), READ_ONLY_ROOT))
