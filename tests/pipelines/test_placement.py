"""What a placement says reaches the pods that it is said of, in the words that the backend parses."""

from __future__ import annotations

import re

import pytest
from google.protobuf import json_format
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

from components.run_outcome.notice import ADDRESS_VARIABLE
from components.runtime.errors import ContractError
from pipelines.__main__ import main
from pipelines.placement import NEEDS, Nodes, Placement, Toleration, Variables
from tests.pipelines.compiled import STEPS, Compiled, dashed

SPOT = Toleration(key="cloud.google.com/gke-spot", operator="Equal", value="true")
SLICES = {"cloud.google.com/gke-accelerator": "nvidia-tesla-a100", "cloud.google.com/gke-gpu-partition-size": "1g.5gb"}
EVERYTHING = {
    "registry": "europe-docker.pkg.dev/p/r",
    "tag": "3f2a9c1",
    "image_pull_secrets": ("registry-key", "another"),
    "accelerator": "nvidia.com/mig-1g.5gb",
    "gpu_nodes": Nodes(selector=SLICES, tolerations=(Toleration(key="nvidia.com/gpu"), SPOT)),
    "cpu_nodes": Nodes(selector={"pool": "cpu"}, tolerations=(SPOT,)),
    "shared_memory": "4Gi",
    "needs": {"training": {"cpu": "4", "memory": "24Gi", "timeout_seconds": 7200}, "validation": {"memory": "20Gi"}},
    "run_as_user": 10001,
    "labels": {"cost-centre": "ads"},
    "secrets": (
        Variables(name="evergreen-notifications", keys={"url": ADDRESS_VARIABLE}, steps=("run_outcome",)),
        Variables(name="proxy", keys={"https": "HTTPS_PROXY"}),
    ),
    "config_maps": (Variables(name="pipeline-settings", keys={"level": "LOG_LEVEL"}, steps=("training",)),),
}


@pytest.fixture(scope="module")
def everything(compile_with):
    return compile_with(**EVERYTHING)


def parsed(compiled: Compiled, step: str):
    """The step's part of the platform section as the backend reads it: an unknown field is an error."""
    message = kubernetes_executor_config_pb2.KubernetesExecutorConfig()
    return json_format.ParseDict(compiled.platform(step), message)


@pytest.mark.parametrize("step", STEPS)
def test_backends_own_schema_takes_every_field(everything, step):
    config = parsed(everything, step)
    assert json_format.MessageToDict(config) == everything.platform(step)


def test_schema_refuses_a_field_that_it_has_not(everything):
    platform = {**everything.platform("training"), "priorityClassName": "high"}
    with pytest.raises(json_format.ParseError, match="priorityClassName"):
        json_format.ParseDict(platform, kubernetes_executor_config_pb2.KubernetesExecutorConfig())


def test_pipelines_own_schema_takes_the_other_document(everything):
    message = json_format.ParseDict(everything.spec, pipeline_spec_pb2.PipelineSpec())
    assert message.pipeline_info.name == "evergreen-retraining"


@pytest.mark.parametrize("step", STEPS)
def test_pods_go_to_the_nodes_of_their_kind(everything, step):
    config = parsed(everything, step)
    on_gpu = step == "training"
    assert dict(config.node_selector.labels) == (SLICES if on_gpu else {"pool": "cpu"})
    spot = ("cloud.google.com/gke-spot", "Equal", "true", "NoSchedule")
    expected = [("nvidia.com/gpu", "Exists", "", "NoSchedule"), spot] if on_gpu else [spot]
    assert [(t.key, t.operator, t.value, t.effect) for t in config.tolerations] == expected


def test_without_an_accelerator_all_pods_go_to_the_other_nodes(compile_with):
    compiled = compile_with(**{**EVERYTHING, "accelerator": ""})
    for step in STEPS:
        assert dict(parsed(compiled, step).node_selector.labels) == {"pool": "cpu"}
        assert "accelerator" not in compiled.executor(step)["resources"]


@pytest.mark.parametrize("step", STEPS)
def test_only_a_gpu_step_has_a_large_shared_memory(everything, step):
    mounts = [(m.mount_path, m.medium, m.size_limit) for m in parsed(everything, step).empty_dir_mounts]
    assert mounts == ([("/dev/shm", "Memory", "4Gi")] if step == "training" else [])


@pytest.mark.parametrize("step", STEPS)
def test_needs_of_a_step_are_the_clusters_where_it_says_so(everything, step):
    needs = {"training": ("4", "24Gi", 7200), "validation": (NEEDS[step].cpu, "20Gi", NEEDS[step].timeout_seconds)}
    cpu, memory, seconds = needs.get(step, (NEEDS[step].cpu, NEEDS[step].memory, NEEDS[step].timeout_seconds))
    resources = everything.executor(step)["resources"]
    assert (resources["resourceCpuLimit"], resources["resourceMemoryLimit"]) == (cpu, memory)
    assert parsed(everything, step).active_deadline_seconds == seconds


@pytest.mark.parametrize("step", STEPS)
def test_containers_are_nobody_special_and_pull_with_the_secrets_named(everything, step):
    config = parsed(everything, step)
    assert (config.security_context.run_as_user, config.security_context.run_as_non_root) == (10001, True)
    assert [each.secret_name for each in config.image_pull_secret] == ["registry-key", "another"]
    assert everything.executor(step)["image"] == f"europe-docker.pkg.dev/p/r/evergreen-{dashed(step)}:3f2a9c1"


@pytest.mark.parametrize("step", STEPS)
def test_variables_reach_the_steps_that_they_are_for_and_are_optional(everything, step):
    config = parsed(everything, step)
    secrets = {e.secret_name: [(k.secret_key, k.env_var) for k in e.key_to_env] for e in config.secret_as_env}
    expected = {"proxy": [("https", "HTTPS_PROXY")]}
    if step == "run_outcome":
        expected["evergreen-notifications"] = [("url", "EVERGREEN_NOTIFY_URL")]
    assert secrets == expected
    maps = [each.config_map_name_parameter.runtime_value.constant.string_value for each in config.config_map_as_env]
    assert maps == (["pipeline-settings"] if step == "training" else [])
    assert all(each.optional for each in [*config.secret_as_env, *config.config_map_as_env])


@pytest.mark.parametrize("step", STEPS)
def test_pods_carry_the_clusters_labels_beside_ours(everything, step):
    assert dict(parsed(everything, step).pod_metadata.labels) == {
        "app.kubernetes.io/part-of": "evergreen",
        "app.kubernetes.io/component": dashed(step),
        "cost-centre": "ads",
    }


def test_laptops_file_says_nothing_that_a_cluster_must_have(compile_with):
    compiled = compile_with()
    for step in STEPS:
        said = compiled.platform(step).keys()
        assert said.isdisjoint({"securityContext", "secretAsEnv", "configMapAsEnv", "imagePullSecret", "nodeSelector"})


def test_defaults_of_the_parameters_are_the_clusters(compile_with):
    urls = "dns:///triton-headless.evergreen.svc.cluster.local:8001"
    chosen = {"repository": "gs://bucket/repository", "triton_urls": urls, "server": "python", "device": "gpu"}
    found = compile_with(**chosen, mount_path="/mnt").defaults
    assert {name: found[name] for name in chosen} == chosen
    assert compile_with(mount_path="/mnt").defaults["repository"] == "/mnt/repository"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"device": "tpu"}, "device is 'tpu', expected one of cpu, gpu"),
        ({"server": "torch"}, "server is 'torch', expected one of onnxruntime, python"),
        ({"backend": "jax"}, "backend is 'jax', expected one of pytorch, hugectr"),
        ({"backend": "hugectr", "accelerator": ""}, "backend is hugectr without an accelerator"),
        ({"run_as_user": 0}, "run_as_user is 0, expected at least 1: 0 is root"),
        ({"num_retries": -1}, "num_retries is -1, expected at least 0"),
        ({"labels": {"team": "a b"}}, "label team is 'a b'"),
        ({"labels": {"team": "x" * 64}}, "label team is"),
        ({"needs": {"trainig": {"cpu": "1"}}}, "needs: step 'trainig' is none of extraction"),
        ({"needs": {"training": {"gpu": True}}}, "needs of training: 'gpu' is none of"),
        ({"needs": {"training": {"cpu": 4}}}, "needs of training: cpu is 4, expected text"),
        ({"needs": {"training": {"timeout_seconds": "1h"}}}, "timeout_seconds is '1h', expected a whole number"),
    ],
)
def test_placement_that_cannot_work_is_refused_when_it_is_made(values, told):
    with pytest.raises(ContractError, match=told):
        Placement(**values)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"operator": "In"}, "operator is 'In'"),
        ({"value": "true"}, "has value 'true', expected none with Exists"),
        ({"effect": "Never"}, "effect is 'Never'"),
    ],
)
def test_toleration_that_kubernetes_would_refuse_is_refused(values, told):
    with pytest.raises(ContractError, match=told):
        Toleration(key="k", **values)


def test_variables_of_an_unknown_step_are_refused():
    with pytest.raises(ContractError, match="step 'outcome' is none of"):
        Variables(name="s", keys={}, steps=("outcome",))


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
    """`evergreen compile --placement` of a file beside a cluster.env; its exit code, and where the output is."""
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


def test_file_describes_a_cluster_with_values_of_the_file_beside_it(compile_file):
    code, output = compile_file(FILE)
    assert code == 0
    compiled = Compiled(output)
    assert compiled.executor("training")["image"] == "r.dev/p=1/images/evergreen-training:t0"
    config = parsed(compiled, "training")
    assert dict(config.node_selector.labels) == {"pool": "a100"}
    assert [t.value for t in config.tolerations] == ["", "true"]
    assert compiled.executor("training")["resources"]["resourceMemoryLimit"] == "24Gi"
    assert [e.secret_name for e in parsed(compiled, "run_outcome").secret_as_env] == ["s"]
    # What neither file nor flags say is the default.
    assert compiled.task("training")["retryPolicy"]["maxRetryCount"] == Placement().training_retries


def test_flags_come_before_the_file(compile_file):
    code, output = compile_file(FILE, "--tag", "3f2a9c1", "--accelerator", "", "--registry", "")
    assert code == 0
    compiled = Compiled(output)
    assert compiled.executor("training")["image"] == "evergreen-training:3f2a9c1"
    assert "accelerator" not in compiled.executor("training")["resources"]


def test_file_without_values_needs_no_file_beside_it(compile_file):
    assert compile_file('{"tag": "t1"}', values=None)[0] == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("registy: x", "placement.yaml: registy is unknown, expected some of registry, tag"),
        ("gpu_nodes: {selectors: {}}", "gpu_nodes: selectors is unknown"),
        ("gpu_nodes: {tolerations: {key: a}}", "gpu_nodes: tolerations is a mapping, expected a list"),
        ("gpu_nodes: {tolerations: [{effect: NoSchedule}]}", r"tolerations\[0\]: key is missing"),
        ("gpu_nodes: {tolerations: [{key: a, value: b}]}", "toleration of a has value 'b'"),
        ("gpu_nodes: {selector: {pool: 1}}", "selector.pool is a whole number 1, expected text"),
        ("cpu_nodes: a", "cpu_nodes is text, expected a mapping"),
        ("training_gpus: yes", "training_gpus is a boolean True, expected a whole number"),
        ("run_as_user: root", "run_as_user is text 'root', expected a whole number"),
        ("tag: 1", "tag is a whole number 1, expected text"),
        ("needs: {training: {cpu: 4}}", "needs of training: cpu is 4"),
        ("- registry", "holds a list, expected a mapping of fields"),
        ("", "holds nothing, expected a mapping of fields"),
        ("a: [", "is no YAML"),
        ("tag: ${NOPE}", "names NOPE, which .*cluster.env lacks"),
        ("tag: $TAG", "holds a '\\$' that opens no"),
    ],
)
def test_file_that_says_something_else_is_refused_by_its_place(compile_file, capsys, text, told):
    code, output = compile_file(text)
    assert code == 2
    assert re.search(told, capsys.readouterr().err)
    assert not output.exists()


def test_absent_file_is_refused_by_its_name(tmp_path, capsys):
    assert main(["compile", "--output", str(tmp_path / "o.yaml"), "--placement", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml cannot be read: No such file" in capsys.readouterr().err
