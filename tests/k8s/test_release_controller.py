"""Tests of the release controller with its command and environment from the manifests.

Tests of the deployment step cover the controller's findings and repairs with real servers.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from controller.__main__ import build_parser as controller_parser
from evergreen.registry.collect import build_parser as collect_parser
from evergreen.serving.servers import parse_urls
from pipelines.images import image_name
from testing.paths import REPOSITORY
from testing.processes import wait_for
from tests.support.rendering import Manifest, find, pod_spec

NOBODY = "127.0.0.1:1"
"""An address without a server."""


def only_container(manifest: Manifest) -> Manifest:
    (container,) = pod_spec(manifest)["containers"]
    return container


def command_line(
    container: Manifest, variables: dict[str, str], replaced: dict[str, str]
) -> list[str]:
    """Return the command line that runs the container's program on this machine.

    The values of `variables` are filled in, and the texts in `replaced` are replaced.
    """
    words = [*container["command"], *container["args"]]
    for old, new in {
        **{f"$({name})": value for name, value in variables.items()},
        **replaced,
    }.items():
        words = [word.replace(old, new) for word in words]
    assert words[0] == "python"
    return [sys.executable, *words[1:]]


def passes(container: Manifest, probe: str, status: Path) -> bool:
    """Return whether the kubelet would see the container's probe pass."""
    words = [
        word.replace("/tmp/controller.json", str(status))
        for word in container[probe]["exec"]["command"]
    ]
    return subprocess.run(words, capture_output=True).returncode == 0


@pytest.fixture
def share(tmp_path) -> Path:
    """The shared folder in the state after the first container of the pod has run."""
    (tmp_path / "share" / "store").mkdir(parents=True)
    return tmp_path / "share"


@pytest.mark.e2e
def test_controller_starts_before_release_turns_green_and_ends_on_signal(rendered, share):
    container = only_container(find(rendered("cpu"), "Deployment", "release-controller"))
    status = share.parent / "controller.json"
    expected_paths = {
        "/evergreen/store": str(share / "store"),
        "/tmp/controller.json": str(status),
        "dns:///triton-headless.evergreen.svc.cluster.local:8001": NOBODY,
        "dns:///triton-headless.evergreen.svc.cluster.local:8002": NOBODY,
    }
    words = command_line(
        container,
        {"MODEL_REPOSITORY": str(share / "repository"), "LAKE": str(share / "lake")},
        expected_paths,
    )
    assert not passes(container, "livenessProbe", status), (
        "the probe must fail before the first round"
    )
    assert not passes(container, "readinessProbe", status)
    process = subprocess.Popen(words, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: status.exists() or process.poll() is not None)
        assert process.poll() is None, process.stderr.read()
        assert passes(container, "livenessProbe", status)
        assert passes(container, "readinessProbe", status)
        assert json.loads(status.read_text())["servers"] == {}
        # An error in a round must not cause a restart. A restart would not help, and would end the
        # on-call engineer's commands in the pod.
        (share / "store" / "journal.jsonl").write_text("not a promotion\n")
        wait_for(lambda: not passes(container, "readinessProbe", status))
        os.utime(status, (0, 0))
        assert not passes(container, "livenessProbe", status)
        wait_for(lambda: passes(container, "livenessProbe", status))
        assert not passes(container, "readinessProbe", status)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.communicate()


def test_flags_are_accepted_by_commands_and_addresses_resolve(variant):
    controller = only_container(find(variant, "Deployment", "release-controller"))
    collect = only_container(find(variant, "CronJob", "collect"))
    assert [each["command"][2] for each in (controller, collect)] == [
        "controller",
        "evergreen.registry.collect",
    ]
    for container in (controller, collect):
        assert container["image"].rsplit("/", 1)[-1].split(":")[0] == image_name("deployment")
    parsed = controller_parser().parse_args(controller["args"])
    for manifest in (
        m for m in variant if m["kind"] == "CronJob" and m["metadata"]["name"].startswith("collect")
    ):
        container = only_container(manifest)
        removes = collect_parser().parse_args(container["args"])
        mounts = {mount["mountPath"]: mount["subPath"] for mount in container["volumeMounts"]}
        assert mounts == {
            path: path.removeprefix("/evergreen/") for path in (removes.store, removes.work)
        }
        assert removes.yes
    services = {m["metadata"]["name"] for m in variant if m["kind"] == "Service"}
    urls = [parsed.triton_urls, parsed.metrics_urls]
    for url in parse_urls(",".join(urls)):
        host = url.removeprefix("dns:///").rsplit(":", 1)[0]
        assert host.split(".")[:3] == ["triton-headless", "evergreen", "svc"]
        assert host.split(".")[0] in services
