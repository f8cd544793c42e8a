"""Tests that `evergreen doctor` finds its containers, variables and folders in all overlays."""

import re
import subprocess

import pytest

from cli import doctor
from cli.doctor import WRONG, Installation, Kubectl, diagnose
from evergreen.runtime.kubeflow import KubeflowServer
from tests.k8s.environment import container, volume_at
from tests.support.rendering import find

PARTS = {"modes of files", "record log", "lake", "model repository"}


@pytest.fixture(params=["cpu", "gke"])
def in_pods(request, rendered):
    """The rendered objects, and the pod and the commands of each checked part."""
    manifests, ran = rendered(request.param), []

    def kubectl(command, **_):
        words = command[1:]
        if words[2] != "exec":
            return subprocess.CompletedProcess(command, 1, "", "no cluster")
        assert (words[:2], words[4], words[6]) == (["-n", doctor.NAMESPACE], "-c", "--")
        ran.append((words[3], words[5], " ".join(words[7:])))
        return subprocess.CompletedProcess(
            command, 0, "1 /evergreen/store/open" if "st_mode" in words[-1] else "", ""
        )

    server = KubeflowServer("http://127.0.0.1:9", timeout_seconds=(0.1, 0.1))
    found = list(diagnose(Installation(server=server, cluster=Kubectl(run=kubectl), store=None)))
    return manifests, ran, found


def test_containers_have_every_variable_that_programs_of_doctor_read(in_pods):
    manifests, ran, _ = in_pods
    assert len(ran) == len(PARTS)
    for target, name, program in ran:
        workload = find(manifests, "Deployment", target.removeprefix("deploy/"))
        ours = container(workload, name)
        there = {each["name"] for each in ours.get("env", ())}
        for source in ours.get("envFrom", ()):
            there |= find(manifests, "ConfigMap", source["configMapRef"]["name"])["data"].keys()
        assert set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", program)) <= there, (name, program)


def test_modes_are_read_and_fixed_where_complete_share_is_mounted(in_pods):
    manifests, _, found = in_pods
    (modes,) = [each for each in found if each.part == "modes of files"]
    assert modes.state == WRONG
    target, name = re.search(r"exec deploy/(\S+) -c (\S+) --", modes.fix).groups()
    workload = find(manifests, "Deployment", target)
    for folder in ("store", "work", "repository"):
        assert f"/evergreen/{folder}" in modes.fix
        volume, is_writable = volume_at(workload, name, f"/evergreen/{folder}")
        assert (volume["name"], is_writable) == ("share", True)
