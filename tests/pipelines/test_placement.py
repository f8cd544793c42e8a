"""Tests that placement settings reach their pods in the form that the backend parses."""

import re

import pytest
from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

from cli.__main__ import main
from components.run_outcome.__main__ import ADDRESS_VARIABLE
from evergreen.runtime.errors import ContractError
from pipelines.placement import (
    NEEDS,
    NeedsChange,
    Nodes,
    Placement,
    Toleration,
    Variables,
    train_job_spec,
)
from tests.support.compiled import STEPS, Compiled, dashed

SPOT = Toleration(key="cloud.google.com/gke-spot", operator="Equal", value="true")
SLICES = {
    "cloud.google.com/gke-accelerator": "nvidia-tesla-a100",
    "cloud.google.com/gke-gpu-partition-size": "1g.5gb",
}
EVERYTHING = {
    "registry": "europe-docker.pkg.dev/p/r/",
    "tag": "3f2a9c1",
    "image_pull_secrets": ("registry-key", "another"),
    "volume": "shared",
    "mount_path": "/mnt/loop",
    "accelerator": "nvidia.com/mig-1g.5gb",
    "gpu_nodes": Nodes(selector=SLICES, tolerations=(Toleration(key="nvidia.com/gpu"), SPOT)),
    "cpu_nodes": Nodes(selector={"pool": "cpu"}, tolerations=(SPOT,)),
    "shared_memory": "4Gi",
    "needs": {
        "training": NeedsChange(cpu="4", memory="24Gi", timeout_seconds=7200),
        "validation": NeedsChange(memory="20Gi"),
    },
    "run_as_user": 10001,
    "labels": {"cost-centre": "ads"},
    "secrets": (
        Variables(
            name="evergreen-notifications", keys={"url": ADDRESS_VARIABLE}, steps=("run_outcome",)
        ),
        Variables(name="proxy", keys={"https": "HTTPS_PROXY"}),
    ),
    "num_retries": 0,
    "training_retries": 0,
}


@pytest.fixture(scope="module")
def everything(compile_with):
    return compile_with(**EVERYTHING)


def parsed(compiled: Compiled, step: str):
    """Parse the platform section of a step as the backend does, which rejects unknown fields."""
    return json_format.ParseDict(
        compiled.platform(step), kubernetes_executor_config_pb2.KubernetesExecutorConfig()
    )


@pytest.mark.parametrize(("security_context", "has_user"), [("set", True), ("omit", False)])
def test_kubeflow_before_2_16_gets_no_security_context(compile_with, security_context, has_user):
    """The backend rejects a pipeline that has unknown fields."""
    compiled = compile_with(run_as_user=10001, security_context=security_context)
    assert [("securityContext" in compiled.platform(step)) for step in STEPS] == [has_user] * len(
        STEPS
    )


@pytest.mark.parametrize("step", STEPS)
def test_every_field_reaches_its_pods(everything, step):
    config, container = parsed(everything, step), everything.executor(step)
    # The backend rejects unknown fields.
    json_format.ParseDict(everything.spec, pipeline_spec_pb2.PipelineSpec())
    on_gpu = step == "training"
    assert json_format.MessageToDict(config) == everything.platform(step)
    assert container["image"] == f"europe-docker.pkg.dev/p/r/evergreen-{dashed(step)}:3f2a9c1"
    assert {each["name"]: each["value"] for each in container["env"]}[
        "ORT_DISABLE_TELEMETRY"
    ] == "1"
    assert [each.secret_name for each in config.image_pull_secret] == ["registry-key", "another"]
    (mount,) = everything.platform(step)["pvcMount"]
    assert (mount["pvcNameParameter"]["runtimeValue"]["constant"], mount["mountPath"]) == (
        "shared",
        "/mnt/loop",
    )
    assert "retryPolicy" not in everything.task(step)

    assert dict(config.node_selector.labels) == (SLICES if on_gpu else {"pool": "cpu"})
    spot = ("cloud.google.com/gke-spot", "Equal", "true", "NoSchedule")
    tolerations = [("nvidia.com/gpu", "Exists", "", "NoSchedule"), spot] if on_gpu else [spot]
    assert [(t.key, t.operator, t.value, t.effect) for t in config.tolerations] == tolerations
    memory = [(m.mount_path, m.medium, m.size_limit) for m in config.empty_dir_mounts]
    covered = ("/mnt/loop/repository", "", "1Mi")
    assert memory == [covered, *([("/dev/shm", "Memory", "4Gi")] if on_gpu else [])][::-1]

    default = (NEEDS[step].cpu, NEEDS[step].memory, NEEDS[step].timeout_seconds)
    needs = {"training": ("4", "24Gi", 7200), "validation": (default[0], "20Gi", default[2])}.get(
        step, default
    )
    resources = container["resources"]
    limits = (
        resources["resourceCpuLimit"],
        resources["resourceMemoryLimit"],
        config.active_deadline_seconds,
    )
    assert limits == needs

    assert (config.security_context.run_as_user, config.security_context.run_as_non_root) == (
        10001,
        True,
    )
    assert dict(config.pod_metadata.labels) == {
        "app.kubernetes.io/part-of": "evergreen",
        "app.kubernetes.io/component": dashed(step),
        "cost-centre": "ads",
    }
    secrets = {
        e.secret_name: [(k.secret_key, k.env_var) for k in e.key_to_env]
        for e in config.secret_as_env
    }
    notified = (
        {"evergreen-notifications": [("url", "EVERGREEN_NOTIFY_URL")]}
        if step == "run_outcome"
        else {}
    )
    assert secrets == {"proxy": [("https", "HTTPS_PROXY")], **notified}
    assert all(each.optional for each in config.secret_as_env)


def test_without_accelerator_all_pods_go_to_other_nodes(compile_with):
    compiled = compile_with(**{**EVERYTHING, "accelerator": ""})
    for step in STEPS:
        config = parsed(compiled, step)
        assert dict(config.node_selector.labels) == {"pool": "cpu"}
        assert [each.mount_path for each in config.empty_dir_mounts] == ["/mnt/loop/repository"]
        assert "accelerator" not in compiled.executor(step)["resources"]


def test_step_that_follows_job_gives_its_requirements_to_job_pods(compile_with):
    placement = {**EVERYTHING, "trainer": "kubeflow"}
    compiled = compile_with(**placement)
    config, container = parsed(compiled, "training"), compiled.executor("training")
    mounted = [each.mount_path for each in config.empty_dir_mounts]
    assert (dict(config.node_selector.labels), mounted) == (
        {"pool": "cpu"},
        ["/mnt/loop/repository"],
    )
    assert (
        container["resources"]["resourceCpuLimit"],
        "accelerator" in container["resources"],
    ) == ("1", False)
    assert {each.name: each.field_path for each in config.field_path_as_env} == {
        "EVERGREEN_POD_NAME": "metadata.name",
        "EVERGREEN_POD_UID": "metadata.uid",
    }
    sent = compiled.task("training")["inputs"]["parameters"]["train_job"]["runtimeValue"][
        "constant"
    ]
    assert sent == train_job_spec(Placement(**placement))


def test_folders_and_servers_are_placements_in_every_step_that_has_them(everything, compile_with):
    chosen = {
        "lake": "gs://lake/clicks",
        "store": "/shop/store",
        "work": "/shop/work",
        "server": "python",
        "device": "gpu",
        "served": "gs://lake/served",
    }
    compiled = compile_with(**chosen)
    assert compiled.locations == chosen
    for step in STEPS:
        given = compiled.task(step)["inputs"]["parameters"]
        found = {name: given[name]["runtimeValue"]["constant"] for name in chosen if name in given}
        assert found == {name: chosen[name] for name in found}
        assert "store" in found
    defaults = {name: f"/mnt/loop/{name}" for name in ("lake", "store", "work")}
    others = {"server": "onnxruntime", "device": "cpu", "served": ""}
    assert everything.locations == defaults | others


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"backend": "hugectr", "accelerator": ""}, "backend is hugectr without an accelerator"),
        ({"training_gpus": 2}, "training_gpus is 2, expected 1 with backend pytorch"),
        (
            {"training_nodes": 2},
            "training_nodes is 2 with trainer step and backend pytorch, expected 1",
        ),
        (
            {"training_nodes": 2, "trainer": "kubeflow"},
            "training_nodes is 2 with trainer kubeflow and backend pytorch",
        ),
        ({"training_nodes": 0, "trainer": "kubeflow"}, "training_nodes is 0"),
        (
            {"training_processes": 2, "backend": "hugectr"},
            "training_processes is 2, expected 1 with backend hugectr",
        ),
        (
            {"training_processes": 2, "backend": "torchrec", "fbgemm": "gpu"},
            "training_processes is 2 with 1 training_gpus",
        ),
        (
            {"backend": "torchrec"},
            "fbgemm is 'cpu', expected 'gpu' for backend torchrec with accelerator 'nvidia",
        ),
        (
            {"needs": {"trainig": NeedsChange(cpu="1")}},
            "step is 'trainig', expected one of extraction",
        ),
        (
            {"secrets": (Variables(name="s", keys={}, steps=("outcome",)),)},
            "step is 'outcome', expected one of",
        ),
    ],
)
def test_impossible_placement_is_refused_when_it_is_made(values, words):
    with pytest.raises(ContractError, match=words):
        Placement(**values)


FILE = """
registry: ${REGISTRY}/images
tag: ${TAG}
run_as_user: 10001
accelerator: nvidia.com/mig-1g.5gb
gpu_nodes:
  selector: {pool: "${POOL}"}
  tolerations:
    - {key: nvidia.com/gpu}
    - {key: cloud.google.com/gke-spot, operator: Equal, value: "true"}
needs: {training: {memory: 24Gi}}
image_pull_secrets: [key]
secrets:
  - {name: s, keys: {k: V}, steps: [run_outcome]}
"""
VALUES = "# where\n\nREGISTRY=r.dev/p=1\nTAG = t0\nPOOL=a100\n"


@pytest.fixture
def compile_file(tmp_path):
    """Runs `evergreen compile --placement=FILE`. Returns exit code and output path."""
    folder = tmp_path / "an overlay"
    folder.mkdir()

    def make(text: str, *flags: str, values: str | None = VALUES) -> tuple[int, object]:
        (folder / "placement.yaml").write_text(text)
        if values is not None:
            (folder / "cluster.env").write_text(values)
        output = tmp_path / "out.yaml"
        words = ["compile", "--output", str(output), "--placement", str(folder / "placement.yaml")]
        return main([*words, *flags]), output

    return make


def test_file_describes_cluster_with_values_of_file_beside_it(compile_file):
    code, output = compile_file(FILE)
    assert code == 0
    compiled = Compiled(output)
    assert compiled.executor("training")["image"] == "r.dev/p=1/images/evergreen-training:t0"
    config = parsed(compiled, "training")
    assert dict(config.node_selector.labels) == {"pool": "a100"}
    assert [t.value for t in config.tolerations] == ["", "true"]
    assert compiled.executor("training")["resources"]["resourceMemoryLimit"] == "24Gi"
    assert [e.secret_name for e in parsed(compiled, "run_outcome").secret_as_env] == ["s"]
    # Settings that the file does not contain have their defaults.
    assert compiled.task("training")["retryPolicy"]["maxRetryCount"] == Placement().training_retries


def test_flags_come_before_file(compile_file):
    code, output = compile_file(FILE, "--tag", "3f2a9c1", "--accelerator", "", "--registry", "")
    assert code == 0
    compiled = Compiled(output)
    assert compiled.executor("training")["image"] == "evergreen-training:3f2a9c1"
    assert "accelerator" not in compiled.executor("training")["resources"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("registy: x", "placement.yaml: placement.registy is not a setting, expected registry"),
        (
            "gpu_nodes: {selectors: {}}",
            "placement.gpu_nodes.selectors is not a setting, expected selector",
        ),
        (
            "gpu_nodes: {tolerations: {key: a}}",
            "gpu_nodes.tolerations is {'key': 'a'}, expected array",
        ),
        (
            "gpu_nodes: {tolerations: [{effect: NoSchedule}]}",
            r"placement.gpu_nodes.tolerations\[0\].key is missing",
        ),
        (
            "gpu_nodes: {tolerations: [{key: a, operator: In}]}",
            "operator is 'In', expected one of Exists, Equal",
        ),
        ("gpu_nodes: {selector: {pool: 1}}", "gpu_nodes.selector.pool is 1, expected str"),
        ("cpu_nodes: a", "cpu_nodes is 'a', expected object"),
        ("training_gpus: yes", "training_gpus is True, expected int"),
        ("run_as_user: root", "run_as_user is 'root', expected int | null"),
        ("needs: {training: {cpu: 4}}", "needs.training.cpu is 4, expected str"),
        ("needs: {training: {gpu: 1}}", "needs.training.gpu is not a setting, expected cpu"),
        ("device: tpu", "device is 'tpu', expected one of cpu, gpu"),
        ("backend: hugectr\naccelerator: ''", "backend is hugectr without an accelerator"),
        ("- registry", "expected a mapping of fields"),
        ("", "is None, expected a mapping of fields"),
        ("a: [", "is not YAML"),
        ("tag: ${NOPE}", "names NOPE, which .*cluster.env lacks"),
        ("tag: 5$", "contains a '\\$' without a name"),
    ],
)
def test_file_with_other_content_is_refused_by_its_path(compile_file, capsys, text, words):
    code, output = compile_file(text)
    assert code == 2
    assert re.search(words, capsys.readouterr().err)
    assert not output.exists()
