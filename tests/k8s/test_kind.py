"""Tests of `make kind` with test doubles of docker, kind and kubectl.

The test doubles record their calls, and remember the objects that were created. `kubectl kustomize`
is the real program. No cluster is created.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from cli import doctor
from cli import recommender as recommender_file
from cli.pipeline import build_parser
from pipelines.images import DOCKERFILES, image_name
from pipelines.placement import NEEDS, read_placement, read_values
from testing.paths import REPOSITORY
from tests.support.rendering import containers, workloads
from tests.support.yaml_texts import documents

SCRIPT = REPOSITORY / "k8s" / "kind" / "up"
DOUBLES = {
    path.stem: path.read_text() for path in (Path(__file__).parent / "kind_doubles").glob("*.sh")
}


@pytest.fixture
def run(tmp_path):
    """`run(*steps)` runs the script and returns the test doubles' calls, one per line."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: manifests cannot be rendered")
    tools, machine = tmp_path / "bin", tmp_path / "machine"
    tools.mkdir()
    machine.mkdir()
    for name, body in DOUBLES.items():
        head = f'#!/bin/bash\ncd {shlex.quote(str(machine))}\necho "{name} $*" >> calls\n'
        (tools / name).write_text(head + body)
        (tools / name).chmod(0o755)
    variables = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "REAL_KUBECTL": shutil.which("kubectl"),
        "REPOSITORY": str(REPOSITORY),
        "TAG": "0123abc",
    }

    def do(*steps: str) -> list[str]:
        (machine / "calls").unlink(missing_ok=True)
        done = subprocess.run(
            [SCRIPT, *steps], env=variables, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return (machine / "calls").read_text().splitlines()

    do.folder = machine
    return do


def script_lists(name: str) -> list[str]:
    (found,) = re.findall(rf'^{name}="(.*)"$', SCRIPT.read_text(), re.MULTILINE)
    return found.split()


def test_second_run_creates_nothing_twice_and_updates_again(run):
    made = re.compile(r"^(docker run|docker network connect|kind create|.* create job)")
    steps = ("cluster", "evergreen", "lake", "traffic", "drift")
    first, second = run(*steps), run(*steps)
    assert len([line for line in first if made.search(line)]) == 4
    assert [line for line in second if made.search(line)] == []
    for calls in (first, second):
        assert [line for line in calls if line.endswith(" apply -f -")]
    assert "host" in (run.folder / "hosts.toml").read_text()


def test_only_cluster_of_this_command_is_used(run):
    calls = [
        line
        for line in run("pipelines", "evergreen", "lake", "traffic", "drift")
        if line.startswith("kubectl ")
    ]
    assert len(calls) > 10
    assert [line for line in calls if "--context kind-evergreen " not in line] == [
        "kubectl kustomize k8s/kind"
    ]


@pytest.mark.parametrize(
    "path", ["k8s/kind/up", "docs/kubernetes/gke.md", "docs/kubernetes/kfp-runs.md"]
)
def test_every_installation_has_failed_steps_tried_again(path):
    """Kubeflow Pipelines as installed here never retries, whatever the pipeline requests."""
    text = (REPOSITORY / path).read_text().replace("\\\n", " ")
    (patch,) = re.findall(
        r"set env deployment/ml-pipeline .*'COMPILED_PIPELINE_SPEC_PATCH=(.+?)'", text
    )
    assert json.loads(patch) == {
        "templateDefaults": {"retryStrategy": {"retryPolicy": "Always", "limit": "0"}}
    }


def test_kubeflow_is_ready_only_with_its_settings(run):
    calls = run("pipelines")
    (settings,) = [at for at, line in enumerate(calls) if "COMPILED_PIPELINE_SPEC_PATCH={" in line]
    assert " -n kubeflow set env deployment/ml-pipeline " in calls[settings]
    assert " rollout status deployment/ml-pipeline " in calls[settings + 1]


def test_applied_manifests_use_images_by_tag(run):
    run("evergreen")
    applied = documents((run.folder / "applied.yaml").read_text())
    registry = read_values(SCRIPT.parent / "cluster.env")["REGISTRY"]
    placement = read_placement(SCRIPT.parent / "placement.yaml", {"tag": "0123abc"})
    built = {f"{registry}/{image_name(image)}:0123abc" for image in script_lists("images")}
    used = {each["image"] for _, spec in workloads(applied) for each in containers(spec)}
    assert {image for image in used if image.startswith(registry)} <= built
    assert {image for image in used if not image.startswith(registry)} == {
        "apache/kafka:4.1.1",
        "nvcr.io/nvidia/tritonserver:26.10-py3",
    }
    assert {f"{placement.registry}/{image_name(step)}:{placement.tag}" for step in NEEDS} <= built
    assert set(script_lists("images")) <= set(DOCKERFILES)


def test_every_evergreen_command_of_script_exists():
    text = SCRIPT.read_text().replace('"$tag"', "0123abc").replace("$store", "build/kind/store")
    commands = [
        shlex.split(line.partition("$evergreen ")[2])
        for line in text.splitlines()
        if "$evergreen " in line
    ]
    assert [command[0] for command in commands] == ["data", "compile", "submit", "doctor"]
    recommender, compile_, submit, look = commands
    recommender_file.build_parser().parse_args(recommender[1:])
    build_parser().parse_args(compile_)
    build_parser().parse_args([*submit, "--host", "http://127.0.0.1:1"])
    doctor.build_parser().parse_args([*look[1:-2], "--host", "http://127.0.0.1:1"])
    for path in (recommender[2], compile_[2]):
        assert (REPOSITORY / path).is_file()


@pytest.mark.parametrize("tool", [*DOUBLES, "git"])
def test_absent_tool_is_named(tmp_path, tool):
    for name in {*DOUBLES, "git", "bash", "dirname"} - {tool}:
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    variables = {"PATH": str(tmp_path), "TAG": "0123abc"}
    done = subprocess.run(
        [tmp_path / "bash", SCRIPT, "lake"], env=variables, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (
        2,
        f"error: '{tool}' is not installed; a cluster of kind needs it\n",
    )


def test_unknown_step_is_refused_before_anything_is_made(run):
    done = subprocess.run(
        [SCRIPT, "cluster", "lakes"],
        env=os.environ | {"PATH": f"{run.folder.parent}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "step 'lakes' is none of cluster, images" in done.stderr
    assert not Path(run.folder, "calls").exists()
