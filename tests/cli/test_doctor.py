"""Tests of `evergreen doctor` with test doubles of the KFP API and kubectl."""

import copy
import json
import os
import subprocess
import time

import pytest

from cli import doctor
from cli.doctor import RIGHT, UNKNOWN, WRONG, Installation, Kubectl, diagnose
from evergreen.registry.runs import step_note, store_name
from evergreen.runtime.errors import TemporaryError
from evergreen.runtime.kubeflow import EXPERIMENT, KubeflowServer
from pipelines import submit
from pipelines.package import compile_pipeline
from pipelines.placement import Placement
from tests.support.kfp_server import KfpServer


def deployment(image: str, *, ready: int = 1, **variables: str) -> dict:
    env = [{"name": name, "value": value} for name, value in variables.items()]
    spec = {"replicas": 1, "template": {"spec": {"containers": [{"image": image, "env": env}]}}}
    return {"spec": spec, "status": {"readyReplicas": ready} if ready else {}}


BOUND = {"status": {"phase": "Bound"}}
WHOLE = {
    "kubeflow deployment/ml-pipeline": deployment(
        "ghcr.io/kubeflow/kfp-api-server:2.17.0",
        COMPILED_PIPELINE_SPEC_PATCH=doctor.RETRY_PATCH,
        DEFAULTPIPELINERUNNERSERVICEACCOUNT="evergreen-pipeline",
    ),
    "kubeflow serviceaccount/evergreen-pipeline": {"kind": "ServiceAccount"},
    "kubeflow rolebinding/evergreen-pipeline": {"kind": "RoleBinding"},
    "kubeflow pvc/evergreen": BOUND,
    "evergreen pvc/evergreen": BOUND,
    "evergreen deployment/monitor": deployment("r.dev/evergreen-monitoring:3f2a9c1"),
    "evergreen deployment/release-controller": deployment("r.dev/evergreen-deployment:3f2a9c1"),
    "evergreen deployment/triton": deployment("nvcr.io/nvidia/tritonserver:26.10-py3"),
    "evergreen pods": {
        "items": [
            {
                "status": {
                    "containerStatuses": [
                        {"image": "r.dev/a:1", "imageID": f"r.dev/a@sha256:{digest}"}
                    ]
                }
            }
            for digest in ("aa", "aa")
        ]
    },
    "evergreen hpa": {
        "items": [
            {
                "metadata": {"name": "triton"},
                "status": {"conditions": [{"type": "ScalingActive", "status": "True"}]},
            }
        ]
    },
    "monitoring pods -l app.kubernetes.io/name=prometheus": {
        "items": [{"status": {"phase": "Running"}}]
    },
    "exec monitor evergreen.events": "connected",
    "exec uploader open_objects": "",
    "exec release-controller MODEL_REPOSITORY": "",
    "exec release-controller st_mode": "0",
}
"""kubectl's answers for a healthy installation."""


class KubectlDouble:
    """Test double of kubectl, with answers by namespace and object.

    If `answers` has no entry for an object, the object does not exist. If an answer is an
    exception, kubectl fails with it.
    """

    def __init__(self, answers: dict) -> None:
        self.answers, self.commands = answers, []

    def __call__(self, command, **_):
        self.commands.append(command)
        _, *words = command
        assert words[0] == "-n"
        namespace, verb, rest = words[1], words[2], words[3:]
        if verb == "exec":
            container, program = rest[2], " ".join(rest[4:])
            (answer,) = [
                value
                for key, value in self.answers.items()
                if key.startswith(f"exec {container} ") and key.split()[2] in program
            ]
        else:
            assert (verb, rest[-3:]) == ("get", ["--ignore-not-found", "-o", "json"])
            answer = self.answers.get(f"{namespace} {' '.join(rest[:-3])}")
        if isinstance(answer, Exception):
            return subprocess.CompletedProcess(command, 1, "", f"Error from server: {answer}\n")
        text = answer if isinstance(answer, str) else json.dumps(answer) if answer else ""
        return subprocess.CompletedProcess(command, 0, text, "")


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    double = KfpServer()
    yield double
    double.close()


@pytest.fixture
def look(server, tmp_path):
    """`look(**changed)` replaces answers of kubectl, and returns the findings by part."""
    package = tmp_path / "retraining.yaml"
    compile_pipeline(package, Placement(registry="r.dev", tag="3f2a9c1"))
    kfp = KubeflowServer(server.url, timeout_seconds=(2.0, 2.0))
    submit.upload(kfp, package, "3f2a9c1")

    def at(changed=(), *, namespace="", store=None, ahead=0.0):
        answers = {**copy.deepcopy(WHOLE), **dict(changed)}
        seen = KubeflowServer(server.url, namespace=namespace, timeout_seconds=(2.0, 2.0))
        cluster = Kubectl(run=KubectlDouble(answers))
        installation = Installation(
            server=seen, cluster=cluster, store=store, clock=lambda: time.time() + ahead
        )
        return list(diagnose(installation))

    return at


def states(findings) -> set[tuple[str, str]]:
    return {(each.part, each.state) for each in findings if each.state != RIGHT}


def test_no_findings_in_healthy_installation(look, tmp_path):
    (tmp_path / "store").mkdir()
    findings = look(store=tmp_path / "store")
    assert states(findings) == {("runs", UNKNOWN)}, "only the runs are unknown before the first run"
    assert len(findings) > 15
    assert all(each.text and not each.fix for each in findings)


SERVER = "kubeflow deployment/ml-pipeline"


@pytest.mark.parametrize(
    ("changed", "part", "fix"),
    [
        (
            {SERVER: deployment("kfp-api-server:2.15.2")},
            "Kubeflow's settings",
            "security_context: omit",
        ),
        ({SERVER: deployment("kfp-api-server:2.17.0")}, "Kubeflow's settings", doctor.RETRY_PATCH),
        (
            {SERVER: deployment("a:2.17.0", COMPILED_PIPELINE_SPEC_PATCH="{")},
            "Kubeflow's settings",
            "set env",
        ),
        ({SERVER: None}, "Kubeflow's settings", "docs/kubernetes/gke.md"),
        (
            {"kubeflow serviceaccount/evergreen-pipeline": None},
            "rights of the steps",
            "kubectl apply",
        ),
        ({"kubeflow pvc/evergreen": {"status": {"phase": "Pending"}}}, "share", "describe pvc"),
        (
            {"exec release-controller st_mode": "7 /evergreen/store/journal.jsonl"},
            "modes of files",
            "chmod -R go-w",
        ),
        (
            {"evergreen deployment/monitor": deployment("m:9c13f2a")},
            "pipeline",
            "compile --tag 9c13f2a",
        ),
        (
            {"evergreen deployment/triton": deployment("t:1", ready=0)},
            "programs",
            "once a model is released",
        ),
        (
            {"exec monitor evergreen.events": OSError("topic is absent")},
            "record log",
            "evergreen.events check",
        ),
        ({"exec uploader open_objects": OSError("403")}, "lake", "open_objects"),
        (
            {"exec release-controller MODEL_REPOSITORY": OSError("403")},
            "model repository",
            "MODEL_REPOSITORY",
        ),
    ],
)
def test_errors_are_named_with_their_fix(look, changed, part, fix):
    wrong = [each for each in look(changed) if each.state == WRONG]
    assert {each.part for each in wrong} == {part}
    assert any(fix in each.fix for each in wrong)


def test_one_name_for_two_images_is_wrong(look):
    pods = copy.deepcopy(WHOLE["evergreen pods"])
    pods["items"][0]["status"]["containerStatuses"][0]["imageID"] = "r.dev/a@sha256:bb"
    assert ("programs", WRONG) in states(look({"evergreen pods": pods}))


def test_check_without_answer_of_kubectl_is_unknown(look):
    refused = {name: OSError("forbidden") for name in WHOLE if not name.startswith("exec")}
    found = states(look(refused))
    assert {part for part, state in found if state == WRONG} == set()
    assert ("share", UNKNOWN) in found


def test_clock_differences_and_multi_user_server_are_reported(look):
    assert ("Kubeflow's API and clock", WRONG) in states(look(ahead=60.0))
    assert ("Kubeflow's API and clock", WRONG) in states(look(ahead=-60.0))
    (wrong,) = [each for each in look(namespace="team-a") if each.fix == "leave out --namespace"]
    assert "an installation of one user" in wrong.text


def test_multi_user_installation_needs_monitor_role_in_profile(look):
    texts = {each.text for each in look(namespace="team-a") if each.state == WRONG}
    assert {
        "role team-a/evergreen-monitor is absent",
        "rolebinding team-a/evergreen-monitor is absent",
    } <= texts


def test_reason_of_program_in_pod_is_shown_besides_its_exit_code():
    def kubectl(command, **_):
        return subprocess.CompletedProcess(
            command, 1, "problem: topic is gone\n", "command terminated with exit code 1\n"
        )

    with pytest.raises(TemporaryError, match="^kubectl: problem: topic is gone$"):
        Kubectl(run=kubectl).call("exec", "deploy/monitor")


def test_unresponsive_server_is_reported_and_others_are_checked(look, server):
    server.failure = 503
    findings = look()
    assert ("Kubeflow's API and clock", WRONG) in states(findings)
    assert ("share", RIGHT) in {(each.part, each.state) for each in findings}


def test_failed_run_without_note_is_reported_and_one_with_note_is_not(look, server, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    server.experiments.append({"experiment_id": "e1", "display_name": EXPERIMENT})
    for name in ("weekly", "drift"):
        server.end(server.add_run(name, "PENDING"), "FAILED", root_driver="FAILED")
    with step_note(store, store_name("drift", "", server.runs[1]["run_id"]), "extraction"):
        pass
    (lost,) = [each for each in look(store=store) if each.state == WRONG]
    assert lost.text.startswith("weekly left nothing: ")
    assert "no step ran; root-driver failed" in lost.text
    assert lost.fix.endswith(server.runs[0]["run_id"])


def test_open_files_of_mounted_registry_are_counted(look, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    for name, mode in (("right", 0o640), ("open", 0o666)):
        (store / name).write_text("")
        os.chmod(store / name, mode)
    (found,) = [each for each in look(store=store) if each.part == "modes of files"]
    assert (
        found.state,
        "1 files and folders of the share" in found.text,
        str(store / "open") in found.text,
    ) == (
        WRONG,
        True,
        True,
    )


def test_command_prints_line_for_each_part_and_exits_1_if_one_is_wrong(
    server, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))  # no kubectl
    assert doctor.main(["--host", server.url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "wrong   pipeline: pipeline evergreen-retraining is not uploaded" in lines
    assert any(line.startswith("        fix: evergreen submit") for line in lines)
    assert any(line.startswith("unknown share: ") and "kubectl" in line for line in lines)
